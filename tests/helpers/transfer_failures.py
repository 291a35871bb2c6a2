"""Changes of what a replica sends: damage, loss and delay."""

import asyncio
import dataclasses

import pytest

BY_LAYER = pytest.mark.parametrize("group_bytes", [1 << 30, 1], ids=["at once", "by layer"])


def changed(**changes):
    """Return what changes fields of the last group's last layer on its way."""

    async def change(groups):
        sent = [group async for group in groups]
        *layers, last = sent[-1].layers
        fields = {name: value(getattr(last, name)) for name, value in changes.items()}
        for group in [*sent[:-1], sent[-1]._replace(layers=[*layers, last._replace(**fields)])]:
            yield group

    return change


def with_header(*, is_signed, **fields):
    """Return what changes fields of the message that is sent; with right checksums if `is_signed`."""

    async def change(groups):
        sent = [group async for group in groups]
        (message,) = (dataclasses.replace(message, **fields) for message in sent[0].messages)
        if is_signed:
            object.__setattr__(message, "checksum", message.compute_checksum())
        for group in sent:
            checksums = [message.layer_checksum(*layer[1:4]) if is_signed else layer.checksum for layer in group.layers]
            layers = [layer._replace(checksum=new) for layer, new in zip(group.layers, checksums, strict=True)]
            yield group._replace(messages=[message] if group.messages else [], layers=layers)

    return change


def flip(array):
    array = array.copy()
    array.flat[5] ^= 1
    return array


async def without_last_layer(groups):
    sent = [group async for group in groups]
    for group in [*sent[:-1], sent[-1]._replace(layers=sent[-1].layers[:-1])]:
        yield group


async def reordered(groups):
    """Layers have each other's content, and their own checksums."""
    sent = [group async for group in groups]
    contents = [layer for group in sent for layer in group.layers][::-1]
    for group in sent:
        layers = [layer._replace(keys=(other := contents.pop(0)).keys, values=other.values) for layer in group.layers]
        yield group._replace(layers=layers)


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
    "more layers": with_header(is_signed=True, shapes=[((48, 2, 16), (48, 2, 16))] * 9),
}


async def empty(groups):
    for group in ():
        yield group


FAILURES = {
    "empty": empty,
    "corrupted keys": changed(keys=flip),
    "corrupted values": changed(values=flip),
    "truncated keys": changed(keys=lambda array: array[:-1]),
    "one row": changed(values=lambda array: array[:1]),
    "layer of another number": changed(layer=lambda layer: layer - 1),
    "truncated layers": without_last_layer,
    "exchanged layers": reordered,
    "slow": slow,
    "dead": gone,
}
