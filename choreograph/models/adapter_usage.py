"""What a trained adapter is for: a record in its folder, and its check."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ValidationError

from ..errors import ConfigError, DataError
from ..utils import atomic_write_text, describe_validation_error
from .hf_model import HFModel

USAGE_FILE = "adapter_usage.json"  # in the folder of an adapter


class AdapterUsage(BaseModel):
    """Workflow, stages and base weights of an adapter."""

    version: Literal[2] = 2
    workflow: str
    adapter_stages: list[str] = []  # stages that the adapter alone computes; empty: all
    stages: list[str] = []  # stages that were learned; empty: all
    weights: str  # hash of the base weights
    dtype: str  # of the base weights
    units: list[str] = []  # hashes of the questions or games of training and validation

    def write(self, folder: Path) -> None:
        """Write the record into the folder of the adapter."""
        atomic_write_text(folder / USAGE_FILE, self.model_dump_json(indent=1))


def read_usage(adapter: str) -> AdapterUsage | None:
    """Return the record of an adapter; None if it has none.

    Raises:
        ConfigError: if it is damaged, or of another version.
    """
    file = Path(adapter) / USAGE_FILE
    if not file.is_file() and not file.with_name("learned.json").is_file():  # name in earlier versions
        return None
    return read_record(AdapterUsage, file, ConfigError)


def check_adapter_usage(
    adapter: str, adapter_stages: Sequence[str], base: HFModel, *, workflow: str | None = None
) -> None:
    """Raise ConfigError if an adapter was trained for another use."""
    usage = read_usage(adapter)
    if usage is None:
        return
    if workflow is not None and usage.workflow != workflow:
        raise ConfigError(f"{adapter}: trained for the workflow {usage.workflow!r}: give an adapter of {workflow!r}")
    if sorted(set(adapter_stages)) != usage.adapter_stages:
        learned = usage.adapter_stages
        hint = " ".join(f"--adapter-stage {json.dumps(stage)}" for stage in learned) or "no --adapter-stage"
        raise ConfigError(
            f"{adapter}: this adapter was trained for {'some stages' if learned else 'all decodes'}: give {hint}"
        )
    if not matches_weights(usage.weights, usage.dtype, base):
        raise ConfigError(
            f"{adapter}: trained on other weights than {base.model_info.name!r} has: use the model of its training"
        )


def matches_weights(weights: str | None, dtype: str | None, hf_model: HFModel) -> bool:
    """Return whether a weights hash fits the model, or cannot be compared."""
    dtypes = {dtype, hf_model.model_info.dtype_name}
    is_comparable = weights is not None and (len(dtypes) == 1 or "float16" not in dtypes)  # float16 rounds differently
    return not is_comparable or weights == hf_model.sampled_weights_hash


M = TypeVar("M", bound=BaseModel)


def read_record(record: type[M], file: Path, error: type[Exception] = DataError) -> M:
    """Read a JSON record of a training.

    Raises:
        error: if the file is damaged or of another version.
    """
    try:
        return record.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as exc:
        reason = describe_validation_error(exc) if isinstance(exc, ValidationError) else str(exc)
        raise error(
            f"{file}: damaged, or of another version of this package ({reason}): train again in a new folder"
        ) from None
