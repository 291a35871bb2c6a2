"""KV entries from outside a request: share, pin, export and import."""

import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from ..context.placement import PLACERS, Placement
from ..core.core import EngineCore
from ..errors import (
    CacheBusyError,
    CacheFullError,
    InvalidPositionError,
    InvalidRequestError,
    MessageReleasedError,
    SessionClosedError,
)
from ..kv_cache.container import Block, ContainerFile, EntryInfo, Header, TensorKey, as_bytes
from ..kv_cache.entry import EntryLayers, KVEntry
from ..kv_cache.hashing import portable_content_hash
from ..kv_cache.pool import KVPool, LayerKeyValues
from ..kv_cache.tiers import TransferOps
from ..kv_cache.transfer import ThreadExecutor, make_executor
from ..outputs import Usage
from ..request.request import Request, RequestState
from ..utils import atomic_write, ensure_writable


class KVSnapshot(NamedTuple):
    """Keys and values of a message in host memory.

    `base_position` may differ from the message's position: messages with equal inputs share one KV
    entry at any position.
    """

    base_position: int  # of token 0; keys are rotated to it
    layers: list[LayerKeyValues]  # (keys, values) per layer, each (T, heads, head_dim), or rows of `int8_rows`
    model_hash: str  # weights hash of the model that computed it
    content_hash: str  # of tokens and context, equal across processes and clients
    checksum: int | None = None  # of everything else; None: cannot be verified
    inputs: Mapping[int, Tensor] = MappingProxyType({})  # hidden states before some layers, as `KVPool.tensors`

    def describe(self, **fields: Any) -> EntryInfo:
        """Return what the snapshot is, for the header of a container.

        Args:
            fields: more fields of `EntryInfo`.
        """
        shapes: dict[TensorKey, tuple[int, ...]] = {
            (layer, "inputs"): tuple(x.shape) for layer, x in self.inputs.items()
        }
        for layer, (keys, values) in enumerate(self.layers):
            shapes[layer, "keys"], shapes[layer, "values"] = tuple(keys.shape), tuple(values.shape)
        return EntryInfo(
            shapes=shapes,
            base_position=self.base_position,
            model_hash=self.model_hash,
            content_hash=self.content_hash,
            **fields,
        )

    def _header(self) -> Header:
        dtypes = {tensor.dtype for tensor in (*chain(*self.layers), *self.inputs.values())}
        try:
            (dtype,) = dtypes
            return Header([self.describe()], dtype)
        except (ValueError, LookupError) as exc:
            reason = " ".join([*str(exc).split(), *map(str, dtypes)])
            raise InvalidRequestError(
                f"the snapshot cannot be verified or saved ({reason}): use what Message.export_kv gave"
            ) from None

    def compute_checksum(self) -> int:
        header = self._header()
        return header.combine(block.checksum for block in seal_blocks(header, [self]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the snapshot to a container, a safetensors file.

        Raises:
            ConfigError: if the file cannot be written.
            InvalidRequestError: if the snapshot is not what was exported.
        """
        ensure_writable(Path(path))
        write_snapshots(Path(path), self._header(), [self], self.checksum)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "KVSnapshot":
        """Read a file written by `save`.

        Raises:
            CacheFileError: if the file is unreadable, of another format, or damaged.
        """
        with ContainerFile.open(Path(path), "remove it and export the message again") as file:
            header = file.header
            if len(header.entries) != 1 or not header.blocks:
                raise header.error(f"is no snapshot of one message, it has {len(header.entries)} entries")
            blocks = file.read_all()
        (snapshot,) = to_snapshots(header, blocks)
        return snapshot._replace(checksum=header.combine(block.checksum for block in blocks))


def seal_block(header: Header, number: int, snapshots: Sequence[KVSnapshot]) -> Block:
    """Return a block of a container with the tensors of snapshots, one an entry."""
    info = header.blocks[number]
    snapshot = snapshots[info.entry]
    tensors = snapshot.layers[info.layer] if "keys" in info.kinds else (snapshot.inputs[info.layer],)
    return header.seal(number, [as_bytes(tensor.cpu().contiguous()) for tensor in tensors])


def seal_blocks(header: Header, snapshots: Sequence[KVSnapshot]) -> Iterator[Block]:
    return (seal_block(header, number, snapshots) for number in range(len(header.blocks)))


def write_snapshots(path: Path, header: Header, snapshots: Sequence[KVSnapshot], checksum: int | None = None) -> None:
    """Write snapshots as the entries of a container, atomically.

    Args:
        checksum: expected one of the container.

    Raises:
        ConfigError: if the file cannot be written.
        InvalidRequestError: if the checksum differs.
    """

    def write(part: Path) -> None:
        checksums = []
        with ContainerFile.create(part, header) as file:
            for block in seal_blocks(header, snapshots):
                file.write(block)
                checksums.append(block.checksum)
        if checksum not in (None, header.combine(checksums)):
            raise InvalidRequestError(f"{path}: the snapshot is damaged, its checksum differs: export it again")

    atomic_write(path, write)


def to_snapshots(header: Header, blocks: Iterable[Block]) -> list[KVSnapshot]:
    """Return the entries of a container, with keys and values of all layers."""
    tensors: list[dict[TensorKey, Tensor]] = [{} for _ in header.entries]
    for block in blocks:
        info = header.blocks[block.number]
        for kind, rows in zip(info.kinds, block.tensors, strict=True):
            tensors[info.entry][info.layer, kind] = header.as_tensor(info, kind, rows)
    snapshots = []
    for entry, found in zip(header.entries, tensors, strict=True):
        layer_ids = sorted(layer for layer, kind in found if kind == "keys")
        if layer_ids != [*range(len(layer_ids))]:
            raise header.error(f"has keys and values of layers {layer_ids} only, all of them are needed")
        layers = [(found[layer, "keys"], found[layer, "values"]) for layer in layer_ids]
        inputs = {layer: tensor for (layer, kind), tensor in found.items() if kind == "inputs"}
        snapshots.append(KVSnapshot(entry.base_position, layers, entry.model_hash, entry.content_hash, inputs=inputs))
    return snapshots


def wait_encoded(core: EngineCore, request: Request) -> None:
    """Run the engine until the KV of every token is computed."""
    core.run_until(
        request, lambda: request.tokens_final and request.entry is not None and request.entry.is_materialized
    )


def attach_entry(core: EngineCore, request: Request, entry: KVEntry) -> None:
    """Complete a request that was never queued with an existing KV entry."""
    with core.lock:
        if core.closed:
            raise SessionClosedError("the engine is closed: make a new one")
        request.entry, request.state = entry, RequestState.RUNNING
        core.cache_manager.acquire(entry, request.message_owner)
        request.usage = Usage(cached_tokens=len(request.prompt))
        core.lifecycle.finish(request, RequestState.DONE, "cached")


def export_kv(core: EngineCore, request: Request) -> KVSnapshot:
    """Copy the computed KV entry of a message to host memory."""
    snapshot = copy_kv(core, request)
    return snapshot._replace(checksum=snapshot.compute_checksum())


def copy_kv(core: EngineCore, request: Request, *, with_inputs: bool = False) -> KVSnapshot:
    """Return `export_kv` without the checksum.

    Args:
        with_inputs: copy the cached hidden states too, from which other models compute layers.
    """
    if request.mode != "choreographed":
        raise InvalidRequestError(
            f"message {request.id} was computed in {request.mode} mode, where KV entries belong to whole prompts: "
            "use mode='choreographed'"
        )
    if request.layers is not None:
        raise InvalidRequestError(
            f"message {request.id} was computed in some layers only: export the message it comes from"
        )
    core.model_set.weights_hash(request.model)  # slow the first time (reads all weights): not under the lock
    with core.lock, resident(core, request) as entry:
        return _snapshot(core, entry, entry.pages, with_inputs=with_inputs)


def try_copy_kv(core: EngineCore, request: Request) -> KVSnapshot | None:
    """Return `copy_kv` without waiting for a running step, from any thread.

    Hidden states are copied too. Takes no lock: an entry's list of pages is replaced before they are freed, so a copy
    is whole if the list is the same afterwards. None if it is not, or if the KV entry is not complete in CPU memory.
    """
    entry, pool = request.entry, core.cache_manager.pool
    if request.mode != "choreographed" or request.layers is not None or request.released or entry is None:
        return None
    if pool.keys[0].device.type != "cpu" or not request.tokens_final or entry.shared_header is not None:
        return None
    pages = entry.pages
    if entry.location != "device" or not entry.is_complete:
        return None
    snapshot = _snapshot(core, entry, pages, with_inputs=True)
    return snapshot if entry.pages is pages else None


def _snapshot(core: EngineCore, entry: KVEntry, pages: list[int], *, with_inputs: bool) -> KVSnapshot:
    weights_hash, pool, slots = core.model_set.weights_hash, core.cache_manager.pool, entry.slots_in(pages)
    model_hash = weights_hash(entry.model)
    content_hash = portable_content_hash(entry.tokens, entry.base_position, entry.context, entry.model, weights_hash)
    inputs = {layer: pool.export_inputs(layer, slots) for layer in entry.layers.hidden if with_inputs}
    return KVSnapshot(entry.base_position, pool.export_slots(slots), model_hash, content_hash, inputs=inputs)


@contextmanager
def resident(core: EngineCore, request: Request) -> Iterator[KVEntry]:
    """Keep a message's KV entry on the device inside the block.

    Runs steps until the entry is on the device. Its context is referenced only as by a message: a
    waiting request may evict it.
    """
    owner_id = -request.id
    with core.lock, ExitStack() as owned:
        entry = _require_entry(request)
        owners = [(entry, ("call", owner_id)), *((e, ("message", owner_id)) for e in entry.read_entries)]
        for owned_entry, owner in owners:
            core.cache_manager.acquire(owned_entry, owner)
            owned.callback(core.cache_manager.release, owned_entry, owner)
        try:
            while not (entry := _require_entry(request)).is_complete:
                is_stuck = False
                try:
                    core.context_loader.ensure_resident(owner_id, [entry])
                except CacheFullError:
                    is_stuck = not core.cache_manager.has_pending  # before the step, which polls transfers
                    if is_stuck and not core.step(wait=False):
                        raise
                if not is_stuck and not core.step(wait=False):
                    _wait_for_space(core)
        finally:  # a step that raises must not leave references
            core.context_loader.release(owner_id)
        yield entry


def _require_entry(request: Request) -> KVEntry:
    """Return the message's KV entry; raise MessageReleasedError if it is released."""
    if request.entry is None or request.released:
        raise MessageReleasedError(f"message {request.id} has no KV entry: keep it until then")
    return request.entry


def _wait_for_space(core: EngineCore) -> None:
    core.cache_manager.wait_for_space()
    core.poll_transfers()


def pin(core: EngineCore, request: Request, owner: str | None, seconds: float | None) -> None:
    """Pin a message's KV entry on the device for an owner."""
    with core.lock, resident(core, request) as entry:
        core.cache_manager.pins.pin(entry, (request.session_id, owner, request.id), seconds)


def unpin(core: EngineCore, request: Request, owner: str | None) -> None:
    """Remove an owner's pin, if there is one."""
    with core.lock:
        if request.entry is not None:
            core.cache_manager.pins.unpin(request.entry, (request.session_id, owner, request.id))


def unpin_session(core: EngineCore, session_id: int) -> None:
    """Remove every pin made through a session."""
    with core.lock:
        core.cache_manager.pins.unpin_session(session_id)


def import_kv(
    core: EngineCore,
    request: Request,
    snapshot: KVSnapshot,
    *,
    check: bool,
    any_context: bool = False,
    load: Callable[[KVPool, KVEntry], TransferOps] | None = None,
) -> bool:
    """Complete a prefill from a snapshot, without queueing it.

    Returns False if there is no capacity for it at the moment.

    Args:
        check: verify the checksum, which reads the complete snapshot.
        any_context: take a snapshot that was computed in a context that is not here; the request then needs a
            namespace of its own.
        load: returns operations that load the entry while steps run; the tensors of the snapshot are not read then.
            Where loading fails, readers fail with LostContextError.

    Raises:
        InvalidRequestError: if the snapshot has other tokens or another context, or is damaged.
        InvalidPositionError: if keys would have to be rotated and the model has learned positions.
    """
    core.model_set.weights_hash(request.model)
    with core.lock:
        _check_snapshot(core, request, snapshot, any_context)
    if check:  # slow: not under the lock
        if snapshot.checksum is None:
            raise InvalidRequestError(
                "the copy has no checksum: export it again with Message.export_kv, or skip this check with check=False"
            )
        if snapshot.checksum != snapshot.compute_checksum():
            raise InvalidRequestError("the copy is damaged, its checksum differs: export it again")
    with core.lock:
        while True:
            try:
                # a dropped entry would be computed without the context that is not here
                entry = reserve(core, request, lambda equal: not any_context or equal.location != "dropped")
                break
            except CacheBusyError:
                _wait_for_space(core)
        if entry is None:
            return request.is_finished
        with ExitStack() as on_error:
            on_error.callback(cancel_reservation, core, request, entry)
            if snapshot.base_position != entry.base_position and not core.hf_model.model_info.supports_shift:
                raise InvalidPositionError(
                    f"the copy was computed at position {snapshot.base_position}, not {entry.base_position}, and "
                    f"{core.hf_model.model_info.name} has learned positions: its keys cannot be rotated"
                )
            pool = core.cache_manager.pool
            if load is None:
                pool.import_slots(entry.slots, snapshot.layers)
                entry.num_scheduled_tokens = entry.num_computed_tokens = len(entry.tokens)
            else:
                entry.storage.can_recompute = False  # until it is here: its readers would get it without its context
                ops = load(pool, entry)._replace(finish=partial(setattr, entry.storage, "can_recompute", True))
                executor = make_executor(pool.keys[0].device, idle_seconds=0)  # of its own: it waits for no other load
                core.cache_manager.offload_manager.load_remote(entry, ops, executor)
            core.events.emit("imported", request=request.id, tokens=len(entry.tokens))
            _adopt(core, request, entry, snapshot.base_position)
            on_error.pop_all()
    return True


def _check_snapshot(core: EngineCore, request: Request, snapshot: object, any_context: bool) -> None:
    """Check that a snapshot matches the request's model, tokens and context.

    Every field is validated first, since the snapshot may be edited by hand.
    """
    if not isinstance(snapshot, KVSnapshot):
        raise InvalidRequestError(f"snapshot is of type {type(snapshot).__name__}: use what Message.export_kv gave")
    base_position, layers = snapshot.base_position, snapshot.layers
    is_valid = {
        "base_position": type(base_position) is int and 0 <= base_position < 1 << 31,
        "layers": isinstance(layers, (list, tuple)) and all(map(_is_layer, layers)),
        "model_hash": isinstance(snapshot.model_hash, str),
        "content_hash": isinstance(snapshot.content_hash, str),
        "checksum": snapshot.checksum is None or isinstance(snapshot.checksum, int),
    }
    for field, valid in is_valid.items():
        if not valid:
            value = reprlib.repr(getattr(snapshot, field))
            raise InvalidRequestError(f"snapshot.{field} is {value}: use what Message.export_kv gave")
    if snapshot.model_hash != core.model_set.weights_hash(request.model):
        raise InvalidRequestError(f"the copy was computed by another model than {request.model!r}: name that model")
    placement, pool = _compute_placement(core, request), core.cache_manager.pool
    dtypes, cache_dtype = {tensor.dtype for layer in layers for tensor in layer}, pool.keys[0].dtype
    if dtypes - {cache_dtype}:
        raise InvalidRequestError(
            f"the copy is in {sorted(map(str, dtypes))}, the cache in {cache_dtype}: export it from an "
            "engine with the same dtype and CacheConfig.kv_cache_dtype"
        )
    num_tokens = len(placement.tokens)
    shapes = [(tuple(keys.shape), tuple(values.shape)) for keys, values in layers]
    pool_layers = zip(pool.keys, pool.values, strict=True)
    expected = [((num_tokens, *keys.shape[1:]), (num_tokens, *values.shape[1:])) for keys, values in pool_layers]
    if shapes != expected:
        raise InvalidRequestError(
            f"the copy has keys and values {shapes[:1]} in {len(shapes)} layers, these {num_tokens} tokens have "
            f"{expected[:1]} in {len(expected)}: use the tokens that were exported"
        )
    if any_context:
        return
    work_hash = portable_content_hash(
        placement.tokens, placement.position, placement.context, request.model, core.model_set.weights_hash
    )
    if snapshot.content_hash != work_hash:
        raise InvalidRequestError(
            f"the copy has content hash {snapshot.content_hash[:12]}, these tokens and parents {work_hash[:12]}: "
            "give the tokens, parents and offsets that were exported"
        )


def _is_layer(layer: object) -> bool:
    return isinstance(layer, (list, tuple)) and len(layer) == 2 and all(isinstance(t, Tensor) for t in layer)


def _compute_placement(core: EngineCore, request: Request) -> Placement:
    """Return the placement of a prefill that was never queued."""
    if any(parent.entry is None for parent in request.parents):
        raise InvalidRequestError("a copy is imported only after its parents are complete: read them first")
    request.resolve_dependencies()
    return PLACERS[request.mode](request, core.cache_manager, core.hf_model.model_info)


def start_remote_load(
    core: EngineCore,
    request: Request,
    entry: KVEntry,
    ops: TransferOps,
    executor: ThreadExecutor,
    layers: EntryLayers,
) -> None:
    """Complete a prefill with a reserved KV entry that is still loading.

    Args:
        ops: transfer operations that load it at the entry's base position.
        executor: runs them.
        layers: what is loaded of each layer.
    """
    with core.lock, ExitStack() as on_error:
        on_error.callback(cancel_reservation, core, request, entry)
        entry.layers = layers
        entry.storage.can_recompute = False
        core.cache_manager.offload_manager.load_remote(entry, ops, executor)
        _adopt(core, request, entry, entry.base_position)
        on_error.pop_all()


def reserve(
    core: EngineCore, request: Request, is_sufficient: Callable[[KVEntry], bool] = lambda entry: True
) -> KVEntry | None:
    """Allocate a KV entry for a prefill computed in another process.

    The message owns the entry; lookups do not return it yet.

    Args:
        is_sufficient: predicate on an equal cached entry; True completes the request with it.

    Returns:
        None if there is no capacity at the moment, or an equal entry completed the request.

    Raises:
        CacheBusyError: if there is capacity when a transfer completes.
    """
    with core.lock:
        placement = _compute_placement(core, request)
        assert placement.content_hash is not None, "only choreographed prefills can be imported"
        if (
            placement.cached_entry is not None
            and not placement.cached_entry.is_lost
            and is_sufficient(placement.cached_entry)
        ):
            attach_entry(core, request, placement.cached_entry)
            return None
        try:
            entry = core.cache_manager.allocate_entry(
                placement.tokens,
                placement.position,
                placement.context,
                capacity=len(placement.tokens),
                owner=request.message_owner,
                model=request.model,
            )
        except CacheBusyError:
            raise
        except CacheFullError:
            return None
        entry.content_hash = placement.content_hash
        return entry


def _adopt(core: EngineCore, request: Request, entry: KVEntry, base_position: int) -> None:
    """Attach a reserved entry to its request, at the given base position."""
    shift = base_position - entry.base_position
    entry.context = tuple(kv_slice._replace(position=kv_slice.position + shift) for kv_slice in entry.context)
    entry.base_position = base_position
    assert entry.content_hash is not None
    core.cache_manager.register(entry, entry.content_hash)
    attach_entry(core, request, entry)


def cancel_reservation(core: EngineCore, request: Request, entry: KVEntry) -> None:
    """Release a reserved entry that is not needed."""
    with core.lock:
        core.cache_manager.release(entry, request.message_owner)
