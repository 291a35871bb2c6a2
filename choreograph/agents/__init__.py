"""Agent workflows: eviction and prefetch by predicted agent execution (KVFlow).

`Workflow` tracks the agents of a session, whatever program runs them. The papers' programs are in
`choreograph.lab.workflows`, which is something else.
"""

from .step_graph import Progress, StepGraph, TransitionStats
from .tracker import Agent, Workflow

__all__ = ["Agent", "Progress", "StepGraph", "TransitionStats", "Workflow"]
