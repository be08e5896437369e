"""Whole jobs from VMware's own simulator to a volume: the warm engine, vim_api and the worker's code as they are."""

import asyncio
import random
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from synvirt.live import LiveAdapter
from synvirt.live.vsphere import files as vim_files
from synvirt.live.vsphere.adapter import VimApi
from synvirt.live.vsphere.nvram import as_store
from synvirt.live.vsphere.session import library
from synvirt.migrations import passes
from synvirt.migrations.memory import JobMemory, PassMemory
from synvirt.migrations.planning.retrying import has_kept_copy
from synvirt.migrations.tidying import Tidier
from synvirt.model.job import Migration
from synvirt.model.kinds import LiveKind, Mode, State
from synvirt.store import Store
from synvirt.store.tables import OWED_KINDS
from tests.contracts.live import in_session
from tests.fakes.busy_guest import busy_guest
from tests.fakes.vcenter import DISK_BYTES, VCenter
from tests.fakes.workers import in_process
from tests.house import SOURCE_ID, Crash, House, crash_at, live_plan, states
from tests.live.vsphere.test_vim_variables import ENTRY, ORDER, written

pytestmark = pytest.mark.timeout(600)

VM = "vm-57"


class VimHouse(House):
    def __init__(self, folder: Path, platform: VCenter, **options: Any) -> None:
        """`options`: those of the source, beside its pin."""
        super().__init__(folder, workers=in_process)
        self.vcenter, self.options = platform, options

    async def connect(self, kind: LiveKind, source_id: UUID) -> LiveAdapter:
        return VimApi(self.vcenter.access(fingerprint_sha256=self.vcenter.fingerprint, **self.options))


@pytest.fixture
def disk(platform: VCenter) -> Path:
    generator = random.Random(7)
    parts = (bytes(1 << 20) if number % 3 == 2 else generator.randbytes(1 << 20) for number in range(DISK_BYTES >> 20))
    return platform.add_disk(VM, b"".join(parts))


@pytest.fixture
def house(tmp_path: Path, platform: VCenter) -> Iterator[VimHouse]:
    folder = tmp_path / "house"
    folder.mkdir()
    made = VimHouse(folder, platform)
    yield made
    made.close()


def plan(mode: str = "Warm", *, vm: str = VM, **fields: Any) -> Any:
    return live_plan(
        mode,
        source={"Live": "vim_api"},
        source_ref={"kind": "live_vm", "source_id": str(SOURCE_ID), "vm_id": vm},
        **fields,
    )


# No guest writes here, in the middle of the disk's zeros.
NEVER = range(5 << 19, 6 << 19)


def busy(platform: VCenter) -> AbstractContextManager[list[int]]:
    return busy_guest(lambda offset, data: platform.guest_writes(VM, offset, data), DISK_BYTES, spared=NEVER)


def same(house: VimHouse, job: Migration, disk: Path) -> bool:
    return house.volume(job, job.disks[0].key).read_bytes() == disk.read_bytes()


def test_a_guest_that_keeps_writing_is_moved_warm_and_loses_nothing(house: VimHouse, platform: VCenter, disk: Path) -> None:
    with busy(platform) as written:
        job = house.intake.submit(plan(warm={"delta_threshold_bytes": 64 << 20}))
        job = house.run(job.id)
    assert job.state is State.COMPLETED, job.last_error
    assert job.mode_effective is Mode.WARM
    assert written[0] > 0
    assert same(house, job, disk)
    assert job.name == "DC0_H0_VM0"  # the platform's id says nothing to a person
    assert (job.passes[0].kind, job.passes[-1].kind) == ("full", "final")
    assert job.passes[0].bytes <= DISK_BYTES - len(NEVER)  # what was never written is not read
    assert platform.snapshots() == []
    assert platform.tracked() == []  # as it was found
    assert platform.sessions() == 0
    assert State.CUTTING_OVER in states(job)


