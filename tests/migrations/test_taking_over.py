"""Jobs of a host that is lost: taken over where their storage is shared, else waited for, or started over."""

import signal
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from hashlib import sha256
from pathlib import Path
from uuid import UUID

import pytest

from synvirt.destinations import DestinationAway
from synvirt.errors import AuthFailed, Conflict
from synvirt.jobs.lease import GRACE_S, LEASE_S, SELF_FENCE_S, boot_clock
from synvirt.migrations.hosts.about import AboutHost
from synvirt.migrations.hosts.taking_over import TakingOver
from synvirt.migrations.tidying import Tidier
from synvirt.model.job import Instant, Migration
from synvirt.model.kinds import State
from synvirt.model.plan import OnHostLost
from synvirt.model.values import now
from synvirt.sizes import MIB
from synvirt.store import LedgerEntry
from synvirt.store.hosts import clock
from tests.drawn import drawn
from tests.fakes.workers import in_process
from tests.house import VM, Crash, House, crash_at, live_plan, offline_plan
from tests.running.processes import ready, until, workers

DISK = "disk-0"


def disk_content() -> bytes:
    return drawn(3 * MIB)


class Fleet:
    """Host a, with a job that it was killed in, and host b, which looks after it. `shared`: they reach one destination."""

    def __init__(self, folder: Path, url: str, *, shared: bool = True) -> None:
        (folder / "shared").mkdir()
        self.begun: list[UUID] = []
        self.a, self.b = (
            House(folder / host, store_url=url, host=host, shared=folder / "shared" if shared else None, workers=in_process)
            for host in "ab"
        )
        if not shared:
            self.b.platform = self.a.platform
        self.a.platform.add_vm(VM, {DISK: disk_content()})
        about = AboutHost(self.a.rooms.destinations, self.a.rooms.hypervisor)
        about.ask()
        self.document = about.document()
        self.lives("a", ttl_s=1000)
        self.lives("b", ttl_s=1000)

    def lives(self, host: str, *, ttl_s: float) -> None:
        self.b.store.hosts.begin(host, ttl_s=ttl_s, document=self.document)

    def killed_at(self, commit: int, job: Migration) -> Migration:
        """Host a, with its lease over."""
        self.a.store.on_commit = crash_at(commit)
        with pytest.raises(Crash):
            self.a.run(job.id)
        self.a.store.on_commit = lambda: None
        self.lives("a", ttl_s=-1000)
        return self.a.store.get(job.id)

    def taking_over(
        self,
        on_host_lost: OnHostLost = "wait",
        *,
        held_for_s: float = 1000,
        silent_s: float = 0,
        clock: Callable[[], float] = boot_clock,
    ) -> TakingOver:
        return TakingOver(
            self.b.rooms,
            begin=self.begun.append,
            held_for_s=lambda: held_for_s,
            opens_source=lambda _: None,
            on_host_lost=on_host_lost,
            silent_s=silent_s,
            clock=clock,
        )

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture
def fleet(tmp_path: Path, database_url: str) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, database_url)
    yield fleet
    fleet.close()


@pytest.fixture
def apart(tmp_path: Path, database_url: str) -> Iterator[Fleet]:
    """Each with disks of its own."""
    fleet = Fleet(tmp_path, database_url, shared=False)
    yield fleet
    fleet.close()


