"""Log-probabilities of prompts: what a plain model gives, and the oracle's over every context."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from context.test_attention_semantics import ORACLES, expected, make_engine, submit
from helpers import tiny_models
from helpers.hypothesis_profile import many
from helpers.inspect_engine import inspect
from helpers.message_graphs import default_placements, graphs
from helpers.model_configs import CONFIGS
from helpers.model_configs import VOCABULARY as FAMILY_VOCABULARY
from helpers.oracle import Oracle, OracleMessage
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from choreograph import CacheConfig, Engine, EngineConfig, LayerPattern, Repair
from choreograph.errors import InvalidPositionError, RequestFailedError, SamplingError
from choreograph.execution import prompt_scoring

TOKENS = [(7 * i) % 59 + 1 for i in range(40)]


def plain_scores(tokens, model=None):
    """Log-probabilities of the tokens after the first one, by one forward pass of transformers."""
    with torch.no_grad():
        rows = (model or tiny_models.model())(torch.tensor([tokens])).logits[0, :-1].double().log_softmax(-1)
    return rows.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


def scores_of(message):
    """Log-probabilities of a message's prompt after its first token."""
    first, *rest = message.prompt_logprobs
    assert first is None
    return [item.logprob for item in rest]


def score(session, header, parents=(), **options):
    return session.decode(header, parents, max_tokens=0, prompt_logprobs=0, **options)


@pytest.mark.parametrize("mode", ["choreographed", "prefix", "naive"])
@pytest.mark.parametrize("step", [1, 7, 1024])
def test_a_prompt_has_the_log_probabilities_of_a_plain_model(mode, step):
    engine = tiny_models.engine(step=step)
    with engine.session(mode=mode) as session:
        for _ in range(2):  # the second time, most of it is cached in prefix mode
            message = session.decode(TOKENS, max_tokens=3, temperature=0, prompt_logprobs=2, logprobs=0)
            assert scores_of(message) == pytest.approx(plain_scores(TOKENS), abs=1e-4)
            assert [item and item.token for item in message.prompt_logprobs] == [None, *TOKENS[1:]]
            full = plain_scores(TOKENS + message.output_token_ids)
            assert [item.logprob for item in message.logprobs] == pytest.approx(full[-3:], abs=1e-4)
            engine.run_until_idle()
            engine.check()
    engine.check()


