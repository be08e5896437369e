"""Volumes on real zfs: the tests of tests/guest, run inside the lab guest."""

import xml.etree.ElementTree as ET  # what pytest wrote
from pathlib import Path

import pytest

from tests import lab

# The guest is emulated, and shares the machine with the other tests: some 5 minutes each, 10 on a machine that is overloaded.
# What has no time of its own to lose boots together: a boot and Python's imports take a minute.
GUEST_TIMEOUT_S = 2400
PYTEST = "-m pytest --noconftest -p no:cacheprovider --junitxml=/result/results.xml --timeout=600 --color=no --durations=5 -q"


@pytest.mark.slow
@pytest.mark.timeout(GUEST_TIMEOUT_S + 60)
@pytest.mark.parametrize("names", ["zfs_contracts zfs_destination zfs_restores", "zfs_import zfs_backups"])
def test_in_the_guest(names: str, tmp_path: Path) -> None:
    files = " ".join(f"tests/guest/{name}.py" for name in names.split())
    said = lab.run(f"cd /host && {lab.python()} {PYTEST} {files}", tmp_path, timeout_s=GUEST_TIMEOUT_S)
    assert said.code == 0, f"{said.output}\n{said.console}"
    suite = next(ET.parse(tmp_path / "results.xml").getroot().iter("testsuite"))
    assert int(suite.attrib["tests"]) > 0
    assert suite.attrib["skipped"] == "0", said.output


def test_no_file_of_the_guest_is_left_out() -> None:
    (mark,) = [mark for mark in test_in_the_guest.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    run = " ".join(mark.args[1]).split()
    assert sorted(run) == sorted(path.stem for path in (lab.CHECKOUT / "tests/guest").glob("zfs_*.py"))
