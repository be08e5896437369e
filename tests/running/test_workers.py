"""xdist's workers: forked from one process that has collected, and processes of their own all the same."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

CONFTEST = """
from tests.running import workers

def pytest_configure(config):
    config.pluginmanager.register(workers.Workers())
"""
TESTS = """
import json, os, random, sys, threading
from pathlib import Path
import pytest
from tests.running.ports import free_port

HERE = Path(__file__).parent
with (HERE / "collected").open("a") as collected:
    print(os.getpid(), file=collected)

def test_it_prints_and_fails():
    print("printed")
    os.system("echo by a program")
    print("complained", file=sys.stderr)
    raise KeyError("x")

def test_it_crashes():
    os._exit(3)

@pytest.mark.parametrize("number", range(8))
def test_it_is_alone(number, tmp_path, worker_id, capfd):
    os.system("echo captured")
    assert capfd.readouterr().out == "captured\\n"
    assert os.environ["PYTEST_XDIST_WORKER"] == worker_id
    assert os.environ["PYTEST_XDIST_WORKER_COUNT"] == "2"
    drawn = [random.random(), free_port()]
    facts = [os.getpid(), worker_id, str(tmp_path.parent), drawn, threading.active_count(), sys.argv, os.getcwd()]
    with (HERE / "alone").open("a") as alone:
        print(json.dumps(facts), file=alone)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "xdist",
        "-n",
        "2",
        "--dist",
        "worksteal",
        "-c",
        "pytest.ini",
        *arguments,
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    # Schemathesis alone takes a second to load, in each process.
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def test_one_process_collects_and_each_worker_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    done = run(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"2 failed, 8 passed", done.stdout), done.stdout
    assert "crashed while running 'test_some.py::test_it_crashes'" in done.stdout
    failure = done.stdout.partition("KeyError: 'x'")[2]
    assert re.search(r"stdout call -+\nprinted\nby a program\n-+ Captured stderr call -+\ncomplained\n", failure), failure
    (collected_by,) = (tmp_path / "collected").read_text().split()
    alone = [json.loads(line) for line in (tmp_path / "alone").read_text().splitlines()]
    assert len({(pid, name, folder) for pid, name, folder, *_ in alone}) == len({pid for pid, *_ in alone})
    assert int(collected_by) not in {pid for pid, *_ in alone}
    assert all(Path(folder).name == f"popen-{name}" for _, name, folder, *_ in alone)
    for drawn in zip(*(drawn for _, _, _, drawn, *_ in alone), strict=True):
        assert len(set(drawn)) == len(alone) == 8
    assert all(line[4:] == [1, ["-c"], str(tmp_path)] for line in alone)
    again = run(tmp_path, "--last-failed", "-k", "not crashes")
    assert "1 failed in " in again.stdout, again.stdout


def test_what_cannot_be_collected_is_reported(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_good.py").write_text("def test_good(): pass")
    (tmp_path / "test_bad.py").write_text("raise KeyError('at once')")
    done = run(tmp_path)
    assert (done.returncode, "KeyError: 'at once'" in done.stdout, "1 passed" in done.stdout) == (1, True, True), done.stdout
    missing = run(tmp_path, "test_none.py")
    assert missing.returncode == 4
    assert "file or directory not found: test_none.py" in missing.stderr
