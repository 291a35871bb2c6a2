"""Choosing tokens: the fast nucleus against transformers' processors, independence of rows, vLLM's options."""

from collections import Counter

import pytest
import torch
from helpers.hypothesis_profile import many
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from choreograph import SamplingParams
from choreograph.errors import SamplingError
from choreograph.execution.sampler import (
    CANDIDATES,
    _apply_penalties,
    _sampling_tensor,
    logits_warpers,
    sample,
    top_candidates,
)
from choreograph.request import penalties as penalties_module
from choreograph.request.decode_state import DecodeState

NO_IDS = torch.empty(1, 0, dtype=torch.long)
NEAR = 1e-4  # how close to a threshold float32 sums may fall on either side

sizes = st.sampled_from([1, 2, 7, 61, CANDIDATES - 1, CANDIDATES, CANDIDATES + 1, 2000, 9000])
shapes = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1e-3, 0.1, 0.7, 1.0, 1.3, 5.0]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 40, CANDIDATES, CANDIDATES + 1, 20_000]),
        "top_p": st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    }
)


def logits_of(size: int, seed: int, spread: float = 4.0, ties: bool = False) -> torch.Tensor:
    row = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread
    return row.round() if ties else row


def generation(seed=0, prompt=(1, 2), forced=None, stops=(), tokens=(), **options) -> DecodeState:
    made = DecodeState(
        sampling=SamplingParams(**options),
        prompt=list(prompt),
        stop_tokens=frozenset(stops),
        generator=torch.Generator().manual_seed(seed),
        forced_tokens=forced,
    )
    made.tokens = list(tokens)
    return made


def take(logits: torch.Tensor, generations: list[DecodeState]) -> list[int]:
    """Chooses and accepts, as a step does."""
    tokens = sample(logits, generations).read()
    for one, token in zip(generations, tokens, strict=True):
        one.append(token)
    return tokens


def fast(row: torch.Tensor, options: SamplingParams) -> torch.Tensor | None:
    """The probabilities that `nucleus` keeps, over the whole vocabulary."""
    asked = _sampling_tensor([DecodeState(options, [], frozenset(), torch.Generator())], row.device)
    ids, weights, enough = (result[0] for result in top_candidates(row[None], [options], asked))
    if not enough:
        return None
    assert len(ids) == len(ids.unique()), "a token is kept twice"
    return torch.zeros(len(row)).index_put((ids,), weights / weights.sum())


def slow(row: torch.Tensor, options: SamplingParams) -> torch.Tensor:
    return logits_warpers(options)(NO_IDS, row[None].clone())[0].softmax(-1)


def near_a_threshold(row: torch.Tensor, s: SamplingParams) -> bool:
    """Whether rounding alone may decide about a token, judged in float64."""
    scores = row.double().sort(descending=True).values / s.temperature
    if 0 < s.top_k < len(row):
        scores = scores[scores >= scores[s.top_k - 1]]
    shares = scores.softmax(-1)
    before = shares.cumsum(-1) - shares
    edge = s.top_p < 1 and bool(((before - s.top_p).abs() < NEAR)[1:].any())
    return edge or (s.min_p > 0 and bool(((shares / shares[0] - s.min_p).abs() < NEAR * s.min_p)[1:].any()))


# -- the nucleus ---------------------------------------------------------------------------------------------


@settings(max_examples=many(250), deadline=None)
@given(size=sizes, seed=st.integers(0, 10**6), options=shapes, spread=st.sampled_from([0.01, 1.0, 4.0, 20.0]))
def test_nucleus_keeps_what_the_processors_keep(size, seed, options, spread):
    row, options = logits_of(size, seed, spread), SamplingParams(**options)
    got = fast(row, options)
    assume(got is not None and not near_a_threshold(row, options))
    want = slow(row, options)
    assert torch.equal(got > 0, want > 0)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-3)


