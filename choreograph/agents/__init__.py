"""Agent workflows: eviction and prefetch by predicted agent execution (KVFlow)."""

from .step_graph import Progress, StepGraph, TransitionStats
from .tracker import Agent, Workflow

__all__ = ["Agent", "Progress", "StepGraph", "TransitionStats", "Workflow"]
