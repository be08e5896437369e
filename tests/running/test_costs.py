"""What a run of tests says of its memory and its threads."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import drawn

CONFTEST = """
from tests.running import costs

costs.WORKER_MIB = {worker_mib}

def pytest_configure(config):
    config.pluginmanager.register(costs.Costs())
"""
TESTS = """
import threading

def test_little(): pass

def test_much(): assert sum(memoryview(bytearray(b"x" * (96 << 20)))[::4096])

def test_little_again(): pass

def test_leaves_a_thread(): threading.Thread(target=threading.Event().wait, daemon=True, name="forgotten").start()
"""


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("worker_mib", "above"), [(90, True), (4000, False)])
def test_who_takes_much_is_named_and_a_worker_above_its_bound_too(
    tmp_path: Path, workers: int, worker_mib: int, above: bool
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(CONFTEST.format(worker_mib=worker_mib))
    (tmp_path / "test_some.py").write_text(TESTS)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", str(workers), "--durations", "1", "-c", "pytest.ini"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    # Schemathesis alone takes a second to load, in each process.
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"MiB more memory, to .*::(\w+)", done.stdout) == ["test_much"]
    assert re.search(r"peak memory in MiB: \{'(alone|gw0)': (9[6-9]|\d{3})\}", done.stdout)
    assert (f"more than the {worker_mib} MiB that a worker may have" in done.stdout) is above
    assert "threads that outlived their file: ['forgotten of test_some.py']" in done.stdout


def test_what_the_tests_of_a_file_share_is_forgotten_after_it() -> None:
    first = drawn.drawn(1000)
    assert drawn.drawn(1000) is first
    drawn.forget()
    assert drawn.drawn(1000) is not first
    assert drawn.drawn(1000) == first
