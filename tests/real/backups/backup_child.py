"""A process that rules a guest of an embedded driver, and backs it up: `python -m tests.real.backups.backup_child DATA_DIR`.

The embedded driver belongs to one process at a time, and the guest outlives it: so one guest serves for runs, for a service
that is killed, and for the next. Actions come as lines of JSON on stdin, [name, argument …]; each is answered with a line.
"""

import base64
import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from synvirt.backups.model import BackupJobRequest, BackupRepositoryRequest
from synvirt.backups.repositories import Repositories
from synvirt.backups.service import Backups
from synvirt.backups.sources import guest as source
from synvirt.backups.sources.made import MadeRows
from synvirt.backups.sources.ways import sources_of
from synvirt.backups.working import Working
from synvirt.kvm import agent
from synvirt.kvm.connection import Connection, load
from synvirt.live.libvirt import backup as jobs
from synvirt.repository.disk import PointReader
from synvirt.settings import Settings
from synvirt.store import Store
from tests.fakes.backups import ended
from tests.real.killed_as_recorded import kill_at

NAME = "backed-up"
# Time for a guest that boots beside other tests, and is emulated.
BOOT_TIMEOUT_S = 240
XML = """<domain type='qemu'><name>{name}</name><memory unit='MiB'>256</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os><features><acpi/></features><devices>
<disk type='file'><driver name='qemu' type='qcow2'/><source file='{folder}/system.qcow2'/><target dev='vda'/></disk>
<disk type='file'><driver name='qemu' type='raw'/><source file='{folder}/data.img'/><target dev='vdb'/></disk>
<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
<memballoon model='none'/></devices></domain>"""


def say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def stay(at: str) -> None:
    say(at)
    time.sleep(600)


