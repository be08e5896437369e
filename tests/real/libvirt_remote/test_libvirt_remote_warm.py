"""A guest that keeps writing is moved warm from one libvirt to another, by the service as it is run: nothing it wrote is lost.

The guest writes numbered lines, each with the SHA-256 of the line before, and syncs each: what it has on disk is a chain that
shows where it was cut. Beside that it overwrites blocks of a file, so that deltas have something to carry.
"""

import asyncio
import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from synvirt.errors import SnapshotFailed
from synvirt.live.libvirt.adapter import libvirt_remote
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.machine import VmManifest
from synvirt.model.plan import MigrationPlan
from synvirt.model.sources import Source, SourceTest
from synvirt.sample import ID_PATH, Sample
from synvirt.sizes import MIB
from tests.needs import need
from tests.real.libvirt_remote.gone_on import started
from tests.real.test_service import _guests, service
from tests.running import forked
from tests.servers.libvirt_lab import LibvirtLab, lab, until

BOOT_TIMEOUT_S = 240
# One and a part of the one before.
LINE_BYTES = 100
DELTA_BYTES = 24 * MIB

# A line or two a second, and 256 KiB of other blocks with each: each costs an emulated guest a twentieth of a second.
WRITER = """\
export PATH=/bin; i=0; line=begin
while :; do
    i=$((i + 1)); line="$(echo -n "$line" | sha256sum)"; line="$i ${line%% *}"; echo "$line" >> /chain
    dd if=/dev/urandom of=/churn bs=64k count=4 seek=$((i % 64 * 4)) conv=notrunc 2>/dev/null
    sync; usleep 600000
done
"""


@pytest.fixture(scope="module")
def host() -> Iterator[LibvirtLab]:
    with lab(boots=True) as running:
        yield running


