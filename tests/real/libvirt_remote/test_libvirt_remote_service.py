"""The service as it is run, with other libvirt hosts as its sources: each transport, kill -9, cancel, the command line."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from synvirt.cli.client import Client
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.plan import MigrationPlan
from synvirt.model.sources import Source
from synvirt.sizes import MIB
from tests.real.test_service import service, volumes
from tests.running import forked
from tests.servers.libvirt_lab import LibvirtLab, lab, until


@pytest.fixture(scope="module")
def host() -> Iterator[LibvirtLab]:
    with lab(boots=True) as running:
        yield running


def register(client: Client, host: LibvirtLab, transport: str) -> Source:
    access = host.access(transport)
    request = {"name": transport, "kind": "libvirt_remote", "endpoint": access.endpoint, "options": dict(access.options)}
    return Source.model_validate_json(client.ask("POST", "/sources", json={**request, "credentials": dict(access.credentials)}))


def submit(client: Client, source: Source, domain: Any, mode: str, **fields: object) -> Migration:
    plan = {
        "source": {"Live": "libvirt_remote"},
        "source_ref": {"kind": "live_vm", "source_id": str(source.id), "vm_id": domain.UUIDString()},
        "mode": mode,
        "target": {"start": False},
        **fields,
    }
    return client.submit(MigrationPlan.model_validate(plan))


def ended(client: Client, job: Migration) -> Migration:
    until(lambda: client.migration(job.id).ended, 150)
    return client.migration(job.id)


def machine(host: LibvirtLab, fmt: str = "qcow2", data_mib: int = 8) -> Any:
    domain = host.domain(host.disk(f"{data_mib + 8}M", fmt))
    domain.create()
    for number in range(data_mib):
        host.write(domain, "vda", number * MIB, random.Random(number).randbytes(MIB))
    return domain


def volume_of(data_dir: Path, job: Migration) -> bytes:
    [path] = [path for path in volumes(data_dir) if str(job.id) in str(path)]
    return path.read_bytes()


def nothing_is_left(host: LibvirtLab, domain: Any) -> None:
    assert host.snapshots(domain) == []
    assert list((host.folder / "scratch").glob("*.scratch")) == []


RUNNING = 1  # libvirt.VIR_DOMAIN_RUNNING


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", ["Warm", "Cold"])
def test_a_machine_is_moved_by_every_transport(host: LibvirtLab, tmp_path: Path, mode: str) -> None:
    data_dir = tmp_path / "data"
    with service(data_dir) as (_, client):
        for transport in ("local", "ssh", "tls", "tcp"):
            domain = machine(host)
            job = ended(client, submit(client, register(client, host, transport), domain, mode))
            assert job.state == State.COMPLETED, (transport, job.last_error)
            assert (job.mode_effective, job.last_error) == (mode, None)
            assert volume_of(data_dir, job) == host.content(domain, "vda")
            assert not domain.isActive()
            nothing_is_left(host, domain)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fmt", ["raw", "qcow2 of version 2"])
def test_a_disk_that_cannot_be_tracked_is_moved_cold_and_the_job_says_so(host: LibvirtLab, tmp_path: Path, fmt: str) -> None:
    """Known from the XML, or found out by trying."""
    domain = machine(host) if fmt == "raw" else host.domain(host.disk("8M", "qcow2", "-o", "compat=0.10"))
    if fmt == "raw":
        domain.undefine()
        domain.destroy()
        domain = machine(host, "raw")
    else:
        domain.create()
    data_dir = tmp_path / "data"
    with service(data_dir) as (_, client):
        job = ended(client, submit(client, register(client, host, "ssh"), domain, "Warm"))
        assert job.state == State.COMPLETED, job.last_error
        assert job.mode_effective == "Cold"
        assert job.last_error is not None
        assert (job.last_error.code, job.last_error.fatal) == ("E_MIG_CBT_UNSUPPORTED", False)
        assert volume_of(data_dir, job) == host.content(domain, "vda")
        nothing_is_left(host, domain)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("state", [State.COPYING_FULL, State.DELTA_SYNCING, State.CUTTING_OVER])
def test_a_killed_service_goes_on(host: LibvirtLab, tmp_path: Path, state: State) -> None:
    """kill -9 in each sort of pass: its backup job is found again where it is, and the guest has written meanwhile."""
    domain, data_dir = machine(host, data_mib=24), tmp_path / "data"
    with service(data_dir) as (process, client):
        source = register(client, host, "ssh")
        slow = {"limits": {"bandwidth_bps": 12 * MIB}, "warm": {"delta_threshold_bytes": 64 * MIB}}
        job = submit(client, source, domain, "Warm", **slow)
        if state is not State.COPYING_FULL:
            until(lambda: client.migration(job.id).passes)
            for number in range(16):
                host.write(domain, "vda", number * MIB, random.Random(-number - 1).randbytes(MIB))
        until(lambda: _copies(client.migration(job.id), state), 120)
        process.kill()
        process.wait()
    # One that the job has gone beyond its pass with may be active, and only read: nobody writes to it.
    if domain.state()[0] == RUNNING and state is not State.CUTTING_OVER:
        host.write(domain, "vda", 30 * MIB, b"written while nobody looked")
    with service(data_dir) as (_, client):
        last = ended(client, job)
        assert last.state == State.COMPLETED, last.last_error
        assert volume_of(data_dir, job) == host.content(domain, "vda")
        assert not domain.isActive()
        nothing_is_left(host, domain)


def _copies(job: Migration, state: State) -> bool:
    """In the middle of a pass of that state, or just beyond: what matters is that nothing is lost."""
    in_the_middle = job.state == state and bool(job.passes) and job.passes[-1].finished_at is None
    return (in_the_middle and job.passes[-1].bytes > 0) or job.state in (State.STARTING, State.COMPLETED)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cancelled_job_leaves_its_source_as_it_was(host: LibvirtLab, tmp_path: Path) -> None:
    domain, data_dir = machine(host, data_mib=24), tmp_path / "data"
    before = domain.XMLDesc(2)
    with service(data_dir) as (_, client):
        source = register(client, host, "ssh")
        for mode in ("Warm", "Cold"):
            job = submit(client, source, domain, mode, limits={"bandwidth_bps": 4 * MIB})
            until(lambda: client.migration(job.id).progress.bytes_done > 0)  # noqa: B023
            client.cancel(job.id)
            assert ended(client, job).state == State.CANCELLED
            nothing_is_left(host, domain)
            assert domain.isActive()
            # libvirt keeps the empty element of metadata that is gone.
            assert domain.XMLDesc(2).replace("  <metadata/>\n", "") == before
            assert volumes(data_dir) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_by_command_line(host: LibvirtLab, tmp_path: Path) -> None:
    """As docs/platforms/libvirt.md says it."""
    domain, data_dir, access = machine(host), tmp_path / "data", host.access("ssh")
    (tmp_path / "mover").write_text(access.credentials["private_key"])

    def synvirt(*argv: str) -> str:
        done = forked.run(
            [sys.executable, "-m", "synvirt", *argv, "--data-dir", str(data_dir)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    with service(data_dir) as (_, client):
        form = ["--credential", "private_key=@mover", "--option", f"known_hosts={access.options['known_hosts'].strip()}"]
        quick = ["--option", f"scratch_dir={host.folder}/scratch", "--option", "shutdown_timeout_s=1"]
        synvirt("sources", "add", "old", access.endpoint, *form, *quick)
        assert "PRIVATE" not in synvirt("sources", "show", "old", "--json")
        assert json.loads(synvirt("sources", "test", "old", "--deep", "--json"))["ok"]
        assert domain.name() in synvirt("sources", "vms", "old")
        synvirt("import", domain.name(), "--source", "old", "--mode", "warm", "--no-start", "--wait")
        [job] = [Migration.model_validate(one) for one in json.loads(client.ask("GET", "/migrations"))["items"]]
        assert job.state == State.COMPLETED
        assert volume_of(data_dir, job) == host.content(domain, "vda")