@settings(max_examples=many(150), deadline=None)
@given(size=sizes, seed=st.integers(0, 10**6), options=shapes)
def test_ties_keep_equal_probabilities(size, seed, options):
    """Which of several equal tokens stays at the edge is open; how many stay, and their share, is not."""
    row, options = logits_of(size, seed, 3.0, ties=True), SamplingParams(**options)
    got = fast(row, options)
    assume(got is not None and not near_a_threshold(row, options))
    torch.testing.assert_close(got.sort().values, slow(row, options).sort().values, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("top_k", [1, 3, CANDIDATES])
@pytest.mark.parametrize("size", [CANDIDATES, 3000])
def test_all_logits_equal(size, top_k):
    """Every token ties with the k-th: all stay, which the candidates alone cannot show for a large vocabulary."""
    options = SamplingParams(top_k=top_k)
    got = fast(torch.zeros(size), options)
    assert (got is None) == (size > CANDIDATES)
    assert slow(torch.zeros(size), options).gt(0).all()


def test_logits_that_the_temperature_makes_equal():
    """Two neighbouring floats become one number after division: both are the k-th likeliest then."""
    high = torch.rand(2000, generator=torch.Generator().manual_seed(0)) + 0.5
    low = torch.nextafter(high, torch.zeros(()))
    merged = high[high / 1.5 == low / 1.5]
    assert len(merged)
    for one in merged[:5]:
        row, options = (
            torch.stack([torch.nextafter(one, torch.zeros(())), one]),
            SamplingParams(temperature=1.5, top_k=1),
        )
        assert (fast(row, options) > 0).tolist() == (slow(row, options) > 0).tolist() == [True, True]


def test_too_few_candidates_are_noticed():
    flat = logits_of(4000, 0, spread=0.01)
    assert fast(flat, SamplingParams(top_p=0.9)) is None
    assert fast(flat, SamplingParams()) is None
    assert fast(flat, SamplingParams(top_k=CANDIDATES + 1)) is None
    assert fast(flat, SamplingParams(top_k=50)) is not None
    assert fast(logits_of(4000, 0, spread=20.0), SamplingParams(top_p=0.9)) is not None


def test_banned_tokens_are_never_kept():
    row = logits_of(50, 3)
    row[10:] = float("-inf")
    for options in ({}, {"top_p": 0.999}, {"top_k": 30}, {"min_p": 0.001}):
        assert not fast(row, SamplingParams(**options))[10:].any()
        assert all(sample(row[None], [generation(seed, **options)]).read()[0] < 10 for seed in range(20))


@pytest.mark.parametrize("size", [11, CANDIDATES + 500])
def test_frequencies_follow_the_distribution(size):
    row, count = torch.full((size,), -30.0), 4000
    row[:4] = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    one = generation(seed=5)
    drawn = torch.tensor([take(row[None], [one])[0] for _ in range(count)])
    share = drawn.bincount(minlength=4)[:4] / count
    torch.testing.assert_close(share, torch.tensor([0.5, 0.25, 0.15, 0.1]), atol=0.035, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-40, 1e-9])
def test_a_vanishing_temperature_is_greedy(temperature):
    row = logits_of(700, 1)
    assert sample(row[None], [generation(temperature=temperature)]).read() == [int(row.argmax())]


def test_a_vanishing_nucleus_is_the_likeliest_token():
    for size in (10, 700):
        row = logits_of(size, 2)
        assert sample(row[None], [generation(top_p=1e-46)]).read() == [int(row.argmax())]


def test_a_huge_temperature_is_uniform():
    one = generation(temperature=1e30)
    assert len({take(logits_of(20, 1)[None], [one])[0] for _ in range(300)}) == 20


# -- rows are independent ------------------------------------------------------------------------------------

rows = st.lists(
    st.tuples(
        shapes,
        st.sampled_from(
            [
                {},
                {"temperature": 0.0},
                {"repetition_penalty": 1.5},
                {"presence_penalty": 1.0, "frequency_penalty": -0.5},
                {"logit_bias": {3: 5.0}},
                {"logprobs": 2},
            ]
        ),
        st.integers(0, 1000),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=many(60), deadline=None)
@given(rows=rows, size=st.sampled_from([40, CANDIDATES + 300]), seed=st.integers(0, 1000), ties=st.booleans())
def test_a_row_chooses_the_same_alone_and_in_a_batch(rows, size, seed, ties):
    def make(shape, extra, own):
        return generation(own, tokens=(4, 4, 9), **{**shape, **extra})

    logits = torch.stack([logits_of(size, seed + i, ties=ties) for i in range(len(rows))])
    together = [make(*row) for row in rows]
    batch = [take(logits, together) for _ in range(3)]
    for i, row in enumerate(rows):
        alone = make(*row)
        assert [take(logits[i : i + 1], [alone])[0] for _ in range(3)] == [tokens[i] for tokens in batch]
        assert torch.equal(alone.generator.get_state(), together[i].generator.get_state())


def test_choosing_leaves_the_logits_alone():
    logits = logits_of(40, 0)[None]
    before = logits.clone()
    sample(
        logits, [generation(tokens=(1,), presence_penalty=2, repetition_penalty=2, logit_bias={0: 9}, top_k=3)]
    ).read()
    assert torch.equal(logits, before)


def test_a_second_try_of_a_step_chooses_the_same():
    """A step that broke after choosing is chosen again: nothing was used up."""
    one = generation(seed=3, logprobs=2)
    row = logits_of(50, 4)[None]
    assert sample(row, [one]).read() == sample(row, [one]).read()
    assert one.logprobs == []


def test_rows_without_numbers_choose_nothing_and_harm_nobody():
    rows = torch.stack([logits_of(30, 1), torch.full((30,), float("nan")), logits_of(30, 2)])
    ways = [{"temperature": 0}, {"top_p": 0.5}, {"temperature": 0}]
    got = sample(rows, [generation(**way) for way in ways]).read()
    assert got == [int(rows[0].argmax()), None, int(rows[2].argmax())]


# -- forced tokens, log-probabilities ------------------------------------------------------------------------


def test_forced_tokens_come_in_order_and_draw_nothing():
    one = generation(forced=[7, 0, 7])
    before = one.generator.get_state()
    for want in (7, 0, 7):
        assert sample(logits_of(9, 0)[None], [one]).read() == [want]
        one.append(want)
    assert torch.equal(one.generator.get_state(), before)


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"temperature": 0.1, "top_k": 1, "logit_bias": {5: 100}}])
def test_logprobs_are_the_models_own(options):
    row = logits_of(30, 2)
    one = generation(logprobs=4, **options)
    token = take(row[None], [one])[0]
    want, (got,) = row.log_softmax(-1), one.logprobs
    assert got.token == token
    assert got.logprob == pytest.approx(float(want[token]))
    assert list(got.top) == want.topk(4).indices.tolist()
    assert list(got.top.values()) == pytest.approx(want.topk(4).values.tolist())


