"""The path of a request stays short: few calls of our own functions, in few files."""

from helpers import tiny_models
from helpers.call_counts import count_calls, describe, files_of

from choreograph import Engine, SamplingParams

SAMPLING = SamplingParams(temperature=0, max_tokens=20)


def test_calls_to_submit_a_decode_and_to_compute_a_step():
    engine = Engine.from_pretrained(tiny_models.build())  # without the hooks of other tests
    with engine.session(seed=1) as session:
        question = session.prefill([1, 2, 3])
        context = session.prefill([4, 5, 6, 7], [question])
        session.decode([9], sampling=SAMPLING).result()  # computes what is kept: the end tokens of the model
        submitted = count_calls(lambda: session.decode([8, 9], [question, context], sampling=SAMPLING))
        print(describe("submit a decode", submitted))
        for _ in range(5):  # admission, the header, and steps that build the plan of the next one
            engine.step()
        step = count_calls(engine.step)
        print(describe("a plain decode step of a 2-layer model", step))
    assert submitted.total() <= 35
    assert step.total() <= 90
    assert len(files_of(step)) <= 12
