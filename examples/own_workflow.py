"""A workflow of your own: draft, criticise, revise. One file with `run`; every command takes its path.

choreograph run examples/own_workflow.py --task "Describe the sea."
"""

from choreograph.lab.workflows import Condition, WorkflowRun

CONDITIONS = {"baseline": Condition("prefix"), "choreographed": Condition("choreographed")}


def run(p: WorkflowRun, task: str, *, critics: int = 2):
    asked = p.prefill("task", p.user(f"{task} Answer in two sentences."))
    draft = p.decode("draft", p.assistant("Draft:"), [asked])
    critic = p.prefill("critic", p.user(f"Name one weakness of the draft that follows. It answers: {task}"))
    notes = [p.decode("note", p.assistant(f"Critic {i + 1}:"), [critic, draft], max_tokens=24) for i in range(critics)]
    p.record("words", len(draft.text.split()))  # reading a value runs what it needs
    if not any(note.text.strip() for note in notes):
        p.record_parse_failure("note")
    again = p.user("Write the answer again, without the weaknesses.")  # in the header: it sees the draft and the notes
    return p.decode("answer", [again, p.assistant("Final:")], [asked, draft, *notes])


if __name__ == "__main__":
    from choreograph import Engine, SamplingParams
    from choreograph.lab.workflows.run import run_workflow

    done = run_workflow(
        Engine.from_pretrained(), run, "Describe the sea.", mode="choreographed",
        sampling=SamplingParams(temperature=0, max_tokens=32),
    )  # fmt: skip
    print(done.answer.text)
    print(f"reused {done.metrics.cached} tokens, encoded {done.metrics.encoded}, found {done.run.outputs}")
