"""The benchmark of the GPU path where nothing has to be timed: its budget, counts, predictions and lines."""

from dataclasses import replace

import pytest

from benchmarks.common import Row
from benchmarks.gpu import kernels, predictions, steps, table
from benchmarks.gpu.__main__ import MEASURES, MIN_SECONDS, SHARES
from benchmarks.gpu.budget import Budget, has_time_for_round
from benchmarks.gpu.counts import StepWork, count_flow, count_step_work, make_transcript, task_of
from benchmarks.gpu.lines import PARTS
from benchmarks.gpu.predictions import EFFICIENCY, PRESETS, Model
from benchmarks.gpu.shape import FULL, TINY, flows
from choreograph.attention.metadata import KVRead, build_metadata
from choreograph.models.loader import DEFAULT_MODEL, load_tokenizer

H200, LLAMA = PRESETS["h200"], Model.from_shape(FULL)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEFAULT_MODEL)[0]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


# -- the budget ---------------------------------------------------------------------------------------------------


def test_a_round_follows_where_the_longest_one_still_fits():
    assert has_time_for_round([], left=-5, max_rounds=3)  # a part that was begun gives figures
    assert has_time_for_round([2, 4], left=4, max_rounds=3)
    assert not has_time_for_round([2, 4], left=3.9, max_rounds=3)
    assert not has_time_for_round([2, 4, 1], left=100, max_rounds=3)


def test_unused_time_of_a_part_goes_to_later_parts():
    clock = Clock()
    budget = Budget(100, {"a": 1, "b": 1, "c": 2}, clock)
    assert budget.open("a").left == 25
    clock.now = 10
    assert budget.open("b").left == pytest.approx(30)
    clock.now = 95
    assert budget.open("c", min_seconds=10) is None
    assert budget.left == 5


def test_rounds_end_with_the_time():
    clock = Clock()
    allowance = Budget(10, {"a": 1}, clock).open("a")
    made = []
    for number in allowance.rounds(100):
        made.append(number)
        clock.now += 3
    assert made == [0, 1, 2]


def test_every_part_has_lines_a_share_and_a_least_time():
    assert list(PARTS) == list(MEASURES)
    assert set(PARTS) == set(SHARES) == set(MIN_SECONDS)
    assert sum(MIN_SECONDS.values()) < 8 * 60


# -- counts -------------------------------------------------------------------------------------------------------


def test_the_work_of_a_plan_is_counted_by_hand():
    shared = [KVRead(0, row, row + 1, 0, 10, 0, 0) for row in range(3)]
    own = [KVRead(20, 0, 1, 0, 1, 1, 10), KVRead(30, 1, 2, 0, 1, 1, 10), KVRead(40, 2, 3, 0, 1, 1, 10)]
    assert count_step_work(build_metadata([20, 30, 40], shared + own, [10] * 3), 3) == StepWork(3, 33, 13, 3)
    prompt = build_metadata(list(range(4)), [KVRead(0, 0, 4, 0, 1, 1, 0)], list(range(4)))
    assert count_step_work(prompt, 0) == StepWork(4, 1 + 2 + 3 + 4, 4, 0)
    assert count_step_work(build_metadata([], [], []), 0) == StepWork(0, 0, 0, 0)


def test_attention_is_measured_on_what_is_predicted():
    for name, case in kernels.cases(64).items():
        case.metadata.check()
        told, result = predictions.attention_cases(64)[name], count_step_work(case.metadata, 0)
        assert (result.rows, result.pairs) == (told.rows, told.pairs), name
        assert result.kv_tokens_read - told.ours in range(9), name


def test_a_prompt_in_chunks_sees_what_it_sees_in_one():
    whole, parts = predictions.prefill(100, 1000, sampled_rows=1), predictions.prefill(100, 30, sampled_rows=1)
    assert whole == [StepWork(100, 5050, 100, 1)]
    assert sum(work.pairs for work in parts) == 5050 and sum(work.rows for work in parts) == 100
    assert [work.sampled_rows for work in parts] == [0, 0, 0, 1]


SMALL = replace(FULL, flows=flows(40, 4, 8, 16, 40), agents=3, fixed=512)


