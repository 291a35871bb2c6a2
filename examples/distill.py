"""Train an adapter for a workflow of your own and serve it.

python examples/distill.py
"""

import tempfile
from pathlib import Path

from choreograph import Engine, SamplingParams
from choreograph.lab.evaluation.datasets import Example
from choreograph.lab.training import TrainConfig, collect_traces, train_from_traces
from choreograph.lab.workflows import find
from choreograph.lab.workflows.run import run_workflow

WORKFLOW = str(Path(__file__).with_name("own_workflow.py"))
THINGS = ("bridge", "clock", "kite", "drum")  # use a hundred tasks or more, and longer texts


def main(tokens: int = 8, epochs: int = 1) -> None:
    out = Path(tempfile.mkdtemp())
    engine = Engine.from_pretrained(dtype="float32")
    tasks = [Example(f"task-{i}", "text", f"What is a {thing} for?") for i, thing in enumerate(THINGS)]
    traces = out / "traces"
    collect_traces(engine, WORKFLOW, find(WORKFLOW), tasks, traces, sampling=SamplingParams(max_tokens=tokens))
    config = TrainConfig(epochs=epochs, batch_size=2)
    report = train_from_traces(engine.core.hf_model, traces, out / "adapter", config, workflow=WORKFLOW)
    print(
        f"log-loss under reuse {report.loss_before:.2f}, trained {report.loss_after:.2f}, baseline {report.baseline:.2f}"
    )
    engine.add_adapter("tuned", out / "adapter")
    sampling = SamplingParams(temperature=0, max_tokens=tokens)
    result = run_workflow(
        engine, find(WORKFLOW), "What is a key for?", mode="choreographed", model="tuned", sampling=sampling
    )
    print(result.answer.text)


if __name__ == "__main__":
    main()
