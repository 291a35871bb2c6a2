"""What determines the results of an evaluation: workflow, conditions, sampling, engine, data."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...api.engine import Engine
from ...errors import ConfigError
from ...outputs import BASE_MODEL
from ...sampling_params import SamplingParams
from ..workflows import WorkflowFunction, conditions_of, source_modules
from ..workflows.run import Condition
from .datasets import Example
from .run_dir import RunRecord

# yields a record of each example; the records of the baseline are None if it has to read none
RunFunction = Callable[[Engine, Sequence[Example], Mapping[str, RunRecord] | None], Iterator[RunRecord]]


@dataclass(frozen=True)
class Experiment:
    """A workflow under conditions."""

    name: str  # of the workflow, or the path of its file
    workflow: WorkflowFunction
    conditions: Mapping[str, Condition]  # by name, the baseline first
    sampling: SamplingParams
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)  # of the workflow, without a condition's

    def settings(self, engine: Engine, examples: Sequence[Example]) -> dict[str, Any]:
        """Return all that determines the results, except this package's code.

        Raises:
            ConfigError: for an option that every condition but the baseline sets, or for an unknown model.
        """
        _, *others = conditions_of(self.workflow).values()
        if fixed := sorted(self.options.keys() & set.intersection(*(set(c.options) for c in others)) if others else ()):
            raise ConfigError(f"options {fixed}: the workflow's conditions set them: leave them out, name conditions")
        described = {key: asdict(condition) for key, condition in self.conditions.items()}
        for condition in described.values():
            if (model := condition.pop("model")) not in engine.models:
                raise ConfigError(
                    f"a condition on model {model!r}: the engine has {list(engine.models)}: give an adapter"
                )
            if model != BASE_MODEL:  # the fingerprint of the engine names the base model
                condition["model"] = engine.core.model_set.fingerprint(model)
            if not condition["adapter_stages"]:
                del condition["adapter_stages"]
        tasks = json.dumps([[e.id, e.task] for e in examples], ensure_ascii=False)
        return {
            "workflow": self.name,
            "source": code_hash(self.workflow),
            **describe_engine(engine),
            "examples": len(examples),
            "data": hashlib.sha256(tasks.encode()).hexdigest()[:16],
            "conditions": described,
            "sampling": {k: v for k, v in asdict(self.sampling).items() if v != getattr(SamplingParams(), k)},
            "options": dict(self.options),
            "seed": self.seed,
        }


def describe_engine(engine: Engine) -> dict[str, Any]:
    """Return what of an engine determines a result."""
    describe = getattr(engine, "describe", None)  # of a server, whose model is not in this process
    if describe is not None:
        return dict(describe())
    return {
        "model": engine.model_info.name,
        "fingerprint": engine.model_info.fingerprint,
        "weights": engine.core.hf_model.sampled_weights_hash,
        "engine": {
            "backend": engine.core.backend.name,
            "compile": engine.core.config.compile,
            "quantization": engine.core.config.quantization,
            **({} if (kv := engine.core.config.cache.kv_cache_dtype) == "auto" else {"kv_cache_dtype": kv}),
        },
        "dtype": engine.model_info.dtype_name,
    }


def code_hash(workflow: WorkflowFunction) -> str:
    """Return a hash of the source files of a workflow."""
    files = [names["__file__"] for names in source_modules(workflow) if "__file__" in names]
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:16] if files else ""


def example_seed(seed: int, example: str) -> int:
    """Return the seed of one example, equal under every condition."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{example}".encode()).digest()[:7], "big")
