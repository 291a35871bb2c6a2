"""Directory of a run: settings, records as JSON lines, lock.

A process killed at any time leaves complete files, or an incomplete last line.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import ConfigError, DataError
from ...utils import atomic_write_text, ensure_dir, require

RunRecord = dict[str, Any]


@contextmanager
def exclusive_dir(path: Path) -> Iterator[None]:
    """Create a directory and lock it against other processes."""
    filelock = require("filelock", "eval")
    ensure_dir(path)
    try:
        with filelock.FileLock(path / ".lock", timeout=0):
            yield
    except filelock.Timeout:
        raise ConfigError(f"{path}: another process is at work in this folder: use another one, or wait") from None


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or raise DataError."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(result, dict):
            raise ValueError(f"{type(result).__name__} instead of an object")
    except (ValueError, RecursionError) as exc:
        raise DataError(f"{file}: damaged ({exc}): remove the folder and start again") from None
    return result


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    atomic_write_text(file, json.dumps(data, indent=1) + "\n")


def read_lines(file: Path) -> tuple[list[str], bool]:
    """Return the complete lines, and whether an incomplete one follows."""
    complete, _, cut = file.read_bytes().rpartition(b"\n")
    try:
        return (complete.decode().split("\n") if complete else []), bool(cut)
    except UnicodeDecodeError as exc:
        raise DataError(f"{file}: damaged ({exc}): remove what is not UTF-8") from None


class RunDirectory:
    """Run directory: `settings.json` and one `<condition>.jsonl` with a record per example."""

    def __init__(self, path: Path, run_config: Mapping[str, Any]) -> None:
        """Open or create the directory.

        Raises ConfigError if it holds a run with other settings, or if two conditions would share a file.
        """
        self.path = path
        names: dict[str, str] = {}  # file systems may ignore case
        conditions = run_config.get("conditions", ())
        if not isinstance(conditions, (Mapping, list, tuple)) or not all(isinstance(x, str) for x in conditions):
            raise DataError(f"{path}: conditions={conditions!r} does not name them: make the run again")
        for condition in conditions:
            other = names.setdefault(self.path_for(condition).name.casefold(), condition)
            if other != condition:
                raise ConfigError(f"conditions {other!r} and {condition!r} would share a file: rename one of them")
        ensure_dir(path)
        expected, file = json.loads(json.dumps(run_config)), path / "settings.json"
        if not file.exists():
            write_json(file, expected)
            return
        settings = read_json_object(file)
        if settings != expected:
            keys = settings.keys() | expected.keys()
            other_settings = {k: settings.get(k) for k in sorted(keys) if settings.get(k) != expected.get(k)}
            raise ConfigError(
                f"{path} holds a run with other settings {other_settings}: use another folder, or remove it"
            )

    def path_for(self, condition: str) -> Path:
        """Return the file of a condition; no other one has its name."""
        escaped = {ord(character): f"%{ord(character):02X}" for character in "%-/\\:\0"} | {ord(" "): "-"}
        return self.path / f"{condition.translate(escaped)}.jsonl"

    def records(self, condition: str) -> list[RunRecord]:
        """Return the records of a condition; remove an incomplete last line."""
        file = self.path_for(condition)
        if not file.exists():
            return []
        lines, is_cut = read_lines(file)
        if is_cut:
            file.write_bytes("".join(f"{line}\n" for line in lines).encode())
        try:
            result = [json.loads(line) for line in lines if line.strip()]
            if invalid := [r for r in result if not isinstance(r, dict) or not isinstance(r.get("id"), str)]:
                raise ValueError(f"{str(invalid[0])[:60]} has no id")
        except (ValueError, RecursionError) as exc:
            raise DataError(f"{file}: a damaged record ({exc}): remove the line") from None
        return result

    def append(self, condition: str, record: RunRecord) -> None:
        """Add the record of one example."""
        with self.path_for(condition).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
