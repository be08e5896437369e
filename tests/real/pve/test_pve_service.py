"""The service as it is run, with Proxmox VE nodes as its source: cold, downgraded, tracking lost, kill -9, cancel."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from synvirt.cli.client import Client
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.plan import MigrationPlan
from synvirt.model.sources import Source
from synvirt.sizes import MIB
from tests.fakes.pve.cluster import Vm
from tests.real.test_service import service, volumes
from tests.running.processes import FILTERED, caged
from tests.servers.libvirt_lab import until
from tests.servers.pve_lab import PveLab, pve_lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
WHOLE_MIB = 24


@pytest.fixture(scope="module")
def lab() -> Iterator[PveLab]:
    with pve_lab("pve1", "pve2") as running:
        yield running
        assert running.server.wrong == []


def register(client: Client, lab: PveLab) -> Source:
    access = lab.access()
    request = {"name": "cluster", "kind": "pve_api", "endpoint": access.endpoint, "options": dict(access.options)}
    return Source.model_validate_json(client.ask("POST", "/sources", json={**request, "credentials": dict(access.credentials)}))


def submit(client: Client, source: Source, vm: Vm, mode: str, **fields: object) -> Migration:
    plan = {
        "source": {"Live": "pve_api"},
        "source_ref": {"kind": "live_vm", "source_id": str(source.id), "vm_id": str(vm.vmid)},
        "mode": mode,
        "target": {"start": False},
        **fields,
    }
    return client.submit(MigrationPlan.model_validate(plan))


def ended(client: Client, job: Migration) -> Migration:
    until(lambda: client.migration(job.id).ended, 200)
    return client.migration(job.id)


def machine(lab: PveLab, **config: object) -> Vm:
    """It runs, and holds WHOLE_MIB of data."""
    vm = lab.vm(f"{WHOLE_MIB + 8}M", **config)  # type: ignore[arg-type]
    lab.start(vm.vmid)
    for number in range(0, WHOLE_MIB, 4):
        lab.write(vm, "scsi0", number * MIB, random.Random(number).randbytes(4 * MIB))
    return vm


def volume_of(data_dir: Path, job: Migration) -> bytes:
    [path] = [path for path in volumes(data_dir) if str(job.id) in str(path)]
    return path.read_bytes()


def nothing_is_left(lab: PveLab, vm: Vm) -> None:
    assert lab.leftovers(vm) == []
    assert lab.servers() == []


def test_off_and_running_guests_are_moved_cold(lab: PveLab, tmp_path: Path) -> None:
    """By workers in their cages, as another user and without a network: the sockets that SSH forwards are all they have."""
    data_dir = tmp_path / "data"
    with service(data_dir) as (process, client), caged(process.pid) as seen:
        source = register(client, lab)
        for runs in (False, True):
            seen.clear()
            vm = machine(lab)
            if not runs:
                lab.kill(vm.vmid)
            job = ended(client, submit(client, source, vm, "Cold"))
            assert job.state == State.COMPLETED, job.last_error
            assert (job.mode_effective, job.last_error) == ("Cold", None)
            assert volume_of(data_dir, job) == lab.content(vm, "scsi0")
            assert not lab.is_running(vm.vmid)
            assert "migrated to" in vm.config["description"]
            assert FILTERED in seen
            nothing_is_left(lab, vm)


def test_a_guest_that_cannot_be_tracked_is_moved_cold_and_the_job_says_so(lab: PveLab, tmp_path: Path) -> None:
    vm, data_dir = machine(lab), tmp_path / "data"
    vm.config["scsi0"] += ",iothread=1"  # in QEMU 7.2 an export of such a disk may end it
    with service(data_dir) as (_, client):
        job = ended(client, submit(client, register(client, lab), vm, "Warm"))
        assert job.state == State.COMPLETED, job.last_error
        assert job.mode_effective == "Cold"
        assert job.last_error is not None
        assert (job.last_error.code, job.last_error.fatal) == ("E_MIG_CBT_UNSUPPORTED", False)
        assert volume_of(data_dir, job) == lab.content(vm, "scsi0")
        nothing_is_left(lab, vm)


@pytest.mark.parametrize("how", ["started again", "moved to another node", "shut down by its owner"])
def test_a_guest_whose_changes_are_not_known_any_more_is_compared_whole(lab: PveLab, tmp_path: Path, how: str) -> None:
    """In the middle of a warm job: its QEMU is another, or there is none, and the bitmaps are gone."""
    vm, data_dir = machine(lab), tmp_path / "data"
    with service(data_dir) as (_, client):
        warm = {"cutover": "manual", "interval_s": 1, "delta_threshold_bytes": 64 * MIB}
        job = submit(client, register(client, lab), vm, "Warm", warm=warm)
        until(lambda: len(client.migration(job.id).passes) > 1 or client.migration(job.id).ended, 120)
        if how == "shut down by its owner":
            lab.write(vm, "scsi0", 5 * MIB, b"its last words")
        lab.kill(vm.vmid)
        if how == "moved to another node":
            vm.node = "pve2"
        if how != "shut down by its owner":
            lab.start(vm.vmid)
            lab.write(vm, "scsi0", 5 * MIB, b"since then")
        until(lambda: any(one.whole for one in client.migration(job.id).passes[1:]) or client.migration(job.id).ended, 120)
        client.ask("POST", f"/migrations/{job.id}/cutover")
        job = ended(client, job)
        assert job.state == State.COMPLETED, job.last_error
        assert job.mode_effective == "Warm"
        assert any(one.whole for one in job.passes[1:]), job.passes
        assert volume_of(data_dir, job) == lab.content(vm, "scsi0")
        nothing_is_left(lab, vm)
        assert list((lab.folder / "pve1/scratch").iterdir()) == []


@pytest.mark.parametrize(
    ("state", "access"),
    [(State.COPYING_FULL, False), (State.COPYING_FULL, True), (State.DELTA_SYNCING, True), (State.CUTTING_OVER, False)],
)
def test_a_killed_service_goes_on(lab: PveLab, tmp_path: Path, state: State, access: bool) -> None:
    """kill -9 in each sort of pass; the guest writes meanwhile, and nothing stays on the node."""
    vm, data_dir = lab.vm(f"{WHOLE_MIB + 8}M"), tmp_path / "data"
    if access:
        lab.with_access.add(vm.vmid)
    lab.start(vm.vmid)
    for number in range(0, WHOLE_MIB, 4):
        lab.write(vm, "scsi0", number * MIB, random.Random(number).randbytes(4 * MIB))
    slow = {"limits": {"bandwidth_bps": 12 * MIB}, "warm": {"delta_threshold_bytes": 64 * MIB}}
    with service(data_dir) as (process, client):
        job = submit(client, register(client, lab), vm, "Warm", **slow)
        if state is not State.COPYING_FULL:
            until(lambda: client.migration(job.id).passes)
            for number in range(0, 16, 4):
                lab.write(vm, "scsi0", number * MIB, random.Random(-number - 1).randbytes(4 * MIB))
        until(lambda: _copies(client.migration(job.id), state), 120)
        process.kill()
        process.wait()
    if lab.is_running(vm.vmid) and state is not State.CUTTING_OVER:
        lab.write(vm, "scsi0", 30 * MIB, b"written while nobody looked")
    with service(data_dir) as (_, client):
        last = ended(client, job)
        assert last.state == State.COMPLETED, last.last_error
        assert volume_of(data_dir, job) == lab.content(vm, "scsi0")
        assert not lab.is_running(vm.vmid)
        nothing_is_left(lab, vm)


def _copies(job: Migration, state: State) -> bool:
    """In the middle of a pass of that state, or just beyond: what matters is that nothing is lost."""
    in_the_middle = job.state == state and bool(job.passes) and job.passes[-1].finished_at is None
    return (in_the_middle and job.passes[-1].bytes > 0) or job.state in (State.STARTING, State.COMPLETED)


def test_a_cancelled_job_leaves_its_source_as_it_was(lab: PveLab, tmp_path: Path) -> None:
    vm, data_dir = machine(lab), tmp_path / "data"
    before = dict(vm.config)
    with service(data_dir) as (_, client):
        source = register(client, lab)
        for mode in ("Warm", "Cold"):
            job = submit(client, source, vm, mode, limits={"bandwidth_bps": 4 * MIB})
            until(lambda: client.migration(job.id).progress.bytes_done > 0)  # noqa: B023
            client.cancel(job.id)
            assert ended(client, job).state == State.CANCELLED
            nothing_is_left(lab, vm)
            assert lab.is_running(vm.vmid)
            assert vm.config == before
            assert volumes(data_dir) == []


def test_a_job_waits_for_a_lock(lab: PveLab, tmp_path: Path) -> None:
    """vzdump holds one for as long as it takes."""
    vm, data_dir = machine(lab), tmp_path / "data"
    with service(data_dir) as (_, client):
        source = register(client, lab)
        vm.config["lock"] = "backup"
        job = submit(client, source, vm, "Warm")
        until(lambda: client.migration(job.id).last_error is not None or client.migration(job.id).ended, 120)
        waiting = client.migration(job.id)
        assert not waiting.ended, waiting.last_error
        assert waiting.last_error is not None
        assert "locked by Proxmox VE (backup)" in waiting.last_error.message
        del vm.config["lock"]
        # It would be tried again within a minute; a source that is changed is tried at once.
        client.ask("PATCH", f"/sources/{source.id}", json={"name": "cluster again"})
        job = ended(client, job)
        assert job.state == State.COMPLETED, job.last_error
        assert volume_of(data_dir, job) == lab.content(vm, "scsi0")
        nothing_is_left(lab, vm)
