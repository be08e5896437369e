"""A job's session with its source, ended whatever moment the operator cancels at."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from synvirt.errors import AuthFailed, SnapshotFailed, SourceUnreachable, SynvirtError
from synvirt.jobs.stop import Stop
from synvirt.live import sessions as of_sessions
from synvirt.live.keeping_alive import KeptAlive
from synvirt.live.sessions import IDLE_MOST, Sessions
from synvirt.migrations.engine import Engine
from synvirt.migrations.job import Job
from synvirt.migrations.warm import holding
from synvirt.model.kinds import LiveKind, State
from synvirt.sizes import MIB
from tests.fakes.workers import in_process
from tests.house import VM, House, live_plan
from tests.running.processes import until


class Slow:
    """An adapter whose source lets it wait; it closes slowly too."""

    def __init__(self) -> None:
        self.connecting, self.closed = asyncio.Event(), False

    async def connect(self) -> None:
        self.connecting.set()
        await asyncio.Event().wait()

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed = True


def test_a_session_that_is_cancelled_while_it_opens_is_closed() -> None:
    async def cancelled() -> bool:
        adapter = Slow()

        async def connect(*_: object) -> Slow:
            return adapter

        plan = SimpleNamespace(
            source=SimpleNamespace(Live="vsphere"), source_ref=SimpleNamespace(kind="live_vm", source_id=None)
        )
        rooms: Any = SimpleNamespace(sessions=Sessions(cast(Any, connect)))
        job = Job(cast(Any, SimpleNamespace(plan=plan)), rooms, Stop())

        async def session() -> None:
            async with job.session():
                pytest.fail("nobody let it in")

        opening = asyncio.create_task(session())
        await adapter.connecting.wait()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        return adapter.closed

    assert asyncio.run(cancelled())


class Platform:
    """Counts who logs in, who rests and who is in."""

    def __init__(self) -> None:
        self.logins, self.rests, self.inside = 0, 0, 0


class Reused:
    kind = LiveKind.VIM_API

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    async def connect(self) -> None:
        self.platform.logins += 1
        self.platform.inside += 1

    async def rest(self) -> None:
        self.platform.rests += 1

    async def close(self) -> None:
        self.platform.inside -= 1


def pooled(platform: Platform) -> Sessions:
    async def opened(_kind: LiveKind, _source_id: UUID) -> Any:
        return Reused(platform)

    return Sessions(opened)


SOURCE, OTHER = UUID(int=1), UUID(int=2)


async def use(sessions: Sessions, source: UUID = SOURCE, error: BaseException | None = None) -> None:
    async with sessions.lent(LiveKind.VIM_API, source):
        await asyncio.sleep(0)
        if error is not None:
            raise error


def test_one_login_serves_one_user_after_another() -> None:
    platform = Platform()

    async def main() -> None:
        sessions = pooled(platform)
        sessions.begin()
        for _ in range(50):
            await use(sessions)
        assert (platform.logins, platform.rests, platform.inside) == (1, 50, 1)
        await asyncio.gather(*(use(sessions) for _ in range(10)))
        assert platform.inside == IDLE_MOST
        await use(sessions, OTHER)
        await sessions.end()
        assert platform.inside == 0
        await use(sessions)
        assert platform.inside == 0

    asyncio.run(main())


@pytest.mark.parametrize(("error", "kept"), [(SnapshotFailed("x"), 1), (SourceUnreachable("x"), 0), (AuthFailed("x"), 0)])
def test_a_session_that_had_trouble_is_not_used_again(error: SynvirtError, kept: int) -> None:
    platform = Platform()

    async def main() -> None:
        sessions = pooled(platform)
        sessions.begin()
        with pytest.raises(type(error)):
            await use(sessions, error=error)
        assert platform.inside == kept
        await sessions.end()

    asyncio.run(main())


def test_a_changed_source_is_logged_in_at_again_and_an_idle_session_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = Platform()

    async def main() -> None:
        sessions = pooled(platform)
        sessions.begin()
        await use(sessions)
        sessions.changed(SOURCE)
        async with sessions.lent(LiveKind.VIM_API, SOURCE):
            sessions.changed(SOURCE)
        assert platform.logins == 2
        monkeypatch.setattr(of_sessions, "IDLE_S", 0.0)
        await use(sessions)
        async with asyncio.timeout(60):
            while platform.inside:
                await asyncio.sleep(0.01)
        assert platform.logins == 3
        await sessions.end()

    asyncio.run(main())


def test_a_held_job_logs_in_once_for_all_its_deltas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "HOLD_UNKNOWN_S", 0.05)
    monkeypatch.setattr(holding, "HOLD_LEAST_S", 0.05)
    monkeypatch.setattr(holding, "HOLD_MOST_S", 0.05)
    house = House(tmp_path, workers=in_process)
    house.platform.add_vm(VM, {"disk-0": bytes(MIB)})
    engine = Engine(house.rooms, host="local")
    engine.start()
    try:
        job = house.intake.submit(live_plan(warm={"cutover": "manual"}))
        engine.begin(job.id)
        until(lambda: len(house.store.get(job.id).passes) > 5)
        assert (house.platform.logins, house.platform.sessions) == (1, 1)
        house.store.request_cutover(job.id)
        engine.wake(job.id)
        until(lambda: house.store.get(job.id).ended)
        assert house.store.get(job.id).state is State.COMPLETED
        assert house.platform.logins == 1
    finally:
        engine.close()
        house.close()
    assert house.platform.sessions == 0


class Broken(Reused):
    async def close(self) -> None:
        self.platform.inside -= 1
        raise OSError("the goodbye went nowhere")


@pytest.mark.parametrize("error", [None, AuthFailed("no"), SnapshotFailed("no"), asyncio.CancelledError()])
def test_a_session_that_does_not_end_changes_nothing_for_its_user(error: BaseException | None) -> None:
    """A cancelled job stays cancelled, an error keeps its cause, and what went well went well."""
    platform = Platform()

    async def opened(_kind: LiveKind, _source_id: UUID) -> Any:
        return Broken(platform)

    async def main() -> None:
        await use(Sessions(opened), error=error)

    if error is None:
        asyncio.run(main())
    else:
        with pytest.raises(type(error)):
            asyncio.run(main())
    assert platform.inside == 0


def test_a_session_is_kept_alive_also_after_an_error_of_another_kind() -> None:
    async def main() -> None:
        asked = 0
        again = asyncio.Event()
        loop = asyncio.get_running_loop()

        def ask() -> None:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise MemoryError
            loop.call_soon_threadsafe(again.set)

        keeping = KeptAlive(ask, 0.0)
        keeping.begin()
        async with asyncio.timeout(30):
            await again.wait()
        keeping.end()

    asyncio.run(main())
