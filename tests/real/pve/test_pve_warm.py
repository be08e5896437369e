"""A guest that keeps writing is moved warm off a node by the service as it is run, cut over by hand: nothing it wrote is lost.

Its QEMU ends with the guest, and its bitmaps with that: what it wrote last is known because it was read in between.
"""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from synvirt.model.kinds import State
from synvirt.model.plan import MigrationPlan
from synvirt.model.sources import Source, SourceTest
from synvirt.sample import ID_PATH, Sample
from tests.real.libvirt_remote.test_libvirt_remote_warm import (
    BOOT_TIMEOUT_S,
    DELTA_BYTES,
    WRITER,
    Guest,
    Witness,
    check_chain,
    read_guest,
)
from tests.real.test_service import _guests, service
from tests.servers.libvirt_lab import until
from tests.servers.pve_lab import PveLab, pve_lab


@pytest.fixture(scope="module")
def lab() -> Iterator[PveLab]:
    with pve_lab("pve1", boots=True) as running:
        yield running
        assert running.server.wrong == []


class PveGuest(Guest):
    """The sample on a node, asked by its agent's socket."""

    def __init__(self, lab: PveLab, sample: Sample) -> None:
        assert sample.raw is not None
        self.vm = lab.vm("1M", key="virtio", agent="1", memory_mib=256)
        (_, path, _), *_ = lab.disks(self.vm)
        subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "raw", str(sample.raw), str(path)], check=True)
        volume = str(self.vm.config["virtio0"]).split(",")[0]
        lab.cluster.volumes[volume] |= {"size": path.stat().st_size, "used": path.stat().st_blocks * 512}
        lab.start(self.vm.vmid)
        self._lab = lab
        until(lambda: self.ask("guest-ping") is not None, BOOT_TIMEOUT_S)

    def ask(self, command: str, **arguments: object) -> Any | None:
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.settimeout(20)
                made.connect(str(self._lab.machines[self.vm.vmid].qga))
                made.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
                return json.loads(made.makefile().readline())["return"]
        except (OSError, ValueError, KeyError):
            return None


def register(client: Any, lab: PveLab) -> Source:
    access = lab.access(shutdown_timeout_s=90)
    request = {
        "name": "the old cluster",
        "kind": "pve_api",
        "endpoint": access.endpoint,
        "credentials": dict(access.credentials),
        "options": dict(access.options),
    }
    return Source.model_validate_json(client.ask("POST", "/sources", json=request))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_guest_that_keeps_writing_is_moved_warm(
    lab: PveLab, sample: Sample, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    guest, data_dir = PveGuest(lab, sample), tmp_path / "data"
    guest.run("/bin/busybox", "sh", "-c", WRITER, wait=False)
    until(lambda: guest.lines() > 3)
    try:
        with service(data_dir) as (_, client):
            source = register(client, lab)
            tested = SourceTest.model_validate_json(client.ask("POST", f"/sources/{source.id}/test", params={"deep": True}))
            assert tested.ok, tested.checks
            assert lab.leftovers(guest.vm) == []
            plan = {
                "source": {"Live": "pve_api"},
                "source_ref": {"kind": "live_vm", "source_id": str(source.id), "vm_id": str(guest.vm.vmid)},
                "mode": "Warm",
                "warm": {"delta_threshold_bytes": DELTA_BYTES, "cutover": "manual", "interval_s": 1},
            }
            with Witness(guest) as witness:
                job = client.submit(MigrationPlan.model_validate(plan))
                until(lambda: len(client.migration(job.id).passes) > 2 or client.migration(job.id).ended, 600)
                client.ask("POST", f"/migrations/{job.id}/cutover")
                until(lambda: client.migration(job.id).ended, 600)
                job = client.migration(job.id)
            assert job.state == State.COMPLETED, job.last_error
            assert (job.mode_effective, job.last_error, job.boot_sign) == ("Warm", None, "agent")
            assert [one.kind for one in job.passes][:2] == ["full", "delta"]
            assert job.passes[-1].kind == "final"
            # A final pass that knew nothing of what changed would have read the whole disk.
            assert not job.passes[-1].whole
            assert all(0 < one.bytes < sample.capacity_bytes for one in job.passes)
            record_property("downtime_s", job.downtime_s)
            print(f"downtime {job.downtime_s} s; {job.forecast}; {job.passes}")
            assert not lab.is_running(guest.vm.vmid)
            assert lab.leftovers(guest.vm) == []
            assert lab.servers() == []
            assert "migrated to" in guest.vm.config["description"]
            assert list(data_dir.rglob("changes-*.json")) == []
        assert job.domain is not None
        assert read_guest(data_dir, job.domain.uuid, ID_PATH).strip() == sample.id
        arrived = check_chain(read_guest(data_dir, job.domain.uuid, "/chain"))
        assert witness.seen > 3
        assert arrived >= witness.seen
    finally:
        for pid in _guests(data_dir):
            os.kill(pid, signal.SIGKILL)
