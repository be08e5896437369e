"""A job whose run blocks: its task ends with its thread, never before it."""

import asyncio
import threading
from uuid import UUID, uuid4

import pytest
import structlog

from synvirt.errors import PersistFailed
from synvirt.jobs import runner as runner_module
from synvirt.jobs.runner import Runner, Threads, in_a_thread
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


def test_one_that_is_cancelled_fails_with_nothing_else() -> None:
    """A runner that saw the thread's error would take the job up again, or for cancelled by its operator."""
    let_go, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        let_go.wait(60)
        raise PersistFailed("the store is away")

    async def cancelled() -> None:
        task = asyncio.ensure_future(in_a_thread(work, let_go.set))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())


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


class NoThreads:
    """A host that has no more threads, for those with such a name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.refused, start = list[str](), threading.Thread.start
        self.over = False

        def started(thread: threading.Thread) -> None:
            if not self.over and thread.name in names:
                self.refused.append(thread.name)
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", started)


def test_work_without_a_thread_waits_for_another_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said to have failed, and was done all the same, after what it should have made was removed."""
    no, done, go = NoThreads(monkeypatch, "pool_1"), list[int](), threading.Event()
    with Threads(4, thread_name_prefix="pool") as pool:
        first = pool.submit(go.wait, 60)
        second = pool.submit(done.append, 2)
        assert (no.refused, done) == (["pool_1"], [])
        go.set()
        second.result(60)
        assert (first.result(), done) == (True, [2])


def test_work_that_nobody_can_do_is_not_done_later(monkeypatch: pytest.MonkeyPatch) -> None:
    no, done = NoThreads(monkeypatch, "pool_0"), list[int]()
    with Threads(4, thread_name_prefix="pool") as pool:
        with pytest.raises(RuntimeError):
            pool.submit(done.append, 1)
        no.over = True
        pool.submit(done.append, 2).result(60)
    assert done == [2]


def test_a_runner_that_cannot_be_started_can_be_later(monkeypatch: pytest.MonkeyPatch) -> None:
    no, left = NoThreads(monkeypatch, "scarce"), [uuid4()]

    async def run(job_id: UUID) -> None:
        left.remove(job_id)

    runner = Runner(run, lambda: list(left), name="scarce")
    with pytest.raises(RuntimeError):
        runner.start()
    no.over = True
    runner.start()
    until(lambda: not left)
    runner.close()
