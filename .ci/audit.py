"""Look for known vulnerabilities of the installed dependencies with pip-audit.

usage: python .ci/audit.py [--need-data]

Installs pip-audit into an environment of its own and audits the packages of this one. Where its data cannot be had (no network,
or no service at the index), says so and exits with 0; with `--need-data`, as in CI, with 1. Exits with 1 for a vulnerability.
"""

import contextlib
import json
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

LIMIT = 600  # seconds


def audit(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run pip-audit over the packages of this environment."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "pip-audit"]
    installed = subprocess.run(install, capture_output=True, text=True, check=False, timeout=LIMIT)
    if installed.returncode:
        return subprocess.CompletedProcess(install, 3, "", installed.stderr)
    command = [python, "-m", "pip_audit", "--progress-spinner", "off", "-f", "json", "--skip-editable"]
    command += ["--path", sysconfig.get_path("purelib")]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="audit-") as temporary:
        try:
            result = audit(Path(temporary) / "venv")
        except subprocess.TimeoutExpired as exc:
            result = subprocess.CompletedProcess(exc.cmd, 3, "", f"no answer after {LIMIT} s")
    dependencies, reason = [], (result.stderr.strip().splitlines() or ["no output"])[-1]
    with contextlib.suppress(ValueError, KeyError):
        dependencies = json.loads(result.stdout)["dependencies"]
        reason = "the index has it for none of the packages"
    skipped = [item["name"] for item in dependencies if "skip_reason" in item]
    if len(skipped) == len(dependencies):
        print(f"not audited, the data of pip-audit cannot be had: {reason[:300]}")
        return int("--need-data" in sys.argv[1:])
    found = [(item["name"], item["version"], flaw) for item in dependencies for flaw in item.get("vulns", ())]
    for name, version, flaw in found:
        print(f"{name} {version}: {flaw['id']}, fixed in {', '.join(flaw['fix_versions']) or 'no version'}")
    num_audited = len(dependencies) - len(skipped)
    print(
        f"{num_audited} packages audited, {len(found)} vulnerabilities; not known to the index: {', '.join(skipped) or 'none'}"
    )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