class Guest:
    """The sample, running on its old host."""

    # Its agent's handle of what the guest writes.
    _chain: int | None = None

    def __init__(self, host: LibvirtLab, sample: Sample, cards: str = "") -> None:
        self.domain = started(host, sample, cards, self._until_agent)
        self._until_agent(self.domain)

    def _until_agent(self, domain: Any) -> None:
        self.domain = domain
        until(lambda: self.ask("guest-ping") is not None, BOOT_TIMEOUT_S)

    def ask(self, command: str, **arguments: object) -> Any | None:
        """None, where the agent does not answer."""
        import libvirt
        import libvirt_qemu

        try:
            question = json.dumps({"execute": command, "arguments": arguments})
            return json.loads(libvirt_qemu.qemuAgentCommand(self.domain, question, 20, 0))["return"]
        except (libvirt.libvirtError, KeyError):
            return None

    def run(self, *argv: str, wait: bool = True) -> str:
        """What it prints. A command that is waited for may be run again, where the agent does not answer."""
        path, *rest = argv
        started = None
        for _ in range(3 if wait else 1):
            # libvirt gives it five seconds to get back in step after a command that took too long, a busy guest takes more.
            until(lambda: self.ask("guest-ping") is not None, BOOT_TIMEOUT_S)
            started = self.ask("guest-exec", path=path, arg=rest, **{"capture-output": wait})
            if started is not None:
                break
        assert started is not None
        while wait:
            status = self.ask("guest-exec-status", pid=started["pid"])
            if status is None:
                break
            if status["exited"]:
                return base64.b64decode(status.get("out-data", "")).decode()
            time.sleep(0.05)
        return ""

    def lines(self) -> int:
        """How many lines are on its disk for sure: each was synced before the next was begun. Its agent itself reads them: a
        program that it starts costs an emulated guest a tenth of a second, and this is asked all the time."""
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while (found := self.lines_now()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return found

    def lines_now(self) -> int | None:
        """None, where the agent does not answer, or nothing was written yet."""
        if self._chain is None:
            self._chain = self.ask("guest-file-open", path="/chain")
        if self._chain is None:
            return None
        # The file is there before its first line.
        end = self.ask("guest-file-seek", handle=self._chain, offset=0, whence="end") or {"position": 0}
        back = -min(end["position"], LINE_BYTES)
        if back == 0 or self.ask("guest-file-seek", handle=self._chain, offset=back, whence="end") is None:
            return None
        read = self.ask("guest-file-read", handle=self._chain, count=LINE_BYTES)
        return None if read is None else int(base64.b64decode(read["buf-b64"]).splitlines()[-1].split()[0]) - 1


class Witness:
    """Asks the guest on its old host how far it has come, until it answers no more."""

    def __init__(self, guest: Guest) -> None:
        self.seen = 0
        self._guest, self._stopped = guest, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Witness":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(30)

    def _watch(self) -> None:
        while not self._stopped.wait(0.5):
            self.seen = max(self.seen, self._guest.lines_now() or 0)


def read_guest(data_dir: Path, uuid: str, path: str) -> str:
    argv = [sys.executable, "-m", "tests.real.hypervisor.guest_child", str(data_dir), "read", uuid, path]
    done = forked.run(argv, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_chain(text: str) -> int:
    """The number of its lines; each follows from the one before."""
    before = "begin"
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        assert line == f"{number} {hashlib.sha256(before.encode()).hexdigest()}"
        before = line
    return len(lines)


def register(client: Any, host: LibvirtLab, transport: str) -> Source:
    access = host.access(transport, quiesce="try", shutdown_timeout_s=60)
    request = {
        "name": f"the old host by {transport}",
        "kind": "libvirt_remote",
        "endpoint": access.endpoint,
        "credentials": dict(access.credentials),
        "options": dict(access.options),
    }
    return Source.model_validate_json(client.ask("POST", "/sources", json=request))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["ssh"])
def test_a_guest_that_keeps_writing_is_moved_warm(
    host: LibvirtLab, sample: Sample, tmp_path: Path, transport: str, record_property: Callable[[str, object], None]
) -> None:
    guest, data_dir = Guest(host, sample), tmp_path / "data"
    vm_id = guest.domain.UUIDString()
    guest.run("/bin/busybox", "sh", "-c", WRITER, wait=False)
    until(lambda: guest.lines() > 3)
    try:
        with service(data_dir) as (_, client):
            source = register(client, host, transport)
            tested = SourceTest.model_validate_json(client.ask("POST", f"/sources/{source.id}/test", params={"deep": True}))
            assert tested.ok, tested.checks
            manifest = VmManifest.model_validate_json(client.ask("GET", f"/sources/{source.id}/vms/{vm_id}"))
            assert (manifest.cbt_reason_without(["vdb"]), manifest.guest_os.family) == (None, "linux")
            plan = {
                "source": {"Live": "libvirt_remote"},
                "source_ref": {"kind": "live_vm", "source_id": str(source.id), "vm_id": vm_id},
                "mode": "Warm",
                "skip_disks": ["vdb"],
                "warm": {"delta_threshold_bytes": DELTA_BYTES, "max_passes": 8},
            }
            with Witness(guest) as witness:
                job = client.submit(MigrationPlan.model_validate(plan))
                until(lambda: client.migration(job.id).ended, 600)
                job = client.migration(job.id)
            assert job.state == State.COMPLETED, job.last_error
            check_job(job, sample)
            record_property("downtime_s", job.downtime_s)
            print(f"downtime {job.downtime_s} s; {job.forecast}; {job.passes}")
            assert host.snapshots(guest.domain) == []
            assert not guest.domain.isActive()
            assert "migrated to" in guest.domain.XMLDesc(0)
        assert job.domain is not None
        assert read_guest(data_dir, job.domain.uuid, ID_PATH).strip() == sample.id
        arrived = check_chain(read_guest(data_dir, job.domain.uuid, "/chain"))
        assert witness.seen > 3
        assert arrived >= witness.seen
    finally:
        for pid in _guests(data_dir):
            subprocess.run(["kill", "-9", str(pid)], check=False)


def check_job(job: Migration, sample: Sample) -> None:
    assert job.mode_effective == "Warm"
    assert job.last_error is None
    assert job.boot_sign == "agent"
    assert [one.kind for one in job.passes][:2] == ["full", "delta"]
    assert job.passes[-1].kind == "final"
    assert all(0 < one.bytes < sample.capacity_bytes for one in job.passes)
    assert job.downtime_s is not None
    assert job.forecast is not None
    assert job.forecast.change_rate_bps > 0


_HANGS = """\
import asyncio, json, sys, time
from synvirt.live import SourceAccess
from synvirt.live.libvirt import backup
from synvirt.live.libvirt.adapter import libvirt_remote
backup.begin = lambda *_, **__: time.sleep(100)
async def hang():
    given = json.loads(sys.stdin.readline())
    adapter = libvirt_remote(SourceAccess(given["endpoint"], given["credentials"], given["options"]))
    await adapter.connect()
    await adapter.snapshot(given["vm_id"], "synvirt-frozen-1")
asyncio.run(hang())
"""


def check_a_killed_service_leaves_it_thawed(host: LibvirtLab, guest: Guest) -> None:
    """kill -9 in the one moment in which its file systems stand still."""
    access = host.access("ssh", quiesce="require")
    given = {
        "endpoint": access.endpoint,
        "credentials": dict(access.credentials),
        "options": dict(access.options),
        "vm_id": guest.domain.UUIDString(),
    }
    with subprocess.Popen([sys.executable, "-c", _HANGS], stdin=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        child.stdin.write(json.dumps(given) + "\n")
        child.stdin.flush()
        until(lambda: guest.ask("guest-fsfreeze-status") == "frozen")
        child.kill()
    until(lambda: guest.ask("guest-fsfreeze-status") == "thawed")
    assert guest.run("/bin/busybox", "sh", "-c", "echo alive > /written && /bin/busybox cat /written") == "alive\n"


@contextmanager
def key_in_an_agent(host: LibvirtLab, folder: Path) -> Iterator[str]:
    """The socket of an ssh-agent that holds the key which the host lets in."""
    address = folder / "agent"
    with subprocess.Popen([need("ssh-agent", "openssh-client"), "-D", "-a", address], stdout=subprocess.DEVNULL) as agent:
        try:
            until(address.is_socket)
            environment = {**os.environ, "SSH_AUTH_SOCK": str(address)}
            subprocess.run(["ssh-add", "-q", host.folder / "ssh/client"], env=environment, check=True)
            yield str(address)
        finally:
            agent.kill()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_guest_is_still_for_a_moment_only_though_its_service_is_killed(
    host: LibvirtLab, sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It thaws though its backup does not begin; and a guest without an agent is refused where quiescing is required. The key
    is the service's user's: the process that freezes must find it as well."""
    guest = Guest(host, sample)
    vm_id = guest.domain.UUIDString()

    def take(scratch_dir: str, domain_id: str) -> None:
        async def snapshot() -> None:
            adapter = libvirt_remote(host.access("ssh", credentials={}, quiesce="require", scratch_dir=scratch_dir))
            try:
                await adapter.connect()
                await adapter.snapshot(domain_id, "synvirt-still-1")
                assert guest.ask("guest-fsfreeze-status") == "thawed"
                await adapter.cleanup(domain_id, "synvirt-still-1")
            finally:
                await adapter.close()

        asyncio.run(snapshot())

    silent = host.domain(host.disk("8M"))
    silent.create()
    with key_in_an_agent(host, tmp_path) as address:
        monkeypatch.setenv("SSH_AUTH_SOCK", address)
        # It has much to write out first, to a slow disk.
        guest.domain.setBlockIoTune("vda", {"write_bytes_sec": 2 * MIB})
        guest.run("/bin/busybox", "dd", "if=/dev/zero", "of=/slow", "bs=1M", "count=14")
        take(str(host.folder / "scratch"), vm_id)
        guest.domain.setBlockIoTune("vda", {"write_bytes_sec": 0})
        with pytest.raises(SnapshotFailed, match="cannot be read"):
            take("/proc/synvirt", vm_id)
        assert guest.ask("guest-fsfreeze-status") == "thawed"
        with pytest.raises(SnapshotFailed, match="cannot be quiesced"):
            take(str(host.folder / "scratch"), silent.UUIDString())
    check_a_killed_service_leaves_it_thawed(host, guest)
