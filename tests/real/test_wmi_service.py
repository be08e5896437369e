"""Hyper-V as an operator meets it: `synvirt serve` in a process of its own, the command line, a host of our own with real VHDX
on a real Samba; and the guest that was moved, booted here."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from synvirt.sample import build
from tests.fakes.hyperv.host import USER, FakeHost, hyperv_host
from tests.real.test_service import service
from tests.remote_servers import PASSWORD

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
OS_NAME = (
    '<INSTANCE CLASSNAME="Msvm_KvpExchangeDataItem"><PROPERTY NAME="Data" TYPE="string"><VALUE>Debian GNU/Linux 12</VALUE>'
    '</PROPERTY><PROPERTY NAME="Name" TYPE="string"><VALUE>OSName</VALUE></PROPERTY></INSTANCE>'
)
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
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in entry.read_bytes() and b"qemu-system" in entry.read_bytes():
                os.kill(int(entry.parent.name), signal.SIGKILL)
        except OSError:
            continue


def test_from_an_unknown_certificate_to_a_guest_that_runs_here(tmp_path: Path, host: FakeHost, data_dir: Path) -> None:
    sample = build(tmp_path / "sample", payload_mib=0, keep_raw=True)
    assert sample.raw is not None
    vm = host.hyperv.add_vm("linux", sample.raw.read_bytes())
    vm.generation, vm.extra = 1, {"kvp": [OS_NAME]}
    for disk in vm.disks:
        disk.bus = 0
        disk.files.checkpoint()

    def run(*arguments: str, typed: str = "", code: int = 0) -> str:
        argv = [sys.executable, "-m", "synvirt", "--data-dir", str(data_dir), *arguments]
        done = subprocess.run(argv, input=typed, capture_output=True, text=True, timeout=600, env=os.environ)
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
        assert "The source serves." in run("sources", "test", "hv", "--deep", "--vm", vm.id)
        assert host.snapshots(vm) == []
        assert "linux" in run("sources", "vms", "hv")
        host.hyperv.guest_writes(vm, GAP, b"written at the source")
        job = json.loads(run("import", "linux", "--source", "hv", "--mode", "warm", "--wait", "--json"))
        assert (job["state"], job["mode_effective"], job["last_error"]) == ("Completed", "Warm", None)
        assert [one["kind"] for one in job["passes"]] == ["full", "delta", "final"]
        with (data_dir / "volumes" / job["disks"][0]["volume"]).open("rb") as volume:
            volume.seek(GAP)
            assert volume.read(21) == b"written at the source"
    assert host.snapshots(vm) == []
    assert host.wsman.shells == {}
    assert PASSWORD not in (data_dir.parent / "serve.log").read_text()
    kept = [path for path in data_dir.rglob("*") if path.is_file() and path.stat().st_size < 8 << 20]
    assert [path for path in kept if PASSWORD.encode() in path.read_bytes()] == []