def test_the_number_of_log_probabilities_is_the_requested_one():
    for count, want in ((0, 0), (1, 1), (10_000, 30)):
        one = generation(logprobs=count)
        take(logits_of(30, 2)[None], [one])
        assert len(one.logprobs[0].top) == want
    quiet = generation()
    take(logits_of(30, 2)[None], [quiet])
    assert quiet.logprobs == []


def test_forced_tokens_have_logprobs():
    one = generation(forced=[4], logprobs=0)
    take(logits_of(30, 2)[None], [one])
    assert one.logprobs[0].logprob == pytest.approx(float(logits_of(30, 2).log_softmax(-1)[4]))


# -- penalties, bias, minimum length: vLLM's meaning ---------------------------------------------------------


def test_repetition_penalty_counts_header_and_generated_once():
    row = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0])
    got = _apply_penalties(row, generation(prompt=(0, 1), tokens=(2, 2, 2), repetition_penalty=2.0))
    assert got.tolist() == [1.0, -4.0, 1.0, -2.0, 2.0]


def test_presence_and_frequency_look_at_generated_tokens_only():
    row = torch.zeros(5)
    got = _apply_penalties(row, generation(prompt=(0, 1), tokens=(2, 2, 3), presence_penalty=1.0))
    assert got.tolist() == [0, 0, -1, -1, 0]
    got = _apply_penalties(row, generation(prompt=(0, 1), tokens=(2, 2, 3), frequency_penalty=0.5))
    assert got.tolist() == [0, 0, -1, -0.5, 0]
    got = _apply_penalties(row, generation(prompt=(0, 1), tokens=(2, 2, 3), frequency_penalty=-1, presence_penalty=-1))
    assert got.tolist() == [0, 0, 3, 2, 0]


def penalized(row: torch.Tensor, state: DecodeState) -> torch.Tensor:
    """Penalties of all tokens, computed anew."""
    options, scores = state.sampling, row[None].clone()
    for token, bias in options.logit_bias.items():
        scores[0, token] += bias
    if options.repetition_penalty != 1:
        ids = torch.tensor([state.prompt + state.tokens])
        scores = RepetitionPenaltyLogitsProcessor(options.repetition_penalty)(ids, scores)
    for token, number in Counter(state.tokens).items():
        scores[0, token] += -options.presence_penalty - options.frequency_penalty * number
    return scores[0]


@settings(max_examples=many(100), deadline=None)
@given(
    prompt=st.lists(st.integers(0, 8), max_size=6),
    steps=st.lists(st.tuples(st.integers(0, 8), st.lists(st.integers(0, 8), max_size=4)), max_size=12),
    repetition=st.sampled_from([1.0, 1.3, 0.5]),
    presence=st.sampled_from([0.0, 1.0]),
    frequency=st.sampled_from([0.0, 0.7]),
)
def test_penalties_kept_between_tokens_are_those_computed_anew(prompt, steps, repetition, presence, frequency):
    options = {"repetition_penalty": repetition, "presence_penalty": presence, "frequency_penalty": frequency}
    state, row = generation(prompt=prompt, logit_bias={3: 1.5}, **options), logits_of(9, 5)
    for token, draft in steps:
        for index in range(len(draft) + 1):
            drafted = state.after(draft[:index]) if index else state
            torch.testing.assert_close(_apply_penalties(row, drafted), penalized(row, drafted), rtol=0, atol=1e-6)
        state.append(token)


