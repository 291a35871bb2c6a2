"""A feature from outside: each parent is read only from a given token on.

It is one class, registered with the engine; the rest of this file are its tests.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import pytest
from helpers import model_variants, tiny_models
from helpers.inspect_engine import inspect
from helpers.live_server import serving
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph import Engine, SamplingParams, connect
from choreograph.context.feature import READY, ContextFeature, Outcome, Prefills, RequestDraft
from choreograph.errors import ConfigError, InvalidRequestError, RequestFailedError
from choreograph.request.request import Purpose, Request

GREEDY = SamplingParams(temperature=0, max_tokens=5, logprobs=0)


@dataclass
class FirstRead:
    """First token of every parent that a request reads."""

    token: int
    is_applied: bool = False


def parse_read_from(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ConfigError(f"read_from={value!r}: use a whole number, 0 or more")
    return value


class ReadFrom(ContextFeature):
    """Reads each parent only from token `read_from` on; positions stay as they are."""

    options = {"read_from": parse_read_from}  # noqa: RUF012

    def prepare(self, draft: RequestDraft) -> None:
        if draft.options.get("read_from") and draft.request.parents:
            draft.request.extend(FirstRead(draft.options["read_from"]))

    def namespace(self, request: Request) -> Hashable:
        state = request.extension(FirstRead)
        return None if state is None else state.token

    def rewrite(self, request: Request, *, may_load: bool) -> Outcome:
        state = request.extension(FirstRead)
        if state is None or state.is_applied:
            return READY
        parents, slices, offsets, end = [], [], [], 0
        for parent, part, offset in zip(request.parents, request.parent_slices, request.offsets, strict=True):
            first, last = part or (0, len(parent.tokens))
            position = end if offset is None else offset
            end = position + last - first
            if first + state.token < last:
                parents.append(parent)
                slices.append((first + state.token, last))
                offsets.append(position + state.token)
        request.new_offset = end if request.new_offset is None else request.new_offset
        request.parents, request.parent_slices, request.offsets = tuple(parents), tuple(slices), tuple(offsets)
        state.is_applied = True
        return READY


def engine(**options):
    return tiny_models.engine(features=[ReadFrom()], **options)


def assert_equal(messages, others):
    assert [message.tokens for message in messages] == [other.tokens for other in others]
    for message, other in zip(messages, others, strict=True):
        expected = [one.logprob for one in other.logprobs]
        assert [one.logprob for one in message.logprobs] == pytest.approx(expected, abs=1e-5)


TEXTS = [[5, 9, 17, 3, 44, 21, 8, 2], [7, 7, 30, 12, 1], [60, 41]]


def ask(session, first, parents=None):
    """Read the texts from a token on, alone and together, and with offsets."""
    parents = parents or [session.prefill(text) for text in TEXTS]
    own = session.prefill([33, 34, 35], parents, read_from=first)
    calls = [([4, 6], parents, None), ([4], [own, parents[0]], None), ([8], parents[::-1], [20, 1, 9])]
    return [session.decode(header, read, offsets, read_from=first, sampling=GREEDY) for header, read, offsets in calls]


def read_with_slices(parents, first, offsets=None):
    """Slices of the parents from a token on, and their offsets."""
    chosen, positions, end = [], [], 0
    for index, parent in enumerate(parents):
        position = end if offsets is None else offsets[index]
        end = position + parent.length
        if first < parent.length:
            chosen.append(parent[first : parent.length])
            positions.append(position + first)
    return chosen, positions


def ask_with_slices(session, first):
    """The same, written with slices and offsets."""

    def read(parents, offsets=None):
        chosen, positions = read_with_slices(parents, first, offsets)
        ends = [offset + parent.length for parent, offset in zip(parents, offsets, strict=True)] if offsets else []
        end = ends[-1] if ends else sum(parent.length for parent in parents)
        return {"parents": chosen, "offsets": positions, "new_offset": end}

    parents = [session.prefill(text) for text in TEXTS]
    own = session.prefill([33, 34, 35], **read(parents))
    calls = [([4, 6], read(parents)), ([4], read([own, parents[0]])), ([8], read(parents[::-1], [20, 1, 9]))]
    return [session.decode(header, **options, sampling=GREEDY) for header, options in calls]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 9), st.integers(1, 64))
def test_parents_are_read_from_the_given_token_on(first, step):
    with engine(step=step).session() as session, tiny_models.engine(step=step).session() as other:
        assert_equal(ask(session, first), ask_with_slices(other, first))
        session.engine.run_until_idle()
        session.engine.check()


def test_the_option_separates_the_cache_and_is_a_default_of_a_session():
    made = engine()
    with made.session() as session, made.session(read_from=2) as reader:
        for one in (session, reader):
            parents = [one.prefill(text) for text in TEXTS]
            one.prefill([33, 34], parents).result()
        whole, part = (one.messages[-1] for one in (session, reader))
        assert inspect(whole).namespace != inspect(part).namespace
        again = session.prefill([33, 34], [session.prefill(text) for text in TEXTS], read_from=2)
        assert again.finish_reason == "cached" and whole.finish_reason == part.finish_reason == "encoded"
        assert reader.prefill([33, 34], parents, read_from=0).finish_reason == "cached"  # that of the other session
        made.check()


@pytest.mark.parametrize("host", [None, 96])
def test_what_is_read_in_part_is_evicted_and_comes_back(host):
    small, large = engine(tokens=96, host_capacity=host), engine()
    with small.session() as session, large.session() as other:
        texts = [[one.prefill(text) for text in TEXTS] for one in (session, other)]
        for first in (2, 2, 3):
            assert_equal(ask(session, first, texts[0]), ask(other, first, texts[1]))
            session.prefill([first] * 80).release()  # takes most of the small cache
            session.prefill([first] * 80).result().release()
            small.check()
    kinds = small.events.counts
    assert kinds["evicted"] and kinds["loaded" if host else "recomputing"]


@pytest.mark.parametrize("tokens", [48, 4096])
def test_prefix_mode_reads_the_same_texts_and_shares_prompts_of_equal_options(tokens):
    made = engine(tokens=tokens, page=4)
    with made.session(mode="prefix") as session, made.session(mode="prefix") as other:
        for first in (0, 2, 4, 2):
            said = session.decode([4, 6], [session.prefill(text) for text in TEXTS], read_from=first, sampling=GREEDY)
            prompt = [token for text in TEXTS for token in text[first:]] + [4, 6]
            told = other.decode(prompt, sampling=GREEDY)
            assert said.output_token_ids == told.output_token_ids
        made.check()
        if tokens > 48:
            assert said.usage.cached_tokens == len(prompt) - 1  # of the second call with the same option


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_repair_computes_what_is_read(share):
    with engine().session(repair=share) as session, tiny_models.engine().session(repair=share) as other:
        for first in (2, 4):
            parents = [[one.prefill(text, repair=0) for text in TEXTS] for one in (session, other)]
            said = session.decode([4, 6], parents[0], read_from=first, sampling=GREEDY)
            slices = [parent[first : parent.length] for parent in parents[1] if first < parent.length]
            assert_equal([said], [other.decode([4, 6], slices, sampling=GREEDY)])
            assert said.usage.repaired_tokens
            session.engine.check()


@pytest.mark.parametrize("first", [1, 2, 5])
def test_another_model_encodes_again_what_was_read(first):
    """The second text is as long as `first` or shorter for some: no token of it is read then."""
    models = {"math": model_variants.finetuned()}
    made, plain = (
        Engine.from_pretrained(model_variants.base(), models=models, features=features)
        for features in ([ReadFrom()], [])
    )
    with made.session() as session, plain.session() as other:
        texts = [[one.prefill(text) for text in TEXTS] for one in (session, other)]
        noted = session.prefill([33, 34, 35], texts[0], read_from=first)
        slices, offsets = read_with_slices(texts[1], first)
        told = other.prefill([33, 34, 35], slices, offsets, 15)
        said = session.decode([4], [noted], model="math", sampling=GREEDY)
        assert_equal([said], [other.decode([4], [told], model="math", sampling=GREEDY)])
        made.check()


def test_a_copy_for_a_reader_with_less_clearance_reads_the_same_part():
    made, plain = engine(), tiny_models.engine()
    with made.session() as session, plain.session() as other:
        secret = [one.prefill([9, 9, 9, 9], labels={"secret"}) for one in (session, other)]
        texts = [[one.prefill(text) for text in TEXTS] for one in (session, other)]
        noted = session.prefill([33, 34], [secret[0], *texts[0]], read_from=3)
        slices, offsets = read_with_slices(texts[1], 3)
        told = other.prefill([33, 34], slices, offsets, 15)
        said = session.decode([4], [noted], clearance=(), sampling=GREEDY)
        assert_equal([said], [other.decode([4], [told], sampling=GREEDY)])
        made.check()


def test_wrong_values_and_engines_without_it_are_refused():
    with engine().session() as session:
        parent = session.prefill([1, 2])
        with pytest.raises(ConfigError, match="read_from=-1"):
            session.decode([3], [parent], read_from=-1)
    with pytest.raises(ConfigError, match="read_from='x'"):
        engine().session(read_from="x")
    with (
        tiny_models.engine().session() as session,
        pytest.raises(InvalidRequestError, match="read_from=2: no such argument"),
    ):
        session.decode([3], read_from=2)
    with pytest.raises(ConfigError, match="no such option"):
        tiny_models.engine().session(read_from=2)
    with pytest.raises(ConfigError, match="two are of type ReadFrom"):
        tiny_models.engine(features=[ReadFrom(), ReadFrom()])


def test_a_server_takes_the_option(talker_folder):
    made, local = (Engine.from_pretrained(talker_folder, features=[ReadFrom()]) for _ in range(2))
    with serving(made) as live, connect(live.url) as remote:
        with remote.session(seed=0) as session, local.session(seed=0) as own:
            assert [m.tokens for m in ask(session, 2)] == [m.tokens for m in ask(own, 2)]
        with remote.session(seed=0, read_from=2) as session, local.session(seed=0, read_from=2) as own:
            parents = [[one.prefill(text) for text in TEXTS] for one in (session, own)]
            said, told = (
                one.decode([4], read, sampling=GREEDY) for one, read in zip((session, own), parents, strict=True)
            )
            assert said.tokens == told.tokens


class Broken(ContextFeature):
    """Raises in one of its methods, for requests that start with token 50."""

    def __init__(self, method):
        setattr(self, method, self._raise)
        self.method = method

    def _raise(self, request, **_):
        if request.prompt[0] == 50:
            raise ValueError("broken")
        return READY if self.method == "rewrite" else None

    def rewrite(self, request, *, may_load):
        return READY

    def admitted(self, request):
        pass

    def finished(self, request):
        pass


class Endless(ContextFeature):
    """Asks for other prefills again and again."""

    def attach(self, core):
        self._core = core

    def rewrite(self, request, *, may_load):
        if request.prompt[0] != 50 or request.purpose is Purpose.CONTEXT:
            return READY
        return Prefills([request.for_context(self._core.new_id(), [7, 8], (), ())])


@pytest.mark.parametrize("feature", [Broken("rewrite"), Broken("admitted"), Broken("finished"), Endless()])
def test_a_feature_that_goes_wrong_fails_its_request_alone(feature):
    made = tiny_models.engine(features=[feature])
    with made.session() as session, tiny_models.engine().session() as other:
        parent, expected = session.prefill([1, 2, 3]), other.prefill([1, 2, 3])
        bad = session.decode([50, 4], [parent], sampling=GREEDY)
        good = session.decode([4, 6], [parent], sampling=GREEDY)
        assert_equal([good], [other.decode([4, 6], [expected], sampling=GREEDY)])
        made.run_until_idle()
        with pytest.raises(RequestFailedError, match=r"broken|features asked for other prefills"):
            bad.result()
        made.check()
    assert made.stats().num_referenced_entries == 0
