"""Distillation: a model on reused encodings learns to say what it says on the baseline (Prompt Choreography, 3.2)."""

from .lessons import Lesson, answer_lessons, lessons_of
from .run import train_on
from .setting import TrainConfig, TrainReport
from .traces import Trace, collect, read_traces
from .training import train

__all__ = [
    "Lesson",
    "Trace",
    "TrainConfig",
    "TrainReport",
    "answer_lessons",
    "collect",
    "lessons_of",
    "read_traces",
    "train",
    "train_on",
]
