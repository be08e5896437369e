"""A host that was fenced writes no more, and one that cannot renew its lease ends its jobs: on SQLite and on PostgreSQL."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from synvirt.errors import Conflict, PersistFailed
from synvirt.jobs.lease import END_TIMEOUT_S, GRACE_S, LEASE_S, LOOK_EVERY_S, RENEW_EVERY_S, SELF_FENCE_S, HostLease, Together
from synvirt.migrations.memory import JobMemory
from synvirt.store import Store, Watermark
from synvirt.store.hosts import Fence, LeaseLost
from tests.jobs.migrations import migration
from tests.running.processes import until

# Long enough that no thread of a lease looks in the middle of a test: what happens, the test says.
UNHURRIED_S = 6e6


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def other(database_url: str, store: Store) -> Iterator[Store]:
    """The same store, of another process."""
    other = Store(database_url)
    yield other
    other.close()


class Kept:
    """A lease, and what it did to the jobs."""

    def __init__(self, store: Store, host: str = "a", *, after_another: bool = False) -> None:
        """`after_another`: a process had the host's id until now, and the database may not have noticed yet that it is gone."""
        self.clock = Clock()
        self.did: list[str] = []
        self.lease = HostLease(
            store,
            host,
            on_lost=lambda: self.did.append("ended"),
            on_held=lambda: self.did.append("begun"),
            clock=self.clock,
            lease_s=UNHURRIED_S,
            claim_within_s=1 if after_another else 0,  # by a clock that stands still
        )
        self.lease.begin()

    def pass_(self, share: float) -> None:
        """Lets this share of the time pass after which a host ends its jobs."""
        self.clock.now += share * SELF_FENCE_S * UNHURRIED_S / LEASE_S


@pytest.fixture
def kept(store: Store) -> Iterator[Kept]:
    kept = Kept(store)
    yield kept
    kept.lease.close()


def test_a_host_ends_its_jobs_before_another_may_begin() -> None:
    assert SELF_FENCE_S + 10 < LEASE_S
    assert GRACE_S > 0


def test_a_fenced_host_commits_nothing(store: Store, other: Store, kept: Kept) -> None:
    store.add(first := migration(), host="a")
    assert other.hosts.fence("a")
    with pytest.raises(LeaseLost, match="epoch 1, and it is 2"):
        store.add(migration(), host="a")
    with pytest.raises(LeaseLost):
        store.record(first.id, "volume", "v")
    assert store.ledger(first.id) == []
    assert [job.id for job in other.unended()] == [first.id]


def test_a_fenced_host_that_is_alive_ends_its_jobs_and_starts_over(store: Store, other: Store, kept: Kept) -> None:
    other.hosts.fence("a")
    assert other.hosts.all()[0].fenced == "operator"
    kept.lease.renew()
    assert kept.did == ["ended", "begun"]
    store.add(migration(), host="a")
    (row,) = other.hosts.all()
    assert (row.epoch, row.fenced) == (3, "")


def test_a_job_is_written_by_its_own_host_alone_and_asked_by_all(store: Store, other: Store, kept: Kept) -> None:
    other.add(theirs := migration(), host="b")
    other.record(theirs.id, "volume", "theirs")
    mark = Watermark("disk-0", 1, 7, 9, 7, 0, finished=False)
    for write in (
        lambda: store.put_watermark(theirs.id, mark),
        lambda: store.record(theirs.id, "volume", "v"),
        lambda: store.strike(theirs.id, "volume", "theirs"),
        lambda: store.claim(theirs.id, ["name web"], hint=""),
        lambda: store.fold_passes(theirs.id, 3),
        lambda: store.memory.change(theirs.id, JobMemory, lambda before: before),
        lambda: store.change(theirs.id, theirs.state, lambda job: job),
    ):
        with pytest.raises(LeaseLost, match="host b's, not a's"):
            write()
    assert store.watermarks(theirs.id, 1) == {}
    assert [entry.name for entry in store.ledger(theirs.id)] == ["theirs"]
    store.request_cancel(theirs.id)
    assert other.cancel_requested(theirs.id)


def test_jobs_end_when_the_lease_is_not_renewed_in_time(kept: Kept) -> None:
    kept.pass_(0.9)
    kept.lease.look()
    assert kept.did == []
    kept.pass_(0.2)
    kept.lease.look()
    kept.lease.look()
    assert kept.did == ["ended"]
    kept.lease.renew()
    assert kept.did == ["ended", "begun"]
    assert kept.lease.held


