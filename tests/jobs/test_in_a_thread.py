"""A job whose run blocks: its task ends with its thread, never before it."""

import asyncio
import threading
from uuid import UUID, uuid4

import pytest
import structlog

from synvirt.errors import PersistFailed
from synvirt.jobs import runner as runner_module
from synvirt.jobs.runner import Runner, in_a_thread
from tests.running.processes import until


def test_a_task_that_is_cancelled_twice_ends_with_its_thread() -> None:
    let_go, ended, reported = threading.Event(), threading.Event(), list[int]()

    def work() -> None:
        let_go.wait(60)
        ended.set()

    def on_cancel() -> None:
        reported.append(1)
        if len(reported) == 2:
            let_go.set()

    async def cancelled_twice() -> None:
        task = asyncio.ensure_future(in_a_thread(work, on_cancel))
        for count in (1, 2):
            await asyncio.sleep(0.01)
            assert not task.done()
            task.cancel()
            while len(reported) < count:
                await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(cancelled_twice())


def test_what_the_thread_fails_with_is_raised() -> None:
    def work() -> None:
        raise PersistFailed("the store is away")

    with pytest.raises(PersistFailed):
        asyncio.run(in_a_thread(work))


def test_a_job_never_has_two_threads_over_a_lost_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not stop in time is waited for by the next, however long."""
    monkeypatch.setattr("synvirt.jobs.runner.END_TIMEOUT_S", 0.05)
    monkeypatch.setattr("synvirt.jobs.runner.RECONCILE_EVERY_S", 0.05)
    job, go, at_once, runs = uuid4(), threading.Event(), list[int](), list[int]()
    lock = threading.Lock()

    def work() -> None:
        with lock:
            runs.append(1)
            at_once.append(len(at_once_now) + 1)
            at_once_now.append(1)
        go.wait(60)
        at_once_now.pop()

    at_once_now: list[int] = []
    left = [job]

    async def run(job_id: UUID) -> None:
        await in_a_thread(work)
        left.remove(job_id)

    runner = Runner(run, lambda: list(left), name="test")
    runner.start()
    until(lambda: len(runs) == 1)
    for _ in range(2):
        runner.pause()
        runner.resume()
    assert len(runs) == 1
    go.set()
    until(lambda: not left)
    runner.close()
    assert len(runs) == 2
    assert max(at_once) == 1


def test_a_look_for_jobs_that_fails_in_any_way_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that was lost in a crash was found only by the next start."""
    monkeypatch.setattr(runner_module, "STORE_PAUSE_S", 0.01)
    failures: list[Exception] = [RuntimeError("can't start new thread"), PersistFailed("the disk is full")]
    left = [uuid4()]

    def unended() -> list[UUID]:
        if failures:
            raise failures.pop()
        return list(left)

    async def run(job_id: UUID) -> None:
        left.remove(job_id)

    runner = Runner(run, unended, name="test")
    runner.start()
    until(lambda: not left)
    runner.close()


def test_the_log_of_a_store_that_is_away_does_not_fill_its_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line a job, and again after a minute; the job is tried as often as before."""
    monkeypatch.setattr("synvirt.jobs.runner.STORE_PAUSE_S", 0.001)
    jobs, ended, tries = (uuid4(), uuid4()), set[UUID](), list[UUID]()

    async def run(job_id: UUID) -> None:
        tries.append(job_id)
        if tries.count(job_id) < 5:
            raise PersistFailed("database or disk is full")
        ended.add(job_id)

    with structlog.testing.capture_logs() as logs:
        runner = Runner(run, lambda: list(jobs), name="full")
        runner.start()
        until(lambda: ended == set(jobs))
        runner.close()
    assert sorted(one["job"] for one in logs if one["event"] == "the store is away; the job waits") == sorted(map(str, jobs))
