"""What the adapter decides by the backup job that it finds: whose it is, and what its bitmaps are since. No libvirt."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.errors import CbtReset, SnapshotFailed
from synvirt.live import SnapshotRef
from synvirt.live.libvirt import backup
from synvirt.live.libvirt import domain as domains
from synvirt.live.libvirt.adapter import LibvirtRemote
from synvirt.live.libvirt.backup import Export, Running
from synvirt.model.machine import Disk

DOMAIN: Any = SimpleNamespace(name=lambda: "web")
VDA = Disk(key="vda", label="vda", capacity_bytes=1 << 20)


def running(snapshot: str | None, since: str | None = None, bitmap: str | None = None) -> Running:
    return Running(snapshot, since, "/s", None, {"vda": Export(f"{snapshot}-vda", bitmap)})


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An adapter whose domain's present job is `remote.job`; `remote.did`: what it was made to do."""
    made: Any = LibvirtRemote.__new__(LibvirtRemote)
    made.job, made.did, made.checkpoint = None, [], True
    made._plain, made._closing, made._watch = False, threading.Event(), object()
    made._options = SimpleNamespace(scratch_dir="/s")
    made._host = SimpleNamespace(spec=lambda name, *, path, port, bitmap: bitmap)

    def begin(_domain: Any, name: str, _disks: Any) -> None:
        made.did.append(f"begin {name}")
        made.job = running(name)

    def end(_domain: Any, ours: Any) -> None:
        if made.job is not None and ours(made.job.snapshot):
            made.did.append(f"end {made.job.snapshot}")

    made._begin, made._knock = begin, lambda *_: None
    monkeypatch.setattr(backup, "running", lambda _: made.job)
    monkeypatch.setattr(backup, "end", end)
    monkeypatch.setattr(backup, "has_checkpoint", lambda *_: made.checkpoint)
    monkeypatch.setattr(backup, "image_was_of", lambda *_: None)
    monkeypatch.setattr(domains, "tracked", lambda _: frozenset({"vda"}))
    return made


@pytest.mark.parametrize(
    ("asked", "since", "bitmap", "read"),
    [
        (None, None, None, None),
        (None, "synvirt-job-1", "b", None),  # the whole disk, though the job has its changes
        ("synvirt-job-1", "synvirt-job-1", "b", "b"),
        ("synvirt-job-1", "synvirt-job-0", "b", CbtReset),
        ("synvirt-job-1", None, "b", CbtReset),
        ("synvirt-job-1", "synvirt-job-1", None, CbtReset),
    ],
)
def test_changes_are_read_only_since_the_checkpoint_that_was_asked_for(
    remote: Any, asked: str | None, since: str | None, bitmap: str | None, read: Any
) -> None:
    remote.job = running("synvirt-job-2", since, bitmap)
    snapshot = SnapshotRef(id="synvirt-job-2", change_ids={})
    if read is CbtReset:
        with pytest.raises(CbtReset, match="not known any more"):
            remote._open(DOMAIN, snapshot, VDA, asked)
        return
    assert remote._open(DOMAIN, snapshot, VDA, asked) == read


@pytest.mark.parametrize("job", [None, running("synvirt-job-3"), running("synvirt-other-2"), running(None)])
def test_no_other_moment_is_read_than_that_of_the_snapshot(remote: Any, job: Running | None) -> None:
    remote.job = job
    with pytest.raises(SnapshotFailed, match="no longer exists"):
        remote._open(DOMAIN, SnapshotRef(id="synvirt-job-2", change_ids={}), VDA, None)


@pytest.mark.parametrize(
    ("job", "did"),
    [
        (None, ["begin synvirt-job-2"]),
        (running("synvirt-job-2"), []),
        (running("synvirt-job-1"), ["end synvirt-job-1", "begin synvirt-job-2"]),
        (running("synvirt-other-1"), None),
        (running(None), None),
    ],
)
def test_only_an_earlier_pass_of_the_same_job_makes_way(remote: Any, job: Running | None, did: list[str] | None) -> None:
    remote.job = job
    if did is None:
        with pytest.raises(SnapshotFailed, match="another backup job"):
            remote._snapshot(DOMAIN, "synvirt-job-2", None)
    else:
        assert remote._snapshot(DOMAIN, "synvirt-job-2", None).change_ids == {"vda": "synvirt-job-2"}
    assert remote.did == (did or [])


def test_a_snapshot_without_its_checkpoint_has_no_change_ids(remote: Any) -> None:
    remote.checkpoint = False
    assert remote._snapshot(DOMAIN, "synvirt-job-2", None).change_ids == {}


@pytest.mark.parametrize(
    ("exports", "snapshot"),
    [
        (("theirs-vda",), None),
        (("synvirt-a-1-vda", "theirs-vdb"), None),
        (("synvirt-a-1-vda", "synvirt-b-1-vdb"), None),
        (("synvirt-b-1-vda", "synvirt-b-1-vdb"), "synvirt-b-1"),
    ],
)
def test_a_job_that_is_not_ours_as_a_whole_is_never_ended(exports: tuple[str, ...], snapshot: str | None) -> None:
    disks = "".join(f"<disk name='{one.rpartition('-')[2]}' backup='yes' exportname='{one}'/>" for one in exports)
    xml = f"<domainbackup mode='pull'><disks>{disks}</disks></domainbackup>"
    domain: Any = SimpleNamespace(backupGetXMLDesc=lambda: xml, abortJob=lambda: pytest.fail("it was ended"))
    found = backup.running(domain)
    assert found is not None
    assert found.snapshot == snapshot
    backup.end(domain, lambda name: name == "synvirt-a-1")