def test_a_score_has_the_rank_and_the_likeliest_tokens():
    with tiny_models.engine().session() as session:
        message = session.decode(TOKENS, max_tokens=0, prompt_logprobs=3)
        rows = tiny_models.model()(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
        for row, item in zip(rows, message.prompt_logprobs[1:], strict=False):
            assert item.rank == int((row > row[item.token]).sum()) + 1
            assert list(item.top) == row.topk(3).indices.tolist()
            assert list(item.top.values()) == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("shape", ["gqa", "mqa-odd-head", "llama3-rope"])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
@settings(max_examples=many(15), deadline=None)
@given(nodes=graphs(), step_tokens=st.sampled_from([3, 16, 1024]), data=st.data())
def test_every_context_is_scored_as_the_oracle_does(shape, backend, nodes, step_tokens, data):
    order = data.draw(st.permutations(range(len(nodes))))[: data.draw(st.integers(1, 4))]
    engine, oracle, header = make_engine(shape, backend, step_tokens), ORACLES[shape], [7, 8, 9]
    with engine.session(seed=0) as session:
        messages, truths = submit(session, nodes), expected(shape, nodes)
        parents, parts, position = [], [], 0
        for index in order:
            num_tokens = len(nodes[index].all_tokens)
            first = data.draw(st.integers(0, num_tokens - 1))
            parents.append(messages[index][first:] if first else messages[index])
            parts.append((truths[index], first, num_tokens, position))
            position += num_tokens - first
        message = score(session, header, parents)
        result = scores_of(message)
        engine.run_until_idle()
        engine.check()
        tokens = [token for truth, first, end, _ in parts for token in truth.tokens[first:end]] + header
        rows = oracle.score_context(parts)
        assert result[: len(rows)] == pytest.approx(list(rows[range(len(rows)), tokens[1 : len(rows) + 1]]), abs=2e-4)
        # the header is computed over the same context: forced, it has the same log-probabilities
        forced = session.decode(header[:1], parents, forced_tokens=header[1:], logprobs=0)
        assert result[len(rows) :] == pytest.approx([item.logprob for item in forced.logprobs], abs=2e-4)
    engine.check()


@settings(max_examples=many(15), deadline=None)
@given(nodes=graphs(), data=st.data())
def test_contexts_at_any_offsets_are_scored_where_they_are_read(nodes, data):
    engine, truths = make_engine("gqa", "auto", 16), expected("gqa", nodes)
    offsets = [data.draw(st.one_of(st.none(), st.integers(0, 90))) for _ in nodes]
    nodes[-1].parents, nodes[-1].offsets, nodes[-1].position = list(range(len(nodes) - 1)), offsets[:-1], None
    nodes[-1].generated = None
    places, start = default_placements(nodes)[-1]
    if not nodes[-1].parents or start + len(nodes[-1].tokens) > 150:
        return
    with engine.session() as session:
        messages = submit(session, nodes[:-1])
        message = score(session, nodes[-1].tokens, messages, offsets=nodes[-1].offsets)
        parts = [(t, 0, len(t.tokens), at) for t, at in zip(truths, places, strict=False)]
        tokens = [token for part in parts for token in part[0].tokens] + nodes[-1].tokens
        rows = ORACLES["gqa"].score_context(parts)
        wanted = rows[range(len(rows)), tokens[1 : len(rows) + 1]]
        np.testing.assert_allclose(scores_of(message)[: len(rows)], wanted, atol=2e-4)
    engine.check()


def test_scoring_changes_no_entry_and_no_other_answer():
    engine = tiny_models.engine(step=8)
    with engine.session(seed=1) as session:
        parents = [session.prefill(TOKENS[:10]), session.prefill(TOKENS[20:33])]
        alone = [session.decode([5, i], parents, max_tokens=8, temperature=0).tokens for i in range(3)]
        engine.run_until_idle()
        pool = inspect(engine).pool
        slots = [slot for parent in parents for slot in inspect(parent).entry.slots]
        keys = [layer[slots].clone() for layer in pool.keys]
        num_entries = engine.stats().num_referenced_entries
        others = [session.decode([5, i], parents, max_tokens=8, temperature=0) for i in range(3)]
        scored = [score(session, [5, i], parents[::-1]) for i in range(3)]
        assert [other.tokens for other in others] == alone
        assert all(len(message.prompt_logprobs) == 25 for message in scored)
        engine.run_until_idle()
        assert all(torch.equal(before, layer[slots]) for before, layer in zip(keys, pool.keys, strict=True))
        assert engine.stats().num_referenced_entries == num_entries + 6, "one entry a decode"
        engine.check()


@pytest.mark.parametrize("mode", ["choreographed", "prefix"])
def test_a_small_cache_evicts_and_preempts_without_changing_scores(mode):
    with tiny_models.engine().session(mode=mode) as session:
        parents = [session.prefill(TOKENS[i : i + 12]) for i in range(4)]
        wanted = [scores_of(score(session, [9, i, 3], parents)) for i in range(8)]
    small = tiny_models.engine(tokens=96, step=5, page=2)
    with small.session(mode=mode) as session:
        parents = [session.prefill(TOKENS[i : i + 12]) for i in range(4)]
        rest = {"max_tokens": 20, "temperature": 0, "prompt_logprobs": 0}
        messages = [session.decode([9, i, 3], parents, **rest) for i in range(8)]
        fillers = [session.decode([i, 4], max_tokens=30, temperature=0, priority=-1) for i in range(4)]
        for message, scores in zip(messages, wanted, strict=True):
            assert scores_of(message) == pytest.approx(scores, abs=1e-4)
            small.check()
        assert all(len(filler.output_token_ids) == 30 for filler in fillers)
        small.run_until_idle()
        small.check()
        assert small.stats().events["preempted"]
    small.check()


def test_few_logits_are_in_memory_at_once(monkeypatch):
    monkeypatch.setattr(prompt_scoring, "MAX_LOGITS", 5 * tiny_models.VOCABULARY)
    monkeypatch.setattr(prompt_scoring, "BLOCK_ROWS", 2)
    engine, sizes = tiny_models.engine(), []
    forward = inspect(engine).hf_model.forward

    def observe(tokens, positions, context, rows, models=()):
        sizes.append(len(rows))
        return forward(tokens, positions, context, rows, models)

    monkeypatch.setattr(inspect(engine).hf_model, "forward", observe)
    with engine.session() as session:
        parent = session.prefill(TOKENS[:20])
        messages = [score(session, TOKENS[20:], [parent]) for _ in range(2)]
        assert all(scores_of(message) == pytest.approx(plain_scores(TOKENS), abs=1e-4) for message in messages)
    assert max(sizes) <= 5 + 2, "the scored rows of a step, and one sampled row of each request"
    engine.check()


def test_a_prompt_is_scored_in_steps_as_large_as_those_of_a_prefill():
    engine = tiny_models.engine(step=16)
    with engine.session() as session:
        parent = session.prefill(TOKENS[:32]).result()
        num_steps = engine.stats().num_steps
        assert len(score(session, TOKENS[32:], [parent]).prompt_logprobs) == 40
        assert engine.stats().num_steps - num_steps == 3


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_repaired_tokens_are_scored_as_they_were_computed_again(share):
    engine = tiny_models.engine()
    with engine.session() as session:
        first, second = session.prefill(TOKENS[:10]), session.prefill(TOKENS[10:20])
        repaired = scores_of(score(session, TOKENS[20:], [first, second], repair=Repair(share, "first")))
        num_tokens = round(share * 10)
        again = session.prefill(TOKENS[10 : 10 + num_tokens], [first])
        rest = [second[num_tokens:]] if num_tokens < 10 else []
        by_hand = scores_of(score(session, TOKENS[20:], [first, again, *rest]))
        reused = scores_of(score(session, TOKENS[20:], [first, second]))
        assert repaired == pytest.approx(by_hand, abs=1e-5)
        assert repaired != pytest.approx(reused, abs=1e-3)
        if share == 1:
            assert repaired == pytest.approx(plain_scores(TOKENS), abs=1e-4)
    engine.check()


def test_an_adapter_scores_with_its_own_weights(tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    options = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    get_peft_model(tiny_models.build(), LoraConfig(**options)).save_pretrained(str(tmp_path))
    merged = PeftModel.from_pretrained(tiny_models.build(), str(tmp_path)).merge_and_unload()
    config = EngineConfig(cache=CacheConfig(capacity=2048, poison_freed_pages=True))
    engine = Engine.from_pretrained(tiny_models.build(), config=config, adapters={"a": tmp_path})
    with engine.session() as session:
        parent = session.prefill(TOKENS[:20], model="a")
        scored = [score(session, TOKENS[20:], [parent], model="a"), score(session, TOKENS)]
        assert scores_of(scored[0]) == pytest.approx(plain_scores(TOKENS, merged), abs=1e-4)
        assert scores_of(scored[1]) == pytest.approx(plain_scores(TOKENS), abs=1e-4)
    engine.check()


@pytest.mark.parametrize("layers", [[0], [1], [0, 1]])
def test_layers_of_another_model_are_read_as_they_are(layers):
    base, tuned = tiny_models.build(), tiny_models.finetuned(tiny_models.build())
    config = EngineConfig(cache=CacheConfig(capacity=2048, poison_freed_pages=True))
    engine = Engine.from_pretrained(base, config=config, models={"tuned": tuned})
    engine.enable_layer_reuse("tuned", pattern=LayerPattern.from_layers(layers))
    sent = Oracle(base).compute(OracleMessage(TOKENS[:20], 0, []))
    receiver, partial = Oracle(tuned), OracleMessage(TOKENS[:20], 0, [])
    rows = receiver.score_context([(receiver.compute_layers(partial, sent, set(layers)), 0, 20, 0)])
    with engine.session() as session:
        message = score(session, TOKENS[20:], [session.prefill(TOKENS[:20])], model="tuned", kv_reuse="partial")
        assert scores_of(message)[:20] == pytest.approx(list(rows[range(20), TOKENS[1:21]]), abs=2e-4)
    engine.check()


def test_nothing_is_generated_with_a_limit_of_no_token():
    engine = tiny_models.engine()
    for mode in ("choreographed", "prefix", "naive"):
        with engine.session(mode=mode) as session:
            message = session.decode(TOKENS, max_tokens=0, prompt_logprobs=0, footer=[3, 4])
            assert (message.output_token_ids, message.finish_reason) == ([], "length")
            assert message.usage.completion_tokens == 0
            after = session.decode([5], [message], max_tokens=2)
            assert len(after.output_token_ids) == 2
            if mode == "prefix":
                longer = session.decode([*TOKENS, 5, 6], max_tokens=1)
                assert longer.usage.cached_tokens == len(TOKENS), "all of the prompt was computed, and is found"
            engine.run_until_idle()
            engine.check()
    assert score(engine.session(), [5]).prompt_logprobs == [None]
    engine.check()


def test_prompts_are_not_scored_unless_asked_for():
    with tiny_models.engine().session() as session:
        assert session.decode(TOKENS, max_tokens=1).prompt_logprobs is None
        assert session.prefill(TOKENS).prompt_logprobs is None
        with pytest.raises(SamplingError, match="max_tokens=0"):
            session.decode(TOKENS, max_tokens=0)
        for wrong in (-1, 1.5, True, "1"):
            with pytest.raises(SamplingError, match="prompt_logprobs"):
                session.decode(TOKENS, prompt_logprobs=wrong)


def test_nan_logits_fail_the_scored_request_alone(monkeypatch):
    engine = tiny_models.engine()
    score_tokens = prompt_scoring.score_tokens

    def with_nan(tokens, logits, num_top):
        return score_tokens(tokens, logits * float("nan") if 60 in tokens else logits, num_top)

    monkeypatch.setattr(prompt_scoring, "score_tokens", with_nan)
    with engine.session() as session:
        messages = [score(session, [*TOKENS, 60]), score(session, TOKENS), session.decode(TOKENS, max_tokens=2)]
        with pytest.raises(RequestFailedError, match="NaN"):
            messages[0].result()
        assert scores_of(messages[1]) == pytest.approx(plain_scores(TOKENS), abs=1e-4)
        assert len(messages[2].output_token_ids) == 2
        engine.check()
    engine.check()


def test_a_released_message_stops_being_scored():
    engine = tiny_models.engine(step=4)
    with engine.session() as session:
        parent = session.prefill(TOKENS[:30])
        message = score(session, TOKENS[30:], [parent])
        for _ in range(9):
            engine.step()
        message.release()
        engine.run_until_idle()
        engine.check()
        assert scores_of(score(session, TOKENS[30:], [parent])) == pytest.approx(plain_scores(TOKENS), abs=1e-4)
    engine.check()


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_has_the_scores_of_its_plain_model(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).float().eval()
    config = EngineConfig(cache=CacheConfig(capacity=1024, page_size=4, poison_freed_pages=True))
    engine = Engine.from_pretrained(model, config=config)
    tokens = [(7 * i) % (FAMILY_VOCABULARY - 1) + 1 for i in range(24)]
    rope = inspect(engine).hf_model.static_rope  # of the longest length, where tables depend on it
    with rope.applied() if rope.is_dynamic else nullcontext():
        wanted = plain_scores(tokens, model)
    with engine.session(mode="prefix") as session:
        for _ in range(2):
            assert scores_of(score(session, tokens)) == pytest.approx(wanted, abs=1e-3)
    with engine.session() as session:
        first = session.prefill(tokens[:9])
        second = session.prefill(tokens[9:15], [first])
        assert scores_of(score(session, tokens[15:], [first, second])) == pytest.approx(wanted, abs=1e-3)
    engine.check()


@pytest.mark.parametrize("backend", ["native", "sdpa", "triton"])
def test_all_backends_give_the_scores_of_the_reference(backend):
    results = []
    for name in ("reference", backend):
        engine = tiny_models.engine(backend=name, step=8)
        with engine.session() as session:
            secret = session.prefill(TOKENS[:6])
            parents = [session.prefill(TOKENS[6:15], [secret]), session.prefill(TOKENS[15:19], [secret])]
            results.append(scores_of(score(session, TOKENS[19:24], [parents[1], parents[0][2:], secret])))
        engine.check()
    assert results[1] == pytest.approx(results[0], abs=1e-4)


def test_a_prompt_may_reach_the_last_position_but_one():
    engine = tiny_models.engine()
    tokens = (TOKENS * 7)[: tiny_models.POSITIONS]
    with engine.session() as session:
        assert scores_of(score(session, tokens[:-1])) == pytest.approx(plain_scores(tokens[:-1]), abs=1e-3)
        with pytest.raises(InvalidPositionError):
            score(session, tokens)
    engine.check()


def test_drafts_begin_behind_a_scored_prompt():
    config = EngineConfig(cache=CacheConfig(capacity=2048, poison_freed_pages=True), draft_tokens=4)
    engine = Engine.from_pretrained(tiny_models.model(), config=config)
    with engine.session() as session, tiny_models.engine().session() as plain:
        messages = []
        for run in (session, plain):
            parent = run.prefill(TOKENS * 2)
            messages.append(run.decode([3, 4], [parent], max_tokens=40, temperature=0, prompt_logprobs=0))
        assert messages[0].tokens == messages[1].tokens
        assert scores_of(messages[0]) == pytest.approx(scores_of(messages[1]), abs=1e-4)
        assert messages[0].usage.drafted_tokens
    engine.check()


def test_dropped_scores_free_their_memory():
    with tiny_models.engine().session() as session:
        message = session.decode(TOKENS, max_tokens=4, prompt_logprobs=1)
        assert len(message.prompt_logprobs) == len(TOKENS)
        message.drop_prompt_logprobs()
        assert message.prompt_logprobs == [] and len(message.output_token_ids) == 4
        session.decode(TOKENS, max_tokens=1).drop_prompt_logprobs()
