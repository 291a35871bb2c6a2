"""Changes of what a replica sends: damage, loss and delay."""

import asyncio

import pytest

from choreograph.kv_cache.container import CHECKSUM_BYTES, FORMAT, Header

BY_LAYER = pytest.mark.parametrize("group_bytes", [1 << 30, 1], ids=["at once", "by layer"])


def changed(**changes):
    """Return what changes fields of the last group's last block on its way."""

    async def change(groups):
        sent = [group async for group in groups]
        *blocks, last = sent[-1].blocks
        fields = {name: value(getattr(last, name)) for name, value in changes.items()}
        for group in [*sent[:-1], sent[-1]._replace(blocks=[*blocks, last._replace(**fields)])]:
            yield group

    return change


def with_header(*, is_signed, **fields):
    """Return what changes fields of the message that is sent; with right checksums if `is_signed`."""

    async def change(groups):
        sent = [group async for group in groups]
        header = Header.parse(sent[0].header, "the sent header", "")
        new = Header([header.entries[0].model_copy(update=fields)], header.dtype)
        raw = new.raw if is_signed else new.raw[:-CHECKSUM_BYTES] + header.raw[-CHECKSUM_BYTES:]
        for group in sent:
            blocks = [new.seal(block.number, block.tensors) if is_signed else block for block in group.blocks]
            yield group._replace(header=raw if group.header else b"", blocks=blocks)

    return change


def flip(array):
    array = array.copy()
    array.flat[5] ^= 1
    return array


def part(number, change):
    """Return what changes the keys or values of a block's tensors."""
    return lambda tensors: tuple(change(array) if i == number else array for i, array in enumerate(tensors))


async def without_last_layer(groups):
    sent = [group async for group in groups]
    for group in [*sent[:-1], sent[-1]._replace(blocks=sent[-1].blocks[:-1])]:
        yield group


async def reordered(groups):
    """Layers have each other's content, and their own checksums."""
    sent = [group async for group in groups]
    contents = [block.tensors for group in sent for block in group.blocks][::-1]
    for group in sent:
        yield group._replace(blocks=[block._replace(tensors=contents.pop(0)) for block in group.blocks])


async def of_another_version(groups):
    async for group in groups:
        yield group._replace(header=group.header.replace(FORMAT.encode(), b"choreograph-kv-1"))


async def slow(groups):
    sent = [group async for group in groups]
    for group in sent[:-1]:
        yield group
    await asyncio.sleep(60)
    yield sent[-1]


async def gone(groups):
    sent = [group async for group in groups]
    for group in sent[:-1]:
        yield group
    raise ConnectionError("the replica is gone")


HEADER_FAILURES = {
    "corrupted tokens": with_header(is_signed=False, tokens=[5] * 48),
    "another model": with_header(is_signed=True, model_hash="other"),
    "another position": with_header(is_signed=False, base_position=7),
    "fewer tokens": with_header(is_signed=True, tokens=[5] * 40),
    "more layers": with_header(
        is_signed=True, shapes={(i, k): (48, 2, 16) for i in range(9) for k in ("keys", "values")}
    ),
    "another version": of_another_version,
}


async def empty(groups):
    for group in ():
        yield group


FAILURES = {
    "empty": empty,
    "corrupted keys": changed(tensors=part(0, flip)),
    "corrupted values": changed(tensors=part(1, flip)),
    "truncated keys": changed(tensors=part(0, lambda array: array[:-1])),
    "one row": changed(tensors=part(1, lambda array: array[:1])),
    "no values": changed(tensors=lambda tensors: tensors[:1]),
    "layer of another number": changed(number=lambda number: number - 1),
    "no layer": changed(number=lambda number: number + 1),
    "truncated layers": without_last_layer,
    "exchanged layers": reordered,
    "slow": slow,
    "dead": gone,
}
