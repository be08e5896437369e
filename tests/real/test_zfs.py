"""Volumes on real zfs: the tests of tests/guest, run inside the lab guest."""

import xml.etree.ElementTree as ET  # what pytest wrote
from pathlib import Path

import pytest

from tests import lab

# The guest is emulated, and shares the machine with the other tests: some 4 minutes each, 8 on a machine that is overloaded.
GUEST_TIMEOUT_S = 1500
PYTEST = "-m pytest --noconftest -p no:cacheprovider --junitxml=/result/results.xml --timeout=600 --color=no --durations=5 -q"


@pytest.mark.slow
@pytest.mark.timeout(GUEST_TIMEOUT_S + 60)
@pytest.mark.parametrize("names", ["zfs_contracts", "zfs_destination", "zfs_import zfs_backups"])
def test_in_the_guest(names: str, tmp_path: Path) -> None:
    files = " ".join(f"tests/guest/{name}.py" for name in names.split())
    said = lab.run(f"cd /host && {lab.python()} {PYTEST} {files}", tmp_path, timeout_s=GUEST_TIMEOUT_S)
    assert said.code == 0, f"{said.output}\n{said.console}"
    suite = next(ET.parse(tmp_path / "results.xml").getroot().iter("testsuite"))
    assert int(suite.attrib["tests"]) > 0
    assert suite.attrib["skipped"] == "0", said.output
