"""How a job's ledger is swept: in which order, what waits for what, and how often it is tried."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, nullcontext
from itertools import chain, combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call
from uuid import UUID

import pytest

from synvirt.errors import AuthFailed, Cancelled, Internal, PersistFailed, SourceUnreachable, SynvirtError
from synvirt.jobs.board import Board
from synvirt.jobs.slots import Turns
from synvirt.jobs.stop import Stop
from synvirt.migrations import advance, source_vm
from synvirt.migrations.advance import SWEEP_PAUSES_S, sweep
from synvirt.migrations.steps import STEPS
from synvirt.model.job import DiskProgress, Progress
from synvirt.model.kinds import State
from synvirt.model.problems import Problem
from synvirt.model.values import now
from synvirt.store import LedgerEntry
from tests.fakes.workers import in_process
from tests.house import House, offline_plan

# The oldest first; a later pass has a newer snapshot than all that was made before.
KINDS = ("volume", "source_power", "domain", "tracking", "snapshot")
IN_ORDER = ["domain", "source_power", "volume", "snapshot", "tracking"]
AT_THE_SOURCE = {"source_power", "tracking", "snapshot"}
TRIES = len(SWEEP_PAUSES_S) + 1


def subsets(of: Sequence[str]) -> Iterator[frozenset[str]]:
    return map(frozenset, chain.from_iterable(combinations(of, count) for count in range(len(of) + 1)))


class Job:
    """It has an entry of each of these kinds."""

    def __init__(self, kinds: Sequence[str] = KINDS) -> None:
        self.id, self.stop = UUID(int=1), Stop()
        self.struck: list[str] = []
        entries = [LedgerEntry(kind, f"its {kind}") for kind in kinds]
        self.rooms = SimpleNamespace(store=SimpleNamespace(ledger=lambda _: entries))

    async def in_thread(self, call: Callable[..., Any], *arguments: object) -> Any:
        return call(*arguments)

    async def strike(self, kind: str, name: str) -> None:
        assert name == f"its {kind}"
        self.struck.append(kind)


def swept(
    patched: pytest.MonkeyPatch, job: Job, failing: dict[str, SynvirtError], keep: frozenset[str] = frozenset()
) -> list[str]:
    """The kinds whose things were tried to be undone, once for each try."""
    tried: list[str] = []

    def sweeper(kind: str) -> Callable[..., Any]:
        async def undo(_job: object, name: str) -> None:
            assert name == f"its {kind}"
            tried.append(kind)
            if kind in failing:
                raise failing[kind]

        return undo

    patched.setattr(advance, "SWEEPERS", {kind: sweeper(kind) for kind in KINDS})
    patched.setattr(advance, "SWEEP_PAUSES_S", tuple(0 for _ in SWEEP_PAUSES_S))
    of: Any = job
    asyncio.run(sweep(of, keep))
    return tried


def test_all_is_undone_that_may_be_and_nothing_beside_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the things cannot be undone. Two copies of a guest never run at once."""
    for kinds, left_running, keep in product((KINDS, KINDS[:-1]), (False, True), subsets(("volume", "domain"))):
        for failing in subsets(kinds):
            job = Job(kinds)
            job.stop.left_running = left_running
            tried = swept(monkeypatch, job, dict.fromkeys(failing, AuthFailed("no")), keep)
            untried = AT_THE_SOURCE & set(kinds) if left_running else set()
            stays = (failing - keep) | untried
            waits = {one for one, other in (("source_power", "domain"), ("tracking", "snapshot")) if other in stays}
            wanted = set(kinds) - keep - waits - untried
            assert tried == [kind for kind in IN_ORDER if kind in wanted]
            assert sorted(job.struck) == sorted(set(kinds) - stays - waits)


@pytest.mark.parametrize(
    ("error", "is_cancelled", "tries", "leaves"),
    [
        (Internal("it hangs"), False, TRIES, False),
        (AuthFailed("the account would be locked"), False, 1, False),
        (SourceUnreachable("it does not answer", waited_s=45.0), False, TRIES, False),
        (SourceUnreachable("it refuses"), True, TRIES, False),
        (SourceUnreachable("it does not answer", waited_s=45.0), True, 1, True),
    ],
)
def test_a_thing_is_tried_again_unless_that_does_harm(
    monkeypatch: pytest.MonkeyPatch, error: SynvirtError, is_cancelled: bool, tries: int, leaves: bool
) -> None:
    """Who cancels does not wait for a platform that hangs, nor for the rest that is there."""
    job = Job()
    if is_cancelled:
        job.stop.set()
    tried = swept(monkeypatch, job, {"source_power": error})
    rest = ["volume"] if leaves else ["volume", "snapshot", "tracking"]
    assert tried == ["domain", *["source_power"] * tries, *rest]
    assert (job.struck, job.stop.left_running) == (["domain", *rest], leaves)


