"""A backup of a real domain: libvirt's embedded driver says what its disks are, and when it is started."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Literal
from uuid import uuid4

import pytest

from synvirt.backups.model import ENDS, BackupJobRequest, BackupRepositoryRequest, BackupRun, RestoreRequest
from synvirt.backups.repositories import Repositories
from synvirt.backups.service import Backups
from synvirt.backups.sources.guest import Ask, Sources
from synvirt.backups.sources.made import MadeRows
from synvirt.backups.sources.ways import sources_of
from synvirt.disks import open_reader
from synvirt.errors import (
    BackupNotFound,
    Cancelled,
    QuiesceFailed,
    SourceReadFailed,
    SourceRunning,
    SourceSnapshotFailed,
    SourceUnsupported,
)
from synvirt.hypervisor.libvirt_host import LibvirtHost
from synvirt.kvm.connection import Connection
from synvirt.live.libvirt import backup as jobs
from synvirt.repository.keys import CHUNK_BYTES
from synvirt.settings import Settings
from synvirt.store import Store
from tests.drawn import drawn
from tests.needs import need
from tests.running.processes import until

XML = """<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os><devices>
<disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{folder}/raw.img'/><target dev='vda'/></disk>
<disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='{folder}/disk.qcow2'/><target dev='vdb'/></disk>
<disk type='file' device='cdrom'><target dev='sda' bus='sata'/></disk>
{more}</devices></domain>"""


def disk_content() -> bytes:
    return drawn(CHUNK_BYTES, zeros=3 * CHUNK_BYTES)


@pytest.fixture
def connection(host: LibvirtHost, data_dir: Path) -> Connection:
    return Connection(Settings(data_dir=data_dir).hypervisor_uri, lambda: None)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(f"sqlite:///{tmp_path / 'test.db'}")
    yield made
    made.close()


@pytest.fixture
def sources(connection: Connection, store: Store) -> Sources:
    return sources_of(connection, store.backups, host="local")


def asked(vm_id: str) -> Ask:
    return Ask(
        vm_id=vm_id,
        job_id=uuid4(),
        quiesce="off",
        base=lambda _: None,
        move=lambda _: None,
        warn=lambda _code, _message: None,
        stop=lambda: False,
    )


@pytest.fixture
def name(connection: Connection, tmp_path: Path) -> str:
    return _defined(connection, tmp_path)


def _defined(connection: Connection, folder: Path, more: str = "") -> str:
    (folder / "raw.img").write_bytes(disk_content())
    convert = [
        need("qemu-img", "qemu-utils"),
        "convert",
        "-f",
        "raw",
        "-O",
        "qcow2",
        f"{folder}/raw.img",
        f"{folder}/disk.qcow2",
    ]
    subprocess.run(convert, check=True)
    name = f"backup-{uuid4().hex[:8]}"
    connection.use().defineXML(XML.format(name=name, folder=folder, more=more))
    return name


def _ended(backups: Backups, run: BackupRun) -> BackupRun:
    until = time.monotonic() + 60
    while (now := backups.runs.get(run.id)).status not in ENDS:
        assert time.monotonic() < until, now
        time.sleep(0.02)
    return now


def test_a_domain_that_is_shut_off_is_backed_up_and_restored(
    connection: Connection, sources: Sources, store: Store, name: str, tmp_path: Path
) -> None:
    for folder in ("keyring", "repository"):
        (tmp_path / folder).mkdir()
    repositories = Repositories(store.backups, host="local", keyring=tmp_path / "keyring")
    backups = Backups(
        store.backups,
        repositories,
        host="local",
        open_guest=sources.open,
        exports=tmp_path / "exports",
    )
    backups.start()
    known = backups.add_repository(BackupRepositoryRequest(name="here", kind="local", path=str(tmp_path / "repository")))
    uuid = connection.use().lookupByName(name).UUIDString()
    job = backups.add_job(BackupJobRequest(name="nightly", vm_ids=(name,), repository_id=known.id))
    run = _ended(backups, backups.run_job(job.id))
    assert (run.status, run.error) == ("completed", None)
    point = backups.points.get(run.restore_point_ids[0])
    assert (point.vm_id, point.vm_name, [disk.target for disk in point.disks]) == (uuid, name, ["vda", "vdb"])
    restored = _ended(backups, backups.restore(point.id, RestoreRequest(target="export", name="out")))
    assert restored.status == "completed", restored.error
    for file in ("0-vda.raw", "1-vdb.raw"):
        assert [(tmp_path / "exports/out" / file).read_bytes() == disk_content()] == [True]
    backups.close()


def test_a_guest_that_is_started_while_it_is_read_is_noticed(connection: Connection, sources: Sources, name: str) -> None:
    domain = connection.use().lookupByName(name)
    with sources.open(asked(domain.UUIDString())) as guest:
        guest.check_unchanged()
        domain.create()
        with pytest.raises(SourceRunning, match="started"):
            guest.check_unchanged()
        domain.destroy()
        until = time.monotonic() + 30
        while time.monotonic() < until:  # the event comes from libvirt's own thread
            try:
                guest.check_unchanged()
            except SourceRunning:
                break
        with pytest.raises(SourceRunning):
            guest.check_unchanged()


def test_a_disk_that_changes_is_noticed(sources: Sources, name: str, tmp_path: Path) -> None:
    with sources.open(asked(name)) as guest:
        with (tmp_path / "raw.img").open("r+b") as file:
            file.write(b"changed")
        with pytest.raises(SourceRunning, match="changed"):
            guest.check_unchanged()


def test_what_cannot_be_backed_up_is_named(connection: Connection, sources: Sources, tmp_path: Path) -> None:
    more = """<disk type='network' device='disk'><driver name='qemu' type='raw'/>
