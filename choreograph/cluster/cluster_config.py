"""Options of a cluster of replicas."""

from typing import Annotated, Literal

from pydantic import Field

from ..config import NonNegativeInt, PositiveInt, validated
from ..errors import ConfigError

TransferMode = Literal["auto", "always", "never"]  # when messages are fetched from replicas that hold them


@validated()
class ClusterConfig:
    """Number of replicas, and what each of them gets."""

    # at the start, and the fewest
    replicas: Annotated[PositiveInt, Field(description="Serve with this many engines on Ray.")] = 1
    # None: no autoscaling
    max_replicas: Annotated[PositiveInt | None, Field(description="Add replicas under load, up to this many.")] = None
    cpus_per_replica: PositiveInt = 1
    gpus_per_replica: NonNegativeInt = 0
    threads_per_replica: PositiveInt = 1  # of one operation on the CPU
    target_requests: PositiveInt = 8  # of a replica, running and waiting, that autoscaling keeps
    # policy of `cluster/routing.py`
    router: Annotated[
        str, Field(description="Routing to replicas: message, prefix, power-of-two, round-robin, session.")
    ] = "message"
    transfer: Annotated[
        TransferMode, Field(description="Messages from other replicas, in auto mode if that is faster than computing.")
    ] = "auto"

    def __post_init__(self) -> None:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(f"max_replicas={self.max_replicas}: use at least replicas={self.replicas}")