def test_a_job_on_shared_storage_goes_on_elsewhere_wherever_its_host_died(tmp_path: Path, postgresql_url: str) -> None:
    """At every sixth commit."""
    taken = 0
    for commit in range(1, 60, 6):
        folder = tmp_path / str(commit)
        folder.mkdir()
        fleet = Fleet(folder, postgresql_url)
        job = fleet.a.intake.submit(live_plan())
        left = fleet.killed_at(commit, job)
        fleet.taking_over().look()
        if left.state in (State.QUEUED, State.COPYING_FULL, State.DELTA_SYNCING):
            assert fleet.begun == [job.id]
            assert fleet.b.store.host_of(job.id) == "b"
            ended = fleet.b.run(job.id)
            assert ended.state is State.COMPLETED, ended.last_error
            assert fleet.b.volume(ended).read_bytes() == disk_content()
            assert hashed(fleet.b, ended) == sha256(disk_content()).hexdigest(), (
                "what the lost host hashed is not in it, or is true"
            )
            assert fleet.b.platform.vm(VM)["snapshots"] == {}
            # A host that is back, without a start of its service.
            Tidier(fleet.a.rooms, host="a").look()
            assert list((fleet.a.folder / "receipts").rglob("*.hashes")) == []
            taken += 1
        else:
            assert fleet.begun == []
            assert fleet.b.store.host_of(job.id) == "a"
            fleet.b.intake.cancel(job.id)
            fleet.lives("a", ttl_s=1000)
            assert fleet.a.run(job.id).state is State.CANCELLED
        fleet.close()
        if not taken and left.state not in (State.QUEUED, State.COPYING_FULL):
            break
    assert taken > 2


def hashed(house: House, ended: Migration) -> str:
    """What the job's receipt says of its one disk, which is smaller than a block of it."""
    assert house.rooms.receipts is not None
    with tarfile.open(house.rooms.receipts.path_of(ended.id)) as tar:
        (ledger,) = [name for name in tar.getnames() if name.endswith(".sha256")]
        found = tar.extractfile(ledger)
        assert found is not None
        (row,) = found.read().decode().splitlines()
    return row.split()[0]


def test_nobody_is_fenced_by_a_host_that_has_only_just_its_own_lease(fleet: Fleet) -> None:
    """After a database's outage all leases are over, and all hosts alive."""
    job = fleet.a.intake.submit(live_plan())
    fleet.lives("a", ttl_s=-1000)
    fleet.taking_over(held_for_s=5).look()
    assert fleet.b.store.host_of(job.id) == "a"
    assert {row.fenced for row in fleet.b.store.hosts.all()} == {""}
    fleet.taking_over().look()
    assert fleet.b.store.host_of(job.id) == "b"


@pytest.mark.parametrize("stood_still_s", [0, 600])
def test_a_clock_that_is_set_forward_fences_no_host_that_lives(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, stood_still_s: float
) -> None:
    """The database's: all leases are over at once, and all hosts write. Or all have stood still together, with their host."""
    job, hosts = fleet.a.intake.submit(live_plan()), fleet.b.store.hosts
    passed = set_forward = 0.0
    monkeypatch.setattr("synvirt.store.hosts.now", lambda db: clock(db.dialect.name) + passed + set_forward)
    fence = hosts.begin("a", ttl_s=LEASE_S, document=fleet.document)
    looks = fleet.taking_over(silent_s=SELF_FENCE_S, clock=lambda: 1000 + passed)
    for number in range(12):
        passed += 10
        if number == 5:
            set_forward, passed = 300.0, passed + stood_still_s
        looks.look()
        assert hosts.renew(fence, ttl_s=LEASE_S, document=fleet.document), "it was fenced, and its worker writes on"
    assert fleet.b.store.host_of(job.id) == "a"
    while fleet.b.store.host_of(job.id) == "a" and passed < 2000:
        passed += 10
        looks.look()
    assert fleet.begun == [job.id]
    assert passed - stood_still_s <= 120 + LEASE_S + GRACE_S + 10, "no later than ever"