def test_a_vm_that_was_tracked_before_stays_tracked(house: VimHouse, platform: VCenter, disk: Path) -> None:
    keys = [one.key for one in in_session(lambda: VimApi(platform.access()), lambda adapter: adapter.inspect(VM)).disks]
    in_session(lambda: VimApi(platform.access()), lambda adapter: adapter.enable_cbt(VM, keys))
    before = platform.tracked()
    assert [name.endswith("-ctk.vmdk") for name in before] == [False, True]
    ended = house.run(house.intake.submit(plan()).id)
    assert ended.state is State.COMPLETED, ended.last_error
    assert platform.tracked() == before


def test_a_cancelled_job_tracks_no_more(house: VimHouse, platform: VCenter, disk: Path) -> None:
    job = house.intake.submit(plan(warm={"delta_threshold_bytes": 0, "max_passes": 20}))
    seen: list[str] = []

    def committed() -> None:
        if house.store.get(job.id).state is State.DELTA_SYNCING and not seen:
            seen.extend(platform.tracked())
            house.store.request_cancel(job.id)

    house.store.on_commit = committed
    ended = house.run(job.id)
    assert ended.state is State.CANCELLED
    assert len(seen) == 2
    assert (platform.tracked(), platform.snapshots(), house.store.ledger(job.id)) == ([], [], [])
    assert platform.guest_writes(VM, 0, b"it still runs")


def test_tracking_that_cannot_be_switched_off_now_is_switched_off_later(house: VimHouse, platform: VCenter, disk: Path) -> None:
    """And the guest lives here meanwhile."""
    platform.fault("ReconfigVM_Task", "task:SystemError", times=3, match="<changeTrackingEnabled>false")
    ended = house.run(house.intake.submit(plan()).id)
    assert ended.state is State.COMPLETED
    assert ended.last_error is not None
    assert "could not be tidied up" in ended.last_error.message
    assert [one.kind for one in house.store.ledger(ended.id) if one.kind in OWED_KINDS] == ["tracking"]
    platform.control("nofaults")
    Tidier(house.rooms, host="local").look()
    assert platform.tracked() == []
    assert house.store.get(ended.id).last_error is None


def test_every_disk_is_moved_by_its_key(house: VimHouse, platform: VCenter, disk: Path) -> None:
    data = platform.add_disk(VM, random.Random(5).randbytes(1 << 20), place=1)
    with busy(platform):
        job = house.run(house.intake.submit(plan()).id)
    assert job.state is State.COMPLETED, job.last_error
    keys = [one.key for one in job.disks]
    assert len(set(keys)) == 2
    assert [house.volume(job, key).read_bytes() for key in keys] == [disk.read_bytes(), data.read_bytes()]


def test_a_disk_that_is_left_out_is_not_read(house: VimHouse, platform: VCenter, disk: Path) -> None:
    data = platform.add_disk(VM, random.Random(5).randbytes(1 << 20), place=1)
    first = in_session(lambda: VimApi(platform.access()), lambda adapter: adapter.inspect(VM)).disks[0].key
    job = house.run(house.intake.submit(plan("Cold", skip_disks=(first,))).id)
    assert job.state is State.COMPLETED, job.last_error
    assert house.volume(job, job.disks[1].key).read_bytes() == data.read_bytes()
    assert job.disks[0].volume is None


def test_a_disk_that_cannot_be_read_warm_hinders_no_other_once_it_is_left_out(
    house: VimHouse, platform: VCenter, disk: Path
) -> None:
    platform.add_disk(VM, random.Random(5).randbytes(1 << 20), place=1)
    platform.control("mode", vm=VM, place=1, mode="independent_persistent")
    keys = [one.key for one in in_session(lambda: VimApi(platform.access()), lambda adapter: adapter.inspect(VM)).disks]
    refused = house.run(house.intake.submit(plan()).id)
    assert refused.last_error is not None
    assert (refused.last_error.code, keys[1] in refused.last_error.message) == ("E_MIG_INVALID_PLAN", True)
    with busy(platform):
        job = house.run(house.intake.submit(plan(skip_disks=(keys[1],))).id)
    assert job.state is State.COMPLETED, job.last_error
    assert (job.mode_effective, job.last_error) == (Mode.WARM, None)
    assert same(house, job, disk)


