"""A restore whose guest starts at once, whole: `synvirt serve`, libvirt, QEMU; the guest counts while it is copied, and every
process is killed with -9 meanwhile (see test_instant.py)."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from synvirt.backups.model import BackupRun
from synvirt.cli.client import Client
from synvirt.errors import Conflict
from synvirt.jobs.exports import holder
from synvirt.sizes import MIB
from tests.needs import need_root
from tests.real import guests
from tests.real.instant_site import SLOWLY, Site, a_site
from tests.running.processes import until, workers


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    yield from a_site(tmp_path)


@dataclass
class Restored:
    """A guest that was imported, never ran, was backed up, and is restored beside itself."""

    site: Site
    id: str = ""

    def begin(self, client: Client, **fields: Any) -> None:
        repository = self.site.data_dir.parent / "repository"
        repository.mkdir(exist_ok=True)
        job = client.submit(self.site.plan(instant=False, limits={}, target={"start": False, "name": "counts"}))
        until(lambda: client.migration(job.id).ended, 120)
        request: dict[str, Any] = {"name": "here", "kind": "local", "path": str(repository)}
        known = json.loads(client.ask("POST", "/backup/repositories", json=request))["id"]
        request = {"name": "nightly", "vm_ids": ["counts"], "repository_id": known}
        backup = json.loads(client.ask("POST", "/backup/jobs", json=request))["id"]
        made = json.loads(client.ask("POST", f"/backup/jobs/{backup}/run"))["id"]
        until(lambda: self._run(client, made).finished_at, 120)
        (point,) = self._run(client, made).restore_point_ids
        request = {"target": "new_domain", "name": "again", "start": True, "instant": True, **SLOWLY, **fields}
        self.id = json.loads(client.ask("POST", f"/backup/restore-points/{point}/restore", json=request))["id"]

    @staticmethod
    def _run(client: Client, run_id: str) -> BackupRun:
        return BackupRun.model_validate_json(client.ask("GET", f"/backup/runs/{run_id}"))

    def run(self, client: Client) -> BackupRun:
        return self._run(client, self.id)

    def state(self, client: Client) -> str | None:
        instant = self.run(client).instant
        return None if instant is None else instant.state

    def copying(self, client: Client) -> None:
        """Its guest runs, and its copy is in its middle."""

        def in_its_middle() -> bool:
            run = self.run(client)
            assert run.finished_at is None, run
            return run.instant is not None and run.instant.state == "running" and run.progress.bytes_done >= MIB

        until(in_its_middle, 120)

    def completed(self, client: Client) -> None:
        until(lambda: self.run(client).finished_at, 200)
        run = self.run(client)
        assert (run.status, run.error) == ("completed", None)
        assert run.instant is not None
        assert run.instant.state == "done"
        assert not self.served.parent.exists()

    def cancel(self, client: Client, rest: str = "") -> None:
        client.ask("POST", f"/backup/runs/{self.id}/cancel{rest}")

    @property
    def served(self) -> Path:
        return self.site.served(self.id)

    @property
    def volume(self) -> Path:
        (volume,) = self.site.data_dir.joinpath("volumes", self.id).glob("*.raw")
        return volume

    def check(self) -> None:
        """It goes on on its volume; then it is killed, and every number is there."""
        before = guests.counters(self.volume)
        until(lambda: guests.counters(self.volume)[0] > before[-1])
        (guest,) = self.site.guests()
        os.kill(guest, signal.SIGKILL)
        until(lambda: not self.site.guests())
        self.site.check(self.volume)


def _killed(site: Site) -> None:
    assert site.process is not None
    site.process.kill()
    site.process.wait()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_guest_runs_at_once_and_no_kill_loses_a_write(site: Site) -> None:
    restored = Restored(site)
    with site.service() as client:
        restored.begin(client)
        restored.copying(client)
        (guest,) = site.guests()
        assert site.process is not None
        os.kill(workers(site.process.pid)[0], signal.SIGKILL)
        exporter = holder(restored.served)
        assert exporter is not None
        os.kill(exporter, signal.SIGKILL)
        until(lambda: holder(restored.served) not in (None, exporter))
        exporter = holder(restored.served)
        _killed(site)
        assert site.guests() == [guest], "neither its guest"
        assert holder(restored.served) == exporter, "nor what serves it hangs on the service"
    with site.service() as client:
        restored.copying(client)
        with pytest.raises(Conflict, match="loses all that it wrote"):
            restored.cancel(client)
        restored.completed(client)
        assert site.guests() == [guest], "it never stopped"
        restored.check()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_repository_that_goes_away_holds_the_guest_and_it_goes_on(site: Site) -> None:
    restored, repository = Restored(site), site.data_dir.parent / "repository"
    with site.service() as client:
        restored.begin(client, bandwidth_bps=MIB)
        restored.copying(client)
        (guest,) = site.guests()
        _killed(site)
    exporter = holder(restored.served)
    assert exporter is not None
    repository.rename(repository.with_name("away"))
    os.kill(exporter, signal.SIGKILL)  # with all that it has in memory
    with site.service() as client:
        until(lambda: restored.run(client).error, 60)
        with pytest.raises(Conflict, match="loses all that it wrote"):
            restored.cancel(client)
        assert site.guests() == [guest]
        assert restored.volume.exists()
        repository.with_name("away").rename(repository)
        restored.completed(client)
        assert site.guests() == [guest], "it never stopped"
        restored.check()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_repository_that_is_mounted_anew_is_read_again_before_the_copy_is_complete(site: Site) -> None:
    """As after its server was away. The process that serves it may open only files of what was mounted when it began."""
    need_root("mount")
    restored, repository, kept = Restored(site), site.data_dir.parent / "repository", site.data_dir.parent / "kept"
    repository.mkdir()
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(repository)]
    subprocess.run(mount, check=True)
    try:
        with site.service() as client:
            restored.begin(client, bandwidth_bps=MIB // 2)
            restored.copying(client)
            (guest,) = site.guests()
            shutil.copytree(repository, kept)
            subprocess.run(["umount", "--lazy", repository], check=True)
            until(lambda: restored.state(client) == "waiting", 60)
            subprocess.run(mount, check=True)
            shutil.copytree(kept, repository, dirs_exist_ok=True)
            until(lambda: restored.state(client) != "waiting", 60)
            assert restored.state(client) == "running", "it does not wait for its volume"
            assert site.guests() == [guest], "it never stopped"
            restored.completed(client)
            restored.check()
    finally:
        subprocess.run(["umount", "--lazy", repository], check=False)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_cancel_that_is_meant_leaves_nothing(site: Site) -> None:
    restored = Restored(site)
    with site.service() as client:
        restored.begin(client)
        restored.copying(client)
        process = holder(restored.served)
        assert process is not None
        restored.cancel(client, "?guest_writes=lose")
        until(lambda: restored.run(client).finished_at, 60)
        assert restored.run(client).status == "cancelled"
    assert site.guests() == []
    assert not restored.served.parent.exists()
    assert not list(site.data_dir.joinpath("volumes", restored.id).glob("*"))
    assert not Path(f"/proc/{process}/exe").exists()
