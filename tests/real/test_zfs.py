"""Volumes on real zfs: the tests of tests/guest, run inside the lab guest."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET  # what pytest wrote
from pathlib import Path

import pytest

from synvirt.store import Store
from tests import lab

# The guest shares the machine with the other tests, and has one processor: some minutes on a machine that is overloaded. All
# files are of one boot, and of one start of Python. Of pytest's plugins it needs one.
GUEST_TIMEOUT_S = 2400
FILES = [f"tests/guest/{path.name}" for path in sorted((lab.CHECKOUT / "tests/guest").glob("zfs_*.py"))]
PYTEST = [
    "-m",
    "pytest",
    "--noconftest",
    "-p",
    "no:cacheprovider",
    "-p",
    "pytest_timeout",
    "-p",
    "tests.guest.plugin",
    "-q",
    *FILES,
]
REPORT = "--junitxml=/result/results.xml --timeout=600 --color=no --durations=20"
ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@pytest.mark.slow
@pytest.mark.timeout(GUEST_TIMEOUT_S + 60)
def test_in_the_guest(tmp_path: Path) -> None:
    compiled()
    Store(f"sqlite:///{tmp_path / 'store.db'}").close()
    variables = " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
    ran = lab.run(f"cd /host && {variables} {lab.python()} {' '.join(PYTEST)} {REPORT}", tmp_path, timeout_s=GUEST_TIMEOUT_S)
    assert ran.code == 0, f"{ran.output}\n{ran.console}"
    suite = next(ET.parse(tmp_path / "results.xml").getroot().iter("testsuite"))
    assert int(suite.attrib["tests"]) > 40
    assert suite.attrib["skipped"] == "0", ran.output


def compiled() -> None:
    """All that the guest imports, pytest's assertions with it: it sees the checkout read-only, and compiles for a minute."""
    argv = [sys.executable, *PYTEST, "--collect-only"]
    done = subprocess.run(argv, cwd=lab.CHECKOUT, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
