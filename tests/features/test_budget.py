"""`Budget`: the cheapest way of reading a context that stays within a divergence."""

import numpy as np
import pytest
import torch
from helpers import tiny_models
from helpers.inspect_engine import inspect

from choreograph import Budget, Repair, SamplingParams
from choreograph.errors import ConfigError, DataError
from choreograph.features.budget import MAX_STAGES, MIN_SAMPLES
from choreograph.features.budget import SHARES as REPAIR_SHARES
from choreograph.features.explain import measure_repairs

SHARES = (0.0, *REPAIR_SHARES)
GREEDY = SamplingParams(temperature=0, max_tokens=4)


def observe_synthetic(budget, stage, means, rng, count):
    """Skewed measurements with known means."""
    for _ in range(count):
        budget.observe(stage, {s: m * rng.lognormal(-0.5, 1.0) for s, m in zip(SHARES, means, strict=True)})


@pytest.mark.parametrize("count", [12, 100])
def test_at_least_95_percent_of_stages_stay_within_the_budget(count):
    rng, max_kl, chosen = np.random.default_rng(0), 0.05, []
    budget = Budget(max_kl)
    for number in range(400):
        reuse = 10 ** rng.uniform(-4, 0)
        means = [reuse * factor for factor in (1, 0.7, 0.5, 0.25, 0.15)]
        observe_synthetic(budget, f"s{number}", means, rng, count)
        share = budget.share_for(f"s{number}")
        chosen.append((share, reuse, 0.0 if share == 1 else means[SHARES.index(share)]))
    assert np.mean([kl <= max_kl for _, _, kl in chosen]) >= 0.95
    assert all(share == 0 for share, reuse, _ in chosen if reuse < max_kl / 20)  # clearly within: the cheapest
    assert all(share == 1 for share, reuse, _ in chosen if reuse > max_kl * 20)
    if count == 100:
        assert {share for share, _, _ in chosen} == {*SHARES, 1.0}


def test_nothing_is_reused_before_it_was_measured_often_enough():
    budget = Budget(0.05)
    assert budget.share_for("stage") == 1
    for number in range(MIN_SAMPLES):
        assert budget.share_for("stage") == 1, number
        budget.observe("stage", dict.fromkeys(SHARES, 0.0))
    assert budget.share_for("stage") == 0
    assert budget.share_for("another") == 1


def test_a_stage_that_gets_worse_is_computed_again():
    budget = Budget(0.05)
    for kl in [0.001] * 500 + [1.0] * 60:
        budget.observe("stage", dict.fromkeys(SHARES, kl))
    assert budget.share_for("stage") == 1


def test_unknown_stages_equal_prefix_mode_and_known_ones_reuse():
    engine, budget = tiny_models.engine(), Budget(0.05, workflow="w")

    def run(**options):
        rows = []
        with engine.session(**options) as session:
            parents = [session.prefill([i] * 6) for i in (1, 2)]
            message = session.decode([3], parents, forced_tokens=[4, 5])
            message.on_logprobs(lambda row: rows.append(row.clone()))
            return message.wait_encoded().usage.repaired_tokens, torch.stack(rows)

    repaired, rows = run(max_kl=budget)
    assert repaired == 6 and torch.allclose(rows, run(mode="prefix")[1], atol=2e-4)
    for _ in range(MIN_SAMPLES):
        budget.observe("w/decode 2 pp", {0.0: 0.01})
    repaired, rows = run(max_kl=budget)
    assert repaired == 0 and torch.allclose(rows, run()[1], atol=1e-5)


def serve(budget, num_sessions):
    """Run sessions of one stage; return the engine."""
    engine = tiny_models.engine()
    for number in range(num_sessions):
        with engine.session(seed=number, max_kl=budget) as session:
            parents = [session.prefill([number % 50, i] * 3) for i in (1, 2)]
            session.decode([3], parents, sampling=GREEDY).result()
    engine.check()
    assert engine.stats().num_referenced_entries == 0
    return engine


def test_measurements_are_off_by_default():
    budget = Budget(0.05)
    serve(budget, 3)
    assert budget.num_shadow_tokens == 0 and budget.share_for("/decode 2 pp") == 1


def test_a_stage_is_learned_from_its_own_calls():
    budget = Budget(100.0, shadow_calls=1, shadow_tokens=1e9)
    serve(budget, MIN_SAMPLES)
    assert budget.share_for("/decode 2 pp") == 0


def test_a_session_measures_one_call_of_each_stage():
    """Calls of one session share their context, so they are no independent measurements."""
    engine, budget = tiny_models.engine(), Budget(100.0, shadow_calls=1, shadow_tokens=1e9)
    for number in range(MIN_SAMPLES):
        assert budget.share_for("/decode 2 pp") == budget.share_for("/decode 1 p") == 1, number
        with engine.session(seed=number, max_kl=budget) as session:
            parents = [session.prefill([number, i] * 3) for i in (1, 2)]
            calls = [session.decode([3 + i], parents, sampling=GREEDY) for i in range(3)]
            calls += [session.decode([3], parents[:1], sampling=GREEDY)]
            assert all(len(call.output_token_ids) == 4 for call in calls)
    assert budget.share_for("/decode 2 pp") == budget.share_for("/decode 1 p") == 0


