"""Landing, by the whole service in a process of its own: the ladder, kill -9 in the middle, cancels; and nothing left."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from synvirt.cli.client import Client
from synvirt.errors import Conflict
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.plan import MigrationPlan
from synvirt.sample import Sample
from synvirt.sizes import MIB
from tests.needs import need
from tests.real.guests import boot_sector, debian_without_virtio, prints
from tests.real.test_service import service
from tests.running.processes import command_line, is_guest, until
from tests.servers.halting_rom import halting_rom

LADDER_PATIENCE_S = 280


def plan(path: Path, kind: str, **fields: Any) -> MigrationPlan:
    return MigrationPlan.model_validate(
        {
            "source": {"Offline": kind},
            "source_ref": {"kind": "offline_host_path", "path": str(path)},
            "mode": "Cold",
            **fields,
        }
    )


def ended(client: Client, job: Migration) -> Migration:
    until(lambda: client.migration(job.id).ended, LADDER_PATIENCE_S)
    return client.migration(job.id)


def processes(data_dir: Path) -> list[int]:
    """QEMU and swtpm of this service. libvirt names its sockets by the short link that leads to its folder."""
    roots = [str(data_dir), *(str(link) for link in Path("/run").glob("sv-*") if link.resolve() == data_dir / "libvirt")]
    command_lines = {int(entry.name): command_line(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")}
    return [
        pid
        for pid, command in command_lines.items()
        if ("qemu-system" in command or "swtpm" in command) and any(root in command for root in roots)
    ]


def left(data_dir: Path) -> list[str]:
    """What a job may have made, and is there now."""
    patterns = (
        "volumes/**/*",
        "libvirt/etc/qemu/*.xml",
        "libvirt/lib/qemu/nvram/*",
        "libvirt/lib/swtpm/*",
        "libvirt/lib/qemu/domain-*",
        "libvirt/lib/qemu/channel/target/*",
        "libvirt/run/qemu/*.xml",
        "libvirt/run/qemu/*.pid",
        "libvirt/run/swtpm/*",
        "libvirt/serial/*",
        "libvirt/screens/*",
        "libvirt/log/*/*.log",
    )
    ours = {"driver.pid"}
    found = [
        str(path.relative_to(data_dir)) for pattern in patterns for path in data_dir.glob(pattern) if path.name not in ours
    ]
    with contextlib.suppress(AssertionError):
        # libvirt may be asking a QEMU what it can do. That one ends by itself; an orphan of a killed service is still there.
        until(lambda: all(_lasts(command_line(pid)) for pid in processes(data_dir)), 30)
    return [*found, *(f"process {pid}: {command_line(pid)[:300]}" for pid in processes(data_dir))]


def _lasts(command: str) -> bool:
    return is_guest(command) or "swtpm" in command


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    need("swtpm_setup", "swtpm-tools")
    data_dir = tmp_path_factory.mktemp("service") / "data"
    (data_dir / "imports").mkdir(parents=True)
    yield data_dir
    for pid in processes(data_dir):  # of a test that failed
        os.kill(pid, signal.SIGKILL)


# ── a guest without virtio drivers ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def without_virtio(data_dir: Path) -> Sample:
    for program, package in (("syslinux", "syslinux"), ("mcopy", "mtools"), ("qemu-img", "qemu-utils")):
        need(program, package)
    with pytest.MonkeyPatch.context() as patch:
        return debian_without_virtio(data_dir / "imports", patch)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_guest_without_virtio_drivers_comes_up_on_sata_though_the_service_is_killed_on_the_way(
    data_dir: Path, without_virtio: Sample
) -> None:
    with service(data_dir) as (process, client):
        job = client.submit(plan(without_virtio.ova, "ova_archive"))
        until(lambda: len(client.migration(job.id).boot_attempts) == 2, LADDER_PATIENCE_S)
        process.kill()
        process.wait()
    with service(data_dir) as (_, client):
        last = ended(client, job)
        assert last.state == State.COMPLETED, last.last_error
        # On a busy machine its writes may be seen before its prompt is.
        assert last.boot_sign in ("console", "activity")
        assert [attempt.disk_bus for attempt in last.boot_attempts] == ["virtio", "scsi", "sata"]
        for attempt in last.boot_attempts[:-1]:
            assert "stopped in its initramfs" in str(attempt.trouble)
            assert attempt.ended_at is not None
        assert last.boot_attempts[-1].sign == last.boot_sign
        assert last.last_error is None
        assert last.domain is not None
        assert 'bus="sata"' in last.domain.xml
        assert 'type="e1000e"' in last.domain.xml
        (bus,) = [one for one in last.domain.differences if one.what.startswith("bus of disk")]
        assert (bus.here, "did not boot from scsi" in bus.why) == ("sata", True)
        assert len(processes(data_dir)) == 1
        assert not list(data_dir.glob("libvirt/screens/*")), "it came up: nobody needs to see how it did not"
        with pytest.raises(Conflict, match="name"):
            client.submit(plan(without_virtio.ova, "ova_archive"))
        beside = client.submit(plan(without_virtio.ova, "ova_archive", target={"name": "beside", "start": False}))
        assert ended(client, beside).state == State.COMPLETED


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_bus_that_the_plan_names_is_not_left_and_its_end_is_reported(data_dir: Path) -> None:
    """Its boot record says what a Debian without virtio drivers does, which the test above boots, and halts."""
    stuck = "ALERT!  LABEL=root does not exist.  Dropping to a shell!\n\n(initramfs) "
    image = boot_sector(data_dir / "stuck.raw", prints(stuck), size=8 * MIB)
    run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", image, data_dir / "imports" / "stuck.qcow2"])
    with service(data_dir) as (_, client):
        target = {"name": "only-virtio", "disk_bus": "virtio", "memory_bytes": 64 * MIB}
        last = ended(client, client.submit(plan(data_dir / "imports" / "stuck.qcow2", "qcow2", target=target)))
    assert last.state == State.FAILED
    assert last.last_error is not None
    assert last.last_error.code == "E_MIG_GUEST_BOOT_FAILED"
    assert "(initramfs)" in last.last_error.message, "the console's end is quoted"
    assert [attempt.disk_bus for attempt in last.boot_attempts] == ["virtio"]
    assert (data_dir / "libvirt/screens" / f"{last.id}.png").read_bytes().startswith(b"\x89PNG")


# ── nothing left ─────────────────────────────────────────────────────────────────────────────────────────────────────

VMX = """\
.encoding = "UTF-8"
config.version = "8"
displayName = "{name}"
guestOS = "windows2019srv-64"
firmware = "efi"
vtpm.present = "TRUE"
memsize = "256"
scsi0.present = "TRUE"
scsi0:0.present = "TRUE"
scsi0:0.fileName = "{name}.vmdk"
"""


@pytest.fixture
def clean(tmp_path: Path) -> Iterator[Path]:
    data_dir = tmp_path / "data"
    (data_dir / "imports").mkdir(parents=True)
    yield data_dir
    for pid in processes(data_dir):
        os.kill(pid, signal.SIGKILL)


def halted(data_dir: Path, says: str = "") -> contextlib.AbstractContextManager[tuple["subprocess.Popen[bytes]", Client]]:
    """A service whose guests give no sign of life, and take none of the processor: their firmware halts it. `says`: first."""
    rom = halting_rom(data_dir.parent / "halts", says=says)
    return service(data_dir, "tests.real.hypervisor.halted_service", str(rom))


def machine(data_dir: Path, name: str) -> MigrationPlan:
    """A VMware folder: UEFI, a TPM, and a disk that nothing boots from."""
    need("qemu-img", "qemu-utils")
    need("swtpm_setup", "swtpm-tools")
    folder = data_dir / "imports" / name
    folder.mkdir()
    (folder / f"{name}.vmx").write_text(VMX.format(name=name).replace("windows2019srv-64", "other-64"))
    (image := folder / "disk.raw").write_bytes(bytes(8 * MIB))
    run(["qemu-img", "convert", "-f", "raw", "-O", "vmdk", image, folder / f"{name}.vmdk"])
    return plan(folder, "vmx_folder")


def run(argv: list[str | Path]) -> None:
    subprocess.run(argv, check=True, capture_output=True, timeout=60)


def has_all(data_dir: Path) -> bool:
    kinds = ("libvirt/lib/qemu/nvram/*", "libvirt/lib/swtpm/*", "libvirt/etc/qemu/*.xml", "libvirt/run/qemu/*.xml")
    return all(list(data_dir.glob(kind)) for kind in kinds) and len(processes(data_dir)) == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cancelled_guest_leaves_nothing(clean: Path) -> None:
    with halted(clean) as (_, client):
        job = client.submit(machine(clean, "cancelled"))
        until(lambda: has_all(clean), 120)
        client.ask("POST", f"/migrations/{job.id}/cancel")
        assert ended(client, job).state == State.CANCELLED
        assert left(clean) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_guest_that_did_not_boot_leaves_its_volumes_and_what_it_showed(clean: Path) -> None:
    """Its firmware says what OVMF does, which test_boot.py boots, and halts: OVMF is busy for 12 s of a processor before."""
    with halted(clean, says="BdsDxe: No bootable option or device was found.\r\n") as (_, client):
        job = ended(client, client.submit(machine(clean, "lost")))
        assert job.last_error is not None
        assert (job.state, job.last_error.code) == (State.FAILED, "E_MIG_GUEST_BOOT_FAILED")
        assert "no boot loader" in job.last_error.message
        assert len(job.boot_attempts) == 1, "no bus helps where there is nothing to boot"
        kept = [path for path in left(clean) if not path.startswith("volumes/")]
        assert kept == [f"libvirt/screens/{job.id}.png"]
        assert [disk.volume is not None for disk in job.disks] == [True]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("delay_s", [0, 0.15, 1.5])
def test_killed_while_the_guest_lands_and_cancelled_it_leaves_nothing(clean: Path, delay_s: float) -> None:
    """The moment is drawn by the delay after the state was seen: the ledger must hold at each."""
    with halted(clean) as (process, client):
        job = client.submit(machine(clean, "killed"))
        until(lambda: client.migration(job.id).state == State.STARTING, 120)
        time.sleep(delay_s)
        process.kill()
        process.wait()
    with halted(clean) as (process, client):
        client.ask("POST", f"/migrations/{job.id}/cancel")
        # And killed again, while it may be sweeping.
        time.sleep(delay_s)
        process.kill()
        process.wait()
    with halted(clean) as (_, client):
        assert ended(client, job).state == State.CANCELLED
        assert left(clean) == []