<source protocol='nbd' name='x'><host name='nbd.invalid' port='10809'/></source><target dev='vdc'/></disk>"""
    name = _defined(connection, tmp_path, more)
    with pytest.raises(SourceUnsupported, match="vdc"), sources.open(asked(name)):
        pass
    with pytest.raises(BackupNotFound, match="nobody"), sources.open(asked("nobody")):
        pass


TPM = "<tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>"


def test_a_guest_that_runs_without_an_agent_is_backed_up_as_after_a_crash(
    connection: Connection, sources: Sources, store: Store, tmp_path: Path
) -> None:
    """Unless that is not enough: then nothing is. The state of its TPM is part of it."""
    need("swtpm", "swtpm")
    name = _defined(connection, tmp_path, TPM)
    domain = connection.use().lookupByName(name)
    domain.create()
    ledger, reported = MadeRows(store.backups.ledger, host="local"), []

    def wanted(quiesce: Literal["try", "require"]) -> Ask:
        return replace(asked(name), quiesce=quiesce, warn=lambda code, _: reported.append(code))

    with pytest.raises(QuiesceFailed, match="agent"), sources.open(wanted("require")):
        pass
    assert (ledger.all(), domain.listAllCheckpoints(0), jobs.running(domain)) == ([], [], None)
    with sources.open(wanted("try")) as guest:
        assert (guest.way, guest.consistency, guest.quiesced, reported) == ("bitmap", "crash", False, ["E_BAK_QUIESCE_FAILED"])
        assert guest.tpm is not None
        assert "tpm2-00.permall" in guest.tpm
        assert [disk.mark is not None for disk in guest.disks] == [False, True]
        for disk in guest.disks:
            content = bytearray(len(disk_content()))
            with closing(open_reader(disk.spec)) as reader:
                reader.read_into(0, memoryview(content))
            assert [bytes(content) == disk_content()] == [True]
        guest.check_unchanged()
        domain.abortJob()
        until(lambda: jobs.running(domain) is None)
        with pytest.raises(SourceReadFailed, match="ended while"):
            guest.check_unchanged()
    assert (ledger.all(), domain.listAllCheckpoints(0), jobs.running(domain)) == ([], [], None)


@pytest.mark.timeout(120)
def test_a_guest_that_ends_while_it_is_read_is_the_reason(connection: Connection, sources: Sources, name: str) -> None:
    """The run said that a firewall may be in the way of its disks."""
    domain = connection.use().lookupByName(name)
    domain.create()

    def read() -> None:
        with sources.open(asked(name)):
            domain.destroy()
            raise SourceReadFailed("disk vda: the NBD server is not to be reached", hint="does a firewall let it be reached?")

    with pytest.raises(SourceReadFailed, match=f"the backup job of {name} ended while") as caught:
        read()
    assert "the guest was shut down" in (caught.value.hint or "")


def test_another_backup_of_the_guest_is_waited_for_or_left_alone(
    connection: Connection, sources: Sources, name: str, tmp_path: Path
) -> None:
    domain = connection.use().lookupByName(name)
    domain.create()
    tmp_path.chmod(0o1777)  # QEMU makes the socket, as its user
    jobs.begin(domain, "synvirt-theirs-1", jobs.Server(str(tmp_path)), track=())
    with pytest.raises(SourceSnapshotFailed, match="synvirt-theirs-1"), sources.open(asked(name)):
        pass
    assert jobs.running(domain) is not None
    jobs.end(domain, lambda _: True)
    with sources.open(asked(name)):
        stopped = replace(asked(name), stop=lambda: True)
        with pytest.raises(Cancelled), sources.open(stopped):
            pass


def test_marks_go_with_their_job_though_the_guest_is_off_by_then(
    connection: Connection, sources: Sources, store: Store, name: str, tmp_path: Path
) -> None:
    domain, ask = connection.use().lookupByName(name), asked(name)
    domain.create()
    with sources.open(ask) as guest:
        guest.keep_marks()
        guest.marks_kept()
    assert len(domain.listAllCheckpoints(0)) == 1
    domain.destroyFlags(1)  # VIR_DOMAIN_DESTROY_GRACEFUL: QEMU closes its images
    assert b'"bitmaps"' in _told_of(tmp_path / "disk.qcow2")
    sources.forget(ask.job_id)
    sources.close()
    assert (MadeRows(store.backups.ledger, host="local").all(), domain.listAllCheckpoints(0)) == ([], [])
    assert b'"bitmaps"' not in _told_of(tmp_path / "disk.qcow2")


def _told_of(image: Path) -> bytes:
    return subprocess.run(["qemu-img", "info", "--output=json", "-U", str(image)], check=True, capture_output=True).stdout
