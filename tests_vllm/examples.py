"""How many examples a property is tried on, and which."""

from helpers.hypothesis_profile import THOROUGH, many
from hypothesis import HealthCheck, Phase, settings


def examples(number: int) -> settings:
    """Return the same few examples in every run, or with CHOREOGRAPH_THOROUGH as many random ones.

    A failing example is shrunk only then: every try is many requests.
    """
    phases = list(Phase) if THOROUGH else [Phase.explicit, Phase.generate]
    checks = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
    return settings(max_examples=many(number), derandomize=not THOROUGH, phases=phases, **checks)
