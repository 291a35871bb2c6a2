"""Bad input gives one clear error that names the value, changes nothing, and leaves the engine serving."""

import os

import numpy as np
import pytest
import torch
from helpers import tiny_models
from helpers.inspect_engine import inspect
from transformers import MambaConfig, MambaForCausalLM

import choreograph
from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams, SchedulerConfig
from choreograph import errors as e
from choreograph.lab.workflows import check_options
from choreograph.lab.workflows.run import run_workflow
from choreograph.models.loader import bundled_gguf

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LAST = 511


@pytest.fixture
def engine(tiny_engine):
    return tiny_engine()


@pytest.fixture
def session(engine):
    with engine.session(seed=0) as opened:
        yield opened
    engine.check()
    assert engine.stats().num_referenced_entries == 0


@pytest.fixture
def parent(session):
    return session.prefill([1, 2, 3]).result()


def state(engine):
    queues = inspect(engine).scheduler
    return inspect(engine).cache_manager.stats, list(queues.waiting), list(queues.running), engine.stats().num_steps


def refuses(session, kind, text, call) -> None:
    """`call` raises exactly this error at once, changes nothing, and a good call works afterwards."""
    engine = session.engine
    before, messages = state(engine), list(session.messages)
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (state(engine), session.messages) == (before, messages)
    engine.check()
    serves(engine)


def fails(session, kind, text, message) -> None:
    """Reading any value of `message` raises this error, every time; a good call works afterwards."""
    for read in (message.result, lambda: message.position, lambda: message.usage, message.result):
        with pytest.raises(kind) as caught:
            read()
        assert type(caught.value) is kind
        assert text in str(caught.value)
    assert isinstance(message.error, kind)
    session.engine.check()
    serves(session.engine)


def serves(engine) -> None:
    with engine.session(client_id="probe") as probe:
        first = probe.prefill([5, 6])
        assert len(probe.decode([7], parents=[first], sampling=GREEDY).tokens) == 5
    engine.clear_cache()
    engine.check()


# -- parents -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stranger", [5, "name", None, [1], pytest.param(object(), id="object")], ids=str)
def test_a_parent_that_is_no_message(session, stranger):
    refuses(session, e.NotAMessageError, repr(stranger), lambda: session.prefill([1], parents=[stranger]))
    refuses(session, e.NotAMessageError, repr(stranger), lambda: session.decode([1], parents=(stranger,)))


def test_parents_that_are_no_list(session, parent):
    refuses(session, e.InvalidRequestError, "put it into a list", lambda: session.prefill([1], parents=parent))
    for bad in (None, 5, 1.5):
        refuses(session, e.InvalidRequestError, f"parents={bad}", lambda bad=bad: session.prefill([1], parents=bad))


def test_a_released_parent_is_refused(session, parent):
    parent.release()
    refuses(
        session,
        e.MessageReleasedError,
        f"parents[0] (message {parent.id})",
        lambda: session.decode([1], parents=[parent]),
    )


def test_a_parent_released_while_other_children_wait(session, parent):
    waiting = session.decode([4], parents=[parent], sampling=GREEDY)
    parent.release()
    refuses(
        session,
        e.MessageReleasedError,
        f"parents[0] (message {parent.id})",
        lambda: session.decode([1], parents=[parent]),
    )
    assert len(waiting.tokens) == 5


def test_a_cancelled_parent_is_refused(session):
    parent = session.decode([1], sampling=GREEDY)
    parent.release()
    refuses(
        session,
        e.MessageReleasedError,
        f"parents[0] (message {parent.id})",
        lambda: session.prefill([1], parents=[parent]),
    )


def test_a_repeated_parent_is_refused(session, parent):
    other = session.prefill([9])
    text = f"(message {parent.id}) is given twice"
    refuses(session, e.DuplicateParentError, text, lambda: session.decode([1], parents=[parent, other, parent]))


def test_a_parent_of_another_engine_is_refused(tiny_engine, session, parent):
    for engine in (session.engine, tiny_engine()):
        with engine.session() as other:
            text = f"parents[0] (message {parent.id}) belongs to another"
            refuses(other, e.WrongSessionError, text, lambda other=other: other.decode([1], parents=[parent]))