def test_a_token_adds_to_the_penalties_whatever_came_before(monkeypatch):
    copied = []
    original = penalties_module.to_device
    monkeypatch.setattr(
        penalties_module, "to_device", lambda numbers, *rest: copied.append(len(numbers)) or original(numbers, *rest)
    )
    options = {"repetition_penalty": 1.1, "frequency_penalty": 1, "logit_bias": {1: 1.0, 2: 2.0}}
    state, row = generation(prompt=range(500), max_tokens=200, **options), logits_of(600, 5)
    _apply_penalties(row, state)
    copied.clear()
    for token in range(100, 200):
        state.append(token)
        _apply_penalties(row, state)
    assert sum(copied) <= 100 * 6


def test_bias_is_added_before_penalties():
    got = _apply_penalties(
        torch.tensor([1.0, 1.0]), generation(prompt=(0,), repetition_penalty=2.0, logit_bias={0: 4.0})
    )
    assert got.tolist() == [2.5, 1.0]


def test_bias_can_force_and_forbid():
    row = logits_of(30, 1)
    assert sample(row[None], [generation(logit_bias={29: 100.0})]).read() == [29]
    assert sample(row[None], [generation(temperature=0, logit_bias={int(row.argmax()): -100.0})]).read() != [
        int(row.argmax())
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_are_impossible_before_min_tokens(temperature):
    row = torch.zeros(6)
    row[[2, 4]] = 50.0
    early = generation(stops=(2, 4), tokens=(0, 0), min_tokens=3, max_tokens=9, temperature=temperature)
    late = generation(stops=(2, 4), tokens=(0, 0, 0), min_tokens=3, max_tokens=9, temperature=temperature)
    assert sample(row[None], [early]).read()[0] not in (2, 4)
    assert sample(row[None], [late]).read()[0] in (2, 4)


def test_no_bias_can_bring_a_stop_token_before_min_tokens():
    early = generation(stops=(2,), min_tokens=3, max_tokens=9, temperature=0, logit_bias={2: 100.0})
    assert sample(torch.zeros(1, 6), [early]).read() != [2]


# -- generations end -----------------------------------------------------------------------------------------


class Letters:
    """A detokenizer in which token k is the k-th letter."""

    def step(self, token: int) -> str:
        return chr(ord("a") + token)

    def flush(self) -> str:
        return ""


def written(tokens, **options) -> tuple[DecodeState, list]:
    one = generation(stops=options.pop("stops", ()), **options)
    one.detokenizer = Letters()
    return one, [one.append(t) for t in tokens]


def test_a_stop_string_cuts_the_text():
    one, reasons = written([0, 1, 2], stop=["bc"])
    assert (one.text, reasons, one.tokens) == ("a", [None, None, "stop"], [0, 1, 2])


def test_text_that_a_stop_string_takes_back_is_never_seen():
    seen = []

    class Watched(DecodeState):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "text":
                seen.append(value)
            super().__setattr__(name, value)

    made = Watched(SamplingParams(stop="cd"), [], frozenset(), torch.Generator(), detokenizer=Letters())
    assert [made.append(token) for token in range(4)] == [None, None, None, "stop"]
    assert seen[1:] == ["a", "ab", "abc", "ab"]  # never "abcd"; "c" is not settled


def test_the_earliest_stop_string_wins():
    one, reasons = written([0, 1, 2], stop=["c", "abc", "bc"])
    assert (one.text, reasons[-1]) == ("", "stop")


def test_stop_strings_before_min_tokens_are_text():
    one, reasons = written([0, 1, 0, 2, 1], stop=["b"], min_tokens=3)
    assert reasons == [None, None, None, None, "stop"]
    assert one.text == "abac"


def test_a_stop_string_may_begin_before_min_tokens():
    one, reasons = written([0, 1, 2], stop=["bc"], min_tokens=2)
    assert (one.text, reasons[-1]) == ("a", "stop")


def test_settled_text_is_never_taken_back():
    one, _ = written([0, 1, 2], stop=["bcd"])
    assert one.stable_text == "a"
    one.append(0)
    assert one.stable_text == "abca"


def test_finish_reason_of_a_decode_state():
    assert written([0, 5], stops=(5,))[1] == [None, "stop"]
    assert written([0, 5], max_tokens=2)[1] == [None, "length"]
    assert written([0, 5], stops=(5,), max_tokens=2)[1] == [None, "stop"]
    assert written([5, 0], stops=(5,), forced=[5, 0])[1] == [None, "forced"]
    assert written([0, 5], stops=(5,), forced=[0, 5])[1] == [None, "stop"]


# -- options -------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
IMPOSSIBLE = {
    "temperature": [-0.1, INF, NAN, "hot", None, [1.0], True, 10**400],
    "top_p": [0, -1, 1.1, NAN, "all", None],
    "top_k": [-2, 0.5, 3.0, NAN, INF, "many", None, True, 1 << 63],
    "min_p": [-0.1, 1.1, NAN, "some", None],
    "seed": [1.5, 2.0, "seed", INF, True],
    "stop": [[""], "", [1], [None], 5, b"end"],
    "stop_token_ids": [[-1], [1.5], ["a"], 5, [None], [True]],
    "ignore_eos": [None, "no", 1],
    "max_tokens": [0, -1, 4.0, 1.5, INF, NAN, "ten", True],
    "min_tokens": [-1, 257, 1.0, INF, "ten", None],
    "logprobs": [-1, 1.0, INF, "all", True],
    "presence_penalty": [-2.1, 2.1, NAN, "x", None],
    "frequency_penalty": [-2.1, 2.1, NAN, "x", None],
    "repetition_penalty": [0, -1, INF, NAN, "x", None, 10**400],
    "logit_bias": [{-1: 0}, {1: 101}, {1: -101}, {1: NAN}, {"a": 1}, {1: "a"}, {1.0: 1}, [1], 7, {1: None}],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in IMPOSSIBLE.items() for v in values], ids=repr)
