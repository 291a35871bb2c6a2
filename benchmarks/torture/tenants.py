"""One tenant that tries to see or to time the work of another, through a server of two keys.

In each trial a coin decides what the victim does; then the attacker, with the other key, observes channels. Over all
trials of a channel a rank test (of times and counts) or a test of counts (of texts) has to tell the two cases apart no
better than chance: p above 0.01, corrected for the number of channels (Holm). In `CONTENT` attacks the victim does equal
amounts of work in both cases, once with what the attacker asks about and once with something else. `VOLUME` attacks
observe how much work the victim does; `docs/reliability.md` names these channels and what closes each, and the campaign
only measures them.

The model is tiny; times are those of a whole request over HTTP on one machine.
"""

import hashlib
import json
import random
import re
import string
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from scipy import stats
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from choreograph.models.loader import bundled_gguf, convert_gguf

from ..load import KEYS, server
from .campaign import Options, Outcome, Tally

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MAX_P = 0.01  # below it, a channel tells the two cases apart
WARM_UP = 3  # trials of each attack that are not counted
TIMEOUT = 900  # seconds of a request; a machine may be stopped for minutes while others are measured
NUM_WORDS = 60  # of a secret text
RARE_EVERY = 25  # turns between two trials of a slow attack

Observation = dict[str, float | str]  # what the attacker sees, by channel


@dataclass(frozen=True)
class Attack:
    """One way to look at the other tenant."""

    run: Callable[["Trial"], Observation]
    every: int = 1  # turns


