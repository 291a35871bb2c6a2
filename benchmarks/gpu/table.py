"""Figures as rows: what was measured and predicted, beside what the papers report and what must be reached."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from choreograph.lab.evaluation.statistics import Estimate

from ..common import Row, median_row
from . import kvflow, predictions
from .bench import Bench, PartResult
from .counts import CountedRun, count_flow
from .lines import PARTS, TITLES
from .predictions import EFFICIENCY, PRESETS, Device, Efficiency, Model
from .shape import Shape

HEAD = ("measure", "measured", "95%", "predicted", "paper", "must", "aim")
UNMEASURED = "not measured"


Counts = Mapping[str, Mapping[str, CountedRun]]


def count(tokenizer: Any, shape: Shape) -> Counts:
    """What every workflow has to compute, in both modes."""
    return {name: count_flow(tokenizer, shape, flow) for name, flow in shape.flows.items()}


def predict(device: Device, counts: Counts, shape: Shape, efficiency: Efficiency = EFFICIENCY) -> dict[str, float]:
    """Every figure of the table for a device, by its name."""
    model = Model.from_shape(shape)
    result = predictions.rates(device, efficiency) | predictions.decode_steps(device, model, shape, efficiency)
    for name in ("triton", "flex"):
        result |= predictions.attention(device, model, shape, name, efficiency)
    result |= predictions.prompt_cache(device, model, shape, efficiency)
    result |= predictions.partial_prefill(device, model, shape, efficiency)
    for name, counted in counts.items():
        result |= predictions.flow(device, model, TITLES[name], counted, efficiency)
    return result | kvflow.predicted(predictions.predicted_hardware(device, model, efficiency), shape)


def device_of(bench: Bench, results: Mapping[str, PartResult]) -> Device:
    """The device that is here: what its maker states where it is known, else what plain code reached on it."""
    name = torch.cuda.get_device_name()
    known = next((device for device in PRESETS.values() if device.card in name), None)
    if known is not None:
        return known
    rates = {measure: samples[0] for measure, samples in results.get("rates", {}).items()}  # type: ignore[index]
    if not rates:
        raise SystemExit(f"{name}: no prediction without its rates; run the part `rates` too")
    return Device(
        name,
        name,
        memory=rates["memory, plain copy"] * 1e12 / EFFICIENCY.copy,
        arithmetic=rates["product of matrices"] * 1e12 / EFFICIENCY.arithmetic,
        link=rates["host to device"] * 1e9 / EFFICIENCY.link,
        size=torch.cuda.get_device_properties(0).total_memory,
    )


def rows_of(results: Mapping[str, PartResult]) -> list[Row]:
    """Rows of the parts that were measured, in the order of the table."""
    rows = []
    for part, lines in PARTS.items():
        for line in lines if part in results else ():
            one = results[part][line.measure]
            facts: dict[str, Any] = {"required": line.required, "target": line.target, "better": line.better}
            if isinstance(one, Estimate):
                rows.append(Row(line.measure, one.value, line.unit, one.low, one.high, **facts))
            else:
                rows.append(median_row(line.measure, one, line.unit, **facts))
    return rows


def with_predictions(rows: Iterable[Row], predicted: Mapping[str, float]) -> list[Row]:
    return [replace(row, predicted=predicted.get(row.measure)) for row in rows]


def cells(
    rows: Sequence[Row], predicted: Mapping[str, float], missing: Mapping[str, str], parts: Iterable[str]
) -> list[tuple[str, ...]]:
    """The table's lines; missing: why a part has no figures."""
    known, result = {row.measure: row for row in rows}, []
    for part in parts:
        for line in PARTS[part]:
            row = known.get(line.measure)
            told = (
                ("" if line.measure not in predicted else f"{predicted[line.measure]:.3g}"),
                *("" if x is None else f"{x:g}" for x in (line.paper, line.required, line.target)),
            )
            value = f"{row.value:.3g} {row.unit}".strip() if row else missing.get(part, UNMEASURED)
            span = f"{row.low:.3g} to {row.high:.3g}" if row else ""
            unit = f", {line.unit}" if line.unit not in ("", "x") else ""
            result.append((line.measure + ("" if row else unit), value, span, *told))
    return result