def test_without_a_store_nothing_more_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    with pytest.raises(PersistFailed):
        swept(monkeypatch, job, {"source_power": PersistFailed("the disk is full")})
    assert job.struck == ["domain"]


@pytest.mark.parametrize(
    ("is_cancelled", "error", "ends", "code"),
    [
        (True, Internal("it is not begun"), State.CANCELLED, Cancelled.code),
        (False, Cancelled(), State.CANCELLED, Cancelled.code),
        (False, AuthFailed("no"), State.FAILED, AuthFailed.code),
        (False, ValueError("ours"), State.FAILED, Internal.code),
        (False, PersistFailed("the disk is full"), None, None),
    ],
)
def test_how_a_step_ends_says_how_its_job_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_cancelled: bool,
    error: Exception,
    ends: State | None,
    code: str | None,
) -> None:
    """Without a store nothing is known, and the job goes on later. None begins once the job is cancelled, even if it has its
    turn and so does not wait."""
    begun: list[str] = []

    turns: list[str] = []

    async def taken(*_: object, **__: object) -> None:
        turns.append("taken")

    async def step(job: Any) -> None:
        begun.append(job.migration.state)
        raise error

    monkeypatch.setattr(Turns, "taken", taken)
    monkeypatch.setattr(Turns, "left", lambda *_: turns.append("left"))
    monkeypatch.setitem(STEPS, State.QUEUED, step)
    (tmp_path / "imports" / "appliance").mkdir(parents=True)
    with closing(House(tmp_path, workers=in_process)) as house:
        (house.imports / "appliance" / "disk-0.raw").write_bytes(bytes(4096))
        job = house.intake.submit(offline_plan(house.imports / "appliance"))
        stop = Stop()
        if is_cancelled:
            stop.set()
        with pytest.raises(PersistFailed) if ends is None else nullcontext():
            assert asyncio.run(advance.advance(house.rooms, job, stop)) == ends
        found = house.store.get(job.id)
        assert begun == ([] if is_cancelled else [State.QUEUED])
        assert (found.state, found.last_error and found.last_error.code) == (ends or State.QUEUED, code)
        assert turns == [*([] if is_cancelled else ["taken"]), *([] if ends is None else ["left"])]
        assert (found.finished_at is None, [one.state for one in found.history][1:]) == (ends is None, [ends] if ends else [])


def test_hashes_of_the_job_that_was_retried_go_too() -> None:
    forgotten: list[UUID] = []

    async def in_thread(call: Callable[..., Any], *arguments: object) -> None:
        call(*arguments)

    async def undone(job: Any) -> None:
        await advance.SWEEPERS["hashes"](job, "")

    receipts = SimpleNamespace(forget_hashes=forgotten.append)
    for before in (None, UUID(int=2)):
        job = SimpleNamespace(
            id=UUID(int=1),
            migration=SimpleNamespace(retry_of=before),
            rooms=SimpleNamespace(receipts=receipts),
            in_thread=in_thread,
        )
        asyncio.run(undone(job))
    assert forgotten == [UUID(int=1), UUID(int=1), UUID(int=2)]


@pytest.mark.parametrize("fatal", [True, False])
@pytest.mark.parametrize("error", [Cancelled(), Internal("it broke")])
def test_a_job_that_was_failing_goes_on_with_that_and_one_with_a_trouble_with_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: SynvirtError, fatal: bool
) -> None:
    """Its service was killed. A trouble that may pass is only shown."""

    async def step(_job: Any) -> None:
        raise AuthFailed("its step was tried")

    monkeypatch.setitem(STEPS, State.QUEUED, step)
    (tmp_path / "imports" / "appliance").mkdir(parents=True)
    with closing(House(tmp_path, workers=in_process)) as house:
        (house.imports / "appliance" / "disk-0.raw").write_bytes(bytes(4096))
        job = house.intake.submit(offline_plan(house.imports / "appliance"))
        problem = Problem(code=error.code, message="shown", fatal=fatal, at=now(), state=State.QUEUED)
        job = house.store.change(job.id, State.QUEUED, lambda before: before.model_copy(update={"last_error": problem}))
        ended = asyncio.run(advance.advance(house.rooms, job, Stop()))
        found = house.store.get(job.id).last_error
        assert found is not None
        assert found.code == (error.code if fatal else AuthFailed.code)
        assert ended == (State.CANCELLED if fatal and isinstance(error, Cancelled) else State.FAILED)


