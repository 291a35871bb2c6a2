"""Features and the engine: names of options, failures, labels, lost sources."""

from dataclasses import fields

import pytest
from helpers import model_variants, tiny_models
from helpers.inspect_engine import inspect

from choreograph import SamplingParams
from choreograph.context.feature import READY, ContextFeature, Prefills
from choreograph.errors import ConfigError, LeakError, RequestFailedError
from choreograph.request.request import Purpose

GREEDY = SamplingParams(temperature=0, max_tokens=4)


class Named(ContextFeature):
    """Has an option of a given name."""

    def __init__(self, name):
        self.options = {name: int}


@pytest.mark.parametrize(
    "name", ["seed", "parents", "header", "model", "max_kl", *(f.name for f in fields(SamplingParams))]
)
def test_options_of_features_do_not_take_names_of_the_library(name):
    with pytest.raises(ConfigError, match=f"{name!r} is an option of the library"):
        tiny_models.engine(features=[Named(name)])


class AddsParent(ContextFeature):
    """Adds a message to the parents of requests that start with token 50."""

    def __init__(self, when):
        self._when = when
        self.added = None

    def _add(self, request):
        if request.prompt[0] == 50 and self.added not in request.parents:
            request.parents += (self.added,)
            request.parent_slices += (None,)
            request.offsets += (None,)

    def submit(self, draft):
        if self._when == "submit":
            self._add(draft.request)

    def rewrite(self, request, *, may_load):
        if self._when == "rewrite":
            self._add(request)
        return READY


@pytest.mark.parametrize("when", ["submit", "rewrite"])
def test_a_feature_cannot_add_what_the_reader_must_not_see(when):
    feature = AddsParent(when)
    engine = tiny_models.engine(features=[feature])
    with engine.session() as session:
        secret = session.prefill([9, 9, 9], labels={"secret"}).result()
        feature.added = inspect(secret).request
        with pytest.raises(LeakError, match="feature added parent"):
            session.decode([50, 4], [session.prefill([1, 2])], clearance=(), sampling=GREEDY).result()
        engine.run_until_idle()
        engine.check()
    if when == "submit":
        with engine.session() as session:
            feature.added = inspect(session.prefill([9, 9, 9], labels={"secret"}).result()).request
            assert session.decode([50, 4], sampling=GREEDY).labels == {"secret"}


class TooLarge(ContextFeature):
    """Asks for a prefill that no cache could hold."""

    def attach(self, core):
        self._core = core

    def rewrite(self, request, *, may_load):
        if request.prompt[0] != 50 or any(parent.purpose is Purpose.CONTEXT for parent in request.parents):
            return READY
        prefill = request.for_context(self._core.new_id(), [7] * 200, (), ())
        request.parents, request.parent_slices, request.offsets = (prefill,), (None,), (None,)
        return Prefills([prefill])


def test_a_request_fails_with_the_reason_of_the_prefill_that_it_needs():
    engine = tiny_models.engine(tokens=64, features=[TooLarge()])
    with engine.session() as session:
        message = session.decode([50, 4], sampling=GREEDY)
        with pytest.raises(RequestFailedError, match="needs room for"):
            message.result()
        engine.check()


def lose(engine, message):
    """Let the KV of a message be lost as that of another process."""
    entry, view = inspect(message).entry, inspect(engine)
    view.model_set.remote["far"] = "far"
    entry.storage.can_recompute = False
    view.cache_manager._free_pages(entry)
    assert entry.is_lost


@pytest.mark.parametrize("has_parent", [False, True])
@pytest.mark.parametrize("import_first", [False, True])
def test_original_and_import_of_a_partial_message_are_computed_after_its_source_is_lost(has_parent, import_first):
    engine = model_variants.engine()
    engine.enable_layer_reuse("math", pattern=(0, 1, 2))
    with engine.session() as session, engine.session() as other:
        context = [session.prefill([40, 41, 42])] if has_parent else []
        text = session.prefill(list(range(3, 15)), context)
        partial = session.partial_prefill(text, (0, 1, 2), model="math").result()
        copy = other.import_message(partial)
        lose(engine, text)
        reads = [(session, partial), (other, copy)]
        answers = [
            reader.decode([4], [message], model="math", sampling=GREEDY).output_token_ids
            for reader, message in (reversed(reads) if import_first else reads)
        ]
        assert answers[0] == answers[1]
        if not has_parent:
            again = session.prefill(list(range(3, 15)), model="math")
            assert answers[0] == session.decode([4], [again], model="math", sampling=GREEDY).output_token_ids
        engine.check()


def test_a_chain_of_lost_messages_is_computed_again():
    engine, plain = model_variants.engine(), model_variants.engine()
    with engine.session() as session, plain.session() as other:
        texts = [one.prefill(list(range(3, 15))) for one in (session, other)]
        pairs = zip((session, other), texts, strict=True)
        readers = [one.prefill([20, 21, 22], [text]).result() for one, text in pairs]
        lose(engine, texts[0])
        lose(engine, readers[0])
        pairs = zip((session, other), readers, strict=True)
        said, told = (one.decode([4], [reader], sampling=GREEDY) for one, reader in pairs)
        assert said.output_token_ids == told.output_token_ids
        engine.check()


def test_a_cleared_reader_does_not_depend_on_the_forbidden_context():
    """The message and its context do not fit together; what the reader may see does."""
    engine = tiny_models.engine(tokens=128)
    with engine.session() as session:
        secret = session.prefill([9] * 100, labels={"secret"})
        message = session.prefill([5] * 40, [secret])
        reader = session.decode([4], [message], clearance=(), sampling=GREEDY)
        assert len(reader.output_token_ids) == 4
        engine.run_until_idle()
        engine.check()
