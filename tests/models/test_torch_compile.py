"""Compiled steps give what eager steps give, padding included. One small graph: compiling takes a while."""

from helpers import tiny_models

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams


def test_compiled_steps_equal_eager_ones():
    def run(compile: bool) -> list[list[int]]:
        config = EngineConfig(
            cache=CacheConfig(capacity=1024, poison_freed_pages=True), compile=compile, compile_sizes=(4,)
        )
        engine = Engine.from_pretrained(tiny_models.model(), config=config)
        with engine.session(seed=3) as session:
            root = session.prefill(list(range(20)))
            branches = [session.decode([30 + i], [root], sampling=SamplingParams(max_tokens=4 + i)) for i in range(3)]
            last = session.decode([9], branches, sampling=SamplingParams(temperature=0, max_tokens=5))
            engine.run_until_idle()
            engine.check()
            return [message.tokens for message in (*branches, last)]

    assert run(compile=True) == run(compile=False)