def test_a_vm_that_is_moved_to_another_host_between_two_passes(house: VimHouse, platform: VCenter, disk: Path) -> None:
    """As DRS does: it keeps its id and its files."""
    job = house.intake.submit(plan(warm={"delta_threshold_bytes": 0, "max_passes": 20}))
    hosts: list[str] = []

    async def moved(adapter: VimApi) -> None:
        session, vim = adapter._session, library().vim
        hosts.append((await adapter.inspect(VM)).host)
        found = session.all_of([vim.HostSystem], ("name", "parent"), what="look for hosts")
        other = next(one for one in found if one.properties["name"] != hosts[0])
        pool = session.properties(other.properties["parent"], ("resourcePool",), what="look for a pool")["resourcePool"]
        spec = vim.vm.RelocateSpec(host=session.managed(vim.HostSystem, other.id), pool=pool)
        task = session.call("move it", lambda _: session.machine(VM).RelocateVM_Task(spec))
        session.wait(task, what="move it", timeout_s=60)
        hosts.append((await adapter.inspect(VM)).host)

    def committed() -> None:
        house.store.on_commit = lambda: None
        if house.store.get(job.id).state is State.DELTA_SYNCING:
            in_session(lambda: VimApi(platform.access()), moved)
            platform.guest_writes(VM, 777, b"on the other host")
        else:
            house.store.on_commit = committed

    house.store.on_commit = committed
    ended = house.run(job.id)
    assert ended.state is State.COMPLETED, ended.last_error
    assert len({*hosts}) == 2
    assert same(house, ended, disk)
    assert (platform.snapshots(), platform.tracked()) == ([], [])


@pytest.mark.parametrize("readable", [True, False])
def test_uefi_variables_come_along_and_a_guest_is_moved_without(
    house: VimHouse, platform: VCenter, disk: Path, readable: bool
) -> None:
    content = written([ORDER, ENTRY]) if readable else b"VMWNVRAM, and no such form"
    Path(platform.control("nvram", vm=VM, secure="false")).write_bytes(content)
    job = house.run(house.intake.submit(plan("Cold")).id)
    assert job.state is State.COMPLETED, job.last_error
    assert job.domain is not None
    assert house.hypervisor.variables.get(job.id) == (as_store(content, secure_boot=False) if readable else None)
    assert ("uefi variables" in [one.what for one in job.domain.differences]) == (not readable)


def test_a_host_that_is_away_for_a_while_costs_time_and_nothing_else(house: VimHouse, platform: VCenter, disk: Path) -> None:
    platform.fault("folder", "refuse", times=6)
    job = house.run(house.intake.submit(plan("Cold")).id)
    assert job.state is State.COMPLETED, job.last_error
    assert same(house, job, disk)


def test_a_cold_job_shuts_the_guest_down_first(house: VimHouse, platform: VCenter, disk: Path) -> None:
    with busy(platform):
        job = house.run(house.intake.submit(plan("Cold")).id)
    assert job.state is State.COMPLETED, job.last_error
    assert same(house, job, disk)
    assert platform.snapshots() == []
    assert not platform.guest_writes(VM, 0, b"x")