def test_readers_of_a_failed_parent_fail(session):
    long = session.decode([1], sampling=SamplingParams(max_tokens=300, ignore_eos=True))
    failed = session.prefill([2] * 300, parents=[long])  # the length of its parent is not known yet
    waiting = session.decode([3], parents=[failed], sampling=GREEDY)
    grandchild = session.decode([3], parents=[waiting], sampling=GREEDY)
    fails(session, e.InvalidPositionError, "position 600", failed)
    fails(session, e.RequestFailedError, f"parent {failed.id} failed", waiting)
    fails(session, e.RequestFailedError, f"parent {waiting.id} failed", grandchild)
    refuses(
        session,
        e.InvalidRequestError,
        f"parents[0] (message {failed.id}) failed",
        lambda: session.prefill([1], parents=[failed]),
    )


# -- positions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, -(10**30), 512, 10**30, True, False, 1.0, "3", [0], float("nan")], ids=repr)
def test_impossible_positions_are_refused(session, parent, bad):
    refuses(session, e.InvalidPositionError, f"new_offset={bad!r}", lambda: session.prefill([1], new_offset=bad))
    refuses(
        session, e.InvalidPositionError, f"new_offset={bad!r}", lambda: session.decode([1], [parent], new_offset=bad)
    )
    refuses(
        session, e.InvalidPositionError, f"offsets[0]={bad!r}", lambda: session.prefill([1], [parent], offsets=[bad])
    )


def test_numbers_of_other_libraries_are_numbers(engine, session, parent):
    assert session.prefill([1], [parent], offsets=np.array([3])).offsets == (3,)
    assert session.prefill([1], [parent], [torch.tensor(3)], np.int64(9)).position == 9
    assert parent[np.int32(0) : np.uint8(2)].length == 2
    with engine.session(seed=np.int64(3)) as one, engine.session(seed=3) as other:
        said = [s.decode([1], sampling=SamplingParams(max_tokens=4)).tokens for s in (one, other)]
        assert said[0] == said[1]
    odd = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        seed=np.int64(1),
        stop_token_ids=np.array([5]),
        logit_bias={7: np.float32(2)},
    )
    assert odd == SamplingParams(temperature=0.5, top_k=3, seed=1, stop_token_ids=[5], logit_bias={7: 2.0})
    assert {type(value) for value in (odd.temperature, odd.top_k, odd.seed, *odd.stop_token_ids)} == {float, int}
    for bad in (np.float64("nan"), np.float32("inf"), np.bool_(True), True):
        with pytest.raises(e.SamplingError, match="temperature="):
            SamplingParams(temperature=bad)
    with pytest.raises(e.ConfigError, match="seed="):
        engine.session(seed=np.float64(3))
    for bad in (np.float64(1), np.bool_(True), np.array([1, 2])):
        refuses(session, e.InvalidPositionError, "new_offset=", lambda bad=bad: session.prefill([1], new_offset=bad))
        refuses(session, e.InvalidPositionError, "message[0:", lambda bad=bad: parent[0:bad])
    refuses(session, e.InvalidPositionError, "offsets=", lambda: session.prefill([1], [parent], offsets=np.array(3)))
    beside = {"offsets": np.array([1, 2]), "parents": np.array([1, 2])}
    for name, value in beside.items():
        refuses(
            session,
            e.InvalidRequestError,
            f"{name}=array",
            lambda o={name: value}: session.prefill([{"tokens": [1]}], **o),
        )
    assert session.prefill([{"tokens": [1]}], parents=(), kv_reuse="recompute")[0].length == 1


def test_the_number_of_offsets(session, parent):
    text = "2 offsets for 1 parents"
    refuses(session, e.InvalidPositionError, text, lambda: session.prefill([1], [parent], offsets=[0, 1]))
    refuses(session, e.InvalidPositionError, "0 offsets for 1", lambda: session.prefill([1], [parent], offsets=[]))
    refuses(session, e.InvalidPositionError, "1 offsets for 0", lambda: session.prefill([1], offsets=[0]))
    refuses(session, e.InvalidPositionError, "offsets=7", lambda: session.prefill([1], [parent], offsets=7))


