"""Shared fixtures: a tiny random Llama, engines over it, and the embedded model, loaded once.

Shapes in signatures are checked at run time in all tests: the import hook comes before the package. GPU kernels run
through Triton's interpreter where there is no GPU, which has to be said before anybody imports Triton.
"""

import gc
import os
import shutil
from pathlib import Path

if shutil.which("nvidia-smi") is None and not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"

from helpers.shape_checks import check_shapes

check_shapes("choreograph.attention", "choreograph.kv_cache", "choreograph.execution.sampler")

import pytest
from helpers import tiny_models
from helpers.hypothesis_profile import THOROUGH
from transformers import AutoTokenizer, LlamaForCausalLM

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.attention import autotune as measured
from choreograph.models.loader import bundled_gguf, convert_gguf

STOP = 2


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _old_objects_are_not_collected():
    """Keep what imports and earlier files created out of garbage collections, of which there is one for each engine."""
    gc.collect()
    gc.freeze()


def make_llama(*, seed: int = 0, vocabulary: int = 97, positions: int = 512) -> LlamaForCausalLM:
    """A random Llama in float32; token 2 ends a message."""
    return tiny_models.build(seed=seed, vocabulary=vocabulary, positions=positions, stop=STOP)


@pytest.fixture(scope="session", autouse=True)
def _nothing_measured():
    """What `choreograph tune` found on this machine stays out of the tests."""
    measured._path = lambda: Path(os.devnull)


@pytest.fixture
def brief(monkeypatch):
    """Messages of a dozen tokens at most, so that what a page or an example does is done in seconds; of any length
    where time is no matter."""
    if THOROUGH:
        return
    made = SamplingParams.__post_init__

    def make(self: SamplingParams) -> None:
        made(self)
        object.__setattr__(self, "max_tokens", min(self.max_tokens, max(self.min_tokens, 12)))

    monkeypatch.setattr(SamplingParams, "__post_init__", make)


@pytest.fixture(scope="session")
def tiny_model():
    """The factory of tiny models."""
    return make_llama


@pytest.fixture(scope="session")
def _tiny():
    return make_llama()


@pytest.fixture
def tiny_engine(_tiny):
    """The factory of engines over one tiny model; freed pages are poisoned."""

    def make(*, tokens: int = 2048, model: LlamaForCausalLM | None = None) -> Engine:
        config = EngineConfig(cache=CacheConfig(capacity=tokens, poison_freed_pages=True))
        return Engine.from_pretrained(model or _tiny, config=config)

    return make


@pytest.fixture(scope="session")
def embedded():
    """One engine over the embedded model, in float32 so that results do not depend on the batch."""
    config = EngineConfig(cache=CacheConfig(capacity=4096, poison_freed_pages=True))
    return Engine.from_pretrained(config=config, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def talker_folder(tmp_path_factory):
    """A folder of a tiny random model that has the embedded model's tokenizer: workflows of text, quickly."""
    folder = tmp_path_factory.mktemp("talker")
    tokenizer = AutoTokenizer.from_pretrained(convert_gguf(bundled_gguf()))
    tiny_models.build(vocabulary=len(tokenizer), positions=8192, stop=tokenizer.eos_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def math_folder(talker_folder, tmp_path_factory):
    """A folder of a sibling of that model."""
    folder = tmp_path_factory.mktemp("math")
    tiny_models.finetuned(LlamaForCausalLM.from_pretrained(talker_folder)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def talker(talker_folder):
    """One engine over it."""
    config = EngineConfig(cache=CacheConfig(capacity=4096, poison_freed_pages=True))
    return Engine.from_pretrained(talker_folder, config=config, dtype="float32", device="cpu")
