"""Migrations in a house of fakes: real store, real copies, a platform and a hypervisor that are not there."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from synvirt.destinations.zfs import ZfsDestination
from synvirt.destinations.zfs_command import Zfs
from synvirt.jobs.process import started
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.machine import DiskBus
from synvirt.model.plan import Limits, MigrationPlan
from synvirt.sizes import KIB, MIB
from tests.drawn import drawn
from tests.fakes.guests import MARK, FakePreparer
from tests.fakes.hypervisor import BUSES, FakeHypervisor
from tests.fakes.workers import in_process
from tests.fakes.zfs import FakeZfs
from tests.fakes.zfs_here import answered_here
from tests.house import VM, House, live_plan, offline_plan
from tests.kinds.laws import End, Place, World
from tests.offline.appliances import image, raw_disk
from tests.offline.hyperv import conversion_tool, hyperv_exports
from tests.offline.hyperv.vmcx_service import by_tool

DISK = "disk-0"
# By the seeds of their contents.
EXPORTED = {"ide0:0": 1, "scsi0:0": 2}


def disk_content() -> bytes:
    return drawn(700 * KIB, zeros=400 * KIB, end=500)


def offline(house: House, keys: Sequence[str] = (DISK, "disk-1")) -> MigrationPlan:
    folder = house.imports / "appliance"
    folder.mkdir(exist_ok=True)
    for key in keys:
        (folder / f"{key}.raw").write_bytes(disk_content())
    return offline_plan(folder)


def instant(house: House) -> MigrationPlan:
    return offline(house).model_copy(update={"instant": True})


def slowly(house: House) -> MigrationPlan:
    """One disk, in pieces and with a limit to each second: a job has watermarks in the middle of it."""
    return offline(house, (DISK,)).model_copy(update={"limits": Limits(bandwidth_bps=MIB)})


def live(mode: str) -> Callable[[House], MigrationPlan]:
    def plan(house: House) -> MigrationPlan:
        if VM not in house.platform.vm_ids():
            house.platform.add_vm(VM, {DISK: disk_content()})
        return live_plan(mode, warm={"delta_threshold_bytes": MIB})

    return plan


@dataclass(frozen=True)
class Scenario:
    """`fail`: of the hypervisor. `boots_from`: the buses that its guests have a driver for. `lies`, `forgets`: of the platform,
    between two services. `processes`: its disks are copied by worker processes; those of the others by the same code here."""

    plan: Callable[[House], MigrationPlan]
    family: str = "linux"
    fail: str | None = None
    boots_from: tuple[DiskBus, ...] = BUSES
    live: bool = False
    lies: bool = False
    forgets: bool = False
    processes: bool = False

    def __call__(self, place: Place) -> "InHouse":
        return InHouse(self, place)

    def guest_lives_on(self, place: Place, moment: int) -> None:
        """What a guest does meanwhile: it writes, while it is on. What a lying source hides is much: a sample finds much."""
        platform = place.outside["platform"]
        if VM not in platform.vm_ids():
            return
        if self.lies:
            platform.guest_writes(VM, DISK, 0, random.Random(moment).randbytes(700 * KIB), tracked=False)
        else:
            platform.guest_writes(VM, DISK, moment * 8 * KIB % len(disk_content()), b"written at moment %d" % moment)
        if self.forgets:
            platform.lose_snapshots(VM)


class InHouse(World):
    def __init__(self, scenario: Scenario, place: Place) -> None:
        self.scenario, self.place = scenario, place
        self.house = self.made_house()
        self.store = self.house.store
        place.outside["platform"] = self.house.platform

    def made_house(self, **fields: Any) -> House:
        hypervisor = self.place.outside.setdefault(
            "hypervisor", FakeHypervisor(fail=self.scenario.fail, boots_from=self.scenario.boots_from)
        )
        workers = started if self.scenario.processes else in_process
        known = {"preparer": FakePreparer(), "family": self.scenario.family, "workers": workers}
        return House(self.place.folder, hypervisor=hypervisor, **{**known, **fields})

    def submit(self) -> UUID:
        return self.house.intake.submit(self.scenario.plan(self.house)).id

    def found(self) -> UUID | None:
        jobs = self.jobs()
        return jobs[0].id if jobs else None

    def jobs(self) -> list[Migration]:
        """Newest first."""
        return [Migration.model_validate_json(document) for document in self.store.documents(limit=100)[0]]

    def run(self, job_id: UUID) -> End:
        return str(self.house.run(job_id).state)  # type: ignore[return-value]

    def problem(self, job_id: UUID) -> str:
        return str(self.store.get(job_id).last_error)

    def cancel(self, job_id: UUID) -> None:
        # A wish is no moment of the job.
        on_commit, self.store.on_commit = self.store.on_commit, lambda: None
        try:
            self.house.intake.cancel(job_id, guest_writes="lose")
        finally:
            self.store.on_commit = on_commit

    def check(self, job_id: UUID) -> None:
        job = self.store.get(job_id)
        assert job.domain is not None
        assert [str(uuid) for uuid in self.house.hypervisor.domains] == [job.domain.uuid]
        self.check_rungs(job)
        if self.scenario.live:
            assert self.house.platform.vm(VM)["power"] == "off"
        for disk in job.disks:
            assert self.content(job, disk.key) == self.expected(disk.key), disk.key
        # The fake conversion tells nobody what it wrote.
        if self.scenario.family == "linux":
            self.house.prove(job)

    def check_rungs(self, job: Migration) -> None:
        """The ladder of buses was climbed once: no rung is tried twice, and none is left out."""
        boots = [bus for bus in BUSES if bus in self.scenario.boots_from]
        tried = BUSES[: BUSES.index(boots[0]) + 1] if boots else BUSES
        assert tuple(attempt.disk_bus for attempt in job.boot_attempts) == tried

    def content(self, job: Migration, key: str) -> bytes:
        return self.house.volume(job, key).read_bytes()

    def expected(self, key: str) -> bytes:
        if self.scenario.live:
            return self.house.platform.disk_path(VM, key).read_bytes()
        return MARK + disk_content()[len(MARK) :] if self.scenario.family == "windows" and key == DISK else disk_content()

    def check_undone(self, job_id: UUID) -> None:
        job = self.store.get(job_id)
        assert self.house.hypervisor.domains == {}
        assert job.last_error is not None
        if job.state is State.FAILED and self.scenario.fail is None:
            self.check_rungs(job)
        assert self.house.hypervisor.screenshot(job.id) is None or job.state is State.FAILED
        if job.state is State.CANCELLED:
            assert job.last_error.code == "E_MIG_CANCELLED"
            assert [disk.volume for disk in job.disks if disk.volume] == [], "it names no volume that is gone"
        if self.scenario.live:
            assert self.house.platform.vm(VM)["power"] == "on"

    def left(self, job_id: UUID | None) -> list[str]:
        own: set[str] = set()
        if job_id is not None:
            job = self.store.get(job_id)
            volumes = [self.house.volume(job, disk.key) for disk in job.disks if disk.volume]
            own |= {str(path) for volume in volumes for path in (volume, volume.parent)}
            own |= {f"domain {job.domain.uuid}"} if job.domain else set()
        elif all(job.state is State.FAILED for job in self.jobs()):
            # A replica is never deleted with its failed cut-over, nor what is known of it: a retry goes on from both.
            own |= self.house.copies()
        is_there = self.scenario.live and VM in self.house.platform.vm_ids()
        left = [one for one in self.house.leftovers(VM if is_there else None) if one not in own]
        if is_there and self.house.platform.vm(VM)["cbt_enabled"]:
            left.append("tracking")  # it was off before
        for job in self.jobs():
            if job.id != job_id:
                left += [f"{entry.kind} {entry.name}" for entry in self.store.ledger(job.id)]
        return left

    def close(self) -> None:
        self.house.close()


# ── ways that need a house of their own ──────────────────────────────────────────────────────────────────────────────


class _OfFailed(InHouse):
    """A job that takes up the failed one that `prepare` left."""

    def submit(self) -> UUID:
        return self.house.intake.retry(self.place.outside["before"], {}).id

    def found(self) -> UUID | None:
        newest = self.jobs()[0]
        return None if newest.id == self.place.outside["before"] else newest.id

    def left(self, job_id: UUID | None) -> list[str]:
        """What a retry that was cancelled has is its failed job's again, or gone with it."""
        own = self.house.copies() if job_id is None else set()
        return [one for one in super().left(job_id) if one not in own]