@pytest.mark.parametrize("mode", ["choreographed", "prefix", "naive"])
@pytest.mark.parametrize("count", [513, 600])
def test_a_prefill_of_more_tokens_than_the_model_has_positions_is_refused_at_once(engine, mode, count):
    with engine.session(mode=mode) as session:
        call = {"tokens": [1] * count}
        for submit in (lambda: session.prefill(**call), lambda: session.prefill([{"tokens": [1]}, call])):
            refuses(session, e.InvalidPositionError, f"position {count - 1}, past the model's last one, {LAST}", submit)
            refuses(session, e.InvalidPositionError, "at most 512 tokens", submit)
        refuses(session, e.InvalidPositionError, "position ", lambda: session.decode([1] * 512, sampling=GREEDY))
        assert session.prefill([1] * 512).result().length == 512


def test_messages_that_are_known_to_run_past_the_limit_are_refused(session, parent):
    for text, submit in (
        (f"past the model's last one, {LAST}", lambda: session.prefill([1, 2], new_offset=LAST)),
        ("position 512", lambda: session.decode([1], new_offset=LAST, sampling=GREEDY)),
        ("position 512", lambda: session.decode([1], new_offset=LAST - 1, forced_tokens=[1, 2])),
        (f"parents[0] (message {parent.id}) from offset 510", lambda: session.prefill([1], [parent], [510], 0)),
        ("from offset 511", lambda: session.prefill([1] * 2, [parent], [LAST - parent.length])),
        ("from offset 510", lambda: session.prefill([1], [parent[0:3]], [510], 0)),
    ):
        refuses(session, e.InvalidPositionError, text, submit)


def test_what_a_decoded_parent_moves_past_the_limit_fails_when_its_length_is_known(session):
    draft = session.decode([1] * 8, sampling=SamplingParams(max_tokens=8, ignore_eos=True))
    late = session.prefill([2], [draft], [LAST - 12])
    fails(session, e.InvalidPositionError, f"parents[0] (message {draft.id}) from offset 499", late)
    refuses(session, e.InvalidPositionError, "from offset 499", lambda: session.prefill([2], [draft], [LAST - 12]))


def test_a_footer_past_the_limit(session):
    call = {"header": [1], "new_offset": LAST - 2, "footer": [4, 5], "sampling": GREEDY}
    refuses(session, e.InvalidPositionError, "position 512", lambda: session.decode(**call))
    good = session.decode([1], new_offset=LAST - 3, footer=[4, 5], sampling=GREEDY)
    assert good.position + good.length == LAST + 1


def test_default_places_past_the_limit_are_found_when_lengths_are_known(session):
    first = session.prefill([1] * 250)
    second = session.decode([2] * 250, parents=[first], sampling=SamplingParams(max_tokens=8, ignore_eos=True))
    fits = session.prefill([3] * 4, parents=[first, second])
    third = session.prefill([3] * 5, parents=[first, second])
    fails(session, e.InvalidPositionError, "position 512", third)
    assert fits.result().position == 508


@pytest.mark.parametrize("mode", ["prefix", "naive"])
def test_concatenations_past_the_limit(engine, mode):
    with engine.session(mode=mode) as session:
        halves = session.prefill([{"tokens": [1] * 256}, {"tokens": [2] * 256}])
        with pytest.raises(e.InvalidPositionError, match="position 513"):
            session.decode([3], parents=halves, sampling=GREEDY)
        draft = session.decode([3], [halves[0]], sampling=SamplingParams(max_tokens=200, ignore_eos=True))
        answer = session.decode([4] * 100, parents=[halves[0], draft], sampling=GREEDY)
        with pytest.raises(e.InvalidPositionError, match="position 557"):
            answer.result()
        serves(engine)
    assert engine.stats().num_referenced_entries == 0


