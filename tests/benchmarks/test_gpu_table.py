"""The benchmark of the GPU path where nothing has to be timed: its budget, counts, predictions and lines."""

from dataclasses import replace

import pytest

from benchmarks.common import Row
from benchmarks.gpu import kernels, predictions, steps, table
from benchmarks.gpu.__main__ import LEAST, MEASURES, SHARES
from benchmarks.gpu.budget import Budget, go_on
from benchmarks.gpu.counts import Work, count_flow, script, task_of, work_of
from benchmarks.gpu.lines import PARTS
from benchmarks.gpu.predictions import PRESETS, REACHED, Model
from benchmarks.gpu.shape import FULL, TINY, flows
from choreograph.models.load import EMBEDDED, tokenizer_of
from choreograph.ops.plan import Read, make_plan

H200, LLAMA = PRESETS["h200"], Model.of(FULL)


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of(EMBEDDED)[0]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


# -- the budget ---------------------------------------------------------------------------------------------------


def test_a_round_follows_where_the_longest_one_still_fits():
    assert go_on([], left=-5, most=3)  # a part that was begun gives figures
    assert go_on([2, 4], left=4, most=3)
    assert not go_on([2, 4], left=3.9, most=3)
    assert not go_on([2, 4, 1], left=100, most=3)


def test_what_a_part_does_not_use_goes_to_those_behind_it():
    clock = Clock()
    budget = Budget(100, {"a": 1, "b": 1, "c": 2}, clock)
    assert budget.open("a").left == 25
    clock.now = 10
    assert budget.open("b").left == pytest.approx(30)
    clock.now = 95
    assert budget.open("c", least=10) is None
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
    assert set(PARTS) == set(SHARES) == set(LEAST)
    assert sum(LEAST.values()) < 8 * 60


# -- counts -------------------------------------------------------------------------------------------------------


def test_the_work_of_a_plan_is_counted_by_hand():
    shared = [Read(0, row, row + 1, 0, 10, 0, 0) for row in range(3)]
    own = [Read(20, 0, 1, 0, 1, 1, 10), Read(30, 1, 2, 0, 1, 1, 10), Read(40, 2, 3, 0, 1, 1, 10)]
    assert work_of(make_plan([20, 30, 40], shared + own, [10] * 3), 3) == Work(3, 33, 13, 3)
    prompt = make_plan(list(range(4)), [Read(0, 0, 4, 0, 1, 1, 0)], list(range(4)))
    assert work_of(prompt, 0) == Work(4, 1 + 2 + 3 + 4, 4, 0)
    assert work_of(make_plan([], [], []), 0) == Work(0, 0, 0, 0)


def test_attention_is_measured_on_what_is_predicted():
    for name, case in kernels.cases(64).items():
        case.plan.check()
        told, found = predictions.attention_cases(64)[name], work_of(case.plan, 0)
        assert (found.rows, found.pairs) == (told.rows, told.pairs), name
        assert found.seen - told.ours in range(9), name


def test_a_prompt_in_chunks_sees_what_it_sees_in_one():
    whole, parts = predictions.prefill(100, 1000, drawn=1), predictions.prefill(100, 30, drawn=1)
    assert whole == [Work(100, 5050, 100, 1)]
    assert sum(work.pairs for work in parts) == 5050 and sum(work.rows for work in parts) == 100
    assert [work.drawn for work in parts] == [0, 0, 0, 1]


SMALL = replace(FULL, flows=flows(40, 4, 8, 16, 40), agents=3, fixed=512)


@pytest.mark.parametrize("name", SMALL.flows)
def test_both_modes_of_a_workflow_say_the_same_script(tokenizer, name):
    flow = SMALL.flows[name]
    found = count_flow(tokenizer, SMALL, flow)
    said = sum(len(message) for stage in script(tokenizer, SMALL, flow, 0).values() for message in stage)
    for run in found.values():
        assert sum(work.drawn for work in run.steps) == said
        assert all(0 <= first < last <= len(run.steps) for group in run.waits for first, last in group)
    before, after = found["baseline"], found["choreographed"]
    assert [len(group) for group in before.waits] == [len(group) for group in after.waits]
    rows = [sum(work.rows for work in run.steps) for run in (before, after)]
    assert rows[0] > rows[1]  # what choreography saves


def test_a_task_has_as_many_words_as_the_shape_says(tokenizer):
    text = task_of(tokenizer, FULL, 3)
    assert len(tokenizer.encode(f" {text}", add_special_tokens=False)) == FULL.task
    assert text != task_of(tokenizer, FULL, 4)


# -- predictions --------------------------------------------------------------------------------------------------


def test_the_model_is_llama_3_1_8b():
    embedding = FULL.config.vocab_size * FULL.config.hidden_size
    norms = (2 * FULL.config.num_hidden_layers + 1) * FULL.config.hidden_size
    assert LLAMA.parameters + LLAMA.head + embedding + norms == 8_030_261_248
    assert LLAMA.token_bytes == 131_072


def test_a_small_step_takes_what_its_bytes_take_and_a_large_one_its_operations():
    free = replace(REACHED, overhead=0.0, row=0.0, memory=1.0, arithmetic=1.0, triton=1.0)
    small = Work(1, 2048, 2048, 1)
    least = (2 * (LLAMA.parameters + LLAMA.head) + 131_072 * 2048) / H200.memory
    assert predictions.step_seconds(H200, LLAMA, small, free) == pytest.approx(least)
    (large,) = predictions.prefill(1024)
    work = 2 * LLAMA.parameters * 1024 + 4 * 4096 * 32 * large.pairs
    assert predictions.step_seconds(H200, LLAMA, large, free) == pytest.approx(work / H200.arithmetic)
    half = predictions.step_seconds(H200, LLAMA, large, free, share=0.5)
    assert half == pytest.approx(work / H200.arithmetic / 2)


def test_a_context_that_rows_share_is_read_once():
    found = predictions.decode_steps(H200, LLAMA, FULL)
    assert found["decode step, batch 8, shared"] < found["decode step, batch 8"]
    ours = predictions.attention(H200, LLAMA, FULL, "triton")
    assert ours["triton, decode of 8, shared: SDPA over it"] > 2 * ours["triton, decode of 8: SDPA over it"]


def test_every_line_is_predicted_and_nothing_else(tokenizer):
    found = table.predict(H200, table.count(tokenizer, SMALL), SMALL)
    assert set(found) == {line.measure for lines in PARTS.values() for line in lines}
    assert all(value > 0 for value in found.values())


# -- the table ----------------------------------------------------------------------------------------------------


def test_a_part_that_was_left_out_says_so():
    rows = [Row("memory, plain copy", 4.1, "TB/s", 4.0, 4.2)]
    lines = table.cells(rows, {"memory, plain copy": 4.32}, {"partial": "left out"}, ["rates", "partial"])
    assert lines[0][:4] == ("memory, plain copy", "4.1 TB/s", "4 to 4.2", "4.32")
    assert lines[1][1] == table.UNMEASURED and lines[-1][1] == "left out"


def test_rows_carry_what_they_are_held_against():
    (row,) = table.rows_of({"partial": {PARTS["partial"][0].measure: [2.0, 3.0, 4.0]}})
    assert (row.value, row.aim, row.must) == (3.0, 3, None)


def test_sizes_divide_as_parts_take_them():
    for shape in (FULL, TINY):
        assert shape.context % steps.PARTS == 0
        assert shape.agents // 2 * shape.fixed < shape.room
