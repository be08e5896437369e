"""The service may die: its guests go on, and the next process that opens the folder manages them."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar
from uuid import UUID, uuid4

import pytest

from tests.needs import need
from tests.running import forked
from tests.running.processes import guests_of


class Child:
    alive: ClassVar[list["Child"]] = []

    def __init__(self, folder: Path, action: str, job_id: UUID) -> None:
        argv = [sys.executable, "-m", "tests.real.hypervisor.guest_child", str(folder), action, str(job_id)]
        self.process = forked.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.alive.append(self)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def until(self, wanted: str) -> None:
        while (line := self.line()) != wanted:
            assert line, self.process.communicate()[1]

    def kill(self, how: signal.Signals = signal.SIGKILL) -> str:
        self.process.send_signal(how)
        return self.rest()

    def rest(self) -> str:
        """Whatever it still says; it must say nothing on stderr, where libvirt would."""
        stdout, stderr = self.process.communicate(timeout=60)
        self.alive.remove(self)
        assert stderr == ""
        return stdout.strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("qemu-system-x86_64", "qemu-system-x86")
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def job_id(folder: Path) -> Iterator[UUID]:
    job_id = uuid4()
    yield job_id
    for child in list(Child.alive):  # of a test that failed
        child.kill()
    assert Child(folder, "end", job_id).rest() == "gone"
    assert guests_of(job_id) == []


def test_a_guest_outlives_its_service_and_is_found_again(folder: Path, job_id: UUID) -> None:
    child = Child(folder, "begin", job_id)
    child.until("started")
    (emulator,) = guests_of(job_id)
    child.kill()
    assert guests_of(job_id) == [emulator]
    again = Child(folder, "go on", job_id).rest()
    assert "no sign of life" in again, "it was found running, and watched"
    assert guests_of(job_id) == [emulator], "starting what runs starts nothing"
    assert Child(folder, "end", job_id).rest() == "gone"
    assert guests_of(job_id) == []


@pytest.mark.parametrize("after", ["drawn", "defined"])
@pytest.mark.parametrize("delay_s", [0, 0.02, 0.05, 0.1, 0.2])
def test_killed_at_any_moment_it_leaves_nothing_that_cannot_be_removed(
    folder: Path, job_id: UUID, after: str, delay_s: float
) -> None:
    child = Child(folder, "begin", job_id)
    child.until(after)
    time.sleep(delay_s)
    child.kill()
    assert Child(folder, "end", job_id).rest() == "gone"
    assert guests_of(job_id) == []


@pytest.mark.parametrize("delay_s", [0, 0.02, 0.05, 0.1, 0.2])
def test_killed_while_it_starts_it_can_be_started_again(folder: Path, job_id: UUID, delay_s: float) -> None:
    child = Child(folder, "begin", job_id)
    child.until("defined")
    time.sleep(delay_s)
    child.kill()
    again = Child(folder, "go on", job_id).rest()
    assert again.startswith("started")
    assert "no sign of life" in again, "it runs, and is watched"
    assert len(guests_of(job_id)) == 1


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_service_and_not_its_guests(folder: Path, job_id: UUID, how: signal.Signals) -> None:
    child = Child(folder, "begin", job_id)
    child.until("started")
    emulator = guests_of(job_id)
    assert child.kill(how) == ("interrupted" if how == signal.SIGINT else "")
    assert child.process.returncode == (0 if how == signal.SIGINT else -signal.SIGTERM)
    assert guests_of(job_id) == emulator


def test_a_second_service_on_the_same_folder_is_refused(folder: Path, job_id: UUID) -> None:
    killed = Child(folder, "begin", job_id)
    killed.until("started")
    killed.kill()  # it leaves the file of its lock, and must not weaken that of the next
    child = Child(folder, "begin", job_id)
    child.until("started")
    refused = Child(folder, "end", job_id).rest()
    assert refused.startswith("DomainDefineFailed")
    assert "only one service can run on a data_dir" in refused
    assert len(guests_of(job_id)) == 1
    child.kill()