# -- tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (range(0), "empty"),
        ("", "tokenizer"),
        ([97], "token id 97"),
        ([1, -1], "token id -1"),
        ([10**30], f"token id {10**30}"),
        ([None], "None"),
        ([[1, 2]], "[1, 2]"),
        ([1.5], "1.5"),
        ([1.0], "1.0"),
        ([True], "True"),
        (["5"], "'5'"),
        ([float("nan")], "nan"),
        (None, "None"),
        (5, "5"),
        (b"abc", "b'abc'"),
        (torch.tensor([[1, 2]]), "tensor([1, 2])"),
        (torch.tensor(3), "tensor(3)"),
        (torch.tensor([1.0]), "tensor(1.)"),
        ({"tokens": [1]}, "'tokens'"),
    ],
    ids=repr,
)
def test_impossible_token_ids_are_refused(session, tokens, text):
    kind = e.ConfigError if tokens == "" else e.InvalidTokensError
    refuses(session, kind, text, lambda: session.prefill(tokens))
    refuses(session, kind, text, lambda: session.decode(tokens, sampling=GREEDY))
    if tokens is not None:
        refuses(session, kind, text, lambda: session.decode([1], forced_tokens=tokens))
    if tokens is not None and text not in ("empty", "tokenizer"):
        refuses(session, kind, text, lambda: session.decode([1], footer=tokens))


@pytest.mark.parametrize("mode", ["choreographed", "prefix", "naive"])
def test_an_empty_list_of_requests_has_no_messages(engine, mode):
    with engine.session(mode=mode) as session:
        assert session.prefill([]) == session.decode([]) == []
        parent = session.prefill([1])
        for call in (session.prefill, session.decode):
            with pytest.raises(e.InvalidRequestError, match="list of 0 requests: give at least one token"):
                call([], [parent])
        assert session.messages == [parent]


def test_empty_texts_are_refused(embedded):
    with embedded.session() as session:
        before = state(embedded)
        for call in (lambda: session.prefill(""), lambda: session.decode("")):
            with pytest.raises(e.InvalidTokensError, match="empty"):
                call()
        assert state(embedded) == before


def test_a_chat_turn_that_is_rendered_as_nothing(embedded):
    chat = embedded.chat
    try:
        embedded.chat = choreograph.api.chat.ChatTemplate(_Silent())
        with embedded.session() as session:
            for call in (session.prefill, session.decode):
                with pytest.raises(e.ChoreographError):
                    call(session.user(""))
    finally:
        embedded.chat = chat


class _Silent:
    """A tokenizer whose template writes the text and nothing around it."""

    chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

    def get_chat_template(self, tools=None):
        return self.chat_template

    def __call__(self, text, **_):
        return {"input_ids": list(text.encode())}


# -- sampling ------------------------------------------------------------------------------------------------


def test_impossible_sampling_parameters_are_refused(session):
    def decode(**options):
        return lambda: session.decode([1], sampling=SamplingParams(**options))

    refuses(session, e.SamplingError, "temperature=-1", decode(temperature=-1))
    refuses(session, e.SamplingError, "max_tokens=4.0", decode(max_tokens=4.0))
    refuses(session, e.SamplingError, "top_p=nan", decode(top_p=float("nan")))
    refuses(session, e.SamplingError, "token id 97", decode(stop_token_ids=[97]))
    refuses(session, e.SamplingError, "token id 400", decode(logit_bias={400: 1}))
    refuses(session, e.SamplingError, "stop=('x',)", decode(stop="x"))
    for bad in (None, {"temperature": 0}, 0.7):
        refuses(session, e.SamplingError, f"sampling={bad!r}", lambda bad=bad: session.decode([1], sampling=bad))


def test_whole_numbers_are_fine_where_fractions_are(session):
    odd = {
        "temperature": 1,
        "top_p": 1,
        "min_p": 1,
        "repetition_penalty": 2,
        "presence_penalty": 1,
        "logit_bias": {5: 1},
    }
    answer = session.decode([1], sampling=SamplingParams(max_tokens=3, ignore_eos=True, **odd))
    assert len(answer.output_token_ids) == 3


def test_every_token_forbidden_but_one(session):
    bias = {token: -100.0 for token in range(97) if token != 41}
    assert session.decode([1], sampling=SamplingParams(max_tokens=3, logit_bias=bias)).output_token_ids == [41] * 3


