"""Workflows as the cache sees them: which agent can run next, and what that says about encodings."""

from .agents import Agent, Workflow
from .graph import Progress, StepGraph
from .learned import LearnedSteps, agreement

__all__ = ["Agent", "LearnedSteps", "Progress", "StepGraph", "Workflow", "agreement"]
