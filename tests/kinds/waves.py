"""A wave, and the host that leads it: scheduler and engine over a house of fakes. Both die, where the leader has committed."""

import sqlite3
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from uuid import UUID

from synvirt.fleet.model import RollBackRequest, WaveState
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.sizes import KIB
from synvirt.store.documents import readable
from tests.fakes.hypervisor import FakeHypervisor
from tests.fleet.carrying.night import CONTENT, Night, wave
from tests.house import Crash
from tests.kinds.laws import End, Place, World

DISK = "disk-0"
VMS = ("db", "web")
ENDS: dict[WaveState, End] = {WaveState.COMPLETED: "Completed", WaveState.ROLLED_BACK: "Cancelled"}
WITHIN_S = 90.0
RESTS_S, LOOKS_AGAIN_S = 0.03, 0.09


class Led(World):
    """A wave of two, one behind the other. Its cancel is a roll-back: what was moved goes back to where it was."""

    vms: Sequence[str] = VMS

    def __init__(self, place: Place) -> None:
        self.place = place
        self.night = Night(place.folder, place.outside.setdefault("hypervisor", FakeHypervisor()))
        self.store = self.night.store
        self.leader = threading.get_ident()

    def prepare(self) -> None:
        self.night.vms(*self.vms)

    def is_moment(self) -> bool:
        """The engine's own are those of migrations."""
        return threading.get_ident() == self.leader

    def submit(self) -> UUID:
        made = self.night.waves.create(wave({"id": "db"}, {"id": "web", "after": ["db"]}))
        self.night.waves.go(made.id)
        return made.id

    def found(self) -> UUID | None:
        with self.store._engine.connect() as db:
            rows = db.exec_driver_sql("SELECT id FROM waves").scalars().all()
        return UUID(rows[0]) if rows else None

    def run(self, job_id: UUID) -> End:
        if self.night.waves.whole(job_id).state is WaveState.DRAFT:  # who made it sees that it has not gone
            self.night.waves.go(job_id)
        until = time.monotonic() + WITHIN_S
        # Its own connection: it sees the commits of all others, and is read when the service has died too.
        with closing(sqlite3.connect(self.place.folder / "store.db")) as looking:
            while (state := self.night.waves.whole(job_id).state) not in ENDS:
                assert time.monotonic() < until, self.problem(job_id)
                seen = _commits(looking)
                self.night.carrying.tick()
                for one in self.store.unended_ids(host="local"):
                    self.night.engine.begin(one)
                # A tick costs more than all that it waits for. Not every change is a commit: a check of a guest is none.
                look_again = time.monotonic() + LOOKS_AGAIN_S
                while time.monotonic() < look_again:
                    time.sleep(RESTS_S)
                    if _commits(looking) != seen:
                        break
        return ENDS[state]

    def problem(self, job_id: UUID) -> str:
        return str(self.night.waves.whole(job_id))

    def cancel(self, job_id: UUID) -> None:
        self.night.waves.roll_back(job_id, RollBackRequest())

    def check(self, job_id: UUID) -> None:
        jobs = readable(Migration, self.store.documents(limit=100)[0])
        moved = [job for job in jobs if job.id != self.place.outside.get("before")]
        assert [job.state for job in moved] == [State.COMPLETED] * len(self.vms), "each was moved once"
        for job in moved:
            self.check_moved(job)
        assert [self.night.house.platform.vm(name)["power"] for name in self.vms] == ["off"] * len(self.vms)

    def check_moved(self, job: Migration) -> None:
        assert self.night.house.volume(job).read_bytes() == CONTENT

    def check_undone(self, job_id: UUID) -> None:
        assert [self.night.house.platform.vm(name)["power"] for name in self.vms] == ["on"] * len(self.vms)
        assert self.night.house.hypervisor.domains == {}

    def left(self, job_id: UUID | None) -> list[str]:
        house = self.night.house
        left = [f"snapshot {name}" for vm in self.vms for name in house.platform.vm(vm)["snapshots"]]
        left += [f"tracking of {vm}" for vm in self.vms if house.platform.vm(vm)["cbt_enabled"]]
        completed = [job for job in readable(Migration, self.store.documents(limit=100)[0]) if job.state is State.COMPLETED]
        own = {str(part) for job in completed for disk in job.disks for part in _parts(house.volume(job, disk.key))}
        own |= {f"domain {job.domain.uuid}" for job in completed if job.domain is not None}
        return left + [one for one in house.leftovers() if one not in own]

    def die(self) -> None:
        self.night.engine.close()

    def close(self) -> None:
        try:
            self.night.close()
        except Crash:
            self.store.close()


class LedAgain(Led):
    """A member did not boot here, and is tried again. Its source was switched on again, and has written since."""

    vms = ("db",)

    def prepare(self) -> None:
        super().prepare()
        self.place.outside["hypervisor"].fail = "boot"
        self.place.outside["wave"] = made = self.night.waves.create(wave({"id": "db"})).id
        self.night.waves.go(made)
        held = self.night.until(made, lambda seen: seen.state is WaveState.FAILED)
        assert self.night.house.platform.vm("db")["power"] == "on"
        self.place.outside["hypervisor"].fail = None
        self.place.outside["before"] = held.members[0].job_id
        self.night.house.platform.guest_writes("db", DISK, 4 * KIB, b"by the guest that went on")

    def submit(self) -> UUID:
        made: UUID = self.place.outside["wave"]
        self.night.waves.retry(made, "db")
        return made

    def check_moved(self, job: Migration) -> None:
        before = self.store.get(self.place.outside["before"])
        assert (job.retry_of, job.disks[0].volume) == (before.id, before.disks[0].volume)
        assert self.night.house.volume(job).read_bytes() == self.night.house.platform.disk_path("db", DISK).read_bytes()

    def left(self, job_id: UUID | None) -> list[str]:
        """The failed job's are kept for a retry."""
        before = self.store.get(self.place.outside["before"])
        kept = {str(part) for disk in before.disks for part in _parts(self.night.house.volume(before, disk.key))}
        kept |= {one for one in self.night.house.copies() if f"receipts/hashes/{before.id}" in one}
        return [one for one in super().left(job_id) if one not in kept]


def _commits(looking: sqlite3.Connection) -> int:
    """It changes with each commit of another connection."""
    found: int = looking.execute("PRAGMA data_version").fetchone()[0]
    return found


def _parts(volume: object) -> tuple[object, ...]:
    return volume, getattr(volume, "parent", None)
