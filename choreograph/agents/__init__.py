"""Workflows as the cache sees them: which agent can run next, and what that says about encodings."""

from .step_graph import Progress, StepGraph, TransitionStats, compare_steps
from .tracker import Agent, Workflow

__all__ = ["Agent", "Progress", "StepGraph", "TransitionStats", "Workflow", "compare_steps"]
