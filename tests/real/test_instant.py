"""Instant start, whole: `synvirt serve`, libvirt, QEMU; a guest that writes while it is copied, and kill -9 of every process.

The guest counts, and writes each number to the next of 32 sectors (guests.COUNTS): a write that was lost leaves a gap. It reads
all over its disk meanwhile.
"""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from synvirt.cli.client import Client
from synvirt.errors import Conflict
from synvirt.jobs.exports import holder
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.sizes import MIB
from tests.real import guests
from tests.real.instant_site import Site, a_site, digest
from tests.running.processes import until, workers
from tests.servers import remote_servers as servers


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    yield from a_site(tmp_path)


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
        exporter = holder(site.served(job.id))
        assert exporter is not None
        os.kill(exporter, signal.SIGKILL)
        until(lambda: holder(site.served(job.id)) not in (None, exporter))
        exporter = holder(site.served(job.id))
        site.process.kill()
        site.process.wait()
        assert site.guests() == [guest], "neither its guest"
        assert holder(site.served(job.id)) == exporter, "nor what serves it hangs on the service"
    with site.service() as client:
        _copying(client, job)
        with pytest.raises(Conflict, match="loses all that it wrote"):
            client.cancel(job.id)
        last = _completed(client, job)
        assert [visit.state for visit in last.history] == [State.QUEUED, State.COPYING_FULL, State.STARTING, State.COMPLETED]
        assert site.guests() == [guest], "it never stopped"
        assert not site.served(job.id).parent.exists()
        assert last.domain is not None
        assert "top.qcow2" not in last.domain.xml
        volume = _volume(site)
        before = guests.counters(volume)
        until(lambda: guests.counters(volume)[0] > before[-1])
        os.kill(guest, signal.SIGKILL)
        until(lambda: not site.guests())
        site.check(volume)


# There are 24 with libvirt 9.0: two for the begin and ten for the end of each move. It cannot read the 8th and the 20th itself.
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("nth", [1, 6, 8, 13, 19, 20])
def test_a_service_that_is_killed_as_the_guest_moves_onto_its_volume(site: Site, nth: int) -> None:
    """At the n-th record of the guest that libvirt makes meanwhile."""
    with site.service("tests.real.killed_as_recorded", str(nth)) as client:
        job = client.submit(site.plan(limits={}))
        assert site.process is not None
        assert site.process.wait(200) == -signal.SIGKILL
    (guest,) = site.guests()
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
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_service_that_is_killed_while_it_holds_the_guest(site: Site, nth: int, when: str) -> None:
    with site.service("tests.real.killed_at_pivot", str(nth), when) as client:
        job = client.submit(site.plan(limits={}))
        assert site.process is not None
        assert site.process.wait(200) == -signal.SIGKILL
    (guest,) = site.guests()
    layers = [_volume(site), *site.served(job.id).parent.glob("*.qcow2")]
    held = [digest(layer) for layer in layers]
    time.sleep(1)  # it writes some 15 times a second
    assert [digest(layer) for layer in layers] == held, "it is paused"
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
def test_a_service_that_is_ended_while_it_holds_the_guest_lets_it_go_first(site: Site) -> None:
    """It may not be started again for hours."""
    with site.service("tests.real.killed_at_pivot", "1", "ended") as client:
        job = client.submit(site.plan(limits={}))
        assert site.process is not None
        assert site.process.wait(200) == 0
    (guest,) = site.guests()
    layers = [_volume(site), *site.served(job.id).parent.glob("*.qcow2")]
    held = [digest(layer) for layer in layers]
    until(lambda: [digest(layer) for layer in layers] != held)
    with site.service() as client:
        _completed(client, job)
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
        shutil.copyfile(site.image, nginx.folder / "counts.qcow2")
        ref = {"kind": "remote_url", "url": f"http://127.0.0.1:{wire.port}/open/counts.qcow2"}
        with site.service() as client:
            # Slower still: a copy is fetched ahead of, and what it has in memory already needs no source.
            job = client.submit(site.plan(source_ref=ref, limits={"bandwidth_bps": MIB}))
            _copying(client, job)
            (guest,) = site.guests()
            wire.refuse = True
            process = holder(site.served(job.id))
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
        process = holder(site.served(job.id))
        assert process is not None
        with pytest.raises(Conflict, match="loses all that it wrote"):
            client.cancel(job.id)
        client.cancel(job.id, lose_guest_writes=True)
        until(lambda: client.migration(job.id).ended, 60)
        last = client.migration(job.id)
    assert last.state is State.CANCELLED
    assert site.guests() == []
    assert not site.served(job.id).parent.exists()
    assert list(site.data_dir.joinpath("volumes").rglob("*.raw")) == []
    assert not Path(f"/proc/{process}/exe").exists()


def _state(client: Client, job: Migration) -> str:
    instant = client.migration(job.id).instant
    assert instant is not None
    return instant.state
