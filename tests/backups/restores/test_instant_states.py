"""The state of the guest of an instant restore: who may change it, and what each look makes of it."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from synvirt.backups.model import Status
from synvirt.backups.restores import instant
from synvirt.backups.restores.instant import InstantDomain, _Guest
from synvirt.errors import Cancelled, DiskReadFailed, DomainDefineFailed, SynvirtError
from synvirt.hypervisor import Paused
from synvirt.model.job import Instant, InstantState
from synvirt.model.values import now

STATES: list[InstantState] = ["preparing", "running", "waiting", "moving", "done"]


class UnderWay:
    """A run whose notes are kept."""

    def __init__(self, instant_: Instant | None) -> None:
        self.run = SimpleNamespace(id=UUID(int=1), instant=instant_, error=None)
        self.lock, self.calls = threading.RLock(), list[str]()

    def note(self, **named: Any) -> None:
        vars(self.run).update(named)
        if "instant" in named:
            self.calls.append(named["instant"].state + (" since then" if named["instant"].started_at else ""))

    def move(self, _status: object, **named: Any) -> None:
        self.note(**named)

    def warn(self, *_: object) -> None:
        self.calls.append("warned")


def guest_of(under_way: Any) -> _Guest:
    nothing: Any = None
    return _Guest(under_way, nothing, {}, nothing, {}, [])


@pytest.mark.parametrize("paused", [Paused("its file system"), Paused(), None, DiskReadFailed("it is not served")])
@pytest.mark.parametrize("is_started", [True, False])
@pytest.mark.parametrize("state", [*STATES, None])
def test_a_look_tells_whether_a_guest_waits_that_has_started_and_has_not_moved(
    monkeypatch: pytest.MonkeyPatch, state: InstantState | None, is_started: bool, paused: Any
) -> None:
    looks: list[str] = []

    def kept(*_: object) -> Any:
        looks.append("looked")
        if isinstance(paused, Exception):
            raise paused
        return paused

    monkeypatch.setattr(instant, "keep_going", kept)
    under_way: Any = UnderWay(None if state is None else Instant(state=state, started_at=now() if is_started else None))
    nothing: Any = SimpleNamespace(hypervisor=None)
    guest_of(under_way).look(nothing, nothing)
    is_looked_at = is_started and state is not None
    assert bool(looks) == is_looked_at
    follows = "waiting" if paused else "running"
    expected = follows if is_looked_at and state in ("running", "waiting") else state
    assert (None if under_way.run.instant is None else under_way.run.instant.state) == expected
    assert (under_way.run.error is not None) == (is_looked_at and paused == Paused("its file system"))


@pytest.mark.parametrize("was_started", [False, True])
@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_guest_is_noted_as_started_before_it_is_and_its_overlays_are_laid_once(
    was_started: bool, runs: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it surely has not run, what it wrote must be kept."""
    under_way: Any = UnderWay(Instant(state="preparing", started_at=now()) if was_started else None)

    def start(_uuid: UUID) -> None:
        under_way.calls.append("start")
        if fails:
            raise DomainDefineFailed("it does not start")

    note = under_way.calls.append
    hypervisor = SimpleNamespace(lay=lambda *_: note("lay"), start=start)
    domain = SimpleNamespace(isActive=lambda: runs)
    host: Any = SimpleNamespace(hypervisor=hypervisor, domain=lambda *_: domain, exports=SimpleNamespace(serve=lambda *_: None))
    ledger: Any = SimpleNamespace(record=lambda _, kind, __: note(f"record {kind}"))
    monkeypatch.setattr(instant, "put_tpm", lambda *_: note("tpm"))
    monkeypatch.setattr(instant, "define", lambda *_: note("define"))
    monkeypatch.setattr(_Guest, "layered", lambda _: [SimpleNamespace(disk_key="vda")])
    guest = guest_of(under_way)
    guest.disks["vda"] = SimpleNamespace(size_bytes=1)  # type: ignore[assignment]
    restoring = InstantDomain.__new__(InstantDomain)
    restoring._restore_host, restoring._ledger = host, ledger
    defined: Any = SimpleNamespace(name="web")
    is_raised = fails and (was_started or runs)
    try:
        restoring._begin(guest, defined)
    except SynvirtError:
        assert is_raised
    else:
        assert not is_raised
    made = [] if was_started else ["tpm", "lay", "record domain", "define", "preparing since then"]
    then = [] if is_raised else ["preparing", "warned"] if fails else ["running since then"]
    assert under_way.calls == [*made, "start", *then]