# -- the cache -----------------------------------------------------------------------------------------------


def test_calls_larger_than_the_cache(tiny_engine):
    with tiny_engine(tokens=64).session() as session:
        refuses(
            session,
            e.CacheFullError,
            "needs room for 65 tokens; the whole cache holds 64",
            lambda: session.prefill([1] * 65),
        )
        text = "needs room for 66 tokens"
        options = SamplingParams(max_tokens=60)
        refuses(session, e.CacheFullError, text, lambda: session.decode([1] * 4, footer=[1, 1], sampling=options))
        refuses(session, e.CacheFullError, "needs room for 101", lambda: session.decode([1], forced_tokens=[1] * 100))
        good, bad = {"tokens": [1]}, {"tokens": [1] * 65}
        refuses(session, e.CacheFullError, "65 tokens", lambda: session.prefill([good, bad]))
        session.prefill([1] * 64).result()
        session.close()


def test_a_cache_held_by_a_pin(tiny_engine):
    engine = tiny_engine(tokens=64)
    with engine.session() as session:
        held = session.prefill([1] * 32).pin()
        late = session.prefill([2] * 48)
        with pytest.raises(e.CacheFullError, match="needs 3 pages of 16 tokens; 2 of 4 are free and 0 can be evicted"):
            late.result()
        engine.check()
        counts = inspect(engine).cache_manager.stats
        with pytest.raises(e.CacheFullError):
            late.result()
        assert inspect(engine).cache_manager.stats == counts
        assert len(session.decode([4], parents=[held], sampling=GREEDY).tokens) == 5
        held.unpin()
        assert session.prefill([2] * 48).result().usage.computed_tokens == 48
        engine.check()
    assert engine.stats().num_referenced_entries == 0


def test_a_call_that_does_not_fit_now_waits(tiny_engine):
    engine = tiny_engine(tokens=64)
    with engine.session() as session:
        first = session.decode([1], sampling=SamplingParams(max_tokens=40, ignore_eos=True))
        second = session.decode([2], sampling=SamplingParams(max_tokens=40, ignore_eos=True))
        engine.step()
        assert not second.done
        first.result()
        first.release()
        assert len(second.output_token_ids) == 40
        engine.check()


def test_a_parent_that_its_own_child_has_no_room_beside(tiny_engine):
    engine = tiny_engine(tokens=32)
    with engine.session() as session:
        parent = session.prefill([1] * 32)
        child = session.prefill([2], parents=[parent])
        grandchild = session.prefill([3], parents=[child])
        with pytest.raises(e.CacheFullError, match="in whole pages 48; the whole cache holds 32"):
            child.result()
        with pytest.raises(e.RequestFailedError, match=f"parent {child.id} failed"):
            grandchild.result()
        engine.check()
        parent.release()
        assert session.prefill([2]).result()
    serves(engine)


# -- models --------------------------------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "./nowhere.gguf", "no.gguf"])
def test_a_wrong_model_path_is_named(name):
    with pytest.raises(e.ModelError) as caught:
        Engine.from_pretrained(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("model", [None, 5, b"smollm2", ["smollm2"], torch.nn.Linear(1, 1)], ids=repr)
def test_a_model_of_another_type_is_refused(model):
    with pytest.raises(e.ModelError, match="model="):
        Engine.from_pretrained(model)


def test_folders_that_hold_no_model(tmp_path):
    with pytest.raises(e.ModelError, match=r"holds no config\.json"):
        Engine.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(e.ModelError, match="cannot be loaded"):
        Engine.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(e.ModelError, match="cannot be loaded"):
        Engine.from_pretrained(tmp_path)
    with pytest.raises(e.ModelError, match="no such folder"):
        Engine.from_pretrained(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("size", "times"), [(0, 2), (3, 2), (1000, 2), (3_000_000, 1), pytest.param(20_000_000, 2, marks=pytest.mark.slow)]
)
def test_a_truncated_gguf_file(tmp_path, own_cache, size, times):
    path = tmp_path / "short.gguf"
    with bundled_gguf().open("rb") as whole:
        path.write_bytes(whole.read(size))
    for _ in range(times):
        with pytest.raises(e.ModelError, match=r"short\.gguf' is not a readable GGUF file"):
            Engine.from_pretrained(path)
    assert not os.listdir(own_cache / "choreograph" / "models"), "nothing half-made is left"


def test_a_file_of_another_kind(tmp_path, own_cache):
    path = tmp_path / "text.gguf"
    path.write_text("not a model at all")
    with pytest.raises(e.ModelError, match=r"text\.gguf"):
        Engine.from_pretrained(path)


def test_an_architecture_that_is_not_served():
    model = MambaForCausalLM(MambaConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1))
    with pytest.raises(e.ModelError, match=r"'mamba' cannot be served: 0 of its 1 layers"):
        Engine.from_pretrained(model)


