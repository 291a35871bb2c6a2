"""The folder of a run, or of a training: what it holds, and that one process at a time works in it.

`settings.json` says what was run, `<condition>.jsonl` holds one record an example, a line of JSON each. A folder with
other settings is refused, and so are conditions that would share a file. Files are whole, or end in a line that was cut
off, whenever the process ended.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..errors import ConfigError, DataError
from ..utils import atomic_write_text, ensure_dir

RunRecord = dict[str, Any]


@contextmanager
def exclusive_dir(path: Path) -> Iterator[None]:
    """Makes a folder and holds it against other processes. Raises ConfigError where none can be, and
    where one is at work in it."""
    ensure_dir(path)
    try:
        with FileLock(path / ".lock", timeout=0):
            yield
    except Timeout:
        raise ConfigError(f"{path}: another process is at work in this folder: use another one, or wait") from None


def read_json_object(file: Path) -> dict[str, Any]:
    """What a folder holds. Raises DataError for a file that is no JSON object."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as exc:  # not UTF-8, or no JSON
        raise DataError(f"{file}: damaged ({exc}): remove the folder and start again") from None
    if not isinstance(result, dict):
        raise DataError(f"{file}: {type(result).__name__} where an object belongs: remove the folder and start again")
    return result


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    """All of it or nothing, whenever the process ends."""
    atomic_write_text(file, json.dumps(data, indent=1) + "\n")


def read_lines(file: Path) -> tuple[list[str], bool]:
    """The whole lines of a file that grows at its end, and whether what followed them was cut off, mid-character or
    not. Other line ends than "\\n" are part of the texts."""
    whole, _, cut = file.read_bytes().rpartition(b"\n")
    try:
        return (whole.decode().split("\n") if whole else []), bool(cut)
    except UnicodeDecodeError as exc:
        raise DataError(f"{file}: damaged ({exc}): remove what is no UTF-8") from None


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path, run_config: Mapping[str, Any]) -> None:
        self.path = path
        self._check_distinct_files(run_config.get("conditions", ()))
        ensure_dir(path)
        expected, file = json.loads(json.dumps(run_config)), path / "settings.json"
        if file.exists():
            had = read_json_object(file)
            differ = sorted(k for k in had.keys() | expected.keys() if had.get(k) != expected.get(k))
            if differ:
                was = {k: had.get(k) for k in differ}
                raise ConfigError(f"{path} holds a run with other settings {was}: use another folder, or remove it")
        else:
            write_json(file, expected)

    def path_for(self, condition: str) -> Path:
        """A space is a hyphen there; what no name of a file may hold is written in hexadecimal."""
        name = condition.replace(" ", "-").replace("/", "%2F").replace("\0", "%00")
        return self.path / f"{name}.jsonl"

    def _check_distinct_files(self, conditions: Iterable[str]) -> None:
        """Also where files are found by their letters in any case."""
        taken: dict[str, str] = {}
        for condition in conditions:
            other = taken.setdefault(self.path_for(condition).name.casefold(), condition)
            if other != condition:
                raise ConfigError(f"conditions {other!r} and {condition!r} would share a file: rename one of them")

    def records(self, condition: str) -> list[RunRecord]:
        """What is done already. A last line that was cut off is removed; any other damage is an error."""
        file = self.path_for(condition)
        if not file.exists():
            return []
        lines, cut = read_lines(file)
        if cut:
            file.write_bytes("".join(f"{line}\n" for line in lines).encode())
        try:
            result = [json.loads(line) for line in lines if line.strip()]
        except ValueError as exc:
            raise DataError(f"{file}: a damaged record ({exc}); remove the line") from None
        for record in result:
            if not isinstance(record, dict) or not isinstance(record.get("id"), str):
                raise DataError(f"{file}: a damaged record ({str(record)[:60]}), without an id; remove the line")
        return result

    def append(self, condition: str, record: RunRecord) -> None:
        with self.path_for(condition).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
