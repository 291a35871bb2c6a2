"""Where results go: refused before anything is computed, where nothing could be written. Knows no results."""

import os
from pathlib import Path

from .errors import ConfigError


def make_folder(path: Path) -> None:
    """Makes a folder, with those above it, if it is not there. Raises ConfigError where none can be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ConfigError(f"{path}: no folder can be made there ({problem.strerror}): use another one") from None


def may_be_folder(path: Path) -> bool:
    """Whether it is a folder, or nothing but folders stands where it would be made."""
    there = next((place for place in (path, *path.absolute().parents) if place.exists()), None)
    return there is not None and there.is_dir()


def write_whole(file: Path, text: str) -> None:
    """In place of what is there, once all of it is written."""
    if file.exists() and not file.is_file():  # a device, a pipe
        file.write_text(text, encoding="utf-8")
        return
    part = file.with_name(file.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, file)
    except OSError as problem:
        part.unlink(missing_ok=True)
        raise ConfigError(f"{file}: cannot be written ({problem.strerror})") from None


def make_room(file: Path | None) -> None:
    """Makes the folder of a file that is to be written, if one is. Raises ConfigError where it could not be."""
    if file is None:
        return
    if file.is_dir():
        raise ConfigError(f"{file}: this is a folder: name a file in it")
    make_folder(file.parent)
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{file}: may not be written: use another place")
