"""Agent workflows for the KV cache: which agent can run next, and what it will need (KVFlow)."""

from .step_graph import Progress, StepGraph, TransitionStats
from .tracker import Agent, Workflow

__all__ = ["Agent", "Progress", "StepGraph", "TransitionStats", "Workflow"]
