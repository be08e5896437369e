"""A wave, and the host that leads it: scheduler and engine over a house of fakes. Both die, where the leader has committed."""

import threading
import time
from uuid import UUID

from synvirt.fleet.model import RollBackRequest, WaveState
from synvirt.model.kinds import State
from tests.fakes.hypervisor import FakeHypervisor
from tests.fleet.test_carrying import CONTENT, Night, wave
from tests.house import Crash
from tests.kinds.laws import End, Place, World

VMS = ("db", "web")
ENDS: dict[WaveState, End] = {WaveState.COMPLETED: "Completed", WaveState.ROLLED_BACK: "Cancelled"}
WITHIN_S = 90.0


class Led(World):
    """A wave of two, one behind the other. Its cancel is a roll-back: what was moved goes back to where it was."""

    def __init__(self, place: Place) -> None:
        self.night = Night(place.folder, place.outside.setdefault("hypervisor", FakeHypervisor()))
        self.store = self.night.store
        self.leader = threading.get_ident()

    def prepare(self) -> None:
        self.night.vms(*VMS)

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
        while (state := self.night.waves.whole(job_id).state) not in ENDS:
            assert time.monotonic() < until, self.problem(job_id)
            self.night.carrying.tick()
            for one in self.store.unended_ids(host="local"):
                self.night.engine.begin(one)
            time.sleep(0.01)
        return ENDS[state]

    def problem(self, job_id: UUID) -> str:
        return str(self.night.waves.whole(job_id))

    def cancel(self, job_id: UUID) -> None:
        self.night.waves.roll_back(job_id, RollBackRequest())

    def check(self, job_id: UUID) -> None:
        jobs = self.store.unended(), self.store.ended(host="local")
        assert [job.state for job in jobs[1]] == [State.COMPLETED] * len(VMS), "each was moved once"
        assert jobs[0] == []
        for job in jobs[1]:
            assert self.night.house.volume(job).read_bytes() == CONTENT
        assert [self.night.house.platform.vm(name)["power"] for name in VMS] == ["off"] * len(VMS)

    def check_undone(self, job_id: UUID) -> None:
        assert [self.night.house.platform.vm(name)["power"] for name in VMS] == ["on"] * len(VMS)
        assert self.night.house.hypervisor.domains == {}

    def left(self, job_id: UUID | None) -> list[str]:
        house = self.night.house
        left = [f"snapshot {name}" for vm in VMS for name in house.platform.vm(vm)["snapshots"]]
        left += [f"tracking of {vm}" for vm in VMS if house.platform.vm(vm)["cbt_enabled"]]
        completed = [job for job in self.store.ended(host="local") if job.state is State.COMPLETED]
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


def _parts(volume: object) -> tuple[object, ...]:
    return volume, getattr(volume, "parent", None)