class Retry(_OfFailed):
    """The conversion failed; the job is taken up again with the copy it made, and the source is gone."""

    def __init__(self, place: Place) -> None:
        super().__init__(Scenario(offline, family="windows"), place)

    def made_house(self, **fields: Any) -> House:
        return super().made_house(preparer=FakePreparer(fails="before" not in self.place.outside), **fields)

    def prepare(self) -> None:
        before = self.house.run(self.house.intake.submit(offline(self.house)).id)
        assert before.state is State.FAILED
        self.place.outside["before"] = before.id
        self.house.preparer.fails = False
        for path in self.house.imports.rglob("*.raw"):
            path.unlink()

    def left(self, job_id: UUID | None) -> list[str]:
        kept = [f"{entry.kind} {entry.name}" for entry in self.store.ledger(self.place.outside["before"])]
        return [one for one in super().left(job_id) if one not in kept]


def live_of_two(house: House) -> MigrationPlan:
    if VM not in house.platform.vm_ids():
        house.platform.add_vm(VM, {DISK: disk_content(), "disk-1": disk_content()[: 64 * KIB]})
    return live("Warm")(house)


class RetryLive(_OfFailed):
    """It did not boot. Its source was switched on again, and has written since; so has who started its guest here. Of its disks
    one has another size by now, and one was added."""

    def __init__(self, place: Place) -> None:
        super().__init__(Scenario(live_of_two, live=True), place)

    def prepare(self) -> None:
        self.house.hypervisor.fail = "boot"
        before = self.house.run(self.house.intake.submit(self.scenario.plan(self.house)).id)
        assert (before.state, self.house.platform.vm(VM)["power"]) == (State.FAILED, "on")
        self.house.hypervisor.fail = None
        self.place.outside["before"] = before.id
        with self.house.volume(before).open("r+b") as volume:
            volume.seek(300 * KIB)
            volume.write(b"by a guest that was started here")
        self.house.platform.guest_writes(VM, DISK, 100 * KIB, b"by the guest that went on")
        self.house.platform.resize(VM, "disk-1", disk_content()[: 96 * KIB])
        self.house.platform.resize(VM, "disk-2", disk_content()[: 32 * KIB])


