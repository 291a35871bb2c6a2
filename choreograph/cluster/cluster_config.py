"""Options of a cluster of replicas."""

from typing import Literal

from ..config import NonNegativeInt, PositiveInt, validated
from ..errors import ConfigError

TransferMode = Literal["auto", "always", "never"]  # when messages are fetched from replicas that hold them


@validated()
class ClusterConfig:
    """Number of replicas, and what each of them gets."""

    replicas: PositiveInt = 1
    """Serve on Ray with this many engines, or more; by default without Ray."""
    max_replicas: PositiveInt | None = None
    """Add replicas under load, up to this many."""
    cpus_per_replica: PositiveInt = 1
    gpus_per_replica: NonNegativeInt = 0
    threads_per_replica: PositiveInt = 1  # of one operation on the CPU
    target_requests: PositiveInt = 8  # of a replica, running and waiting, that autoscaling keeps
    router: str = "message"
    """Routing to replicas: message, prefix, power-of-two, round-robin, session."""
    transfer: TransferMode = "auto"
    """Messages from other replicas, in auto mode if that is faster than computing."""

    def __post_init__(self) -> None:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(f"max_replicas={self.max_replicas}: use at least replicas={self.replicas}")
