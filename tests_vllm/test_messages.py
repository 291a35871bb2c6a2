"""Plain chats: turns are found by their content, wherever they are, and read as explicit spans would be."""

import random
import string
from dataclasses import dataclass

import numpy as np
import pytest
from helpers import char_tokenizer
from helpers.hypothesis_profile import many
from helpers.oracle_families import Graph, row_logprobs
from offline_engine import Request, logprobs_of, report_of, tokens_of
from reuse_graphs import OraclePrompt
from tiny_models import CHAT_TEMPLATES

TOLERANCE = 2e-4
MIN_TOKENS = 8  # shorter turns are computed, and not stored
MIN_MOVED = 32  # shorter turns are moved only before longer ones
MAX_TAIL = 8  # tokens at the end of a turn that its entry may lack
MAX_CONTEXTS = 4  # entries of equal turns in other contexts
LETTERS = char_tokenizer.tokenizer().convert_tokens_to_ids(list(string.ascii_letters + " .,"))
ANSWER = (("allowed_token_ids", LETTERS),)  # no special token, which would be the boundary of a turn


def turn_tokens(template: str, role: str, content: str, end: str = "<end>") -> list[int]:
    opening = f"<|{role}|>" if template == "starts" else f"{role}: "
    return char_tokenizer.tokenizer().encode(opening + content + end)


def decode(tokens: list[int]) -> str:
    return char_tokenizer.tokenizer().decode(tokens)


@dataclass(eq=False)
class StoredTurn:
    """A turn that the server stores."""

    tokens: list[int]
    rows: list[int]  # of the oracle
    start: int
    context: object  # all that its first token sees


class ChatOracle:
    """What the server stores and reads, worked out by the test, and the rows that follow from it."""

    def __init__(self) -> None:
        self.graph = Graph()
        self._entries: list[StoredTurn] = []

    def _find(self, turn: list[int]) -> list[StoredTurn]:
        lengths = range(len(turn), max(0, len(turn) - MAX_TAIL - 1), -1)
        return [entry for n in lengths for entry in self._entries if entry.tokens == turn[:n]]

    def chat(self, turns: list[list[int]], answer: list[int]) -> tuple[OraclePrompt, int]:
        """Return the rows of a chat whose last turn is the opening of the answer, and how many tokens are reused."""
        prompt, context, start, num_reused = OraclePrompt(self.graph), [], 0, 0
        found = [self._find(turn) if len(turn) >= MIN_TOKENS else [] for turn in turns[:-1]]
        last_exact, before = -1, list[int]()  # of the turns that go on exactly if all before them are computed
        for i, (turn, entries) in enumerate(zip(turns[:-1], found, strict=True)):
            if any(entry.start == len(before) and entry.context == before for entry in entries):
                last_exact = i
            before += turn
        movable = max((i for i, entries in enumerate(found) if entries and len(turns[i]) >= MIN_MOVED), default=-1)
        stored: list[tuple[StoredTurn, StoredTurn | None]] = []
        for i, (turn, entries) in enumerate(zip(turns[:-1], found, strict=True)):
            exact = [entry for entry in entries if entry.start == start and entry.context == context]
            entry = (exact or (entries if last_exact < i <= movable else []) or [None])[0]
            length = len(entry.tokens) if entry else 0
            prompt.view(entry.rows if entry else [])
            prompt.compute(turn[length:])
            if len(turn) >= MIN_TOKENS and (exact or not entry) and length < len(turn):
                stored.append((StoredTurn(turn, prompt.rows(start, start + len(turn)), start, context), entry))
            context = context + (turn if exact or not entry else [(entry, start), *turn[length:]])
            num_reused += length
            start += len(turn)
        prompt.compute(turns[-1] + answer)
        written = turns[-1] + answer[:-1]
        stored.append((StoredTurn(written, prompt.rows(start, start + len(written)), start, context), None))
        for entry, replaced in stored:
            self._store(entry, replaced)
        return prompt, num_reused

    def _store(self, entry: StoredTurn, replaced: StoredTurn | None) -> None:
        equal = [other for other in self._entries if other.tokens == entry.tokens]
        if any(other.context == entry.context for other in equal):
            return
        if len(equal) == MAX_CONTEXTS:
            self._entries.remove(equal[0])
        self._entries.append(entry)
        if replaced in self._entries:
            self._entries.remove(replaced)


@pytest.mark.parametrize("template", CHAT_TEMPLATES)
def test_turns_render_as_the_chat_template_does(template):
    tokenizer = char_tokenizer.tokenizer()
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    rendered = tokenizer.apply_chat_template(
        chat, chat_template=CHAT_TEMPLATES[template], add_generation_prompt=True, return_dict=False
    )
    turns = [turn_tokens(template, turn["role"], turn["content"]) for turn in chat]
    assert rendered == [*turns[0], *turns[1], *turn_tokens(template, "assistant", "", end="")]


