"""Hyper-V as an operator meets it: `synvirt serve` in a process of its own, the command line, a host of our own with real VHDX
on a real Samba; and the guest that was moved, booted here."""

import contextlib
import json
import os
import random
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from synvirt.model.kinds import Mode, State
from synvirt.model.plan import MigrationPlan
from tests.fakes.hyperv.host import EXPORTING, USER, FakeHost, hyperv_host
from tests.fakes.hyperv.model import OFF
from tests.guests import phony_windows
from tests.guests.conversions import need_conversions
from tests.holding import files_that_hold
from tests.real.guests import halting_linux
from tests.real.test_service import service
from tests.running import forked
from tests.running.processes import guests_of, until
from tests.servers.remote_servers import PASSWORD

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
KVP = (
    '<INSTANCE CLASSNAME="Msvm_KvpExchangeDataItem"><PROPERTY NAME="Data" TYPE="string"><VALUE>{}</VALUE></PROPERTY>'
    '<PROPERTY NAME="Name" TYPE="string"><VALUE>{}</VALUE></PROPERTY></INSTANCE>'
)
OS_NAME = KVP.format("Debian GNU/Linux 12", "OSName")
# Between the boot sector and the first partition: no file system has it.
GAP = 64 << 10


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FakeHost]:
    with hyperv_host(tmp_path / "hyperv") as running:
        yield running


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "data"
    yield folder
    # The embedded driver's guests outlive the service, as guests should: here nobody wants them.
    for pid in guests_of(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def asked(data_dir: Path, *arguments: str, typed: str = "") -> str:
    argv = [sys.executable, "-m", "synvirt", "--data-dir", str(data_dir), *arguments]
    done = forked.run(argv, input=typed, capture_output=True, text=True, timeout=600, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def added(data_dir: Path, host: FakeHost, **more: str) -> None:
    address = f"https://127.0.0.1:{host.port}"
    pin = host.certificate.fingerprint
    pairs = (f"{key}={value}" for key, value in host.access(**more).options.items() if key != "fingerprint_sha256")
    given = [part for pair in pairs for part in ("--option", pair)]
    user = ("--source-user", USER, "--fingerprint", pin)
    asked(data_dir, "sources", "add", "hv", address, "--kind", "wmi_api", *user, *given, typed=f"{PASSWORD}\n")


def test_a_windows_guest_is_moved_warm_by_exports_and_boots_with_its_drivers(
    tmp_path: Path, host: FakeHost, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NTFS, a registry that says Windows Server 2022, a boot record with its emergency console: the conversion's drivers are in
    its registry, and it says its prompt here. Hyper-V exports each snapshot, over a checkpoint, while the guest writes."""
    need_conversions(monkeypatch)
    raw = phony_windows.disk(tmp_path / "windows.raw", tmp_path, boots=True)
    monkeypatch.setenv("SYNVIRT_VIRTIO_WIN_ISO", str(phony_windows.driver_image(tmp_path / "virtio.iso", tmp_path)))
    vm = host.hyperv.add_vm("windows", raw)
    raw.unlink()
    items = (("OSName", "Windows Server 2022 Standard"), ("OSVersion", "10.0.20348"))
    vm.generation, vm.extra = 1, {"kvp": [KVP.format(value, name) for name, value in items]}
    vm.disks[0].bus = 0
    vm.disks[0].files.checkpoint()
    plan: dict[str, Any] = {
        "source": {"Live": "wmi_api"}, "mode": "Warm", "warm": {"cutover": "manual", "interval_s": 3600},
    }  # fmt: skip
    written = random.Random(7).randbytes(512 << 10)
    with service(data_dir) as (_, client):
        added(data_dir, host, **EXPORTING)
        source = json.loads(asked(data_dir, "sources", "list", "--json"))["items"][0]["id"]
        plan |= {"source_ref": {"kind": "live_vm", "source_id": source, "vm_id": vm.id}}
        job = client.submit(MigrationPlan.model_validate(plan))
        until(lambda: client.migration(job.id).state is State.DELTA_SYNCING or client.migration(job.id).ended, 240)
        assert host.hyperv.guest_writes(vm, GAP, written)
        client.ask("POST", f"/migrations/{job.id}/cutover")
        until(lambda: client.migration(job.id).ended, 480)
        job = client.migration(job.id)
    assert (job.state, job.mode_effective) == (State.COMPLETED, Mode.WARM), job.last_error
    assert job.boot_sign
    assert job.conversion is not None
    assert any("virtio drivers installed" in one.text for one in job.conversion.messages)
    assert (host.called("export") > 1, host.snapshots(vm), host.wsman.shells, vm.state) == (True, [], {}, OFF)
    assert State.V2V_PROCESSING in [visit.state for visit in job.history]
    assert not list((data_dir / "conversions").iterdir())
    volume = data_dir / "volumes" / str(job.disks[0].volume)
    with volume.open("rb") as file:
        file.seek(GAP)
        assert file.read(len(written)) == written
    phony_windows.assert_converted(volume, tmp_path)


@pytest.mark.parametrize("way", ["in_place", "export"])
def test_a_killed_service_goes_on_and_leaves_nothing_on_the_host(
    tmp_path: Path, host: FakeHost, data_dir: Path, way: str
) -> None:
    """kill -9 in the first pass and in a later one: snapshot, reference point, export and our line in the notes are found."""
    vm = host.hyperv.add_vm("busy", random.Random(5).randbytes(24 << 20))
    options = EXPORTING if way == "export" else {"read_by": way}
    plan = {
        "source": {"Live": "wmi_api"}, "mode": "Warm", "target": {"start": False},
        "limits": {"bandwidth_bps": 12 << 20}, "warm": {"cutover": "manual", "interval_s": 3600},
    }  # fmt: skip
    with service(data_dir) as (process, client):
        added(data_dir, host, **options)
        source = json.loads(asked(data_dir, "sources", "list", "--json"))["items"][0]["id"]
        plan |= {"source_ref": {"kind": "live_vm", "source_id": source, "vm_id": vm.id}}
        job = client.submit(MigrationPlan.model_validate(plan))
        until(lambda: client.migration(job.id).progress.bytes_done > 0, 240)
        assert len(vm.snapshots) == 1
        process.kill()
        process.wait()
    host.hyperv.guest_writes(vm, 12_345_678, b"written while nobody looked")
    with service(data_dir) as (process, client):
        until(lambda: vm.points and client.migration(job.id).state is State.DELTA_SYNCING, 240)
        for number in range(12):
            host.hyperv.guest_writes(vm, number << 21, random.Random(-number).randbytes(1 << 20))
        client.ask("POST", f"/migrations/{job.id}/cutover")
        until(lambda: len(vm.snapshots) == 1 or vm.state == OFF, 240)
        process.kill()
        process.wait()
    with service(data_dir) as (_, client):
        until(lambda: client.migration(job.id).ended, 240)
        last = client.migration(job.id)
        assert last.state is State.COMPLETED, last.last_error
        content = (data_dir / "volumes" / str(last.disks[0].volume)).read_bytes()
    assert content == host.hyperv.content(vm)
    assert (host.snapshots(vm), vm.state) == ([], OFF)


def test_from_an_unknown_certificate_to_a_guest_that_runs_here(tmp_path: Path, host: FakeHost, data_dir: Path) -> None:
    vm = host.hyperv.add_vm("linux", halting_linux(tmp_path / "linux.raw"))
    vm.generation, vm.extra = 1, {"kvp": [OS_NAME]}
    for disk in vm.disks:
        disk.bus = 0
        disk.files.checkpoint()

    def run(*arguments: str, typed: str = "", code: int = 0) -> str:
        argv = [sys.executable, "-m", "synvirt", "--data-dir", str(data_dir), *arguments]
        done = forked.run(argv, input=typed, capture_output=True, text=True, timeout=600, env=os.environ)
        assert done.returncode == code, done.stdout + done.stderr
        assert PASSWORD not in done.stdout + done.stderr
        return done.stdout

    options = {key: str(value) for key, value in host.access().options.items() if key != "fingerprint_sha256"}
    given = [part for key, value in options.items() for part in ("--option", f"{key}={value}")]
    with service(data_dir):
        address = f"https://127.0.0.1:{host.port}"
        run("sources", "add", "hv", address, "--kind", "wmi_api", "--source-user", USER, *given, typed=f"{PASSWORD}\n")
        first: dict[str, Any] = json.loads(run("sources", "test", "hv", "--json", code=1))
        shown = first["checks"][-1]
        assert (shown["name"], shown["ok"]) == ("certificate", False)
        assert host.wsman.calls == []  # a stranger gets no password
        fingerprint = re.findall(r"(?:[0-9A-F]{2}:){31}[0-9A-F]{2}", shown["hint"])[0]
        run("sources", "change", "hv", "--fingerprint", fingerprint)
        assert "The source can be used." in run("sources", "test", "hv", "--deep", "--vm", vm.id)
        assert host.snapshots(vm) == []
        assert "linux" in run("sources", "vms", "hv")
        host.hyperv.guest_writes(vm, GAP, b"written at the source")
        job = json.loads(run("import", "linux", "--source", "hv", "--mode", "warm", "--wait", "--json"))
        assert (job["state"], job["mode_effective"], job["last_error"]) == ("Completed", "Warm", None)
        assert job["boot_sign"] == "console"
        assert [one["kind"] for one in job["passes"]] == ["full", "delta", "final"]
        with (data_dir / "volumes" / job["disks"][0]["volume"]).open("rb") as volume:
            volume.seek(GAP)
            assert volume.read(21) == b"written at the source"
    assert host.snapshots(vm) == []
    assert host.wsman.shells == {}
    assert PASSWORD not in (data_dir.parent / "serve.log").read_text()
    assert files_that_hold(data_dir, PASSWORD) == []