def test_a_host_that_is_back_keeps_its_jobs(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    job = fleet.a.intake.submit(live_plan())
    fleet.lives("a", ttl_s=-1000)
    store, take_over = fleet.b.store, fleet.b.store.lost_jobs.take_over

    def too_late(*arguments: object, **named: object) -> bool:
        fleet.lives("a", ttl_s=1000)
        return take_over(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(store.lost_jobs, "take_over", too_late)
    fleet.taking_over().look()
    assert (store.host_of(job.id), fleet.begun) == ("a", [])


def test_two_hosts_that_look_at_once_take_a_job_once(fleet: Fleet) -> None:
    job = fleet.a.intake.submit(live_plan())
    fleet.lives("a", ttl_s=-1000)
    for _ in range(2):
        fleet.taking_over().look()
    assert fleet.begun == [job.id]


def test_a_job_whose_source_this_host_cannot_open_waits(fleet: Fleet) -> None:
    job = fleet.a.intake.submit(live_plan())
    fleet.lives("a", ttl_s=-1000)
    looks = fleet.taking_over()

    def refused(_: UUID) -> None:
        raise AuthFailed("no such key here")

    looks._opens_source = refused
    looks.look()
    assert fleet.b.store.host_of(job.id) == "a"


@pytest.mark.parametrize("what", ["hypervisor", "destination"])
def test_a_host_whose_hypervisor_or_destination_is_away_leaves_the_job_to_others(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    job = fleet.a.intake.submit(live_plan())
    fleet.lives("a", ttl_s=-1000)  # it has not begun: its machine is not known
    taking_over = fleet.taking_over()
    with monkeypatch.context() as during:

        def away() -> int:
            raise DestinationAway("it is not mounted")

        if what == "destination":
            during.setattr(fleet.b.destination, "free_bytes", away)
        else:
            fleet.b.hypervisor.away = 10_000
        taking_over.look()
        assert fleet.begun == []
        assert fleet.b.store.host_of(job.id) == "a"
        fleet.b.hypervisor.away = 0
    fleet.taking_over().look()
    assert fleet.begun == [job.id]


def test_files_of_a_host_and_names_that_are_taken_here_are_waited_for(fleet: Fleet) -> None:
    of_a_file = fleet.a.intake.submit(offline_plan(fleet.a.imports / "appliance"))
    live = fleet.a.intake.submit(live_plan())
    fleet.killed_at(6, live)
    names = [entry.name for entry in fleet.a.store.ledger(live.id) if entry.kind == "claim"]
    assert names
    elsewhere = {**live.plan.source_ref.model_dump(), "vm_id": "vm-2"}
    other = fleet.b.intake.submit(live_plan(target={"name": "other"}, source_ref=elsewhere))
    fleet.b.store.claim(other.id, names, hint="")
    fleet.taking_over().look()
    assert [fleet.b.store.host_of(job.id) for job in (of_a_file, live)] == ["a", "a"]


@pytest.mark.parametrize("decided", ["by the setting", "by the plan"])
def test_a_job_on_disks_of_its_host_waits_or_starts_over(apart: Fleet, decided: str) -> None:
    plan = live_plan() if decided == "by the setting" else live_plan(on_host_lost="restart_elsewhere")
    waits = live_plan(on_host_lost="wait", source_ref={**plan.source_ref.model_dump(), "vm_id": "vm-2"}, name="waits")
    job = apart.a.intake.submit(plan)
    waiting = apart.a.intake.submit(waits)
    left = apart.killed_at(12, job)
    assert left.state is State.COPYING_FULL
    figures = left.progress.model_copy(update={"rate_bps": 5.0, "eta_s": 1.0})
    apart.a.store.write_under(None)  # its lease is over
    apart.a.store.change(job.id, left.state, lambda before: before.model_copy(update={"progress": figures}))
    apart.taking_over("restart_elsewhere" if decided == "by the setting" else "wait").look()
    store = apart.b.store
    assert store.host_of(waiting.id) == "a"
    before = store.get(job.id)
    assert before.state is State.FAILED
    assert before.progress == figures.stopped(), "nothing is copied any more"
    assert before.last_error is not None
    assert before.restarted_by is not None
    assert str(before.restarted_by) in before.last_error.message
    assert apart.begun == [before.restarted_by]
    ended = apart.b.run(before.restarted_by)
    assert (ended.state, ended.restart_of, store.host_of(ended.id)) == (State.COMPLETED, job.id, "b")
    assert apart.b.volume(ended).read_bytes() == disk_content()
    assert apart.b.platform.vm(VM)["snapshots"] == {}
    # What it made on its own host goes when that is back.
    assert any(path.is_file() for path in (apart.a.folder / "volumes").rglob("*"))
    apart.lives("a", ttl_s=1000)
    Tidier(apart.a.rooms, host="a").look()
    assert not any(path.is_file() for path in (apart.a.folder / "volumes").rglob("*"))
    assert store.ledger(job.id) == []


def test_what_is_cancelled_ends_though_its_host_never_comes_back(apart: Fleet) -> None:
    """Else its VM could not be moved by any host again, and a wave with it would never end."""
    (folder := apart.a.imports / "web").mkdir()
    of_a_file = apart.a.intake.submit(offline_plan(folder))
    job = apart.a.intake.submit(live_plan(on_host_lost="wait"))
    assert apart.killed_at(12, job).state is State.COPYING_FULL
    assert apart.b.platform.vm(VM)["snapshots"] != {}
    for one in (of_a_file, job):
        apart.b.intake.cancel(one.id)
    with pytest.raises(Conflict, match="is at work on the same machine"):
        apart.b.intake.submit(live_plan())
    apart.taking_over().look()
    store = apart.b.store
    assert [store.get(one.id).state for one in (of_a_file, job)] == [State.FAILED] * 2
    assert len(apart.begun) == 2
    for again in apart.begun:
        ended = apart.b.run(again)
        assert (ended.state, store.host_of(again), store.ledger(again)) == (State.CANCELLED, "b", [])
        assert [visit.state for visit in ended.history] == [State.QUEUED, State.CANCELLED]
    assert apart.b.platform.vm(VM)["snapshots"] == {}
    assert apart.b.run(apart.b.intake.submit(live_plan()).id).state is State.COMPLETED


def test_an_operator_ends_a_cancelled_cut_over_of_a_host_that_never_comes_back(apart: Fleet) -> None:
    job = apart.a.intake.submit(live_plan("Cold"))
    apart.killed_at(20, job)
    apart.a.platform.power(VM, "off")
    apart.a.store.record(job.id, "source_power", VM)
    in_state(apart, job, State.CUTTING_OVER)
    apart.b.intake.cancel(job.id)
    looks = apart.taking_over()
    looks.look()
    assert (apart.b.store.get(job.id).state, apart.begun) == (State.CUTTING_OVER, []), "its guest may run there"
    again = looks.take_over(job.id, restart=True)
    assert apart.b.run(again.id).state is State.CANCELLED
    assert apart.b.platform.vm(VM)["power"] == "on"


def in_state(fleet: Fleet, job: Migration, state: State) -> None:
    before = fleet.a.store.get(job.id)
    fleet.a.store.change(job.id, before.state, lambda now: now.model_copy(update={"state": state}))


def test_from_the_cut_over_on_an_operator_decides(fleet: Fleet) -> None:
    job = fleet.a.intake.submit(live_plan())
    fleet.killed_at(30, job)
    in_state(fleet, job, State.CUTTING_OVER)
    looks = fleet.taking_over("restart_elsewhere")
    with pytest.raises(Conflict, match="not fenced") as refused:
        looks.take_over(job.id, restart=False)
    assert "fence host a" in (refused.value.hint or "")
    looks.look()
    assert fleet.b.store.host_of(job.id) == "a"
    events = fleet.b.store.last_event_id()
    taken = looks.take_over(job.id, restart=False)
    assert (taken.state, taken.host, taken.attempt, job.host) == (State.CUTTING_OVER, "b", 1, "a")
    assert fleet.b.store.events_after(events)[0].document == taken.model_dump_json(), "who follows it sees that"
    with pytest.raises(Conflict, match="is this host's"):
        looks.take_over(job.id, restart=False)
    ended = fleet.b.run(job.id)
    assert ended.state is State.COMPLETED
    assert fleet.b.volume(ended).read_bytes() == disk_content()
    with pytest.raises(Conflict, match="has ended"):
        looks.take_over(job.id, restart=True)


def test_what_has_a_domain_on_its_host_does_not_go_on_elsewhere_but_may_start_over(fleet: Fleet) -> None:
    job = fleet.a.intake.submit(live_plan("Cold"))
    fleet.killed_at(20, job)
    fleet.a.platform.power(VM, "off")
    fleet.a.store.record(job.id, "source_power", VM)
    fleet.a.store.record(job.id, "domain", str(job.id))
    in_state(fleet, job, State.STARTING)
    fleet.b.store.hosts.fence("a")
    looks = fleet.taking_over()
    with pytest.raises(Conflict, match="has its domain on host a"):
        looks.take_over(job.id, restart=False)
    again = looks.take_over(job.id, restart=True)
    assert (again.host, again.attempt) == ("b", 2)
    assert LedgerEntry("source_power", VM) in fleet.b.store.ledger(again.id)
    fleet.b.intake.cancel(again.id)
    assert fleet.b.run(again.id).state is State.CANCELLED
    assert fleet.b.platform.vm(VM)["power"] == "on"


def test_a_guest_that_was_started_at_once_is_neither_started_over_nor_left(fleet: Fleet) -> None:
    """What it wrote is on its host alone."""
    job = fleet.a.intake.submit(live_plan())
    fleet.killed_at(12, job)
    started = Instant(state="running", started_at=now())
    fleet.a.store.change(job.id, State.COPYING_FULL, lambda job: job.model_copy(update={"instant": started}))
    fleet.b.store.hosts.fence("a")
    looks = fleet.taking_over("restart_elsewhere")
    looks.look()
    assert fleet.b.store.host_of(job.id) == "a"
    for restart in (False, True):
        with pytest.raises(Conflict, match="what it wrote since is there alone"):
            looks.take_over(job.id, restart=restart)
    assert fleet.b.store.get(job.id).state is State.COPYING_FULL


def test_a_repair_stays_with_the_receipt_and_never_becomes_a_migration(fleet: Fleet) -> None:
    moved = fleet.a.run(fleet.a.intake.submit(live_plan("Cold", target={"start": False})).id)
    assert moved.receipt is not None, moved.last_error
    job = fleet.a.intake.repair(moved.id, check_only=False)
    fleet.killed_at(3, job)
    fleet.b.store.hosts.fence("a")
    looks = fleet.taking_over("restart_elsewhere")
    looks.look()
    assert (fleet.b.store.host_of(job.id), fleet.begun) == ("a", [])
    for restart in (False, True):
        with pytest.raises(Conflict, match="which is on host a"):
            looks.take_over(job.id, restart=restart)
    fleet.lives("a", ttl_s=1000)
    assert fleet.a.run(job.id).state is State.COMPLETED


# ── two services ─────────────────────────────────────────────────────────────────────────────────────────────────────


def service(folder: Path, url: str, host: str) -> AbstractContextManager[subprocess.Popen[str]]:
    environment = {"HOST": host, "LEASE_S": "6", "SHARED": str(folder / "shared")}
    return ready("tests.migrations.engine_process", str(folder / host), url, log=folder / f"{host}.log", **environment)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_another_service_goes_on_from_the_watermark(tmp_path: Path, postgresql_url: str, how: signal.Signals) -> None:
    (tmp_path / "shared").mkdir()
    house = House(tmp_path / "a", store_url=postgresql_url, host="a", shared=tmp_path / "shared")
    house.platform.add_vm(VM, {DISK: disk_content()})
    store = house.store
    # Its start finds the job: one that comes later from outside it would find by a look each 30 s.
    job = house.intake.submit(live_plan(limits={"bandwidth_bps": MIB}))
    with service(tmp_path, postgresql_url, "b") as b, service(tmp_path, postgresql_url, "a") as a:
        until(lambda: bool(store.watermarks(job.id, 1)))
        a.send_signal(how)
        mark = store.watermarks(job.id, 1)[DISK].offset_bytes
        until(lambda: store.host_of(job.id) == "b", 120)
        # Nobody of the lost host writes any more: its worker ended with its service, or by its silence.
        assert workers(a.pid) == []
        assert store.watermarks(job.id, 1)[DISK].offset_bytes >= mark > 0
        if how is signal.SIGSTOP:
            a.send_signal(signal.SIGCONT)
            until(lambda: {row.id: row.fenced for row in store.hosts.all()}["a"] == "", 120)
        until(lambda: store.get(job.id).ended, 120)
        assert workers(a.pid) == []
        assert b.poll() is None
    ended = store.get(job.id)
    assert (ended.state, store.host_of(job.id)) == (State.COMPLETED, "b")
    assert [visit.state for visit in ended.history].count(State.COPYING_FULL) == 1
    assert house.volume(ended).read_bytes() == disk_content()
    assert house.platform.vm(VM)["snapshots"] == {}
    house.close()