@pytest.mark.parametrize("dtype", ["int8", "float99", "", 5, torch.int64, torch.bool], ids=repr)
def test_an_unknown_dtype_is_refused(tiny_model, dtype):
    with pytest.raises(e.ConfigError) as caught:
        Engine.from_pretrained(tiny_model(), dtype=dtype)
    assert f"dtype={dtype!r}" in str(caught.value)


def test_an_unknown_device_is_refused(tiny_model):
    with pytest.raises(e.ChoreographError, match="nonsense"):
        Engine.from_pretrained(tiny_model(), device="nonsense")


# -- options of engines and sessions -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (EngineConfig, "backend", "flash"),
        (EngineConfig, "backend", None),
        (EngineConfig, "quantization", "int3"),
        (EngineConfig, "compile_sizes", ()),
        (EngineConfig, "compile_sizes", (4, 2)),
        (EngineConfig, "compile_sizes", (0, 1)),
        (EngineConfig, "compile_sizes", (1.5,)),
        (EngineConfig, "compile_sizes", 5),
        (EngineConfig, "cache", 4096),
        (EngineConfig, "scheduler", None),
        (EngineConfig, "compile", "no"),
        (CacheConfig, "capacity", 0),
        (CacheConfig, "capacity", 15),
        (CacheConfig, "capacity", -1),
        (CacheConfig, "capacity", 99.5),
        (CacheConfig, "capacity", "many"),
        (CacheConfig, "page_size", 0),
        (CacheConfig, "page_size", 1.5),
        (CacheConfig, "page_size", None),
        (CacheConfig, "eviction", "random"),
        (CacheConfig, "disk_dir", 7),
        (CacheConfig, "disk_dir", __file__),
        (CacheConfig, "disk_dir", f"{__file__}/below/it"),
        (SchedulerConfig, "max_num_batched_tokens", 0),
        (SchedulerConfig, "max_num_batched_tokens", 7.5),
        (SchedulerConfig, "max_num_seqs", -1),
        (SchedulerConfig, "max_num_seqs", True),
        (SchedulerConfig, "skip_loading", "no"),
        (CacheConfig, "poison_freed_pages", 1),
    ],
)
def test_impossible_config_values(kind, name, value):
    with pytest.raises(e.ConfigError) as caught:
        kind(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)


def test_config_of_another_kind(tiny_model):
    for bad in ({"backend": "sdpa"}, CacheConfig(), "sdpa"):
        with pytest.raises(e.ConfigError, match="config="):
            Engine.from_pretrained(tiny_model(), config=bad)


def test_impossible_session_options_are_refused(engine):
    for options in ({"mode": "fast"}, {"mode": None}, {"seed": "x"}, {"seed": 1.5}, {"client_id": None}):
        with pytest.raises(e.ConfigError) as caught:
            engine.session(**options)
        assert all(f"{name}={value!r}" in str(caught.value) for name, value in options.items())
    serves(engine)


# -- closed --------------------------------------------------------------------------------------------------


def test_a_closed_session_refuses_requests(engine):
    session = engine.session()
    parent = session.prefill([1]).result()
    session.close()
    for call in (
        lambda: session.prefill([1]),
        lambda: session.prefill([1], parents=[parent]),
        lambda: session.decode([1], parents=[parent]),
        lambda: session.decode([{"header": [1]}]),
    ):
        refuses(session, e.SessionClosedError, "the session is closed", call)