# The moments of a reset: between two passes, in a pass that has its snapshot and did not ask yet what changed, and while the
# guest is off.
MOMENTS: dict[str, Callable[[Store, Migration], bool]] = {
    "between": lambda _, job: any(one.finished_at for one in job.passes),
    "in the middle": lambda store, job: store.memory.get(job.id, PassMemory, 2).snapshot is not None,
    "at the end": lambda _, job: any(one.kind == "final" for one in job.passes),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_reset_counts_once_whenever_it_comes_and_costs_one_pass_over_the_whole_disk(
    house: VimHouse, platform: VCenter, disk: Path, moment: str
) -> None:
    job = house.intake.submit(plan(warm={"delta_threshold_bytes": 0, "max_passes": 20}))
    counted: set[int] = set()

    def committed() -> None:
        house.store.on_commit = lambda: None
        now = house.store.get(job.id)
        counted.add(house.store.memory.get(job.id, JobMemory).cbt_resets)
        if MOMENTS[moment](house.store, now):
            platform.control("reset", vm=VM)
            platform.control("lie")  # whoever has lost its tracking is not asked what was ever written
            platform.guest_writes(VM, 777, b"after the reset")
            house.store.on_commit = counting
        else:
            house.store.on_commit = committed

    def counting() -> None:
        counted.add(house.store.memory.get(job.id, JobMemory).cbt_resets)

    house.store.on_commit = committed
    ended = house.run(job.id)
    assert ended.state is State.COMPLETED, ended.last_error
    # What the guest did not pay for with its outage is made good.
    note = ("E_MIG_CBT_RESET", False) if moment == "at the end" else None
    assert (ended.last_error and (ended.last_error.code, ended.last_error.fatal)) == note
    assert [one.whole for one in ended.passes].count(True) == 1
    assert 1 in counted
    assert 2 not in counted
    assert same(house, ended, disk)
    assert platform.snapshots() == []


@pytest.mark.parametrize(("switched_off", "mode"), [((), Mode.WARM), (("scsi0:0.ctkEnabled",), Mode.COLD)])
def test_a_vm_that_is_only_set_to_be_tracked(
    house: VimHouse, platform: VCenter, disk: Path, switched_off: tuple[str, ...], mode: Mode
) -> None:
    """No stun came since somebody switched it on: that costs one, and none of the resets that a job may live through. A disk
    that is left out of it is told with its name, and the job runs cold."""

    async def set_to_be_tracked(adapter: VimApi) -> None:
        session, vim = adapter._session, library().vim
        settings = [vim.option.OptionValue(key=name, value="FALSE") for name in switched_off]
        spec = vim.vm.ConfigSpec(changeTrackingEnabled=True, extraConfig=settings)
        await asyncio.to_thread(session.call, "set it", lambda _: session.machine(VM).ReconfigVM_Task(spec))

    in_session(lambda: VimApi(platform.access()), set_to_be_tracked)
    with busy(platform):
        ended = house.run(house.intake.submit(plan()).id)
    assert ended.state is State.COMPLETED, ended.last_error
    assert (ended.mode_effective, same(house, ended, disk)) == (mode, True)
    assert not any(one.whole for one in ended.passes)
    assert all(name in str(ended.last_error) for name in switched_off)
    assert (ended.last_error is None) == (mode is Mode.WARM)
    assert platform.snapshots() == []


@pytest.mark.parametrize("mode", ["Warm", "Cold"])
def test_a_host_that_lies_about_what_was_ever_written_is_found_out(
    house: VimHouse, platform: VCenter, disk: Path, mode: str
) -> None:
    """As hosts did for disks that were written before their tracking was switched on, or extended since."""
    keys = [one.key for one in in_session(lambda: VimApi(platform.access()), lambda adapter: adapter.inspect(VM)).disks]
    in_session(lambda: VimApi(platform.access()), lambda adapter: adapter.enable_cbt(VM, keys))
    platform.control("lie")
    ended = house.run(house.intake.submit(plan(mode)).id)
    assert ended.state is State.COMPLETED, ended.last_error
    assert same(house, ended, disk)
    assert ended.last_error is not None
    assert (ended.last_error.code, ended.last_error.fatal) == ("E_MIG_CBT_RESET", False)
    assert re.search(r"the source called \d+ bytes at offset \d+ empty, and they are not", ended.last_error.message)


def test_a_second_reset_ends_the_job_and_leaves_the_source_as_it_was(house: VimHouse, platform: VCenter, disk: Path) -> None:
    """Each found, and counted, before the next comes."""
    job = house.intake.submit(plan(warm={"delta_threshold_bytes": 0, "max_passes": 20}))
    resets = {2: False, 3: False}

    def committed() -> None:
        house.store.on_commit = lambda: None
        for number, done in resets.items():
            if not done and house.store.memory.get(job.id, PassMemory, number).snapshot is not None:
                resets[number] = True
                platform.control("reset", vm=VM)
                platform.guest_writes(VM, 4096, f"reset {number}".encode())
        house.store.on_commit = committed

    house.store.on_commit = committed
    ended = house.run(job.id)
    house.store.on_commit = lambda: None
    assert ended.state is State.FAILED
    assert ended.last_error is not None
    assert (ended.last_error.code, ended.last_error.fatal) == ("E_MIG_CBT_RESET", True)
    assert platform.snapshots() == []
    assert platform.guest_writes(VM, 0, b"it still runs")


@pytest.mark.parametrize("moment", ["while it is opened", "while it is copied"])
@pytest.mark.parametrize("cause", ["its VM moved", "its snapshot was removed"])
def test_a_file_that_is_gone_is_looked_for_again(
    house: VimHouse, platform: VCenter, disk: Path, monkeypatch: pytest.MonkeyPatch, cause: str, moment: str
) -> None:
    """Between the question where it is, and its first byte; or by the copy worker, which knows no platform to ask."""
    monkeypatch.setattr(passes, "RETRY_PAUSES_S", (0.05, 0.05, 0.05))
    module, name = (vim_files, "_file") if moment == "while it is opened" else (passes, "_order")
    found, gone = getattr(module, name), list[str]()

    def gone_once(*args: Any, **options: Any) -> Any:
        answer = found(*args, **options)
        if not gone and cause == "its VM moved":
            platform.fault("folder", "status:404")
        elif not gone:
            in_session(lambda: VimApi(platform.access()), lambda adapter: adapter.cleanup(VM, f"synvirt-{job.id}-1"))
        gone.append(cause)
        return answer

    monkeypatch.setattr(module, name, gone_once)
    job = house.intake.submit(plan())
    ended = house.run(job.id)
    assert ended.state is State.COMPLETED, ended.last_error
    assert len(gone) > 1
    assert (house.store.memory.get(job.id, PassMemory, 1).retakes is not None) == (cause == "its snapshot was removed")
    assert same(house, ended, disk)
    assert platform.snapshots() == []


def test_a_job_that_fails_leaves_the_source_as_it_was(
    house: VimHouse, platform: VCenter, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "RETRY_PAUSES_S", (0.05, 0.05, 0.05))
    platform.fault("folder", "status:404", times=1000)
    job = house.run(house.intake.submit(plan()).id)
    assert job.state is State.FAILED
    assert job.last_error is not None
    assert job.last_error.code == "E_MIG_DISK_READ_FAILED"
    assert "answers 404 for [LocalDS_0] DC0_H0_VM0/" in job.last_error.message
    assert platform.calls("folder") == len(passes.RETRY_PAUSES_S) + 1
    assert house.leftovers() == []
    assert (platform.snapshots(), platform.tracked()) == ([], [])
    assert platform.guest_writes(VM, 0, b"it still runs")


def test_a_vm_that_goes_in_the_middle_ends_the_job_with_its_name(house: VimHouse, platform: VCenter, disk: Path) -> None:
    job = house.intake.submit(plan())

    def committed() -> None:
        house.store.on_commit = lambda: None
        if house.store.get(job.id).state is State.DELTA_SYNCING:
            in_session(lambda: VimApi(platform.access()), unregistered)
        else:
            house.store.on_commit = committed

    async def unregistered(adapter: VimApi) -> None:
        session = adapter._session
        await adapter.shutdown(VM)
        await asyncio.to_thread(session.call, "forget it", lambda _: session.machine(VM).UnregisterVM())

    house.store.on_commit = committed
    ended = house.run(job.id)
    assert ended.state is State.FAILED
    assert ended.last_error is not None
    assert ended.last_error.code == "E_MIG_VM_NOT_FOUND"
    assert VM in ended.last_error.message
    assert set(house.leftovers()) == house.copies()
    assert has_kept_copy(ended)
    assert platform.sessions() == 0


@pytest.mark.parametrize("commit", [6, 12, 18, 24, 30])
def test_a_service_that_is_killed_goes_on_and_leaves_nothing(
    house: VimHouse, platform: VCenter, disk: Path, tmp_path: Path, commit: int
) -> None:
    job = house.intake.submit(plan())
    house.store.on_commit = crash_at(commit)
    try:
        house.run(job.id)
    except Crash:
        platform.guest_writes(VM, 4096 * commit, b"while the service was away")
    house.close()
    again = VimHouse(tmp_path / "house", platform)
    try:
        ended = again.run(job.id)
        assert ended.state is State.COMPLETED, ended.last_error
        assert same(again, ended, disk)
        assert platform.snapshots() == []
        assert platform.tracked() == []
    finally:
        again.close()
