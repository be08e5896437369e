"""pve_api on nodes with real sshd and real QEMU behind the stand-in's API: the laws of LiveAdapter, byte for byte."""

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from synvirt.live import LiveAdapter
from synvirt.live.proxmox.adapter import pve_api
from synvirt.sizes import MIB
from tests.contracts.live import LiveCase, LiveContract, data_read, in_session, read
from tests.devices import loop_device
from tests.fakes.pve.cluster import Vm
from tests.servers.pve_lab import PveLab, pve_lab


@pytest.fixture(scope="module")
def lab() -> Iterator[PveLab]:
    with pve_lab("pve1") as running:
        yield running
        assert running.server.wrong == [], "the stand-in's answers keep the vendor's schema"


@pytest.fixture(autouse=True)
def _no_guest_outlives_its_test(lab: PveLab) -> Iterator[None]:
    """Emulated, it takes some thousandths of a core even where it does nothing."""
    yield
    lab.kill_all()


def case_of(lab: PveLab, *, key: str = "scsi", fmt: str = "raw", access: bool = False) -> LiveCase:
    vm = lab.vm("8M", key=key, fmt=fmt)
    if access:
        lab.with_access.add(vm.vmid)
    lab.start(vm.vmid)
    lab.write(vm, f"{key}0", MIB, random.Random(3).randbytes(2 * MIB))
    lab.write(vm, f"{key}0", 7 * MIB, b"the end of the disk is near")

    def lose_tracking() -> None:
        lab.kill(vm.vmid)
        lab.start(vm.vmid)

    def restart() -> None:
        for pid in lab.servers():
            os.kill(pid, 9)
        lab.start(vm.vmid)
        lab.cluster.note("qmstart", vm)
        lab.kill(vm.vmid)

    return LiveCase(
        open=lambda: pve_api(lab.access()),
        vm_id=str(vm.vmid),
        content=lambda: lab.content(vm, f"{key}0"),
        write=lambda offset, data: lab.write(vm, f"{key}0", offset, data),
        snapshots=lambda: lab.snapshots(vm),
        lose_tracking=lose_tracking,
        restart=restart,
    )


class TestPveApi(LiveContract):
    @pytest.fixture
    def case(self, lab: PveLab) -> LiveCase:
        return case_of(lab)


@pytest.mark.parametrize(("key", "fmt"), [("virtio", "qcow2"), ("sata", "raw")])
def test_disks_of_other_kinds(lab: PveLab, key: str, fmt: str) -> None:
    LiveContract().test_deltas_hold_what_changed_and_make_the_copy_whole(case_of(lab, key=key, fmt=fmt))


@pytest.mark.parametrize(
    "law",
    [
        LiveContract.test_a_snapshot_is_the_disk_as_it_was,
        LiveContract.test_a_snapshot_of_one_name_is_made_once,
        LiveContract.test_deltas_hold_what_changed_and_make_the_copy_whole,
        LiveContract.test_a_lost_change_tracking_is_reported_before_anything_is_copied,
    ],
)
def test_the_laws_hold_by_backup_access_too(lab: PveLab, law: Callable[[LiveContract, LiveCase], None]) -> None:
    law(LiveContract(), case_of(lab, access=True))


def test_the_way_is_chosen_by_what_qemu_has_and_shown(lab: PveLab) -> None:
    def shown(vm: Vm, **options: Any) -> str:
        manifest = in_session(lambda: pve_api(lab.access(**options)), lambda adapter: adapter.inspect(str(vm.vmid)))
        return next(one.assessment for one in manifest.concerns if one.id == "pve.read_by")

    plain, own, off = lab.vm("1M"), lab.vm("1M"), lab.vm("1M")
    lab.with_access.add(own.vmid)
    for vm in (plain, own):
        lab.start(vm.vmid)
    assert "frozen by copy-before-write filters of QEMU's own" in shown(plain)
    assert "backup-access-setup" in shown(own)
    assert "backup-access-setup" not in shown(own, backup_access=False)
    assert "by qemu-nbd on node pve1" in shown(off)