class Trial:
    """Two clients, a random choice, and texts that are new to the server."""

    def __init__(self, url: str, draws: random.Random, client: httpx.Client) -> None:
        self.draws, self._client, self._url = draws, client, url
        self.does = draws.random() < 0.5  # the coin

    def ask(self, tenant: int, method: str, path: str, body: Any = None) -> tuple[httpx.Response, float]:
        """Send a request; return the reply and its seconds."""
        headers = {"authorization": f"Bearer {KEYS[tenant]}"}
        urllib.parse.clear_cache()  # of this process, where both tenants' clients are
        start = time.perf_counter()
        reply = self._client.request(method, path, json=body, headers=headers)
        return reply, time.perf_counter() - start

    def victim(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return self.ask(0, method, path, body)[0]

    def attacker(self, method: str, path: str, body: Any = None) -> tuple[httpx.Response, float]:
        return self.ask(1, method, path, body)

    def text(self, num_words: int = NUM_WORDS) -> str:
        """Return words of random letters, which no vocabulary has."""
        return " ".join("".join(self.draws.choices(string.ascii_lowercase, k=9)) for _ in range(num_words))

    def name(self) -> str:
        return "".join(self.draws.choices(string.ascii_lowercase, k=12))


# -- content: the victim does as much in both cases -------------------------------------------------------------------


def chat(text: str, reuse: str, **options: Any) -> dict[str, Any]:
    """Return the body of a chat with one answer of one token."""
    choreography = {"reuse": reuse, "workflow": "shared"}
    messages = [{"role": "user", "content": text}, {"role": "user", "content": "What is it about?"}]
    return {
        "model": "model",
        "messages": messages,
        "max_tokens": 1,
        "temperature": 0,
        "choreography": choreography,
    } | options


def prompt_reuse(reuse: str) -> Callable[[Trial], Observation]:
    """Return an attack that asks about a text which the victim may have sent, in a mode of reuse."""

    def run(trial: Trial) -> Observation:
        secret, other = trial.text(), trial.text()
        trial.victim("POST", CHAT, chat(secret if trial.does else other, reuse))
        text = f"They wrote: {secret}. That was all." if reuse == "auto" else secret
        reply, seconds = trial.attacker("POST", CHAT, chat(text, reuse, logprobs=True, top_logprobs=5))
        reply.raise_for_status()
        again, _ = trial.attacker(
            "POST", CHAT, chat(text, reuse, logprobs=True, top_logprobs=5, cache_salt=trial.name())
        )
        distribution, expected = (json.dumps(r.json()["choices"][0]["logprobs"]) for r in (reply, again))
        return {
            "time": seconds,
            "counts of tokens": _num_cached(reply),
            "rounding": str(distribution == expected),
        }

    return run


def _num_cached(reply: httpx.Response) -> float:
    """Return how many tokens of a prompt were found in the cache, from any source."""
    return float(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def tokenized_text(trial: Trial) -> Observation:
    """Time the tokenization of a text that the victim may have had tokenized."""
    secret, other = trial.text(4 * NUM_WORDS), trial.text(4 * NUM_WORDS)
    trial.victim("POST", "/tokenize", {"prompt": secret if trial.does else other})
    return {"time": trial.attacker("POST", "/tokenize", {"prompt": secret})[1]}


def long_chat(trial: Trial) -> Observation:
    """Time the refusal of a chat that is too long, which tokenizes and computes nothing."""
    secret, other = trial.text(10 * NUM_WORDS), trial.text(10 * NUM_WORDS)
    trial.victim("POST", CHAT, chat(secret if trial.does else other, "exact", max_tokens=100_000))
    reply, seconds = trial.attacker("POST", CHAT, chat(secret, "exact", max_tokens=100_000))
    assert reply.status_code == 400, reply.text
    return {"time": seconds}


def grammar(trial: Trial) -> Observation:
    """Time an answer whose grammar the victim may have used."""
    secret, other = ([trial.name() for _ in range(40)] for _ in "ab")

    def body(choices: Sequence[str]) -> dict[str, Any]:
        return chat("Choose.", "exact", structured_outputs={"choice": list(choices)})

    trial.victim("POST", CHAT, body(secret if trial.does else other))
    return {"time": trial.attacker("POST", CHAT, body(secret))[1]}


def schema(trial: Trial) -> Observation:
    """Ask for a schema that the victim may have declared, by its name and by its text."""
    names = [trial.name(), trial.name()]
    texts = [trial.text(60), trial.text(60)]

    def pml(name: str, text: str) -> dict[str, str]:
        return {"pml": f'<schema name="{name}"><module name="a">{text}</module></schema>'}

    name, text = names[not trial.does], texts[not trial.does]
    trial.victim("PUT", f"/v1/schemas/{name}", pml(name, text))
    listed, _ = trial.attacker("GET", "/v1/schemas")
    removed, seconds = trial.attacker("DELETE", f"/v1/schemas/{names[0]}")
    used, _ = trial.attacker(
        "POST",
        COMPLETIONS,
        {"model": "model", "prompt": f'<prompt schema="{names[0]}"><a/> Go.</prompt>', "max_tokens": 1},
    )
    declared, declared_seconds = trial.attacker("PUT", f"/v1/schemas/{names[0]}", pml(names[0], texts[0]))
    for tenant, known in ((0, name), (1, names[0])):
        trial.ask(tenant, "DELETE", f"/v1/schemas/{known}")
    return {
        "replies": _digest(trial, [listed, removed, declared], names),
        "status of its use": str(used.status_code),
        "time to refuse": seconds,
        "time to declare": declared_seconds,
    }


def response(trial: Trial) -> Observation:
    """Ask for a response by an id, which the victim has stored or deleted."""
    body = {"model": "model", "input": "Hi", "max_output_tokens": 1, "store": True}
    known = trial.victim("POST", RESPONSES, body).json()["id"]
    other = trial.victim("POST", RESPONSES, body).json()["id"]
    trial.victim("DELETE", f"{RESPONSES}/{other if trial.does else known}")
    read, seconds = trial.attacker("GET", f"{RESPONSES}/{known}")
    removed, _ = trial.attacker("DELETE", f"{RESPONSES}/{known}")
    continued, _ = trial.attacker("POST", RESPONSES, {**body, "previous_response_id": known})
    trial.victim("DELETE", f"{RESPONSES}/{known if trial.does else other}")
    return {"replies": _digest(trial, [read, removed, continued], [known]), "time": seconds}


def workflow(trial: Trial) -> Observation:
    """Ask for a workflow that the victim may have declared."""
    names = [trial.name(), trial.name()]
    graph = {"agents": {"a": None, "b": "a"}}
    trial.victim("PUT", f"/v1/workflows/{names[not trial.does]}", graph)
    removed, seconds = trial.attacker("DELETE", f"/v1/workflows/{names[0]}")
    declared, _ = trial.attacker("PUT", f"/v1/workflows/{names[0]}", graph)
    trial.attacker("DELETE", f"/v1/workflows/{names[0]}")
    trial.victim("DELETE", f"/v1/workflows/{names[not trial.does]}")
    return {"replies": _digest(trial, [removed, declared], names), "time": seconds}


def session(trial: Trial) -> Observation:
    """Ask for a remote session by its id, which the victim has open or closed."""
    path = "/v1/choreograph/sessions"
    known, other = (trial.victim("POST", path, {}).json()["id"] for _ in "ab")
    trial.victim("DELETE", f"{path}/{other if trial.does else known}")
    removed, seconds = trial.attacker("DELETE", f"{path}/{known}")
    trial.victim("DELETE", f"{path}/{known if trial.does else other}")
    return {"replies": _digest(trial, [removed], [known]), "time": seconds}


def errors(trial: Trial) -> Observation:
    """Compare the texts of errors after a request of the victim that succeeded or failed."""
    secret = trial.text(20)
    trial.victim("POST", CHAT, chat(secret, "messages", temperature=0 if trial.does else -1))
    text = "Say hello."  # the same in all trials, so that the replies are
    replies = [
        trial.attacker("POST", CHAT, chat(text, "messages", max_tokens=10**6))[0],
        trial.attacker("POST", CHAT, chat(text, "messages", model="other"))[0],
        trial.attacker("POST", CHAT, chat(text, "messages", structured_outputs={"regex": "("}))[0],
        trial.attacker("POST", COMPLETIONS, {"model": "model", "prompt": [10**6]})[0],
        trial.attacker("GET", f"{RESPONSES}/resp_none")[0],
    ]
    return {"replies": _digest(trial, replies, [])}


def concurrent_text(trial: Trial) -> Observation:
    """Time a request while the victim's runs, with the attacker's text or another one of this length."""
    secret, other = trial.text(), trial.text()
    body = chat(secret if trial.does else other, "exact", max_tokens=8, ignore_eos=True)
    thread = threading.Thread(target=trial.victim, args=("POST", CHAT, body))
    thread.start()
    reply, seconds = trial.attacker("POST", CHAT, chat(secret, "exact"))
    thread.join()
    return {"time": seconds, "counts of tokens": _num_cached(reply)}


def _digest(trial: Trial, replies: Sequence[httpx.Response], names: Sequence[str]) -> str:
    """Return a digest of replies without what differs in all trials: drawn names, times and ids."""
    texts = []
    for reply in replies:
        headers = {key: value for key, value in reply.headers.items() if key not in ("date", "x-request-id")}
        body = re.sub(r'"(id|created|created_at|completed_at)": ?("[^"]*"|\d+)', "", reply.text)
        texts.append(f"{reply.status_code} {sorted(headers.items())} {body}")
    text = " ".join(texts)
    for name in names:
        text = text.replace(name, "NAME")
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# -- volume: how much the victim does ---------------------------------------------------------------------------------


def concurrent_load(trial: Trial) -> Observation:
    """Time a request while the victim computes a long prompt or nothing."""
    thread = threading.Thread(target=trial.victim, args=("POST", CHAT, chat(trial.text(), "exact", max_tokens=8)))
    if trial.does:
        thread.start()
    seconds = trial.attacker("POST", CHAT, chat(trial.text(20), "exact"))[1]
    if trial.does:
        thread.join()
    return {"time": seconds}


def eviction(trial: Trial) -> Observation:
    """Look for an own prompt in the cache after the victim has filled it or not."""
    body = chat(trial.text(), "exact")
    trial.attacker("POST", CHAT, body)
    for _ in range(14 if trial.does else 0):
        trial.victim("POST", CHAT, chat(trial.text(6 * NUM_WORDS), "exact"))
    return {"counts of tokens": _num_cached(trial.attacker("POST", CHAT, body)[0])}


def metrics(trial: Trial) -> Observation:
    """Read the metrics of the server, which need no key, before and after a request of the victim or none."""

    def total() -> float:
        text = trial.attacker("GET", "/metrics")[0].text
        return sum(
            float(line.split()[-1]) for line in text.splitlines() if "prompt_tokens_total" in line and line[0] != "#"
        )

    before = total()
    if trial.does:
        trial.victim("POST", CHAT, chat(trial.text(5), "exact"))
    return {"counts of tokens": total() - before}


CONTENT: Mapping[str, Attack] = {
    "chat, exact": Attack(prompt_reuse("exact")),
    "chat, messages": Attack(prompt_reuse("messages")),
    "chat, auto": Attack(prompt_reuse("auto")),
    "tokenized text": Attack(tokenized_text),
    "refused chat": Attack(long_chat),
    "grammar": Attack(grammar),
    "schema": Attack(schema),
    "response": Attack(response),
    "workflow": Attack(workflow),
    "remote session": Attack(session),
    "errors": Attack(errors),
    "chat during the other's": Attack(concurrent_text),
}
VOLUME: Mapping[str, Attack] = {
    "load": Attack(concurrent_load, RARE_EVERY // 5),
    "eviction": Attack(eviction, RARE_EVERY),
    "metrics": Attack(metrics, RARE_EVERY // 5),
}
ATTACKS = {**CONTENT, **VOLUME}


# -- statistics -------------------------------------------------------------------------------------------------------


def channel_p(values: Sequence[tuple[bool, float | str]]) -> tuple[float, float]:
    """Return the p-value that a channel tells the two cases apart, and the share of pairs that it orders rightly.

    Numbers: Mann-Whitney. Texts: chi-square of their counts; the share is that of the best guess.
    """
    cases = [[value for does, value in values if does is case] for case in (False, True)]
    if not all(cases):
        return 1.0, 0.5
    if isinstance(values[0][1], str):
        texts = sorted({value for _, value in values})
        table = np.array([[case.count(text) for text in texts] for case in cases])
        if len(texts) == 1:
            return 1.0, 0.5
        guess = (table / table.sum(axis=1, keepdims=True)).max(axis=0).sum() / 2
        return float(stats.chi2_contingency(table).pvalue), float(guess)
    result = stats.mannwhitneyu(cases[1], cases[0])
    share = float(result.statistic) / (len(cases[0]) * len(cases[1]))
    return float(result.pvalue), max(share, 1 - share)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return p-values that are corrected for their number (Holm 1979)."""
    result: dict[str, float] = {}
    largest = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, p * (len(p_values) - rank)))
        result[name] = largest
    return result


# -- the campaign -----------------------------------------------------------------------------------------------------


def save_model(folder: Path) -> Path:
    """Write a tiny random model that has the tokenizer of the bundled one."""
    tokenizer = AutoTokenizer.from_pretrained(convert_gguf(bundled_gguf()))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        initializer_range=0.25,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(options: Options, attacks: Mapping[str, Attack] = ATTACKS) -> Outcome:
    """Try all attacks in turns, once at least, until the time has passed; then test every channel."""
    tally, seen = Tally(options), dict[str, list[tuple[bool, float | str]]]()
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder))
        with (
            server(str(model), dtype="float32", reuse="exact") as (url, _),
            httpx.Client(base_url=url, timeout=TIMEOUT) as client,
        ):
            for index in options.rounds(len(attacks)):
                names = list(attacks)
                name, turn = names[index % len(names)], index // len(names)
                if turn % attacks[name].every:
                    continue
                trial = Trial(url, options.draws(index), client)
                observations = attacks[name].run(trial)
                if turn < WARM_UP:
                    continue
                tally.inputs += 1
                tally.counts[name] += 1
                for channel, value in observations.items():
                    seen.setdefault(f"{name}: {channel}", []).append((trial.does, value))
    judge(tally, seen)
    return tally.outcome()


def judge(tally: Tally, seen: Mapping[str, Sequence[tuple[bool, float | str]]]) -> None:
    """Test all channels; note those of content that differ between the two cases."""
    results = {channel: channel_p(values) for channel, values in seen.items()}
    content = {channel: p for channel, (p, _) in results.items() if channel.partition(":")[0] in CONTENT}
    corrected = holm(content)
    tally.details["channels"] = {
        channel: {"trials": len(seen[channel]), "p": p, "corrected p": corrected.get(channel), "accuracy": share}
        for channel, (p, share) in results.items()
    }
    for channel, p in corrected.items():
        if p < MAX_P:
            share = results[channel][1]
            found = f"{channel} differs between the cases: {share:.1%} of the guesses are right, corrected p = {p:.2g}"
            tally.lost.append(f"seed {tally.options.seed}: {found}")