def test_a_closed_engine_refuses_requests(engine):
    with engine.session() as session:
        answer = session.decode([1], sampling=GREEDY)
        engine.close()
        before = state(engine)
        for call in (session.prefill, session.decode, engine.session().prefill):
            with pytest.raises(e.SessionClosedError, match="the engine is closed"):
                call([1])
        assert state(engine) == before
        assert len(answer.tokens) == 5, "what was submitted before is still computed"
    engine.check()
    assert engine.stats().num_referenced_entries == 0


# -- a model that fails in the middle ------------------------------------------------------------------------


def test_a_step_that_fails_fails_its_requests_and_the_engine_goes_on(engine, session, monkeypatch):
    want = session.decode([1, 2], sampling=GREEDY).tokens
    forward = inspect(engine).hf_model.forward

    def broken(*_):
        raise RuntimeError("out of memory")

    answer = session.decode([1, 2], sampling=GREEDY)
    engine.step()
    monkeypatch.setattr(inspect(engine).hf_model, "forward", broken)
    with pytest.raises(e.RequestFailedError, match="out of memory") as failed:
        answer.result()
    assert isinstance(failed.value.__cause__, RuntimeError)
    engine.check()
    monkeypatch.setattr(inspect(engine).hf_model, "forward", forward)
    assert session.decode([1, 2], sampling=GREEDY).tokens == want


# -- the tree ------------------------------------------------------------------------------------------------


def test_errors_have_the_base_classes_of_python_too():
    bases = {
        e.ConfigError: ValueError,
        e.SamplingError: e.ConfigError,
        e.ModelError: OSError,
        e.InvalidRequestError: ValueError,
        e.NotAMessageError: e.InvalidRequestError,
        e.WrongSessionError: e.InvalidRequestError,
        e.MessageReleasedError: e.InvalidRequestError,
        e.DuplicateParentError: e.InvalidRequestError,
        e.InvalidTokensError: e.InvalidRequestError,
        e.InvalidPositionError: e.InvalidRequestError,
        e.CacheFullError: MemoryError,
        e.RequestFailedError: RuntimeError,
        e.LostContextError: e.RequestFailedError,
        e.SessionClosedError: RuntimeError,
    }
    for kind, base in bases.items():
        assert issubclass(kind, base)
        assert issubclass(kind, choreograph.ChoreographError)
        assert kind.__name__ in e.__doc__


@pytest.mark.parametrize("mode", ["prefix", "naive"])
def test_a_message_without_kv_cannot_be_pinned_or_exported(tiny_engine, mode):
    with tiny_engine().session(mode=mode) as session:
        text = session.prefill([1, 2, 3])
        assert text.pin() is text and text.wait_encoded() is text and text.kv_location == "nowhere"
        text.unpin()
        with pytest.raises(e.InvalidRequestError, match=f"no KV entry of its own in {mode} mode"):
            text.export_kv()
        said = session.decode([4], [text], sampling=GREEDY)
        assert said.pin().length == 5 and said.kv_location == ("device" if mode == "prefix" else "nowhere")


def test_a_text_with_a_surrogate_is_refused(talker):
    with talker.session() as session:
        refuses(session, e.InvalidTokensError, "surrogates not allowed", lambda: session.prefill("a\ud800b"))
        refuses(
            session, e.InvalidRequestError, "session.user", lambda: session.prefill([{"role": "user", "content": "hi"}])
        )


def test_a_device_may_be_given_as_a_size():
    engine = tiny_models.engine(tokens=64)
    size = 64 * engine.model_info.kv_bytes_per_token
    config = EngineConfig(cache=CacheConfig(capacity=f"{size / 1024}KiB"))
    assert inspect(Engine.from_pretrained(tiny_models.build(), config=config)).pool.pages * 16 == 64
    with pytest.raises(e.ConfigError, match="capacity"):
        CacheConfig(capacity="much")


