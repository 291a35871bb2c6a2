"""Repair strategy "align": attention to reused messages is corrected, nothing is computed (APE, arXiv:2502.05431).

Messages that were encoded apart draw attention otherwise than in one prompt: each has first tokens that draw much of it,
and scores spread in another way. A temperature and a scale of attention to them correct it for free; `Alignment` defines
them. `choreograph calibrate` finds the two numbers of a model.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from platformdirs import user_cache_path

from ...attention.metadata import Alignment
from ...errors import ConfigError, DataError
from ...utils import atomic_write_text, ensure_dir
from .strategy import ContextView, TokenRanges


class Calibration(NamedTuple):
    """Numbers found for a model, and how well they fit."""

    model: str  # name
    alignment: Alignment
    kl: float  # divergence from prefix mode on the calibration set, in nats a token
    kl_of_reuse: float  # the same without alignment


def select_nothing(view: ContextView) -> list[TokenRanges]:
    """Select no token."""
    return [[] for _ in view.parents]


def parse_alignment(value: Any) -> Alignment:
    """Return two numbers as an alignment.

    Raises:
        ConfigError: unless they are finite and above 0.
    """
    if isinstance(value, tuple | list) and len(value) == 2:
        numbers = [x for x in value if isinstance(x, int | float) and not isinstance(x, bool)]
        if len(numbers) == 2 and all(math.isfinite(x) and x > 0 for x in numbers):
            return Alignment(float(numbers[0]), float(numbers[1]))
    raise ConfigError(
        f"repair alignment={value!r}: use 'calibrated' or Alignment(temperature, scale), two numbers above 0"
    )


def calibrations_file() -> Path:
    """Return where calibrations are, beside the converted weights."""
    return user_cache_path("choreograph") / "models" / "alignments.json"


def find_alignment(weights_hash: str, name: str) -> Alignment:
    """Return the calibrated alignment of a model.

    Args:
        weights_hash: `HFModel.sampled_weights_hash`, equal for every dtype and quantization.

    Raises:
        ConfigError: if the model was not calibrated.
        DataError: if the file is damaged.
    """
    records = _read()
    if weights_hash not in records:
        raise ConfigError(
            f"repair alignment='calibrated': {name} is not calibrated: run `choreograph calibrate {name}`, "
            "or give alignment=Alignment(temperature, scale)"
        )
    try:
        return parse_alignment([records[weights_hash]["temperature"], records[weights_hash]["scale"]])
    except (KeyError, TypeError, ConfigError) as exc:
        raise _damaged(exc) from None


def save_calibration(weights_hash: str, calibration: Calibration) -> Path:
    """Store the calibration of a model in place of an earlier one; return the file."""
    path, records = calibrations_file(), _read()
    alignment, record = calibration.alignment, calibration._asdict()
    del record["alignment"]
    ensure_dir(path.parent)
    atomic_write_text(path, json.dumps(records | {weights_hash: record | alignment._asdict()}, indent=1) + "\n")
    return path


def _read() -> dict[str, Any]:
    try:
        records = json.loads(calibrations_file().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as exc:
        raise _damaged(exc) from None
    if not isinstance(records, dict):
        raise _damaged(TypeError("not an object"))
    return records


def _damaged(exc: Exception) -> DataError:
    return DataError(f"{calibrations_file()}: not a file of calibrations ({exc}): remove it and calibrate again")
