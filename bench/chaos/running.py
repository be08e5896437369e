"""A chaos from its seed to its outcome.

jobs, submitted one after the other ─▶ three services ─▶ each ended, with the right bytes or a cause
faults, drawn one after the other ───────┘     └─▶ nothing left: volumes, snapshots, ledger, slots, workers
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psycopg

from bench.chaos.faults import FAULTS, SPANS_S, Fault, Service
from bench.chaos.service import LOCAL, PER_DESTINATION, PER_SOURCE, PER_SOURCE_IN_ALL, POOL, house_of
from bench.chaos.watching import Writers, audit_slots, slots_exceeded, workers
from synvirt.errors import SynvirtError
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.plan import MigrationPlan
from synvirt.sizes import KIB, MIB
from tests.house import House, live_plan, offline_plan
from tests.servers import postgres

HOSTS = ("a", "b", "c")
DISK, DISK_BYTES = "disk-0", 2 * MIB
# A disk takes some seconds, so that faults find it in the middle.
BANDWIDTH_BPS = 512 * KIB
# What a job is: where it comes from and goes to, and what becomes of it when its host is lost.
WAYS = (
    "warm to the pool",
    "a file",
    "cold to the pool",
    "warm, waits for its host",
    "warm to the pool",
    "cold, begins anew elsewhere",
)
# After the last fault: all that is under way ends by itself, and what is left of it is tidied up.
ENDS_WITHIN_S, TIDIED_WITHIN_S, WORKERS_GONE_WITHIN_S = 600.0, 90.0, 15.0
WEIGHTS = [fault.weight for fault in FAULTS.values()]
WRITES_EVERY_S, LOOKS_EVERY_S = 0.2, 0.1


@dataclass
class Outcome:
    """`wrong`: what must not be, a sentence each. `restarted`: how often a job started over elsewhere."""

    jobs: int
    faults: Counter[str] = field(default_factory=Counter)
    took_s: float = 0.0
    states: Counter[str] = field(default_factory=Counter)
    right: int = 0
    taken_over: int = 0
    restarted: int = 0
    looks: int = 0
    slots_given: int = 0
    began_again: int = 0
    causes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def summary(self) -> str:
        drawn = ", ".join(f"{count} {kind}" for kind, count in self.faults.most_common())
        return "\n".join(
            (
                f"{self.jobs} jobs, {self.faults.total()} faults ({drawn}) in {self.took_s:.0f} s",
                f"ended: {dict(self.states)}, {self.right} with the right bytes; failed of: {self.causes}",
                f"{self.taken_over} taken over, {self.restarted} begun anew elsewhere",
                f"{self.slots_given} slots given; volumes looked at {self.looks} times",
                f"services that ended by themselves, without a database at their start: {self.began_again}",
                f"wrong: {self.wrong}",
            )
        )


class Chaos:
    def __init__(self, folder: Path, url: str, seed: int, jobs: int) -> None:
        self.chance, self._url = random.Random(seed), url
        self._shared = folder / "shared"
        self._shared.mkdir()
        database = Path(parse_qs(urlsplit(url).query)["host"][0])
        House(folder / "schema", store_url=url).close()
        audit_slots(url)
        self.services = [Service(host, folder / host, database, url, self._shared) for host in HOSTS]
        self.houses = {one.host: house_of(one.folder, url, one.host, self._shared) for one in self.services}
        self._store = self.houses["a"].store
        self.platform = self.houses["a"].platform
        self.submitted: dict[str, Migration] = {}
        self._contents = {f"vm-{number}": random.Random(number).randbytes(DISK_BYTES) for number in range(jobs)}
        # All of them now: a service that stands still may hold the platform up, and its faults are mended by who submits.
        for number, (vm_id, content) in enumerate(self._contents.items()):
            if WAYS[number % len(WAYS)] != "a file":
                self.platform.add_vm(vm_id, {DISK: content})
        # Each of them once, and then as they weigh.
        self._undrawn = self.chance.sample(list(FAULTS), len(FAULTS))
        self._struck: dict[str, tuple[float, Fault]] = {}

    def submit(self) -> None:
        number = len(self.submitted)
        host, vm_id = HOSTS[number % len(HOSTS)], f"vm-{number}"
        house = self.houses[host]
        self.submitted[vm_id] = house.intake.submit(self._plan(house, WAYS[number % len(WAYS)], vm_id))

    def _plan(self, house: House, way: str, vm_id: str) -> MigrationPlan:
        limits = {"bandwidth_bps": BANDWIDTH_BPS}
        if way == "a file":
            folder = house.imports / vm_id
            folder.mkdir(exist_ok=True)
            (folder / f"{DISK}.raw").write_bytes(self._contents[vm_id])
            return offline_plan(folder, limits=limits)
        plan = live_plan(
            "Warm" if way.startswith("warm") else "Cold",
            target={"destination": POOL if way.endswith("pool") else LOCAL},
            limits=limits,
            on_host_lost="restart_elsewhere" if way.endswith("elsewhere") else "wait",
            **({"warm": {"delta_threshold_bytes": MIB}} if way.startswith("warm") else {}),
        )
        return plan.model_copy(update={"source_ref": plan.source_ref.model_copy(update={"vm_id": vm_id})})

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def mend(self, *, all_: bool = False) -> None:
        """What has lasted its span."""
        for service in self.services:
            until, fault = self._struck.get(service.host, (0.0, None))
            if fault is None:
                service.keep()
            elif all_ or time.monotonic() >= until:
                fault.mend(service)
                del self._struck[service.host]

    def strike(self) -> str | None:
        """A fault drawn for a service that has none; its kind."""
        well = [service for service in self.services if service.host not in self._struck]
        if not well:
            return None
        kind = self._undrawn.pop() if self._undrawn else self.chance.choices(list(FAULTS), WEIGHTS)[0]
        service, fault = self.chance.choice(well), FAULTS[kind]
        fault.strike(service, self.chance)
        self._struck[service.host] = (time.monotonic() + self.chance.choice(SPANS_S), fault)
        return kind

    # ── where the jobs are ───────────────────────────────────────────────────────────────────────────────────────────

    def last(self, job: Migration) -> Migration:
        """As it is now; where it was started over, the job in its place."""
        found = self._store.get(job.id)
        while found.restarted_by is not None:
            found = self._store.get(found.restarted_by)
        return found

    def ended(self) -> bool:
        try:
            return not self._store.unended()
        except SynvirtError:  # the database restarts
            return False

    def content(self, vm_id: str, job: Migration) -> bytes:
        """As it was at the source when it was switched off."""
        is_file = job.plan.source.Live is None
        return self._contents[vm_id] if is_file else self.platform.disk_path(vm_id, DISK).read_bytes()

    def volume(self, job: Migration) -> Path:
        house = self.houses[self._store.host_of(job.id)]
        (disk,) = job.disks
        assert disk.volume is not None
        return Path(house.rooms.destination_named(job.destination).device(disk.volume))

    def left(self) -> list[str]:
        """What no job that completed may say is its own."""
        jobs = [self._store.get(document.id) for document in self._all()]
        own = {self.volume(job) for job in jobs if job.state is State.COMPLETED}
        folders = [self._shared / "pool"]
        for house in self.houses.values():
            folders += [house.folder / name for name in ("volumes", "conversions", "receipts/hashes")]
        left = [str(path) for folder in folders for path in folder.rglob("*") if path.is_file() and path not in own]
        left += [f"snapshot {name} of {vm}" for vm in self.platform.vm_ids() for name in self.platform.vm(vm)["snapshots"]]
        left += [f"tracking of {vm}" for vm in self.platform.vm_ids() if self.platform.vm(vm)["cbt_enabled"]]
        for job in jobs:
            if job.state is not State.COMPLETED:
                left += [f"{entry.kind} {entry.name} of {job.id}" for entry in self._store.ledger(job.id)]
        with psycopg.connect(self._url) as connection:
            left += [f"slot {row}" for row in connection.execute("SELECT resource, job_id, host FROM slots").fetchall()]
        return left

    def _all(self) -> list[Migration]:
        documents, _ = self._store.documents(limit=10_000)
        return [Migration.model_validate_json(document) for document in documents]

    def judge(self, outcome: Outcome) -> None:
        for vm_id, job in self.submitted.items():
            last = self.last(job)
            outcome.states[str(last.state)] += 1
            outcome.restarted += last.restart_of is not None
            outcome.taken_over += last.id == job.id and self._store.host_of(job.id) != self.submitted_to(vm_id)
            if last.state is State.COMPLETED:
                if self.volume(last).read_bytes() == self.content(vm_id, last):
                    outcome.right += 1
                else:
                    outcome.wrong.append(f"{vm_id} completed with other bytes than its source has")
            elif last.ended and last.last_error is not None:
                outcome.causes.append(f"{vm_id}: {last.last_error.code} {last.last_error.message}")
                live = last.plan.source.Live is not None
                if live and self.platform.vm(vm_id)["power"] != "on":
                    outcome.wrong.append(f"{vm_id} failed, and its guest is off")
            else:
                outcome.wrong.append(f"{vm_id} has not ended: {last.state}, {last.last_error}")

    def submitted_to(self, vm_id: str) -> str:
        return HOSTS[list(self.submitted).index(vm_id) % len(HOSTS)]

    def close(self) -> None:
        for service in self.services:
            service.close()
        for house in self.houses.values():
            house.close()


@contextmanager
def _guests_write(chaos: Chaos) -> Iterator[None]:
    """In a thread of its own: a service that stands still may hold the platform up."""
    over, chance = threading.Event(), random.Random(1)

    def write() -> None:
        while not over.wait(WRITES_EVERY_S):
            if live := chaos.platform.vm_ids():
                chaos.platform.guest_writes(
                    chance.choice(live), DISK, chance.randrange(DISK_BYTES - KIB), chance.randbytes(KIB)
                )

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def run(folder: Path, *, jobs: int, faults: int, seed: int, pause_s: float = 2.0) -> Outcome:
    """`pause_s`: between two faults, at most. Blocks, for minutes where there are many."""
    outcome = Outcome(jobs)
    with postgres.server() as server:
        with psycopg.connect(server % "postgres", autocommit=True) as connection:
            connection.execute("CREATE DATABASE chaos")
        url = server % "chaos"
        chaos, began = Chaos(folder, url, seed, jobs), time.monotonic()
        watched = Writers(folder)
        try:
            with _guests_write(chaos):
                _rage(chaos, outcome, faults, pause_s)
            _until(chaos, chaos.ended, ENDS_WITHIN_S)
            outcome.took_s = time.monotonic() - began
            _until(chaos, lambda: not chaos.left(), TIDIED_WITHIN_S)
            outcome.wrong += [f"left: {one}" for one in chaos.left()]
            chaos.judge(outcome)
        finally:
            outcome.began_again = sum(service.deaths for service in chaos.services)
            chaos.close()
            watched.close()
        with suppress(TimeoutError):
            _wait_for(lambda: not workers(folder), WORKERS_GONE_WITHIN_S)
        outcome.looks = watched.looks
        outcome.wrong += [f"two writers: {volume}" for volume in sorted(watched.doubled)]
        outcome.wrong += [f"a worker is left: {process.name}" for process in workers(folder)]
        most = {"source": PER_SOURCE, "in all": PER_SOURCE_IN_ALL, "destination": PER_DESTINATION}
        outcome.slots_given, exceeded = slots_exceeded(url, most)
        outcome.wrong += exceeded
    return outcome


def _rage(chaos: Chaos, outcome: Outcome, faults: int, pause_s: float) -> None:
    """Jobs come as the faults do, so that each fault finds some under way."""
    while outcome.faults.total() < faults:
        due = 1 + outcome.faults.total() * outcome.jobs // faults
        try:
            while len(chaos.submitted) < min(outcome.jobs, due + len(HOSTS)):
                chaos.submit()
        except SynvirtError:
            pass  # the database restarts: it is submitted in the next round
        if (kind := chaos.strike()) is not None:
            outcome.faults[kind] += 1
        until = time.monotonic() + chaos.chance.uniform(0.0, pause_s)
        while time.monotonic() < until:
            chaos.mend()
            time.sleep(LOOKS_EVERY_S)
        chaos.mend()
    chaos.mend(all_=True)
    while len(chaos.submitted) < outcome.jobs:
        chaos.submit()


def _until(chaos: Chaos, happened: Callable[[], bool], within_s: float) -> None:
    """Or it has not, and the judgement says so."""

    def kept() -> bool:
        chaos.mend(all_=True)
        return happened()

    with suppress(TimeoutError):
        _wait_for(kept, within_s)


def _wait_for(happened: Callable[[], bool], within_s: float) -> None:
    until = time.monotonic() + within_s
    while not happened():
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(LOOKS_EVERY_S * 5)
