"""Instant start, whole: `synvirt serve`, libvirt, QEMU; a guest that writes while it is copied, and kill -9 of every process.

The guest counts, and writes each number to the next of 32 sectors (guests.COUNTS): a write that was lost leaves a gap. It reads
all over its disk meanwhile.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from synvirt.cli.client import Client
from synvirt.errors import Conflict
from synvirt.jobs.exports import holder
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.plan import MigrationPlan
from synvirt.sizes import MIB
from tests import remote_servers as servers
from tests.processes import command_line, until, workers
from tests.real import guests

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
        said = self.data_dir.parent / "serve.log"
        with said.open("wb") as log:
            argv = [sys.executable, *(program or ("-m", "synvirt"))]
            argv += ["serve", "--data-dir", str(self.data_dir), "--listen", "127.0.0.1:0"]
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=os.environ | self.environment)
        try:
            until(lambda: "SynVirt serves at" in said.read_text() or self.process.poll() is not None)  # type: ignore[union-attr]
            assert self.process.poll() is None, said.read_text()[-3000:]
            with Client.local(self.data_dir / "synvirt.sock") as client:
                yield client
        finally:
            self.process.terminate()
            self.process.wait(60)

    def plan(self, **fields: Any) -> MigrationPlan:
        ref = {"kind": "offline_host_path", "path": str(self.image)}
        asked = {"source": {"Offline": "qcow2"}, "source_ref": ref, "mode": "Cold", "instant": True, "limits": SLOWLY}
        return MigrationPlan.model_validate(asked | fields)

    def guests(self) -> list[int]:
        found = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
        return [pid for pid in found if re.match(r"\S*qemu-system", command := command_line(pid)) and self._is_ours(command)]

    def _is_ours(self, command: str) -> bool:
        return str(self.data_dir) in command or any(str(link) in command for link in self._links())

    def _links(self) -> list[Path]:
        """By which the embedded driver reaches a folder whose path is too long for sockets."""
        links = [link for link in Path("/run").glob("sv-*") if link.is_symlink()]
        return [link for link in links if link.readlink().is_relative_to(self.data_dir)]

    def served(self, job: Migration) -> Path:
        return self.data_dir / "libvirt" / "instant" / str(job.id) / "served"

    def check(self, volume: Path) -> None:
        counted = guests.counters(volume)
        assert counted == list(range(counted[0], counted[0] + len(counted))), "a write was lost"
        after = guests.SECTOR_BYTES * guests.COUNTERS.stop
        assert volume.read_bytes()[after:] == self.before.read_bytes()[after:]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    data_dir = tmp_path / "data"
    (data_dir / "imports").mkdir(parents=True)
    before = guests.boot_sector(tmp_path / "before.raw", guests.COUNTS, size=SIZE)
    with before.open("r+b") as file:
        file.seek(MIB)
        file.write(random.Random(22).randbytes(40 * MIB))
    image = data_dir / "imports" / "counts.qcow2"
    subprocess.run(["qemu-img", "convert", "-O", "qcow2", str(before), str(image)], check=True)
    site = Site(data_dir, image, before, {"SYNVIRT_BOOT_ACTIVITY_S": "5", "SYNVIRT_REMOTE_ALLOWED_HOSTS": "127.0.0.1"})
    yield site
    for pid in site.guests():
        os.kill(pid, signal.SIGKILL)
    for folder in (data_dir / "libvirt" / "instant").glob("*/served"):
        if (process := holder(folder)) is not None:
            os.kill(process, signal.SIGKILL)


def _copying(client: Client, job: Migration, least: int = MIB) -> None:
    """Its guest was seen to run, and its copy is in its middle."""

    def in_its_middle() -> bool:
        now = client.migration(job.id)
        assert not now.ended, now.last_error
        runs = now.instant is not None and now.instant.state == "running" and now.boot_sign is not None
        return runs and now.progress.bytes_done >= least

    until(in_its_middle, 120)


def _volume(site: Site) -> Path:
    (volume,) = site.data_dir.joinpath("volumes").rglob("*.raw")
    return volume


def _completed(client: Client, job: Migration) -> Migration:
    until(lambda: client.migration(job.id).ended, 200)
    last = client.migration(job.id)
    assert last.state is State.COMPLETED, last.last_error
    assert last.instant is not None
    assert last.instant.state == "done"
    return last


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_guest_runs_at_once_and_no_kill_loses_a_write(site: Site) -> None:
    with site.service() as client:
        job = client.submit(site.plan())
        _copying(client, job)
        (guest,) = site.guests()
        assert site.process is not None
        os.kill(workers(site.process.pid)[0], signal.SIGKILL)
        exporter = holder(site.served(job))
        assert exporter is not None
        os.kill(exporter, signal.SIGKILL)
        until(lambda: holder(site.served(job)) not in (None, exporter))
        exporter = holder(site.served(job))
        site.process.kill()
        site.process.wait()
        assert site.guests() == [guest], "neither its guest"
        assert holder(site.served(job)) == exporter, "nor what serves it hangs on the service"
    with site.service() as client:
        _copying(client, job)
        with pytest.raises(Conflict, match="loses all that it wrote"):
            client.cancel(job.id)
        last = _completed(client, job)
        assert [visit.state for visit in last.history] == [State.QUEUED, State.COPYING_FULL, State.STARTING, State.COMPLETED]
        assert site.guests() == [guest], "it never stopped"
        assert not site.served(job).parent.exists()
        assert last.domain is not None
        assert "top.qcow2" not in last.domain.xml
        volume = _volume(site)
        before = guests.counters(volume)
        until(lambda: guests.counters(volume)[0] > before[-1])
        os.kill(guest, signal.SIGKILL)
        until(lambda: not site.guests())
        site.check(volume)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_service_that_is_killed_as_the_guest_moves_onto_its_volume(site: Site) -> None:
    for _ in range(2):
        with site.service() as client:
            job = client.submit(site.plan(limits={}, target={"identity": "new", "name": f"guest-{os.urandom(2).hex()}"}))
            until(lambda: client.migration(job.id).state is State.STARTING or client.migration(job.id).ended, 120)  # noqa: B023
            assert site.process is not None
            site.process.kill()
            site.process.wait()
        with site.service() as client:
            _completed(client, job)
            (guest,) = site.guests()
            volume = max(site.data_dir.joinpath("volumes").rglob("*.raw"), key=lambda path: path.stat().st_ctime)
            until(lambda: guests.counters(volume)[0] > 40)  # noqa: B023
            os.kill(guest, signal.SIGKILL)
            until(lambda: not site.guests())
            site.check(volume)


# The service, which is killed at its n-th pivot, before QEMU does it or after: the guest is paused then.
KILLED = """
import os, signal, libvirt
from synvirt.__main__ import main
pivot, done = libvirt.virDomain.blockJobAbort, []
def killed(*arguments):
    done.append(None)
    if len(done) < {nth} or "{when}" == "after":
        pivot(*arguments)
    if len(done) == {nth}:
        os.kill(os.getpid(), signal.SIGKILL)
