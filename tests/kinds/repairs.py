"""The volumes of a job that completed, damaged in some places: a repair of them, from a file or from a VM that is off."""

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest

from synvirt.disks.checking import repairing
from synvirt.disks.checking.ledger import BLOCK_BYTES
from synvirt.jobs import repairing_disks
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.plan import MigrationPlan
from synvirt.sizes import KIB
from tests.house import VM, House, live_plan, offline_plan
from tests.kinds.laws import Place
from tests.kinds.migrations import InHouse, Scenario

DISK, SMALL = "disk-0", "disk-1"
DAMAGED = (5, BLOCK_BYTES - 1, 2 * BLOCK_BYTES + 7, 3 * BLOCK_BYTES + 100 * KIB)


def contents() -> dict[str, bytes]:
    """Blocks of data, of zeros, and one that is not whole; another disk, of which nothing is damaged. Made when they are asked
    for: a constant would lie in each worker's memory as long as the suite runs."""
    ends = random.Random(31).randbytes(BLOCK_BYTES), random.Random(32).randbytes(300 * KIB + 500)
    return {DISK: bytes(2 * BLOCK_BYTES).join(ends), SMALL: random.Random(33).randbytes(64 * KIB)}


def files(house: House) -> MigrationPlan:
    folder = house.imports / "appliance"
    folder.mkdir(exist_ok=True)
    for key, content in contents().items():
        (folder / f"{key}.raw").write_bytes(content)
    return offline_plan(folder, target={"start": False})


def off(house: House) -> MigrationPlan:
    house.platform.add_vm(VM, contents())
    return live_plan("Cold", target={"start": False})


def damage(volume: Path) -> None:
    with volume.open("r+b") as file:
        for place in DAMAGED:
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 0x40]))


class Repaired(InHouse):
    def __init__(self, place: Place, *, live: bool) -> None:
        super().__init__(Scenario(off if live else files, live=live), place)
        # So that there is a middle.
        patched = pytest.MonkeyPatch()
        patched.setattr(repairing, "ROWS_A_BATCH", 1)
        place.closing.callback(patched.undo)

    def prepare(self) -> None:
        self.place.outside["contents"] = contents()
        before = self.house.run(self.house.intake.submit(self.scenario.plan(self.house)).id)
        assert before.state is State.COMPLETED, before.last_error
        self.place.outside["before"] = before.id
        damage(self.house.volume(before))
        self.place.outside["damaged"] = self.house.volume(before).read_bytes()

    def steps(self) -> Sequence[tuple[object, str]]:
        """What was written is no commit."""
        return [(repairing_disks, "repair")]

    @property
    def before(self) -> Migration:
        return self.store.get(self.place.outside["before"])

    def submit(self) -> UUID:
        return self.house.intake.repair(self.before.id, check_only=False).id

    def found(self) -> UUID | None:
        newest = self.jobs()[0]
        return None if newest.id == self.before.id else newest.id

    def check(self, job_id: UUID) -> None:
        for key, content in self.place.outside["contents"].items():
            assert self.house.volume(self.before, key).read_bytes() == content, key
        repair = self.store.get(job_id).repair
        assert repair is not None
        found = {disk.key: {span.start // BLOCK_BYTES for span in disk.differs} for disk in repair.disks}
        # The first of the blocks of zeros is right.
        assert found == {DISK: {0, 2, 3}, SMALL: set()}, "what was repaired is not said, or more than that"
        assert [disk.left for disk in repair.disks] == [(), ()]
        self.house.prove(self.before)

    def check_undone(self, job_id: UUID) -> None:
        """Each block is as it was found, or right."""
        job = self.store.get(job_id)
        assert job.last_error is not None
        assert job.last_error.code == "E_MIG_CANCELLED"
        now, damaged = self.house.volume(self.before).read_bytes(), self.place.outside["damaged"]
        right = self.place.outside["contents"]
        # At most moments it is one of the two as a whole: to look at each block makes copies of it.
        for start in range(0, 0 if now in (damaged, right[DISK]) else len(now), BLOCK_BYTES):
            block = slice(start, start + BLOCK_BYTES)
            assert now[block] in (damaged[block], right[DISK][block])
        assert self.house.volume(self.before, SMALL).read_bytes() == right[SMALL]

    def left(self, job_id: UUID | None) -> list[str]:
        """The job that is repaired has all that it had."""
        before = self.before
        assert before.domain is not None
        volumes = [self.house.volume(before, key) for key in (DISK, SMALL)]
        own = {f"domain {before.domain.uuid}", *(str(path) for volume in volumes for path in (volume, volume.parent))}
        there = self.house.leftovers(VM if self.scenario.live else None)
        assert own <= set(there)
        left = [one for one in there if one not in own]
        for job in self.jobs():
            if job.id not in (job_id, before.id):
                left += [f"{entry.kind} {entry.name}" for entry in self.store.ledger(job.id)]
        return left


from_files, from_vm = (partial(Repaired, live=live) for live in (False, True))