def test_a_host_that_stood_still_ends_what_ran_meanwhile_though_nobody_fenced_it(kept: Kept) -> None:
    kept.pass_(1.1)
    kept.lease.renew()
    assert kept.did == ["ended", "begun"]


def test_a_lease_counts_from_before_it_was_asked_for(store: Store, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that comes late says nothing about the time since: another host counts from when the database wrote it."""

    def late(call: Callable[..., object]) -> Callable[..., object]:
        def called(*args: object, **options: object) -> object:
            found = call(*args, **options)
            kept.pass_(0.6)
            return found

        return called

    monkeypatch.setattr(store.hosts, "renew", late(store.hosts.renew))
    monkeypatch.setattr(store.hosts, "begin", late(store.hosts.begin))
    kept.lease.renew()
    kept.lease.look()
    assert kept.did == []
    kept.pass_(0.5)
    kept.lease.look()
    assert kept.did == ["ended"]
    store.hosts.fence("a")
    kept.lease.renew()
    assert kept.did == ["ended", "begun"]
    kept.pass_(0.5)
    kept.lease.look()
    assert kept.did == ["ended", "begun", "ended"]
    kept.lease._begin_epoch()
    assert kept.lease.valid_until < kept.clock.now + 0.5 * SELF_FENCE_S * UNHURRIED_S / LEASE_S


def test_a_database_that_is_away_for_a_while_costs_nothing(store: Store, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object, **__: object) -> bool:
        raise PersistFailed("the store failed")

    with monkeypatch.context() as during:
        during.setattr(store.hosts, "renew", away)
        kept.pass_(0.5)
        kept.lease.renew()
        kept.lease.look()
    kept.lease.renew()
    kept.pass_(0.9)
    kept.lease.look()
    assert kept.did == []


def test_why_a_lease_is_not_renewed_is_known_until_it_is(store: Store, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> bool:
        raise PersistFailed("the store failed: database or disk is full", hint="free some")

    assert kept.lease.failure() is None
    with monkeypatch.context() as during:
        during.setattr(store.hosts, "renew", full)
        kept.lease.renew()
    failure = kept.lease.failure()
    assert failure is not None
    assert (failure.detail, failure.hint) == ("the store failed: database or disk is full", "free some")
    kept.lease.renew()
    assert kept.lease.failure() is None


class FourLooks(threading.Event):
    """Both what wakes a thread and what ends it: it ends before its fourth look. `pauses`: the waits for each, in seconds of a
    lease of LEASE_S."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.pauses.append(timeout * LEASE_S / UNHURRIED_S)
        return False

    def is_set(self) -> bool:
        return len(self.pauses) > 3


def test_a_database_that_was_away_is_asked_soon_not_at_the_next_renewal(
    store: Store, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter((PersistFailed("the store failed"), PersistFailed("the store failed"), None))

    def at_the_third_time(fence: Fence, **asked: Any) -> bool:
        if (error := next(answers)) is not None:
            raise error
        return renew(fence, **asked)

    renew = store.hosts.renew
    with monkeypatch.context() as during:
        during.setattr(store.hosts, "renew", at_the_third_time)
        during.setattr(kept.lease, "_ending", looks := FourLooks())
        kept.lease._repeat(kept.lease.renew, RENEW_EVERY_S, looks)
    assert looks.pauses == pytest.approx([RENEW_EVERY_S, LOOK_EVERY_S, LOOK_EVERY_S, RENEW_EVERY_S])


def test_a_changed_description_is_stored_at_once(store: Store) -> None:
    said = ["nothing yet"]
    lease = HostLease(
        store, "a", document=lambda: said[0], on_lost=lambda: None, on_held=lambda: None, lease_s=600, claim_within_s=0
    )
    lease.begin()
    try:
        said[0] = "all"
        lease.renew_soon()
        until(lambda: [row.document for row in store.hosts.all()] == ["all"])
    finally:
        began = time.monotonic()
        lease.close()
    assert time.monotonic() - began < END_TIMEOUT_S, "its threads are woken"


def test_without_a_new_epoch_no_job_goes_on(store: Store, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object, **__: object) -> Fence:
        raise PersistFailed("the store failed")

    store.hosts.fence("a")
    with monkeypatch.context() as during:
        during.setattr(store.hosts, "begin", away)
        kept.lease.renew()
    assert (kept.did, kept.lease.held) == (["ended"], False)
    kept.lease.renew()
    assert kept.did == ["ended", "begun"]


def test_a_renewal_that_ends_after_the_service_begins_nothing(
    store: Store, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: object, **__: object) -> bool:
        kept.lease.close()
        return True

    kept.pass_(1.1)
    kept.lease.look()
    monkeypatch.setattr(store.hosts, "renew", late)
    kept.lease.renew()
    assert kept.did == ["ended"]


def test_one_process_has_a_host_id(other: Store, kept: Kept) -> None:
    with pytest.raises(Conflict, match="another service runs as host a"):
        Kept(other)
    kept.lease.close()
    Kept(other, after_another=True).lease.close()


def test_who_has_lost_its_id_to_another_process_ends_its_jobs(other: Store, kept: Kept) -> None:
    """On PostgreSQL the claim goes with its session: when the database is back, another process may be the first to ask."""
    kept.lease._claim.let_go()
    after = Kept(other, after_another=True)
    kept.lease.renew()
    assert kept.did == ["ended"]
    assert not kept.lease.held
    assert after.lease.held
    after.lease.close()


def test_another_host_has_a_lease_of_its_own(database_url: str, other: Store, kept: Kept) -> None:
    if database_url.startswith("sqlite"):  # one service a file
        with pytest.raises(Conflict):
            Kept(other, "b")
        return
    beside = Kept(other, "b")
    assert [(row.id, row.epoch) for row in other.hosts.all()] == [("a", 1), ("b", 1)]
    beside.lease.close()


def test_a_new_process_of_a_host_shuts_the_one_before_out(store: Store, other: Store, kept: Kept) -> None:
    kept.lease.close()
    after = Kept(other, after_another=True)
    with pytest.raises(LeaseLost):
        store.add(migration(), host="a")
    other.add(migration(), host="a")
    after.lease.close()


def test_a_host_is_fenced_once_its_lease_is_over_for_long_enough(other: Store, kept: Kept) -> None:
    (row,) = other.hosts.all()
    silent = {"a": row.seen_at}
    assert other.hosts.fence_expired(grace_s=0, silent=silent) == []
    assert other.hosts.fence_expired(grace_s=-2 * UNHURRIED_S, silent={}) == []
    assert other.hosts.fence_expired(grace_s=-2 * UNHURRIED_S, silent={"a": row.seen_at - 1}) == [], "it was seen since"
    assert other.hosts.fence_expired(grace_s=-2 * UNHURRIED_S, silent=silent) == ["a"]
    assert other.hosts.fence_expired(grace_s=-2 * UNHURRIED_S, silent=silent) == []
    (row,) = other.hosts.all()
    assert (row.epoch, row.fenced) == (2, "expired")


def test_an_error_at_the_end_of_jobs_ends_no_watch(store: Store) -> None:
    """The thread ended with the first error: at the next loss of the lease nobody ended the jobs."""
    did: list[str] = []

    def lost() -> None:
        did.append("ended")
        raise OSError("a session cannot be closed")

    clock = Clock()
    lease = HostLease(store, "a", on_lost=lost, on_held=lambda: did.append("begun"), clock=clock, lease_s=0.3, claim_within_s=0)
    lease.begin()
    for _ in range(2):
        before = did.count("ended")
        clock.now += 1  # longer than the lease
        until(lambda: did.count("ended") > before and lease.held)  # noqa: B023
    lease.close()


def test_what_is_paused_without_a_thread_is_paused_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else jobs of a host that has lost its lease would go on, beside those of the host that takes them over."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    class Kind:
        paused = False

        def pause(self) -> None:
            self.paused = True

        def resume(self) -> None: ...

    kinds = Kind(), Kind()
    monkeypatch.setattr(threading.Thread, "start", start)
    Together(kinds).pause()
    assert all(one.paused for one in kinds)


class Kind:
    """A kind of jobs that cannot be resumed at once: the host has no thread for it."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals, self.resumed = refusals, 0

    def pause(self) -> None: ...

    def resume(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError("can't start new thread")
        self.resumed += 1


def test_a_kind_that_cannot_be_resumed_keeps_no_other_from_it_and_is_tried_again(store: Store, other: Store) -> None:
    """One that failed first kept all others from it, until the host lost its lease once more."""
    kinds = [Kind(), Kind(refusals=2), Kind()]
    together = Together(kinds)
    lease = HostLease(store, "a", on_lost=together.pause, on_held=together.resume, lease_s=UNHURRIED_S, claim_within_s=0)
    lease.begin()
    try:
        other.hosts.fence("a")
        for resumed in ([1, 0, 1], [1, 0, 1], [1, 1, 1], [1, 1, 1]):
            with contextlib.suppress(RuntimeError):
                lease.renew()
            assert [kind.resumed for kind in kinds] == resumed
    finally:
        lease.close()
