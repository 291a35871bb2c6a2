"""Two real processes that compute one model together say what one process says; what does not go with it is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import tiny_models, tp_worker
from helpers.model_configs import CONFIGS, SHAPE
from transformers import AutoModelForCausalLM, LlamaConfig

from choreograph import Engine
from choreograph.errors import ConfigError

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow  # the processes take a quarter of a minute


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_models.model().save_pretrained(folder / "llama")
    narrow = LlamaConfig(**SHAPE | {"num_key_value_heads": 1})
    for name in ("qwen2", "gemma2", "gpt2", "narrow"):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(CONFIGS.get(name, narrow))
        model.float().eval().save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def seen(models, tmp_path_factory):
    """What both processes wrote of a scenario."""
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    path = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parent.parent)])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env.pop("PYTHONHASHSEED", None)
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE.parent / "helpers" / "tp_worker.py"), str(meeting), str(rank), str(models)],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)

    def read(scenario, ranks=(0, 1)):
        result = [json.loads(Path(f"{meeting}-{scenario}-{rank}").read_text()) for rank in ranks]
        for one in result:
            assert "failed" not in one, one["failed"]
        return result

    return read


def whole(models, name, cache=tp_worker.CACHE):
    return Engine.from_pretrained(str(models / name), dtype="float32", config=tp_worker.options(cache))


def close(found, wanted):
    """The same tokens, and log-probabilities to rounding."""
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, some), (_, others) in zip(found, wanted, strict=True):
        assert some == pytest.approx(others, abs=1e-4)


@pytest.mark.parametrize("name", tp_worker.FAMILIES)
def test_two_processes_say_what_one_says(seen, models, name):
    first, second = (one[name] for one in seen("families"))
    assert first == second
    for mode, result in zip(tp_worker.MODES, first, strict=True):
        close(result, tp_worker.graph(whole(models, name), mode))


def test_a_single_key_value_head_is_in_every_process(seen, models):
    first, second = seen("single")
    assert first == second and first[0] == [2, 1]
    close(first[1], tp_worker.graph(whole(models, "narrow"), "choreographed"))


def test_lower_tiers_and_pins_that_end_keep_processes_together(seen, models):
    first, second = seen("pressure")
    assert first == second and first[1] > 0
    close(first[0], tp_worker.under_pressure(whole(models, "llama", tp_worker.SMALL))[0])


def test_copies_that_cannot_be_read_back(seen, models):
    """In all processes they are computed again; in one they part its steps from the others', which is an error."""
    (first, one), (second, other) = seen("damaged")
    assert first == second
    close(first[0], tp_worker.under_pressure(whole(models, "llama", tp_worker.SMALL))[0])
    assert one[0] == other[0] == "RequestFailedError"
    assert "differ" in one[1] and "differ" in other[1]


def test_a_model_in_memory_that_is_sharded(seen, models):
    first, second = seen("in_memory")
    assert first == second == seen("families")[0]["llama"][0]


def test_sizes_are_those_of_a_process(seen, models):
    first, second = seen("sizes")
    facts = whole(models, "llama").model_info
    shared = sum(p.numel() for name, p in tiny_models.model().named_parameters() if "norm" in name)
    for result in (first, second):
        assert result[:3] == [facts.query_heads // 2, facts.kv_heads // 2, facts.kv_bytes_per_token // 2]
    assert first[3] + second[3] == facts.parameters + shared
    assert first[4] == second[4]  # free memory differed


def test_the_first_process_chooses(seen, models):
    (first, bad), (second, other_bad) = seen("choices")
    assert first == second
    close(first, tp_worker.graph(whole(models, "llama"), "choreographed"))
    assert bad == other_bad and bad[0] == "RequestFailedError" and "NaN" in bad[1]


def test_a_session_without_a_seed(seen):
    first, second = seen("unseeded")
    assert first == second


WHY = {
    "adapter": ("ConfigError", "LoRA adapter"),
    "adapters": ("ConfigError", "LoRA adapter"),
    "model": ("ConfigError", "second model"),
    "share": ("ConfigError", "layer reuse"),
    "int4": ("ConfigError", "quantization"),
    "compile": ("ConfigError", "compile=True"),
    "device": ("ConfigError", "give one of them"),
    "heads": ("ModelError", "1 key-value heads cannot be divided among 2 processes"),
    "uneven plan": ("ModelError", "2 of 4 query heads and 2 of 2 key-value heads"),
    "no plan": ("ModelError", "no `tp_plan`"),
    "unknown plan": ("ConfigError", "use 'auto'"),
    "one pass": ("ConfigError", "packed forward pass"),
    "sender": ("ConfigError", "sending"),
    "receiver": ("ConfigError", "sender"),
    "options": ("ConfigError", "options differ between processes"),
}


@pytest.mark.parametrize("what", WHY)
def test_what_does_not_go_with_it_is_refused(seen, what):
    kind, words = WHY[what]
    for result in seen("refusals"):
        assert result[what] is not None, "not refused"
        assert result[what][0] == kind and words in result[what][1]


def test_processes_that_do_different_things_end_with_an_error(seen):
    for first, again in seen("other_steps"):
        assert first[0] == again[0] == "RequestFailedError"
        assert "steps of the processes differ" in first[1] and "failed before" in again[1]
    (first, second), both = seen("other_calls"), "rank 0: step"
    assert first[0] == second[0] == "RequestFailedError"
    assert both in second[1] and "rank 1: seed" in first[1]


def test_a_process_that_dies_is_an_error_for_the_others(seen):
    known, first, again = seen("death", ranks=[0])[0]
    assert len(known) == 7
    assert first[0] == again[0] == "RequestFailedError"
    assert "a step broke" in first[1] and "failed before" in again[1]


def test_one_process_alone_needs_no_plan(models, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="torchrun"):
        Engine.from_pretrained(str(models / "llama"), tp_plan="auto")