def test_the_versions_of_each_node_and_the_ways_of_each_storage_are_reported(lab: PveLab) -> None:
    lab.cluster.storages["san"] = "iscsidirect"
    try:
        about = in_session(lambda: pve_api(lab.access()), lambda adapter: adapter.about())
    finally:
        del lab.cluster.storages["san"]
    checks = {check.name: check for check in about.checks}
    assert checks["ssh pve1"].detail == "Proxmox VE 8.4.1, pve-qemu-kvm 7.2.22-1, qemu-server 8.4.0"
    assert "a file (raw, qcow2 or vmdk)" in checks["storage local"].detail
    assert (checks["storage san"].ok, checks["storage san"].warning) == (True, True)
    assert "cannot be moved" in checks["storage san"].detail


def test_a_volume_that_is_a_block_device_is_served_by_its_node(lab: PveLab) -> None:
    """As zvols, LVM's and krbd's are: `pvesm path` says a device. It is not written to: QEMU may open it for reading alone."""
    vm = lab.vm("8M")
    lab.start(vm.vmid)
    lab.write(vm, "scsi0", MIB, random.Random(3).randbytes(2 * MIB))
    lab.kill(vm.vmid)
    [(_, path, _)] = lab.disks(vm)
    backing = path.rename(path.with_suffix(".backing"))
    with loop_device(backing) as device:
        path.symlink_to(device)

        async def read_off(adapter: LiveAdapter) -> bytes:
            snapshot = await adapter.snapshot(str(vm.vmid), f"synvirt-{job}-1")
            disk = (await adapter.inspect(str(vm.vmid))).disks[0]
            spec = await adapter.open_disk(str(vm.vmid), snapshot, disk, None)
            return (await asyncio.to_thread(read, spec))[0]

        job = uuid4()
        assert in_session(lambda: pve_api(lab.access()), read_off) == backing.read_bytes()
        in_session(lambda: pve_api(lab.access()), lambda adapter: adapter.cleanup(str(vm.vmid), f"synvirt-{job}-1"))
        assert lab.servers() == []
        path.unlink()


def test_a_delta_reads_what_changed_and_hardly_more(lab: PveLab) -> None:
    """Blocks all over the disk, of which some lie side by side."""
    vm, job, dice, block = lab.vm("64M"), uuid4(), random.Random(7), 65536
    lab.start(vm.vmid)
    changed = sorted(dice.sample(range(1024), 60))

    async def use(adapter: LiveAdapter) -> int:
        for number in (1, 2):
            snapshot = await adapter.snapshot(str(vm.vmid), f"synvirt-{job}-{number}")
            if number == 1:
                await adapter.release(str(vm.vmid), f"synvirt-{job}-1")
                for at in changed:
                    lab.write(vm, "scsi0", at * block, dice.randbytes(block))
        disk = (await adapter.inspect(str(vm.vmid))).disks[0]
        spec = await adapter.open_disk(str(vm.vmid), snapshot, disk, f"synvirt-{job}-1")
        data_bytes = await asyncio.to_thread(data_read, spec)
        for number in (1, 2):
            await adapter.cleanup(str(vm.vmid), f"synvirt-{job}-{number}")
        return data_bytes

    data_bytes = in_session(lambda: pve_api(lab.access()), use)
    assert len(changed) * block <= data_bytes <= 1.02 * len(changed) * block
    assert lab.leftovers(vm) == []


def test_uefi_variables_are_read_while_the_vm_is_off(lab: PveLab) -> None:
    vm = lab.vm("1M")
    assert in_session(lambda: pve_api(lab.access()), lambda adapter: adapter.uefi_variables(str(vm.vmid))) is None
    path = lab.attach(vm, "efidisk0", "528K")
    path.write_bytes(variables := random.Random(9).randbytes(528 << 10))
    assert in_session(lambda: pve_api(lab.access()), lambda adapter: adapter.uefi_variables(str(vm.vmid))) == variables
    assert lab.servers() == []
    assert lab.leftovers(vm) == []
    lab.start(vm.vmid)
    assert in_session(lambda: pve_api(lab.access()), lambda adapter: adapter.uefi_variables(str(vm.vmid))) is None
