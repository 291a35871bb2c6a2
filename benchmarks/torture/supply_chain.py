"""What the package is built from: licences, equal builds, and no code from files of others.

Each check is a command that other parts of the project run too; one that fails is a broken promise. The lowest and the newest
versions have environments of their own: `make test-versions`.
"""

import subprocess
import sys
from pathlib import Path

from .campaign import Options, Outcome, Tally

ROOT = Path(__file__).parents[2]
CHECKS = {
    "licences": (".ci/licences.py", "--check"),
    "builds": (".ci/reproducible_wheel.py", "--no-isolation"),
    "hostile files": ("-m", "pytest", "-p", "no:cacheprovider", "tests/test_supply_chain.py"),
}


def run(options: Options) -> Outcome:
    """Run each check once; those that would begin after the time has passed are left out."""
    tally = Tally(options)
    for index, (name, arguments) in zip(options.rounds(), CHECKS.items(), strict=False):
        result = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        tally.inputs += 1
        tally.counts[name] += 1
        if result.returncode:
            tally.lose(index, f"{name}: {(result.stdout + result.stderr).strip()[-500:]}")
    return tally.outcome()