class Restored(InstantDomain):
    """What it does is noted, in its order. `stopped_at`: the call after which a cancel is asked for."""

    def __init__(self, under_way: Any, patched: pytest.MonkeyPatch, stopped_at: str = "") -> None:
        self.under_way, self.stopped_at, note = under_way, stopped_at, self.noted
        self.moved = False

        def move(status: Status, **_: object) -> None:
            if under_way.stop():
                raise Cancelled
            under_way.calls.append(str(status))

        under_way.stop, under_way.move = lambda: self.stopped_at in under_way.calls, move
        exports = SimpleNamespace(folder=lambda name: Path("/instant") / name, serve=lambda *_: note("serve"))
        hypervisor = SimpleNamespace(onto_volumes=lambda *_: note("onto its volumes"), has_moved=lambda *_: self.moved)
        self._restore_host: Any = SimpleNamespace(exports=exports, hypervisor=hypervisor)
        patched.setattr(instant, "define", lambda *_: note("define"))
        patched.setattr(instant, "Sum", lambda *_: None)
        patched.setattr(instant, "replace", lambda of, **_: of)
        patched.setattr(_Guest, "layered", lambda _: [])
        self.guest = guest_of(under_way)
        self.guest.disks["vda"] = SimpleNamespace(size_bytes=1)  # type: ignore[assignment]
        self.guest.readers.append(SimpleNamespace())  # type: ignore[arg-type]
        object.__setattr__(self.guest, "volumes", SimpleNamespace(fill=lambda *_: note("copy")))

    def noted(self, call: str) -> None:
        self.under_way.calls.append(call)

    def run(self) -> None:
        nothing: Any = None
        self._copy(self.guest, nothing)
        self._move(self.guest, nothing)


COPIED = ["transferring", "serve", "copy", "moving since then"]
MOVED = ["committing", "onto its volumes", "define", "onto its volumes", "committing", "done since then"]


@pytest.mark.parametrize(
    ("state", "calls"), [("running", [*COPIED, *MOVED]), ("waiting", [*COPIED, *MOVED]), ("moving", MOVED), ("done", [])]
)
def test_a_guest_is_copied_and_moved_once(monkeypatch: pytest.MonkeyPatch, state: InstantState, calls: list[str]) -> None:
    """From the move on its volumes belong to QEMU, and are never copied to again."""
    under_way: Any = UnderWay(Instant(state=state, started_at=now()))
    Restored(under_way, monkeypatch).run()
    assert under_way.calls == calls


def test_a_guest_that_is_on_its_volumes_by_now_is_not_copied_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older copy of the store was put back."""
    under_way: Any = UnderWay(Instant(state="running", started_at=now()))
    restored = Restored(under_way, monkeypatch)
    restored.moved = True
    restored.run()
    assert under_way.calls == ["transferring", "moving since then", *MOVED]


@pytest.mark.parametrize("stopped_at", ["copy", "define"])
def test_a_cancel_is_seen_until_the_guest_is_said_to_be_on_its_volumes(
    monkeypatch: pytest.MonkeyPatch, stopped_at: str
) -> None:
    under_way: Any = UnderWay(Instant(state="running", started_at=now()))
    with pytest.raises(Cancelled):
        Restored(under_way, monkeypatch, stopped_at).run()
    assert under_way.run.instant.state == "moving"