def test_impossible_values_are_named(name, value):
    with pytest.raises(SamplingError) as caught:
        SamplingParams(**{name: value})
    shown = str(caught.value).partition(": ")[0] if not isinstance(value, dict) else str(caught.value)
    assert shown.startswith(f"{name}=")
    assert all(repr(part) in shown for part in (value if isinstance(value, list) else [value]))


def test_sampling_parameters_at_the_edges_of_their_ranges_are_accepted():
    SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1, seed=-5, max_tokens=1, min_tokens=1, logprobs=0)
    SamplingParams(presence_penalty=-2, frequency_penalty=2, repetition_penalty=1e-3, logit_bias={0: 100, 1: -100})
    SamplingParams(seed=1 << 80, stop=None, stop_token_ids=None, logit_bias=None)


def test_sampling_params_are_read_from_a_dict():
    assert SamplingParams.from_dict({"top_k": 3, "stop": "x"}) == SamplingParams(top_k=3, stop=["x"])
    with pytest.raises(SamplingError, match=r"best_of=3: no such option; known:.*temperature"):
        SamplingParams.from_dict({"best_of": 3})
    with pytest.raises(SamplingError, match="top_k='3'"):
        SamplingParams.from_dict({"top_k": "3"})


def test_options_do_not_follow_their_source():
    stops, bias = ["x"], {1: 1.0}
    options = SamplingParams(stop=stops, logit_bias=bias)
    stops.append("y")
    bias[2] = 2.0
    assert options == SamplingParams(stop=["x"], logit_bias={1: 1.0})


class EvenTokens:
    """A mask of the even tokens that records what it is given."""

    def __init__(self, size: int) -> None:
        self.size, self.tokens = size, []

    def allowed(self) -> torch.Tensor:
        return torch.arange(self.size) % 2 == 0

    def advance(self, token: int) -> None:
        self.tokens.append(token)


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 1.3}, {"top_p": 0.9}, {"min_p": 0.2}, {"top_k": 3}]
)
@pytest.mark.parametrize("size", [61, CANDIDATES + 99])
def test_a_mask_excludes_tokens_of_its_own_row_alone(options, size):
    logits = torch.stack([logits_of(size, seed) for seed in (1, 2, 1)])
    masked, free = generation(seed=5, **options), generation(seed=6, **options)
    masked.token_mask = mask = EvenTokens(size)
    alone = take(logits[1:2], [generation(seed=6, **options)])
    tokens = take(logits[:2], [masked, free]) + [take(logits[2:], [masked])[0] for _ in range(8)]
    assert tokens[1] == alone[0]
    assert all(token % 2 == 0 for token in [tokens[0], *tokens[2:]])
    assert mask.tokens == masked.tokens  # every token once, in order
    if options == {"temperature": 0}:
        assert tokens[0] == 2 * int(logits[0, ::2].argmax())
