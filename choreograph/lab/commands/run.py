"""`choreograph run`: one workflow on one task."""

import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from ...cli import common
from ...cli.common import open_engine
from ...console import format_ms, make_console, print_table, print_text
from ...errors import ChoreographError
from . import options

if TYPE_CHECKING:
    from rich.console import Console

    from ...api.message import Message
    from ..workflows import StageCall


def run(
    workflow: options.WorkflowArgument,
    task: Annotated[str, typer.Option(help="The task; - reads standard input.")] = "-",
    model: common.ModelOption = common.DEFAULT_MODEL,
    mode: common.ModeOption = "choreographed",
    dtype: common.DtypeOption = "auto",
    device: common.DeviceOption = "cpu",
    compile: common.CompileOption = False,
    option: options.WorkflowOptions = None,
    adapter: common.AdapterOption = None,
    adapter_stage: options.AdapterStagesOption = None,
    vllm: options.VllmOption = None,
    max_tokens: common.MaxTokensOption = 160,
    temperature: common.TemperatureOption = 0.7,
    seed: common.SeedOption = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the answer and nothing else.")] = False,
    as_json: common.JsonOption = False,
) -> None:
    """Run one workflow; print its calls, the answer and stage costs."""
    from ...sampling_params import SamplingParams
    from ..workflows import find
    from ..workflows.run import run_workflow

    computed_by, function = options.adapter_name(adapter, adapter_stage), find(workflow)
    text = sys.stdin.read().strip() if task == "-" else task
    if not text:
        raise typer.BadParameter("the task is empty: give one with --task or on standard input")
    console = make_console(quiet=as_json or quiet)
    result = run_workflow(
        open_engine(model, dtype, compile, adapter, device, adapter_stage, vllm=vllm),
        function,
        text,
        mode=mode,
        model=computed_by,
        adapter_stages=adapter_stage or (),
        seed=seed,
        sampling=SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens),
        options=common.parse_options(option),
        on_answer=lambda answer, calls: None if console.quiet else _print_calls(console, answer, calls),
        on_text=lambda piece: print_text(console, piece, end=""),
    )
    failures, outputs = dict(result.run.parse_failures), result.run.outputs
    if as_json:
        generated = [{"stage": stage, "text": m.text} for stage, m in result.run.calls if m.kind == "decode"]
        noted = {"unparseable": failures, "findings": outputs, "generated": generated}
        print(json.dumps({"answer": result.answer.text, **noted, **result.metrics.as_dict()}))
        return
    if quiet:
        print_text(make_console(), result.answer.text.strip())
        return
    print_text(console, "\n" if result.answer.text.strip() else "(empty: the model ended it at once)\n")
    rows = [
        (s.stage, str(s.calls), format_ms(s.ttft), str(s.encoded), str(s.cached), str(s.generated))
        for s in result.metrics.stages
    ]
    sums = [str(sum(int(row[column]) for row in rows)) for column in (1, 3, 4, 5)]
    rows.append(("all", sums[0], format_ms(result.metrics.ttft), sums[1], sums[2], sums[3]))
    header = ("stage", "calls", "TTFT", "encoded", "reused", "generated")
    print_table(console, f"{workflow}, {mode}: {result.metrics.seconds:.2f} s", header, rows)
    if outputs:
        print_text(console, f"found out: {json.dumps(outputs, ensure_ascii=False)}")
    for stage, count in failures.items():
        calls = sum(s.calls for s in result.metrics.stages if s.stage == stage)
        print_text(console, f"could not be parsed: {count} of {calls or count} calls of stage {stage!r}")


def _print_calls(console: "Console", answer: "Message", calls: "list[StageCall]") -> None:
    """Print the text of every decode but the answer, which is streamed."""
    numbers: Counter[str] = Counter()
    for stage, message in calls:
        if message.kind == "decode" and message is not answer:
            numbers[stage] += 1
            try:
                text = message.text.strip() or "(empty)"
            except ChoreographError as exc:
                text = f"(failed: {exc})"
            print_text(console, f"[{stage} {numbers[stage]}] {text}")
    console.print("\n[b]Answer:[/b]", end="")