def test_the_figures_of_a_job_have_its_state_after_each_move(tmp_path: Path) -> None:
    """The stream sends them after the event of the move, and a client would take the job back to the state before."""
    (tmp_path / "imports" / "appliance").mkdir(parents=True)
    with closing(House(tmp_path, workers=in_process)) as house:
        (house.imports / "appliance" / "disk-0.raw").write_bytes(bytes(4096))
        job, moved = house.intake.submit(offline_plan(house.imports / "appliance")), []
        while not job.ended:
            moved.append(asyncio.run(advance.advance(house.rooms, job, Stop())))
            job = house.store.get(job.id)
            if not job.ended:
                assert house.rooms.board.latest().get(job.id, (job.state,))[0] == job.state
        assert moved == [State.COPYING_FULL, State.STARTING, State.COMPLETED]


class AtWork:
    """A job whose calls are noted, with what they are given."""

    def __init__(self, kind: str = "live_vm", *, is_cancelled: bool = False) -> None:
        self.called = Mock()
        self.id, self.stop = UUID(int=1), Stop()
        if is_cancelled:
            self.stop.set()
        self.destination = self.called.destination
        self.rooms = SimpleNamespace(
            hypervisor=self.called.hypervisor,
            preparer=self.called.preparer,
            passthroughs={"one": self.called.one, "another": self.called.another},
            receipts=None,
            exports=self.called.exports,
        )
        self.migration: Any = SimpleNamespace(
            plan=SimpleNamespace(source_ref=SimpleNamespace(kind=kind, vm_id="vm-1")), retry_of=None, manifest=None
        )
        self.vm_id = "vm-1"

    async def in_thread(self, call: Callable[..., Any], *arguments: object) -> Any:
        return call(*arguments)

    @asynccontextmanager
    async def session(self, *, within_s: float | None) -> AsyncIterator[Any]:
        self.called.session(within_s)

        async def cleanup(*arguments: object) -> None:
            self.called.cleanup(*arguments)

        async def power_on(*arguments: object) -> None:
            self.called.power_on(*arguments)

        async def inspect(*arguments: object) -> None:
            self.called.inspect(*arguments)

        yield SimpleNamespace(cleanup=cleanup, power_on=power_on, inspect=inspect)


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        ("volume", [call.destination.destroy("its")]),
        ("domain", [call.hypervisor.undefine(UUID(int=3), UUID(int=1))]),
        ("screenshot", [call.hypervisor.forget_screenshot(UUID(int=1))]),
        ("variables", [call.hypervisor.forget_variables(UUID(int=1))]),
        ("conversion", [call.preparer.discard("its")]),
        ("passthrough", [call.one.discard("its"), call.another.discard("its")]),
        ("export", [call.exports.end("its")]),
        ("snapshot", [call.session(None), call.cleanup("vm-1", "its")]),
        ("claim", []),
        ("mark", []),
    ],
)
def test_each_kind_of_thing_is_undone_by_its_own_call(kind: str, calls: list[Any]) -> None:
    job: Any = AtWork()

    async def undone() -> None:
        await advance.SWEEPERS[kind](job, str(UUID(int=3)) if kind == "domain" else "its")

    asyncio.run(undone())
    assert job.called.mock_calls == calls


@pytest.mark.parametrize(
    ("kind", "is_cancelled", "calls"),
    [
        ("live_vm", False, [call.session(None), call.cleanup("vm-1", "its")]),
        ("live_vm", True, [call.session(advance.CANCELLED_CONNECT_S), call.cleanup("vm-1", "its")]),
        ("file", True, []),
    ],
)
def test_who_cancels_does_not_wait_long_for_a_log_in(kind: str, is_cancelled: bool, calls: list[Any]) -> None:
    job: Any = AtWork(kind, is_cancelled=is_cancelled)

    async def undone() -> None:
        await advance.SWEEPERS["snapshot"](job, "its")

    asyncio.run(undone())
    assert job.called.mock_calls == calls


