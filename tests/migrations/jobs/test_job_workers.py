"""Workers that are killed in the middle of a job, and the progress that they report."""

import asyncio
import errno
import os
import signal
import threading
import time
from typing import Any

import pytest

from synvirt.jobs.wire import Flushed, Moved
from synvirt.migrations import passes
from synvirt.migrations.hearing import Tally
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.sizes import MIB
from synvirt.store import Store
from tests.house import House, offline_plan
from tests.migrations.jobs.running import DISK, imported, run, some_disk
from tests.running.processes import workers


def _kill_workers(store: Store, job: Migration, times: int, killed: list[int]) -> None:
    deadline = time.monotonic() + 60
    while len(killed) < times and time.monotonic() < deadline:
        for worker in workers():
            marks = store.watermarks(job.id, 1)
            if worker not in killed and marks and marks[DISK].offset_bytes > len(killed) * MIB:
                os.kill(worker, signal.SIGKILL)
                killed.append(worker)
        time.sleep(0.01)


def test_a_killed_worker_costs_nothing_but_the_bytes_since_its_watermark(house_with_processes: House) -> None:
    house = house_with_processes
    content = some_disk(8 * MIB)
    plan = offline_plan(imported(house, {DISK: content}), limits={"bandwidth_bps": 3 * MIB // 2})
    job = house.intake.submit(plan)
    killed: list[int] = []
    killer = threading.Thread(target=_kill_workers, args=(house.store, job, 2, killed))
    killer.start()
    ended = house.run(job.id)
    killer.join()
    assert len(killed) == 2
    assert ended.state == State.COMPLETED
    assert house.volume(ended).read_bytes() == content
    assert workers() == []


def test_progress_never_goes_back_and_ends_whole(house_with_processes: House) -> None:
    house = house_with_processes
    content = some_disk(6 * MIB)
    job = house.intake.submit(offline_plan(imported(house, {DISK: content}), limits={"bandwidth_bps": 2 * MIB}))
    seen: list[tuple[int, int]] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.05):
            for _, progress in house.board.latest().values():
                seen.append((progress.bytes_done, progress.bytes_total))

    watcher = threading.Thread(target=look)
    watcher.start()
    last = house.run(job.id)
    ended.set()
    watcher.join()
    done = [figures[0] for figures in seen]
    assert done == sorted(done)
    assert len(set(done)) >= 4
    assert all(figures[0] <= figures[1] for figures in seen)
    assert last.progress.bytes_done == last.progress.bytes_total


def test_what_moves_during_a_flush_is_not_taken_back_by_its_end() -> None:
    tally = Tally(before={})
    tally.take(Moved(key="d", bytes_total=9, bytes_done=3, bytes_zero=1))
    tally.take(Moved(key="d", bytes_total=9, bytes_done=5, bytes_zero=2))
    tally.take(Flushed(key="d", offset_bytes=3, bytes_total=9, bytes_done=3, bytes_zero=1))
    assert (tally.progress().bytes_done, tally.progress().bytes_zero) == (5, 2)
    # Another worker goes on from the watermark: what the worker before did after it is lost, and the progress shows that.
    tally.take(Moved(key="d", bytes_total=9, bytes_done=3, bytes_zero=1))
    assert tally.progress().bytes_done == 3
    tally.take(Flushed(key="d", offset_bytes=9, bytes_total=9, bytes_done=9, bytes_zero=2, finished=True, bytes_checked=4))
    assert (tally.progress().bytes_done, tally.checked_bytes()) == (9, 4)


def test_a_pass_says_what_it_would_see_of_the_disk_that_it_saw_least_of() -> None:
    tally = Tally(before={})
    for key, checked in (("a", 8), ("b", 4), ("c", 0)):
        tally.take(
            Flushed(key=key, offset_bytes=9, bytes_total=9, bytes_done=9, bytes_zero=0, finished=True, bytes_checked=checked)
        )
    assert (tally.checked_bytes(), tally.least_checked_bytes()) == (12, 4)


def test_a_worker_that_cannot_be_started_is_tried_again(house_with_processes: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment, the host has no more processes."""
    start, failures = asyncio.create_subprocess_exec, [errno.EAGAIN, errno.EMFILE]

    async def started(*argv: Any, **named: Any) -> Any:
        if failures:
            raise OSError(failures[0], os.strerror(failures.pop(0)))
        return await start(*argv, **named)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    monkeypatch.setattr(passes, "RETRY_PAUSES_S", (0.01, 0.01))
    ended = run(house_with_processes, offline_plan(imported(house_with_processes)))
    assert (ended.state, failures) == (State.COMPLETED, [])


def test_a_worker_that_never_starts_says_why(house_with_processes: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async def started(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    monkeypatch.setattr(passes, "RETRY_PAUSES_S", (0.01,))
    ended = run(house_with_processes, offline_plan(imported(house_with_processes)))
    assert ended.last_error is not None
    assert ended.last_error.message == "a worker cannot be started: Resource temporarily unavailable"
    assert "TasksMax" in (ended.last_error.hint or "")
    assert house_with_processes.leftovers() == []


def test_an_error_of_the_system_in_a_step_is_named(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/sys/class/net")

    monkeypatch.setattr(house.hypervisor, "check_free", full)
    ended = run(house, offline_plan(imported(house)))
    assert ended.last_error is not None
    assert "LimitNOFILE" in (ended.last_error.hint or "")
    assert ended.last_error.message == "Too many open files in Queued"