def test_options_are_of_the_type_of_their_defaults(tiny_engine):
    def workflow(p, task, *, branches: int = 2, share: float = 0.5, quick: bool = False, name: str | None = None):
        return task

    check_options(workflow, {"branches": 3, "share": 1, "quick": True, "name": 7})
    for bad in ({"branches": "foo"}, {"branches": True}, {"branches": 0.5}, {"quick": 1}, {"share": "x"}):
        with pytest.raises(e.ConfigError, match=f"option {next(iter(bad))}="):
            check_options(workflow, bad)
    with pytest.raises(e.ConfigError, match="return the message"):
        run_workflow(tiny_engine(), lambda p, task: "text", "task", mode="choreographed")


def test_options_of_every_kind_of_signature():
    def open_ended(p, task, **options): ...

    def by_place(p, task, critics=2): ...

    def hidden(p, task, private=0, /): ...

    check_options(open_ended, {"critics": 3, "anything": None})
    check_options(by_place, {"critics": 3})
    for workflow, bad in ((open_ended, "task"), (by_place, "task"), (by_place, "p"), (hidden, "private")):
        with pytest.raises(e.ConfigError, match=f"option '{bad}': the workflow has"):
            check_options(workflow, {bad: 3})
    with pytest.raises(e.ConfigError, match="option critics='many'"):
        check_options(by_place, {"critics": "many"})


@pytest.mark.parametrize("name", ["capacity", "host_capacity", "disk_capacity"])
def test_sizes_of_the_cache_that_hold_nothing(name):
    with pytest.raises(e.ConfigError, match=f"{name}='0.1KB': use [0-9,]+ bytes .[0-9]+ tokens. or more"):
        Engine.from_pretrained(tiny_models.model(), config=EngineConfig(cache=CacheConfig(**{name: "0.1KB"})))


def test_host_memory_of_less_than_a_page_is_refused():
    with pytest.raises(e.ConfigError, match=r"host_capacity=8: .*\(16 tokens\) or more"):
        tiny_models.engine(page=16, host_capacity=8)


@pytest.mark.parametrize(
    ("name", "size"), [("capacity", "9000TiB"), ("host_capacity", "9000TiB"), ("host_capacity", 10**15)]
)
def test_sizes_of_the_cache_beyond_the_memory(name, size):
    with pytest.raises(e.ConfigError, match=f"{name}={size!r}: takes [0-9,]+ bytes, the memory has [0-9,]+"):
        Engine.from_pretrained(tiny_models.model(), config=EngineConfig(cache=CacheConfig(**{name: size})))


@pytest.mark.parametrize("what", ["pathlib.Path.mkdir", "tempfile.mkdtemp"])
def test_a_folder_for_the_disk_tier_that_takes_no_files_is_refused(what, tmp_path, monkeypatch):
    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(what, read_only)
    with pytest.raises(e.ConfigError, match=rf"{tmp_path}.*Read-only file system.*another"):
        tiny_models.engine(disk_capacity=96, disk_dir=tmp_path / "below")


def test_a_folder_for_the_disk_tier_may_be_made_later(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (None, tmp_path, tmp_path / "new" / "below", "new", "."):
        CacheConfig(disk_dir=folder)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "place"), [("capacity", "choreograph.api.engine"), ("host_capacity", "choreograph.kv_cache.tiers")]
)
@pytest.mark.parametrize("kind", [MemoryError, RuntimeError, torch.OutOfMemoryError])
def test_memory_that_cannot_be_had_names_the_option(name, place, kind, monkeypatch):
    def pool(**_):
        raise kind("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(f"{place}.KVPool", lambda *_, **options: pool(**options))
    with pytest.raises(e.ConfigError, match=f"{name}=64: .* bytes cannot be allocated; use less"):
        Engine.from_pretrained(
            tiny_models.model(), config=EngineConfig(cache=CacheConfig(**{"capacity": 64, name: 64}))
        )


def test_other_errors_of_an_allocation_are_raised_as_they_are(monkeypatch):
    def pool(**_):
        raise RuntimeError("another error")

    monkeypatch.setattr("choreograph.api.engine.KVPool", pool)
    with pytest.raises(RuntimeError, match="another error"):
        Engine.from_pretrained(tiny_models.model(), config=EngineConfig(cache=CacheConfig(capacity=64)))
