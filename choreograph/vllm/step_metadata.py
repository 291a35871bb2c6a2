"""What the scheduler's half of the connector orders for one step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass
class LoadPiece:
    """Tokens of one entry that are written into a request's pages."""

    uid: int
    source: int  # first token of the entry
    at: int  # index of the first token in the request
    length: int
    shift: int  # positions by which the keys are rotated


@dataclass
class LoadOrder:
    """Reused tokens of one request, written before the forward pass."""

    block_ids: list[int]  # of all tokens of the request
    pieces: list[LoadPiece]


@dataclass
class SaveOrder:
    """Tokens of one request that become an entry."""

    uid: int
    block_ids: list[int]  # of all tokens of the request
    start: int
    stop: int
    tokens: tuple[int, ...]


@dataclass
class StepOrders(KVConnectorMetadata):
    """Orders of one step, in the order of the fields."""

    final_saves: dict[str, list[SaveOrder]] = field(default_factory=dict)  # of finished requests, whose pages wait
    drops: list[int] = field(default_factory=list)  # entries to forget
    loads: list[LoadOrder] = field(default_factory=list)  # before the forward pass
    refused: list[str] = field(default_factory=list)  # requests that end with an error
    refused_blocks: list[int] = field(default_factory=list)  # their pages
    saves: list[SaveOrder] = field(default_factory=list)  # after the forward pass