@pytest.mark.parametrize("may_go_off", [False, True])
@pytest.mark.parametrize("vm_id", ["vm-1", str(UUID(int=7))])
def test_a_source_that_may_still_go_off_is_powered_on_and_stays_noted(
    monkeypatch: pytest.MonkeyPatch, may_go_off: bool, vm_id: str
) -> None:
    """It is inspected before only where its id may be another machine's by now."""
    job: Any = AtWork()
    job.vm_id = vm_id
    monkeypatch.setattr(source_vm, "may_go_off", lambda _: may_go_off)

    async def undone() -> None:
        await advance.SWEEPERS["source_power"](job, "")

    with pytest.raises(SourceUnreachable) if may_go_off else nullcontext():
        asyncio.run(undone())
    looks = [call.inspect(vm_id)] if vm_id == "vm-1" else []
    assert job.called.mock_calls == [call.session(None), *looks, call.power_on(vm_id)]


@pytest.mark.parametrize("error", [Cancelled(), Internal("it broke")])
@pytest.mark.parametrize("keep", [frozenset({"volume"}), frozenset[str]()])
def test_a_job_that_ends_names_the_volumes_that_are_there(
    monkeypatch: pytest.MonkeyPatch, error: SynvirtError, keep: frozenset[str]
) -> None:
    """A cancel keeps nothing. Its rehearsals end first: a volume cannot go while a clone of it is there."""
    calls: list[object] = []

    async def gone(_job: object) -> None:
        calls.append("rehearsals")

    async def swept(_job: object, kept: frozenset[str]) -> None:
        calls.append(kept)

    monkeypatch.setattr(advance, "wait_until_gone", gone)
    monkeypatch.setattr(advance, "sweep", swept)
    monkeypatch.setattr(advance, "kept_on_failure", lambda _: keep)
    disks = tuple(DiskProgress(key=key, label=key, volume=f"volume {key}") for key in ("gone", "left"))
    left = [LedgerEntry("volume", "volume left"), LedgerEntry("domain", "volume gone")]
    changed: dict[str, Any] = {}

    async def change(**named: Any) -> None:
        changed.update(named)

    async def in_thread(of: Callable[..., Any], *arguments: object) -> Any:
        return of(*arguments)

    job: Any = SimpleNamespace(
        id=UUID(int=1),
        migration=SimpleNamespace(
            last_error=SimpleNamespace(code=error.code, fatal=True),
            manifest=None,
            disks=disks,
            domain=None,
            progress=Progress(bytes_total=9, bytes_done=4, rate_bps=5.0, eta_s=1.0),
            state=State.COPYING_FULL,
            history=(),
        ),
        rooms=SimpleNamespace(store=SimpleNamespace(ledger=lambda _: left)),
        in_thread=in_thread,
        change=change,
        leave_turn=lambda: calls.append("turn"),
    )
    is_cancelled = isinstance(error, Cancelled)
    ended = asyncio.run(advance._end(job))
    kept = frozenset() if is_cancelled else keep
    assert ended == changed["state"] == (State.CANCELLED if is_cancelled else State.FAILED)
    assert calls == ["rehearsals", kept, "turn"]
    assert [one.volume for one in changed["disks"]] == ["volume gone" if "volume" in kept else None, "volume left"]
    assert changed["progress"] == Progress(bytes_total=9, bytes_done=4), "nothing is copied any more"


@pytest.mark.parametrize("to", [State.DELTA_SYNCING, State.CUTTING_OVER])
def test_a_state_that_goes_on_is_one_visit(to: State) -> None:
    """A held job syncs for months, pass by pass."""
    changed: dict[str, Any] = {}

    async def change(**named: Any) -> None:
        changed.update(named)

    migration = SimpleNamespace(state=State.DELTA_SYNCING, history=("visit",), progress=Progress())
    job: Any = SimpleNamespace(id=UUID(int=1), migration=migration, change=change, rooms=SimpleNamespace(board=Board()))
    asyncio.run(advance._move(job, to))
    assert len(changed["history"]) == (1 if to is State.DELTA_SYNCING else 2)