class Child:
    def __init__(self, data_dir: Path) -> None:
        self.data_dir, self.settings = data_dir, Settings(data_dir=data_dir)
        self.connection = Connection(self.settings.hypervisor_uri, lambda: None)
        self.name = NAME

    @property
    def domain(self) -> Any:
        return self.connection.use().lookupByName(self.name)

    def rule(self, name: str) -> None:
        """Another guest from here on."""
        self.name = name
        say(self._answering().UUIDString())

    def _answering(self) -> Any:
        """The domain, once its agent does: after each opening of the driver it is connected again."""
        domain, until = self.domain, time.monotonic() + BOOT_TIMEOUT_S
        while not agent.answers(domain):
            assert time.monotonic() < until, "the guest's agent never answered"
            time.sleep(0.1)
        return domain

    def boot(self) -> None:
        self.connection.use().defineXML(XML.format(name=NAME, folder=self.data_dir)).create()
        say(self._answering().UUIDString())

    def status(self) -> None:
        say(agent.ask(self._answering(), "guest-fsfreeze-status"))

    def execute(self, script: str) -> None:
        say(self._executed(script))

    def _executed(self, script: str) -> str:
        """By a shell in the guest; what it prints."""
        domain = self._answering()
        argv = {"path": "/bin/busybox", "arg": ["sh", "-c", script], "capture-output": True}
        started: Any = agent.ask(domain, "guest-exec", **argv)
        while not (reported := cast("dict[str, Any]", agent.ask(domain, "guest-exec-status", pid=started["pid"])))["exited"]:
            time.sleep(0.05)
        return base64.b64decode(reported.get("out-data", "")).decode().strip()

    def run(self, quiesce: str, at: str = "", reference: str = "", meanwhile: str = "") -> None:
        """One run. `at`: it says so and stays there, «frozen» while the guest is, «reading» when its disks are about to be
        read; «beginning»: it is killed as libvirt notes that the backup begins, and says nothing. `reference`: copies of the
        disks as they are at the moment, into that folder. `meanwhile`: a script that the guest has done when they are about to
        be read."""
        begin, carry_out = jobs.begin, Working.carry_out

        def begun(*args: Any, **kwargs: Any) -> None:
            if at == "frozen":
                stay(at)
            if at == "beginning":
                kill_at(1, self.data_dir / "libvirt/run/qemu" / f"{self.name}.xml")
            while at == "slow" and agent.ask(self.domain, "guest-fsfreeze-status") == "frozen":
                time.sleep(0.2)
            begin(*args, **kwargs)
            if reference:
                self._copy(Path(reference))

        def reading(*args: Any) -> None:
            if at == "reading":
                stay(at)
            if meanwhile:
                self._executed(meanwhile)
            carry_out(*args)

        jobs.begin = begun
        Working.carry_out = reading  # type: ignore[method-assign, assignment]
        with self._backups() as backups:
            run = ended(backups, backups.run_job(self._job(backups, quiesce)).id)
            same = [self._is_same(backups, point, Path(reference)) for point in run.restore_point_ids if reference]
            points = [backups.points.get(point).model_dump(mode="json") for point in run.restore_point_ids]
        jobs.begin = begin
        Working.carry_out = carry_out  # type: ignore[method-assign]
        say({"run": run.model_dump(mode="json"), "same": same, "points": points})

    def _is_same(self, backups: Backups, point_id: UUID, reference: Path) -> bool:
        repository = backups.repositories.opened(backups.points.get(point_id).repository_id)
        manifest = repository.manifest(point_id)
        for named, disk in zip(manifest.sealed.disks, manifest.shown.disks, strict=True):
            content = bytearray(disk.size_bytes)
            PointReader(repository, disk).read_into(0, memoryview(content))
            if (reference / named.target).read_bytes() != content:
                return False
        return True

    def left(self) -> None:
        """What is there beside the guest itself."""
        domain, store = self.domain, Store(self.settings.store_url)
        ledger = MadeRows(store.backups.ledger, host=self.settings.host_id)
        running = jobs.running(domain)
        found = {
            "states": [made.state for made in ledger.all()],
            "checkpoints": [one.getName() for one in domain.listAllCheckpoints(0)],
            "job": None if running is None else running.snapshot,
            "scratch": [path.name for path in (self.data_dir / "libvirt/backup").rglob("*") if not path.is_dir()],
        }
        store.close()
        say(found)

    def start(self) -> None:
        """As a service does: what it left undone is swept, and the run that was under way goes on. How that ended."""
        with self._backups() as backups:
            newest, _ = backups.runs.page(limit=1, cursor=None)
            run = ended(backups, newest[0].id)
        say({"status": run.status, "error": run.error})

    def forget_checkpoint(self) -> None:
        for one in self.domain.listAllCheckpoints(0):
            one.delete(0)
        say("forgotten")

    def off(self) -> None:
        with contextlib.suppress(load().libvirtError):
            self.domain.destroy()
        say("off")

    @contextlib.contextmanager
    def _backups(self) -> Iterator[Backups]:
        store, host = Store(self.settings.store_url), self.settings.host_id
        self.settings.keyring_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with source.running(sources_of(self.connection, store.backups, host=host)) as sources:
            caches = self.data_dir / "backups"
            repositories = Repositories(store.backups, host=host, keyring=self.settings.keyring_dir, caches=caches)
            backups = Backups(
                store.backups, repositories, host=host, open_guest=sources.open, exports=self.data_dir / "exports"
            )
            backups.start()
            yield backups
            backups.close()
        store.close()

    def _job(self, backups: Backups, quiesce: str) -> UUID:
        known, _ = backups.jobs(limit=1, cursor=None)
        if known:
            return known[0].id
        folder = self.data_dir / "repository"
        folder.mkdir()
        repository = backups.add_repository(BackupRepositoryRequest(name="here", kind="local", path=str(folder)))
        request = {"name": "nightly", "vm_ids": (NAME,), "repository_id": repository.id, "quiesce": quiesce}
        return backups.add_job(BackupJobRequest.model_validate(request)).id

    def _copy(self, folder: Path) -> None:
        """Nobody writes now: what QEMU has in memory goes to the images, and they are as its guest sees them."""
        import libvirt_qemu

        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        blocks = json.loads(libvirt_qemu.qemuMonitorCommand(self.domain, '{"execute":"query-block"}', 0))["return"]
        for block in blocks:
            as_person = libvirt_qemu.VIR_DOMAIN_QEMU_MONITOR_COMMAND_HMP
            libvirt_qemu.qemuMonitorCommand(self.domain, f'qemu-io -d {block["qdev"]} "flush"', as_person)
        for target, name in (("vda", "system.qcow2"), ("vdb", "data.img")):
            kind = "raw" if name.endswith(".img") else "qcow2"
            argv = ["qemu-img", "convert", "-U", "-f", kind, "-O", "raw"]
            subprocess.run([*argv, str(self.data_dir / name), str(folder / target)], check=True)


def main() -> None:
    child = Child(Path(sys.argv[1]))
    for line in sys.stdin:
        action, *rest = json.loads(line)
        getattr(child, action)(*rest)


if __name__ == "__main__":
    main()