libvirt.virDomain.blockJobAbort = killed
main()
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_service_that_is_killed_while_it_holds_the_guest(site: Site, nth: int, when: str) -> None:
    with site.service("-c", KILLED.format(nth=nth, when=when)) as client:
        job = client.submit(site.plan(limits={}))
        assert site.process is not None
        assert site.process.wait(200) == -signal.SIGKILL
    (guest,) = site.guests()
    layers = [_volume(site), *site.served(job).parent.glob("*.qcow2")]
    held = [layer.read_bytes() for layer in layers]
    time.sleep(1)  # it writes 20 times a second
    assert [layer.read_bytes() for layer in layers] == held, "it is paused"
    with site.service() as client:
        _completed(client, job)
        before = guests.counters(_volume(site))
        until(lambda: guests.counters(_volume(site))[0] > before[-1])
        assert site.guests() == [guest], "it never stopped"
        os.kill(guest, signal.SIGKILL)
        until(lambda: not site.guests())
        site.check(_volume(site))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_guest_that_is_killed_meanwhile_keeps_what_it_wrote(site: Site) -> None:
    with site.service() as client:
        job = client.submit(site.plan())
        _copying(client, job, least=8 * MIB)
        (guest,) = site.guests()
        os.kill(guest, signal.SIGKILL)
        _completed(client, job)
        assert site.guests() == [], "whoever ends a guest does not want it started"
        site.check(_volume(site))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_source_that_goes_away_holds_the_guest_and_it_goes_on(site: Site, tmp_path: Path) -> None:
    with servers.nginx(tmp_path / "nginx") as nginx, servers.wire(nginx.port) as wire:
        (nginx.folder / "counts.qcow2").write_bytes(site.image.read_bytes())
        ref = {"kind": "remote_url", "url": f"http://127.0.0.1:{wire.port}/open/counts.qcow2"}
        with site.service() as client:
            # Slower still: a copy is fetched ahead of, and what it has in memory already needs no source.
            job = client.submit(site.plan(source_ref=ref, limits={"bandwidth_bps": MIB}))
            _copying(client, job)
            (guest,) = site.guests()
            wire.refuse = True
            process = holder(site.served(job))
            assert process is not None
            os.kill(process, signal.SIGKILL)  # with all that it has in memory of the source
            until(lambda: _state(client, job) == "waiting", 180)
            assert site.guests() == [guest]
            wire.refuse = False
            until(lambda: _state(client, job) != "waiting", 180)
            _completed(client, job)
            assert site.guests() == [guest]
            os.kill(guest, signal.SIGKILL)
            until(lambda: not site.guests())
        site.check(_volume(site))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_cancel_that_is_meant_leaves_nothing(site: Site) -> None:
    with site.service() as client:
        job = client.submit(site.plan())
        _copying(client, job)
        process = holder(site.served(job))
        assert process is not None
        with pytest.raises(Conflict, match="loses all that it wrote"):
            client.cancel(job.id)
        client.cancel(job.id, lose_guest_writes=True)
        until(lambda: client.migration(job.id).ended, 60)
        last = client.migration(job.id)
    assert last.state is State.CANCELLED
    assert site.guests() == []
    assert not site.served(job).parent.exists()
    assert list(site.data_dir.joinpath("volumes").rglob("*.raw")) == []
    assert not Path(f"/proc/{process}/exe").exists()


def _state(client: Client, job: Migration) -> str:
    instant = client.migration(job.id).instant
    assert instant is not None
    return instant.state
