"""Waiting requests: the same admissions as a scan of all of them, at a cost that does not grow with their number."""

from helpers import tiny_models
from helpers.hypothesis_profile import many
from helpers.inspect_engine import inspect
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph import SamplingParams
from choreograph.core.waiting_queue import WaitingQueue

GREEDY = SamplingParams(temperature=0, max_tokens=3)


class ScanningQueue(WaitingQueue):
    """Visits every waiting request in every pass."""

    def park(self, request):
        pass


requests = st.tuples(
    st.booleans(),  # decode or prefill
    st.lists(st.integers(0, 9), max_size=2),  # parents, counted back
    st.integers(-1, 1),  # priority
    st.booleans(),  # released at once
    st.integers(0, 2),  # steps computed afterwards
)


@settings(max_examples=many(40), deadline=None)
@given(st.lists(requests, min_size=1, max_size=10), st.sampled_from([1, 2, 256]), st.sampled_from([64, 2048]))
def test_requests_are_admitted_as_a_scan_of_all_admits_them(parts, calls, tokens):
    def run(queue):
        engine = tiny_models.engine(tokens=tokens, calls=calls)
        inspect(engine).queues.waiting = queue
        with engine.session(seed=1) as session:
            first, messages = inspect(engine).new_request_id(), []
            for index, (is_decode, parents, priority, is_released, steps) in enumerate(parts):
                chosen = [messages[-1 - back] for back in sorted(set(parents)) if back < len(messages)]
                options = {"parents": [m for m in chosen if not inspect(m).is_released], "priority": priority}
                if is_decode:
                    messages.append(session.decode([index + 3, 4], sampling=GREEDY, **options))
                else:
                    messages.append(session.prefill([index + 3, 5], **options))
                if is_released:
                    messages[-1].release()
                for _ in range(steps):
                    engine.step()
                    engine.check()
            engine.run_until_idle()
            engine.check()
            events = [(e.kind, e.data["request"] - first) for e in engine.events.recent if "request" in e.data]
            return events, [None if m.error else inspect(m).tokens for m in messages]

    assert run(WaitingQueue()) == run(ScanningQueue())


def test_requests_that_wait_for_a_running_parent_are_not_visited():
    engine, visited = tiny_models.engine(), []
    waiting = inspect(engine).waiting
    next_candidate = waiting.next_candidate
    waiting.next_candidate = lambda: visited.append(next_candidate()) or visited[-1]
    with engine.session() as session:
        parent = session.decode([3], sampling=SamplingParams(temperature=0, max_tokens=20))
        readers = [session.prefill([4, 5 + index], [parent]) for index in range(40)]
        for _ in range(3):
            engine.step()
        visited.clear()
        for _ in range(5):
            engine.step()
        assert set(visited) == {None}
        assert len(waiting) == 40 and list(waiting) == [inspect(reader).request for reader in readers]
        parent.result()
        engine.step()
        assert not len(waiting)


def test_a_request_whose_other_parent_fails_fails_with_it():
    engine = tiny_models.engine()
    with engine.session() as session:
        running = session.decode([3], sampling=SamplingParams(temperature=0, max_tokens=50))
        failing = session.decode([4], sampling=SamplingParams(temperature=0, max_tokens=50))
        failing.on_logprobs(lambda _: 1 / 0)
        reader = session.prefill([5], [running, failing])
        for _ in range(4):
            engine.step()
        assert "parent" in str(reader.error) and not running.done