@pytest.mark.parametrize("template", CHAT_TEMPLATES)
@pytest.mark.parametrize("seed", range(many(8, minimum=2)))
def test_random_chats_read_their_turns_wherever_they_were_first(template, seed, start_engine, tiny_model):
    """Turns in other orders, new ones between them, answers of other chats, short turns, equal turns twice."""
    rng, engine = random.Random(seed), start_engine(template, fresh=True, skip_tokenizer_init=False)
    pool = [
        turn_tokens(template, rng.choice(["user", "assistant"]), "".join(rng.choices(string.ascii_letters, k=length)))
        for length in (1, 9, 20, 33, 50)
    ]
    systems = [[], turn_tokens(template, "system", "You are a tester of chats.")]
    opening, oracle, checks = turn_tokens(template, "assistant", "", end=""), ChatOracle(), []
    reused, expected_reuse = 0, 0
    for _ in range(10):
        turns = [t for t in (rng.choice(systems), *rng.choices(pool, k=rng.randint(1, 4)), opening) if t]
        prompt = [token for turn in turns for token in turn]
        (output,) = engine.run(Request(prompt, max_tokens=rng.randint(1, 30), options=ANSWER))
        answer = tokens_of(output)
        rows, num_reused = oracle.chat(turns, answer)
        if len(turns) > 1:
            assert report_of(output)["mode"] == "messages"
            # less where all that is known continues its prompt exactly, which the prefix cache is for
            assert report_of(output)["reused_tokens"] <= num_reused
        reused += report_of(output)["reused_tokens"]
        expected_reuse += num_reused
        slots = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
        checks += [(rows.computed[slot], row) for slot, row in zip(slots, logprobs_of(output), strict=True)]
        pool.append(turn_tokens(template, "assistant", decode(answer)))
        engine.check_idle()
    assert reused > expected_reuse / 2
    expected = row_logprobs(tiny_model(template).model, oracle.graph)
    assert max(float(np.abs(expected[row] - found).max()) for row, found in checks) < TOLERANCE


@pytest.fixture
def reordered(start_engine):
    """Two chats that have stored their turns, and requests of a third one with the turns in another order."""
    engine = start_engine("starts", fresh=True, skip_tokenizer_init=False)
    system = turn_tokens("starts", "system", "You compare two texts.")
    first, second = (turn_tokens("starts", "user", text * 12) for text in ("one text ", "another "))
    opening = turn_tokens("starts", "assistant", "", end="")
    engine.run(Request(system + first + second + opening, max_tokens=4, options=ANSWER))
    prompt = system + second + first + opening

    def ask(**reuse) -> tuple[np.ndarray, dict]:
        (output,) = engine.run(Request(prompt, reuse or None, max_tokens=6, options=ANSWER))
        return logprobs_of(output), report_of(output)

    ask.engine = engine
    return ask


def test_a_fully_repaired_chat_equals_exact_vllm(reordered):
    exact, report = reordered(mode="exact")
    assert report["reused_tokens"] == 0
    reused, report = reordered()
    assert report["reused_tokens"] > 200
    assert np.abs(reused - exact).max() > 0.1
    repaired, report = reordered(repair=1)
    assert np.abs(repaired - exact).max() < TOLERANCE


def test_more_repair_reuses_fewer_tokens(reordered):
    counts = [reordered(**({"repair": share} if share else {}))[1]["reused_tokens"] for share in (0, 0.25, 0.5, 1)]
    assert counts == sorted(counts, reverse=True) and len(set(counts)) == 4


def test_the_exact_mode_reads_and_stores_nothing(reordered):
    engine, num_tokens = reordered.engine, reordered.engine.num_stored_tokens
    before, _ = reordered(mode="exact")
    assert engine.num_stored_tokens == num_tokens
    reordered()
    again, _ = reordered(mode="exact")
    assert np.abs(before - again).max() < TOLERANCE


def test_the_repeat_of_a_chat_is_exact(start_engine):
    engine = start_engine("starts", fresh=True, skip_tokenizer_init=False)
    turns = [turn_tokens("starts", role, 30 * role[0]) for role in ("system", "user", "assistant", "user")]
    prompt = [token for turn in turns for token in turn] + turn_tokens("starts", "assistant", "", end="")
    request = Request(prompt, max_tokens=8, options=ANSWER)
    (exact,) = engine.run(Request(prompt, {"mode": "exact"}, max_tokens=8, options=ANSWER))
    first, second = engine.run(request)[0], engine.run(request)[0]
    for output in (first, second):
        assert tokens_of(output) == tokens_of(exact)
        assert np.abs(logprobs_of(output) - logprobs_of(exact)).max() < TOLERANCE
    longer = prompt + tokens_of(first) + turn_tokens("starts", "user", "And then?")[0:]
    (continued,) = engine.run(Request([*longer], max_tokens=4, options=ANSWER))
    (expected,) = engine.run(Request([*longer], {"mode": "exact"}, max_tokens=4, options=ANSWER))
    assert np.abs(logprobs_of(continued) - logprobs_of(expected)).max() < TOLERANCE


def test_the_default_mode_is_an_option_of_the_server(start_engine):
    engine = start_engine("starts", fresh=True, skip_tokenizer_init=False, connector_options={"mode": "exact"})
    turns = [turn_tokens("starts", "user", "a question " * 4), turn_tokens("starts", "user", "another one " * 4)]
    opening = turn_tokens("starts", "assistant", "", end="")
    for order in (turns, turns[::-1]):
        prompt = [*order[0], *order[1], *opening]
        (output,) = engine.run(Request(prompt, max_tokens=2, options=ANSWER))
        assert report_of(output)["mode"] == "exact" and report_of(output)["reused_tokens"] == 0
    assert engine.num_stored_tokens == 0
    for reused in (0, len(turns[0]) + len(turns[1])):
        prompt = [*turns[1], *turns[0], *opening] if reused else [*turns[0], *turns[1], *opening]
        (output,) = engine.run(Request(prompt, {"mode": "messages"}, max_tokens=2, options=ANSWER))
        assert report_of(output)["reused_tokens"] == reused
