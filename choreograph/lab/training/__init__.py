"""Distill the baseline into a model under reuse (Prompt Choreography §3.2)."""

from ..evaluation.traces import Trace, collect_traces, load_traces
from .examples import TrainingExample, answer_examples, make_examples
from .train import train, train_from_traces
from .train_config import TrainConfig, TrainReport

__all__ = [
    "Trace",
    "TrainConfig",
    "TrainReport",
    "TrainingExample",
    "answer_examples",
    "collect_traces",
    "load_traces",
    "make_examples",
    "train",
    "train_from_traces",
]
