"""A service over a folder of its own, and the image of a guest that counts: what tests of instant starts have in common."""

import hashlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from synvirt.cli.client import Client
from synvirt.jobs.exports import holder
from synvirt.model.plan import MigrationPlan
from synvirt.sizes import MIB
from tests.real import guests
from tests.running import forked
from tests.running.processes import guests_of, until

SIZE = 96 * MIB
# Slow enough that there is a middle.
SLOWLY = {"bandwidth_bps": 3 * MIB}


@dataclass
class Site:
    """`before`: the disk as it was exported."""

    data_dir: Path
    image: Path
    before: Path
    environment: dict[str, str]
    process: "subprocess.Popen[bytes] | None" = None

    @contextmanager
    def service(self, *program: str) -> Iterator[Client]:
        """`program`: a module that runs it, and its first arguments."""
        log_file = self.data_dir.parent / "serve.log"
        with log_file.open("wb") as log:
            argv = [sys.executable, "-m", *(program or ("synvirt",))]
            argv += ["serve", "--data-dir", str(self.data_dir), "--listen", "127.0.0.1:0"]
            self.process = forked.Popen(argv, stdout=log, stderr=log, env=os.environ | self.environment)
        try:
            until(lambda: "SynVirt serves at" in log_file.read_text() or self.process.poll() is not None)  # type: ignore[union-attr]
            assert self.process.poll() is None, log_file.read_text()[-3000:]
            with Client.local(self.data_dir / "synvirt.sock") as client:
                yield client
        finally:
            self.process.terminate()
            self.process.wait(60)

    def plan(self, **fields: Any) -> MigrationPlan:
        ref = {"kind": "offline_host_path", "path": str(self.image)}
        defaults = {"source": {"Offline": "qcow2"}, "source_ref": ref, "mode": "Cold", "instant": True, "limits": SLOWLY}
        return MigrationPlan.model_validate(defaults | fields)

    def guests(self) -> list[int]:
        return guests_of(self.data_dir, *self._links())

    def _links(self) -> list[Path]:
        """By which the embedded driver reaches a folder whose path is too long for sockets."""
        links = [link for link in Path("/run").glob("sv-*") if link.is_symlink()]
        return [link for link in links if link.readlink().is_relative_to(self.data_dir)]

    def served(self, id_: UUID | str) -> Path:
        """By a job or a run."""
        return self.data_dir / "libvirt" / "instant" / str(id_) / "served"

    def check(self, volume: Path) -> None:
        counted = guests.counters(volume)
        assert counted == list(range(counted[0], counted[0] + len(counted))), "a write was lost"
        after = guests.SECTOR_BYTES * guests.COUNTERS.stop
        assert digest(volume, after) == digest(self.before, after)


def digest(image: Path, after: int = 0) -> str:
    """Of what lies there and behind: two disks take a third of the memory that a worker of pytest may."""
    with image.open("rb") as file:
        file.seek(after)
        return hashlib.file_digest(file, "sha256").hexdigest()


def a_site(tmp_path: Path) -> Iterator[Site]:
    """For a fixture: nothing of it runs on."""
    data_dir = tmp_path / "data"
    (data_dir / "imports").mkdir(parents=True)
    before = guests.boot_sector(tmp_path / "before.raw", guests.COUNTS, size=SIZE)
    with before.open("r+b") as file:
        file.seek(MIB)
        noise = random.Random(22)
        for _ in range(40):
            file.write(noise.randbytes(MIB))
    image = data_dir / "imports" / "counts.qcow2"
    subprocess.run(["qemu-img", "convert", "-O", "qcow2", str(before), str(image)], check=True)
    site = Site(data_dir, image, before, {"SYNVIRT_BOOT_ACTIVITY_S": "5", "SYNVIRT_REMOTE_ALLOWED_HOSTS": "127.0.0.1"})
    yield site
    for pid in site.guests():
        os.kill(pid, signal.SIGKILL)
    for folder in (data_dir / "libvirt" / "instant").glob("*/served"):
        if (process := holder(folder)) is not None:
            os.kill(process, signal.SIGKILL)