class ByTool(InHouse):
    """Imported whole by an outside program, which is a process each time. It has the disks, and converts nothing."""

    def __init__(self, place: Place) -> None:
        super().__init__(Scenario(offline), place)

    def made_house(self, **fields: Any) -> House:
        hypervisor = self.place.outside.setdefault("hypervisor", FakeHypervisor())
        house = by_tool(self.place.folder, "well", hypervisor=hypervisor, workers=in_process)
        disks = {f"web-sd{letter}": self._made(key, "raw") for letter, key in zip("ab", EXPORTED, strict=True)}
        conversion_tool.install_copying(self.place.folder / "bin", disks)
        return house

    def _made(self, key: str, image_format: str) -> Path:
        """For all moments of a test: nobody writes to it."""
        made = self.place.folder.with_name(f"{key.replace(':', '-')}.{image_format}")
        if not made.exists():
            image(made.parent, made.name, image_format, self.expected(key))
        return made

    def submit(self) -> UUID:
        export = self.house.imports / "an export"
        if not export.exists():
            images = {key: self.place.folder / self._made(key, "vhdx").name for key in EXPORTED}
            for key, path in images.items():
                path.hardlink_to(self._made(key, "vhdx"))
            hyperv_exports.export(export, images)
        return self.house.intake.submit(offline_plan(export, kind="vmcx_export")).id

    def expected(self, key: str) -> bytes:
        return raw_disk(3 * MIB, seed=EXPORTED[key])

    def check_rungs(self, job: Migration) -> None:
        """Its disks begin where the export has them."""

    def left(self, job_id: UUID | None) -> list[str]:
        return super().left(job_id) + [str(path) for path in (self.place.folder / "passthrough").rglob("*")]


class OnZfs(InHouse):
    """On a fake zfs, whose volumes are real block devices."""

    def __init__(self, place: Place) -> None:
        super().__init__(Scenario(partial(offline, keys=(DISK,))), place)
        place.closing.enter_context(answered_here())

    def made_house(self, **fields: Any) -> House:
        if "zfs" not in self.place.outside:
            self.place.outside["zfs"] = FakeZfs(self.place.folder / "zfs")
            self.place.closing.callback(self.place.outside["zfs"].close)
        self.fake: FakeZfs = self.place.outside["zfs"]
        zfs = Zfs(self.fake.program)
        destination = ZfsDestination("tank", "synvirt", zfs=zfs, devices=self.fake.devices, name_of=self.fake.name_of)
        return super().made_house(destination=destination)

    def content(self, job: Migration, key: str) -> bytes:
        return super().content(job, key)[: len(disk_content())]

    def left(self, job_id: UUID | None) -> list[str]:
        own = set[str]() if job_id is None else {str(disk.volume) for disk in self.store.get(job_id).disks}
        folders = {"tank", "tank/synvirt", "tank/synvirt/migrations"}
        folders |= {name.rpartition("/")[0] for name in own}
        return [one for one in super().left(job_id) if "/" not in one] + [
            f"dataset {name}" for name in self.fake.datasets() if name not in own | folders
        ]
