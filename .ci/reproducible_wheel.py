"""Build the wheel and the source distribution twice, and compare their bytes.

usage: python .ci/reproducible_wheel.py [--no-isolation]

The builds run in copies of the tracked files at two paths, at different times. SOURCE_DATE_EPOCH is the date of the last
commit, as in a release. `--no-isolation` builds with the setuptools of this environment.
"""

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def epoch() -> str:
    """Return the date of the last commit, seconds."""
    command = ["git", "log", "-1", "--format=%ct"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def copy_tracked(folder: Path) -> None:
    """Copy the files of the working tree that git tracks."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listing.decode().split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())


def build(folder: Path, arguments: list[str]) -> dict[str, bytes]:
    """Return the built packages by name."""
    copy_tracked(folder / "source")
    command = [sys.executable, "-m", "build", *arguments, "--outdir", str(folder / "dist"), str(folder / "source")]
    environment = os.environ | {"SOURCE_DATE_EPOCH": epoch()}
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode:
        raise SystemExit(result.stdout)
    return {file.name: file.read_bytes() for file in sorted((folder / "dist").iterdir())}


def normalized(name: str, data: bytes) -> bytes:
    """Return what must be equal: the wheel as it is, of a source distribution names and contents of its files."""
    if name.endswith(".whl"):
        return data
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with tarfile.open(file.name) as archive:
            members = sorted((m.name, m.mode, m) for m in archive.getmembers() if m.isfile())
            parts = [f"{n} {mode}\n".encode() + archive.extractfile(m).read() for n, mode, m in members]  # type: ignore[union-attr]
    return b"".join(parts)


def main() -> int:
    with tempfile.TemporaryDirectory() as temporary:
        first = build(Path(temporary) / "a", sys.argv[1:])
        time.sleep(2.5)  # archives keep times to two seconds
        second = build(Path(temporary) / "another folder", sys.argv[1:])
        different = [
            name
            for name in first.keys() | second.keys()
            if normalized(name, first.get(name, b"")) != normalized(name, second.get(name, b""))
        ]
        for name in different:
            print(f"{name} differs between two builds")
            if name.endswith(".whl"):
                for part in ("a", "another folder"):
                    with zipfile.ZipFile(Path(temporary) / part / "dist" / name) as wheel:
                        print(part, *[(info.filename, info.date_time, info.CRC) for info in wheel.infolist()][:5])
    for name, data in first.items():
        print(f"{name}: {len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