def test_a_budget_repairs_and_measures_with_its_strategy():
    engine, budget = tiny_models.engine(), Budget(100.0, shadow_calls=1, shadow_tokens=1e9, strategy="attention")
    with engine.session(max_kl=budget) as session:
        parents = [session.prefill([i] * 10) for i in (1, 2, 3)]
        session.decode([4, 5], parents, sampling=GREEDY).result()
        by_hand = [session.decode([4, 5], parents, sampling=GREEDY, repair=Repair(s, "attention")) for s in SHARES]
        trials = measure_repairs(by_hand[0], [Repair(share, "attention") for share in SHARES])
        for message, trial in zip(by_hand, trials, strict=True):
            rows = [message.result().explain(measure=True).kl, trial.kl]
            if message.output_token_ids == by_hand[0].output_token_ids:
                assert rows[0] == pytest.approx(rows[1], abs=1e-4)
        for _ in range(MIN_SAMPLES):
            budget.observe("/decode 3 ppp", {0.0: 1e3, 0.2: 0.0})
        assert budget.choose(inspect(by_hand[0]).request) == Repair(0.2, "attention")


def test_the_cheapest_share_wins_then_the_strategy_that_was_named_first():
    budget = Budget(0.05, strategy=["unseen", "attention"])
    kl = {Repair(0.0, "unseen"): 0.2, Repair(0.1, "unseen"): 0.1, Repair(0.1, "attention"): 0.06}
    kl |= {Repair(0.2, "unseen"): 0.09, Repair(0.2, "attention"): 0.04, Repair(0.4, "unseen"): 0.01}
    for _ in range(MIN_SAMPLES):
        budget.observe("stage", kl)
    assert budget.repair_for("stage") == Repair(0.2, "attention")
    for _ in range(30 * MIN_SAMPLES):
        budget.observe("stage", {Repair(0.2, "unseen"): 0.0})
    assert budget.repair_for("stage") == Repair(0.2, "unseen") and budget.share_for("stage") == 0.2


@pytest.mark.parametrize("strategy", ["first", "attention", ("unseen", "attention")])
def test_measurements_cost_no_more_than_their_limit(strategy):
    plain = Budget(1e9)
    shadowed = Budget(1e9, shadow_calls=1, shadow_tokens=0.5, strategy=strategy)
    without = serve(plain, 20).stats().num_batched_tokens
    extra = serve(shadowed, 20).stats().num_batched_tokens - without  # of the engine's steps
    assert 0 < shadowed.num_shadow_tokens <= 0.5 * shadowed.num_tokens
    assert extra <= shadowed.num_shadow_tokens


def test_a_seed_selects_the_same_calls():
    learned = []
    for seed in (1, 1, 2):
        budget = Budget(0.5, shadow_calls=0.4, shadow_tokens=1e9, seed=seed)
        serve(budget, 10)
        learned.append([vars(d) for d in budget._stages["/decode 2 pp"].values()])
    assert learned[0] == learned[1] != learned[2]


def test_what_was_learned_is_bounded_saved_and_loaded(tmp_path):
    budget = Budget(0.05)
    for number in range(MAX_STAGES + 10):
        for _ in range(MIN_SAMPLES):
            budget.observe(f"s{number}", {0.0: 0.01, 0.2: 0.001})
    assert budget.share_for("s0") == 1 and budget.share_for(f"s{MAX_STAGES + 9}") == 0
    budget.observe("several", {Repair(0.4, "first"): 0.001})
    budget.save(tmp_path / "budget.json")
    other = Budget(0.005)
    other.load(tmp_path / "budget.json")
    assert other.share_for(f"s{MAX_STAGES + 9}") == 0.2 and other.share_for("s0") == 1
    with pytest.raises(DataError, match=r"strategies \('first',\) instead of \('attention',\)"):
        Budget(0.005, strategy="attention").load(tmp_path / "budget.json")
    (tmp_path / "budget.json").write_text("{}")
    with pytest.raises(DataError, match="remove it"):
        other.load(tmp_path / "budget.json")
    assert other.share_for(f"s{MAX_STAGES + 9}") == 0.2


@pytest.mark.parametrize(
    "options",
    [
        {"max_kl": -1},
        {"max_kl": True},
        {"max_kl": 1, "shadow_calls": 1.5},
        {"max_kl": 1, "strategy": "best"},
        {"max_kl": 1, "strategy": ()},
    ],
)
def test_invalid_budgets_are_refused(options):
    with pytest.raises(ConfigError):
        Budget(**options)