@pytest.mark.parametrize("name", SMALL.flows)
def test_both_modes_of_a_workflow_say_the_same_script(tokenizer, name):
    flow = SMALL.flows[name]
    result = count_flow(tokenizer, SMALL, flow)
    said = sum(len(message) for stage in make_transcript(tokenizer, SMALL, flow, 0).values() for message in stage)
    for run in result.values():
        assert sum(work.sampled_rows for work in run.steps) == said
        assert all(0 <= first < last <= len(run.steps) for group in run.waits for first, last in group)
    before, after = result["baseline"], result["choreographed"]
    assert [len(group) for group in before.waits] == [len(group) for group in after.waits]
    rows = [sum(work.rows for work in run.steps) for run in (before, after)]
    assert rows[0] > rows[1]  # what choreography saves


def test_a_task_has_as_many_words_as_the_shape_says(tokenizer):
    text = task_of(tokenizer, FULL, 3)
    assert len(tokenizer.encode(f" {text}", add_special_tokens=False)) == FULL.task_words
    assert text != task_of(tokenizer, FULL, 4)


# -- predictions --------------------------------------------------------------------------------------------------


def test_the_model_is_llama_3_1_8b():
    embedding = FULL.config.vocab_size * FULL.config.hidden_size
    norms = (2 * FULL.config.num_hidden_layers + 1) * FULL.config.hidden_size
    assert LLAMA.parameters + LLAMA.lm_head_parameters + embedding + norms == 8_030_261_248
    assert LLAMA.token_bytes == 131_072


def test_a_small_step_takes_what_its_bytes_take_and_a_large_one_its_operations():
    free = replace(EFFICIENCY, overhead=0.0, row=0.0, memory=1.0, arithmetic=1.0, triton=1.0)
    small = StepWork(1, 2048, 2048, 1)
    least = (2 * (LLAMA.parameters + LLAMA.lm_head_parameters) + 131_072 * 2048) / H200.memory
    assert predictions.step_seconds(H200, LLAMA, small, free) == pytest.approx(least)
    (large,) = predictions.prefill(1024)
    work = 2 * LLAMA.parameters * 1024 + 4 * 4096 * 32 * large.pairs
    assert predictions.step_seconds(H200, LLAMA, large, free) == pytest.approx(work / H200.arithmetic)
    half = predictions.step_seconds(H200, LLAMA, large, free, layer_fraction=0.5)
    assert half == pytest.approx(work / H200.arithmetic / 2)


def test_a_context_that_rows_share_is_read_once():
    result = predictions.decode_steps(H200, LLAMA, FULL)
    assert result["decode step, batch 8, shared"] < result["decode step, batch 8"]
    ours = predictions.attention(H200, LLAMA, FULL, "triton")
    assert ours["triton, decode of 8, shared: SDPA over it"] > 2 * ours["triton, decode of 8: SDPA over it"]


def test_every_line_is_predicted_and_nothing_else(tokenizer):
    result = table.predict(H200, table.count(tokenizer, SMALL), SMALL)
    assert set(result) == {line.measure for lines in PARTS.values() for line in lines}
    assert all(value > 0 for value in result.values())


# -- the table ----------------------------------------------------------------------------------------------------


def test_a_part_that_was_left_out_says_so():
    rows = [Row("memory, plain copy", 4.1, "TB/s", 4.0, 4.2)]
    lines = table.cells(rows, {"memory, plain copy": 4.32}, {"partial": "left out"}, ["rates", "partial"])
    assert lines[0][:4] == ("memory, plain copy", "4.1 TB/s", "4 to 4.2", "4.32")
    assert lines[1][1] == table.UNMEASURED and lines[-1][1] == "left out"


def test_rows_carry_what_they_are_held_against():
    (row,) = table.rows_of({"partial": {PARTS["partial"][0].measure: [2.0, 3.0, 4.0]}})
    assert (row.value, row.target, row.required) == (3.0, 3, None)


def test_sizes_divide_as_parts_take_them():
    for shape in (FULL, TINY):
        assert shape.context % steps.NUM_PARTS == 0
        assert shape.agents // 2 * shape.fixed < shape.cache_tokens
