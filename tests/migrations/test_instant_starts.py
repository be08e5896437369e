"""When the guest of an instant start counts as started: from then on nothing may lose what it wrote."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from synvirt.errors import DomainDefineFailed, GuestBootFailed, SynvirtError
from synvirt.hypervisor import Lived
from synvirt.migrations import instant
from synvirt.migrations.instant import until_it_goes_well
from synvirt.model.job import Instant, InstantState
from synvirt.model.values import now

RUNS, RAN, NEVER = Lived(runs=True, trace="it runs"), Lived(runs=False, trace="it wrote to its disk"), Lived(False, None)


class Job:
    """`lived`: what its hypervisor tells of its domain; None: there is none. It keeps each `instant` that it had."""

    def __init__(self, lived: Lived | None, *, has_domain: bool = True) -> None:
        domain = SimpleNamespace(uuid=str(UUID(int=1))) if has_domain else None
        self.id = UUID(int=2)
        self.migration: Any = SimpleNamespace(
            boot_sign=None, instant=Instant(state="preparing"), domain=domain, state="CopyingFull", last_error=None
        )
        self.rooms = SimpleNamespace(hypervisor=SimpleNamespace(lived=lambda _: lived))
        self.had: list[Instant] = []
        self.shown: list[SynvirtError] = []
        self.stop = SimpleNamespace(sleep=self.slept)

    async def slept(self, _seconds: float) -> None:
        pass

    async def in_thread(self, call: Callable[..., Any], *arguments: object) -> Any:
        return call(*arguments)

    async def change(self, **named: Any) -> None:
        vars(self.migration).update(named)
        self.had.append(self.migration.instant)

    async def show(self, error: SynvirtError) -> None:
        self.shown.append(error)

    async def show_no_more(self) -> None:
        self.shown.clear()


Starts = Callable[[Any], Awaitable[None]]


def landed(job: Any, patched: pytest.MonkeyPatch, land: Callable[[Any, Any, Starts], Awaitable[None]]) -> None:
    patched.setattr(instant, "land", land)
    asyncio.run(instant._landed(job, []))


def test_it_is_noted_before_its_first_start_and_never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On each rung of the ladder it is started anew."""
    job = Job(RUNS)

    async def land(job: Any, _volumes: object, starts: Starts) -> None:
        for state in ("preparing", "waiting", "running"):
            job.migration.instant = job.migration.instant.model_copy(update={"state": state})
            before = job.migration.instant
            await starts(job)
            found = job.migration.instant
            assert found.started_at is not None
            assert found == (found.model_copy(update={"state": "running"}) if before.started_at is None else before)

    landed(job, monkeypatch, land)
    assert len(job.had) == 1


@pytest.mark.parametrize(
    ("lived", "has_domain", "is_kept"),
    [(RUNS, True, True), (RAN, True, True), (NEVER, True, False), (None, True, False), (None, False, False)],
)
def test_one_that_could_not_be_started_has_nothing_to_lose_unless_it_ran(
    monkeypatch: pytest.MonkeyPatch, lived: Lived | None, has_domain: bool, is_kept: bool
) -> None:
    job = Job(lived, has_domain=has_domain)

    async def land(job: Any, _volumes: object, starts: Starts) -> None:
        await starts(job)
        raise DomainDefineFailed("it cannot be started")

    with pytest.raises(DomainDefineFailed):
        landed(job, monkeypatch, land)
    found = job.migration.instant
    assert ((found.started_at is not None), found.state) == ((True, "running") if is_kept else (False, "preparing"))


def test_one_that_does_not_boot_is_copied_and_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(NEVER)

    async def land(job: Any, _volumes: object, starts: Starts) -> None:
        await starts(job)
        raise GuestBootFailed("no sign")

    landed(job, monkeypatch, land)
    assert job.migration.instant.started_at is not None


def test_one_that_was_seen_to_boot_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(RUNS)
    job.migration.boot_sign = "agent"

    async def land(*_: object) -> None:
        pytest.fail("it runs, or its user has shut it down")

    landed(job, monkeypatch, land)
    assert job.had == []


@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize("state", ["preparing", "running", "waiting", "moving", "done", None])
def test_a_failure_is_tried_again_exactly_while_something_would_be_lost(is_started: bool, state: InstantState | None) -> None:
    """None: there is no overlay yet."""
    job: Any = Job(RUNS)
    job.migration.instant = None if state is None else Instant(state=state, started_at=now() if is_started else None)
    tries: list[int] = []

    async def attempt() -> str:
        tries.append(len(job.shown))
        if len(tries) < 3:
            raise ValueError("of any kind")
        return "done"

    if is_started and state not in ("done", None):
        assert asyncio.run(until_it_goes_well(job, attempt)) == "done"
        assert (tries, job.shown) == ([0, 1, 2], [])
    else:
        with pytest.raises(ValueError, match="of any kind"):
            asyncio.run(until_it_goes_well(job, attempt))
        assert (tries, job.shown) == ([0], [])
