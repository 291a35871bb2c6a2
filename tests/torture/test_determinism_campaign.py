"""Each line of the table of determinism, once, and the test of counts."""

import random

import pytest
import torch

from benchmarks.torture import determinism
from benchmarks.torture.campaign import Options
from benchmarks.torture.pairs import Result
from choreograph import SamplingParams

QUICK = (
    *("the same program, another engine", "keys and values back from a tier", "batch", "threads that call", "tiers"),
    *("eviction and preemption", "drafts", "another replica continues", "samples of many seeds", "batch in bfloat16"),
)
OTHERS = [name for name in determinism.LINES if name not in QUICK]


def try_once(name, seed=5):
    index = list(determinism.LINES).index(name)
    return determinism.try_line(Options(0, seed), index)


@pytest.mark.parametrize("name", QUICK)
def test_a_line_holds(name):
    tally = try_once(name)
    assert tally.inputs == 1 and not tally.lost


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_another_line_holds(name):
    assert not try_once(name).lost


def test_a_broken_line_names_itself(monkeypatch):
    monkeypatch.setattr(determinism.pairs, "run_plain", lambda row, calls, **_: [Result([1], logprobs=[object()])])
    tally = try_once("the same program, another engine")
    assert len(tally.lost) == 1 and "the same program, another engine: two engines give other bits" in tally.lost[0]


def test_counts_of_another_distribution_are_found():
    draws = random.Random(0)
    probabilities = [0.5, 0.3, 0.15, 0.05, 0.0]
    sampled = draws.choices(range(5), probabilities, k=2000)
    assert determinism.counts_p(sampled, probabilities) > 0.01
    assert determinism.counts_p(sampled, [0.45, 0.35, 0.15, 0.05, 0.0]) < 1e-4
    assert determinism.counts_p([*sampled, 4], probabilities) == 0


def test_a_distribution_is_truncated_as_sampling_does():
    logprobs = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    top = determinism._truncate(logprobs, SamplingParams(top_k=2))
    assert top.tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])
    nucleus = determinism._truncate(logprobs, SamplingParams(top_p=0.6))
    assert nucleus.tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])
