"""How a job's ledger is swept: in which order, what waits for what, and how often it is tried."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from synvirt.errors import AuthFailed, Internal, PersistFailed, SourceUnreachable, SynvirtError
from synvirt.jobs.stop import Stop
from synvirt.migrations import advance
from synvirt.migrations.advance import AT_SOURCE, SWEEP_PAUSES_S, sweep
from synvirt.store import LedgerEntry

# As a job records them, the oldest first.
KINDS = ("tracking", "snapshot", "volume", "source_power", "domain")
IN_ORDER = ["domain", "source_power", "volume", "snapshot", "tracking"]
TRIES = len(SWEEP_PAUSES_S) + 1


def subsets(of: Sequence[str]) -> Iterator[frozenset[str]]:
    return map(frozenset, chain.from_iterable(combinations(of, count) for count in range(len(of) + 1)))


class Job:
    """It has an entry of each kind."""

    def __init__(self) -> None:
        self.id, self.stop = UUID(int=1), Stop()
        self.struck: list[str] = []
        entries = [LedgerEntry(kind, f"its {kind}") for kind in KINDS]
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
    for failing in subsets(KINDS):
        for keep in subsets(("volume", "domain")):
            for left_running in (False, True):
                job = Job()
                job.stop.left_running = left_running
                tried = swept(monkeypatch, job, dict.fromkeys(failing, AuthFailed("no")), keep)
                stays = failing - keep | (AT_SOURCE if left_running else frozenset())
                waits = {one for one, other in (("source_power", "domain"), ("tracking", "snapshot")) if other in stays}
                wanted = set(KINDS) - keep - waits - (AT_SOURCE if left_running else frozenset())
                assert tried == [kind for kind in IN_ORDER if kind in wanted]
                assert set(job.struck) == set(KINDS) - stays - waits
                assert len(job.struck) == len(set(job.struck))


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
