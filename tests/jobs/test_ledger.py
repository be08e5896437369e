"""The laws of the ledger: nothing that is written down is forgotten before it is undone."""

from collections.abc import Callable
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.errors import DiskWriteFailed, HypervisorAway, PersistFailed
from synvirt.jobs import ledger as ledgers
from synvirt.jobs.ledger import Ledger, Order, Sweep
from synvirt.store import LedgerEntry, Store
from synvirt.store.ledger import Owner

ORDER = Order(late={"late": 1, "last": 2}, only_after={"guest": frozenset({"domain"}), "last": frozenset({"late"})})
ENTRIES = st.lists(
    st.builds(LedgerEntry, st.sampled_from(["volume", "domain", "guest", "late", "last"]), st.uuids().map(str)), max_size=12
)


def ledger_of(store: Store, undo: Callable[[UUID, str], None], *, host: str = "h") -> Ledger:
    return Ledger(store.ledgers, "run", host=host, undo={"file": undo, "domain": undo})


@given(ENTRIES, st.sets(st.integers(0, 11)))
def test_a_sweep_is_newest_first_and_keeps_what_depends_on_what_stays(entries: list[LedgerEntry], failing: set[int]) -> None:
    sweep, undone, left = Sweep(entries, ORDER), list[LedgerEntry](), list[LedgerEntry]()
    for entry in sweep:
        undone.append(entry)
        if entries.index(entry) in failing:
            sweep.stays(entry)
            left.append(entry)
    ranks = [ORDER.late.get(one.kind, 0) for one in undone]
    assert ranks == sorted(ranks)
    for rank in set(ranks):
        places = [entries.index(one) for one in undone if ORDER.late.get(one.kind, 0) == rank]
        assert places == sorted(places, reverse=True)
    for entry in entries:
        before = ORDER.only_after.get(entry.kind, frozenset())
        if entry in undone:
            assert all(one.kind not in before for one in left if undone.index(one) < undone.index(entry))
        else:
            assert any(one.kind in before for one in left)


def test_a_hypervisor_that_is_away_for_a_moment_is_waited_for_but_not_at_a_start(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "LOOK_AGAIN_S", 0.01)
    run, away = uuid4(), [3]

    def undo(_run_id: UUID, _name: str) -> None:
        if away[0]:
            away[0] -= 1
            raise HypervisorAway("client socket is closed")

    ledger = ledger_of(store, undo)
    ledger.record(run, "domain", "web")
    ledger.sweep_all()
    assert (away, len(ledger.of(run))) == ([2], 1)
    assert ledger.sweep(run, away_s=60)
    assert (away, ledger.of(run)) == ([0], [])
    ledger.record(run, "domain", "web")
    away[0] = 1_000_000
    assert not ledger.sweep(run, away_s=0.1)
    assert len(ledger.of(run)) == 1


def test_what_cannot_be_undone_stays_for_the_next_start(store: Store) -> None:
    run, undone, away = uuid4(), list[str](), {"b"}

    def undo(run_id: UUID, name: str) -> None:
        assert run_id == run
        if name in away:
            raise DiskWriteFailed("it is away")
        undone.append(name)

    ledger = ledger_of(store, undo)
    for name in "abc":
        ledger.record(run, "file", name)
        ledger.record(run, "file", name)
    assert not ledger.sweep(run)
    assert undone == ["c", "a"]
    away.clear()
    ledger_of(store, undo).sweep_all()
    assert undone == ["c", "a", "b"]
    assert store.ledgers.of(Owner("run", run)) == []


def test_a_kind_that_nobody_knows_stays_and_stops_nothing(store: Store) -> None:
    """As a later version may have written it."""
    run, undone = uuid4(), list[str]()
    store.ledgers.record(Owner("run", run), "file", "a", host="h")
    store.ledgers.record(Owner("run", run), "of_later", "b", host="h")
    assert not ledger_of(store, lambda _, name: undone.append(name)).sweep(run)
    assert undone == ["a"]
    assert store.ledgers.of(Owner("run", run)) == [LedgerEntry("of_later", "b")]


def test_a_start_sweeps_its_own_hosts_owners_but_those_that_go_on(store: Store) -> None:
    mine, goes_on, theirs = uuid4(), uuid4(), uuid4()
    undone: list[UUID] = []
    ledger = ledger_of(store, lambda run_id, _: undone.append(run_id))
    for run in (mine, goes_on):
        ledger.record(run, "file", "a")
    ledger_of(store, lambda *_: None, host="other").record(theirs, "file", "a")
    store.ledgers.record(Owner("backup_job", uuid4()), "zfs", "a", host="h")
    ledger.sweep_all(but=frozenset({goes_on}))
    assert undone == [mine]


def test_a_ledger_turns_in_one_step(store: Store) -> None:
    run, undone = uuid4(), list[tuple[str, str]]()
    ledger = Ledger(
        store.ledgers,
        "run",
        host="h",
        undo={"file": lambda _, name: undone.append(("file", name)), "domain": lambda _, name: undone.append(("domain", name))},
    )
    ledger.record(run, "file", "a")
    long = "<domain/>" * 4000
    commits: list[int] = []
    store.on_commit = lambda: commits.append(1)
    ledger.replace(run, (LedgerEntry("domain", "d"), LedgerEntry("domain", long)))
    assert commits == [1]
    assert {entry.kind for entry in ledger.of(run)} == {"domain"}
    done = LedgerEntry("file", "done")
    assert ledger.sweep(run, then=(done,))
    assert undone == [("domain", long), ("domain", "d")]
    assert commits == [1, 1]
    assert ledger.of(run) == [done]
    assert ledger.sweep(run)
    assert ledger.of(run) == []


def test_a_sweep_never_raises(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_: Owner) -> list[LedgerEntry]:
        raise PersistFailed("the store is away")

    monkeypatch.setattr(store.ledgers, "of", away)
    assert not ledger_of(store, lambda *_: None).sweep(uuid4())
