"""What this host notes of a VM of Proxmox VE: before anything is made or stopped there, and whole or not at all."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.disks.specs import ChangedSpec, NbdSpec
from synvirt.errors import CbtReset
from synvirt.live import SourceAccess
from synvirt.live.holding import Hold
from synvirt.live.proxmox import farewell
from synvirt.live.proxmox.adapter import PveApi
from synvirt.live.proxmox.cluster import Cluster
from synvirt.live.proxmox.farewell import Notes, Stopped
from synvirt.live.proxmox.reading import Reading
from tests.contracts.live import in_session
from tests.fakes.pve.cluster import Cluster as PveCluster
from tests.fakes.pve.cluster import Paper
from tests.fakes.pve.server import PveServer

FIRST, SECOND = "synvirt-job-1", "synvirt-job-2"
AREAS = {f"{FIRST}.scsi0": [(0, 65536), (1 << 30, 512)], f"{FIRST}.scsi1": [], f"{SECOND}.scsi0": [(4096, 4096)]}
VOLUMES = {"scsi0": "local:100/vm-100-disk-0.qcow2", "scsi1": "local:100/vm-100-disk-1.qcow2"}
BOOT, DATA = VOLUMES.values()


def test_changes_are_known_until_the_guest_is_started(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    assert notes.since("100", "a start", f"{FIRST}.scsi0", BOOT) is None
    notes.put("100", "a start", AREAS, VOLUMES)
    again = Notes(tmp_path / "notes")
    assert again.since("100", "a start", f"{FIRST}.scsi0", BOOT) == ((0, 65536), (1 << 30, 512))
    assert again.since("100", "a start", f"{FIRST}.scsi1", DATA) == (), "nothing changed there, which is known"
    assert again.since("100", "a start", f"{FIRST}.scsi2", DATA) is None
    assert again.since("100", "a later start", f"{FIRST}.scsi0", BOOT) is None
    assert again.since("101", "a start", f"{FIRST}.scsi0", BOOT) is None
    assert again.since("100", "a start", f"{FIRST}.scsi0", DATA) is None, "another disk is attached there by now"


def test_the_changes_of_a_snapshot_go_with_it_and_those_of_another_stay(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    notes.put("100", "a start", AREAS, VOLUMES)
    notes.forget("100", FIRST)
    assert notes.since("100", "a start", f"{FIRST}.scsi0", BOOT) is None
    assert notes.since("100", "a start", f"{SECOND}.scsi0", BOOT) == ((4096, 4096),)
    notes.forget("100", SECOND)
    notes.forget("100", SECOND)
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_guest_is_noted_until_it_is_off_or_runs_on(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    notes.stop("100", "a start", "UPID:1")
    notes.stop("101", "a start", None)
    found = Notes(tmp_path)
    assert [found.stopped(vm_id) for vm_id in ("100", "101", "102")] == [
        Stopped("a start", "UPID:1"),
        Stopped("a start", None),
        None,
    ]
    notes.forget_stop("100")
    assert found.stopped("100") is None


def test_a_note_is_whole_or_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose name is lost keeps the files of its snapshot for ever."""
    notes = Notes(tmp_path)
    notes.held_on(FIRST, "node-a")
    notes.put("100", "a start", AREAS, VOLUMES)
    notes.stop("100", "a start", None)

    def fail(_: int) -> None:
        raise OSError("no space left")

    writes: tuple[Callable[[], object], ...] = (
        lambda: notes.held_on(FIRST, "node-b"),
        lambda: notes.put("100", "a later start", {}, {}),
        lambda: notes.stop("100", "a later start", None),
    )
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        for write in writes:
            with pytest.raises(OSError, match="no space"):
                write()
    assert notes.held_on(FIRST, None) == "node-a"
    assert notes.since("100", "a start", f"{SECOND}.scsi0", BOOT) == ((4096, 4096),)
    assert notes.stopped("100") == Stopped("a start", None)
    notes.let_go(FIRST)
    assert notes.held_on(FIRST, None) is None


# ── what they are good for ───────────────────────────────────────────────────────────────────────────────────────────


class Node:
    """What the API tells of VM 100, which runs until it is powered off."""

    def __init__(self) -> None:
        self.volume, self.state = BOOT, "running"
        self.started = ["UPID:pve1:00001267:00000000:65000000:qmstart:100:root@pam:"]

    def get(self, path: str, **_: object) -> Any:
        match path.rpartition("/")[2]:
            case "config":
                return {"scsi0": f"{self.volume},size=1G"}
            case "tasks":
                return [{"upid": upid, "type": "qmstart"} for upid in reversed(self.started)]
            case _:
                return {"status": self.state}

    def post(self, path: str, **_: object) -> str:
        self.state = "stopped"
        return path

    def wait(self, *_: object) -> None: ...


def test_a_disk_on_another_volume_is_another_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its guest wrote until its end counts for the volume that it had then, whatever its key and its size."""
    whole = NbdSpec(uri="nbd+unix:///x?socket=/x")
    monkeypatch.setattr(Reading, "_kept_alive", lambda _: nullcontext(True))
    monkeypatch.setattr(Reading, "qmp", lambda _: nullcontext(SimpleNamespace(ask=lambda _: None)))
    monkeypatch.setattr(Reading, "_served", lambda *_: whole)
    monkeypatch.setattr(farewell, "changes", lambda *_: AREAS)
    api: Any = Node()
    unused: Any = None
    reading = Reading(
        Cluster(api),
        unused,
        {"vmid": 100, "node": "pve1"},
        notes=Notes(tmp_path),
        other=unused,
        options=unused,
        frozen=lambda: nullcontext(Hold()),
    )
    reading.shut_down(0, "force")
    assert reading.open("synvirt-job-3", "scsi0", SECOND) == ChangedSpec(over=whole, areas=((4096, 4096),))
    api.volume = "other:vm-100-disk-7"
    with pytest.raises(CbtReset, match="or the disk to another volume"):
        reading.open("synvirt-job-3", "scsi0", SECOND)


def test_a_start_is_seen_whose_node_s_clock_was_set_back() -> None:
    """Tasks have times of the wall clock: the newest start by them may not be the last one."""
    api: Any = Node()

    def last() -> str:
        return Cluster(api).last_start({"vmid": 100, "node": "pve1"})

    before = last()
    api.started.append("UPID:pve1:00001268:00000000:64000000:qmstart:100:root@pam:")
    assert (after := last()) != before
    api.started.append("UPID:pve1:00001269:00000000:66000000:qmstart:100:root@pam:")
    assert last() not in (before, after)


def test_what_somebody_writes_while_a_note_for_people_is_added_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration is read by one request, and changed by another."""
    cluster, edits, config_of = PveCluster(Paper()), ["ticket 7", "ticket 8"], Cluster.config
    vm = cluster.add(100, scsi0="local-lvm:vm-100-disk-0,size=32G", onboot=1)

    def changed_after(self: Cluster, row: dict[str, Any]) -> dict[str, Any]:
        found = config_of(self, row)
        if edits:
            vm.config.update(description=edits.pop(0), digest=f"{len(edits) + 7:040x}")
        return found

    monkeypatch.setattr(Cluster, "config", changed_after)
    full = "x" * 8190
    token = {"token_id": "mover@pve!synvirt", "token_secret": "t0ken"}
    with PveServer(cluster, tmp_path) as server:
        access = SourceAccess(server.endpoint, token, {"fingerprint_sha256": server.fingerprint})
        in_session(lambda: PveApi(access), lambda adapter: adapter.mark("100", "it has moved"))
        assert (vm.config["description"], vm.config["onboot"]) == ("ticket 8\n\nit has moved", 0)
        vm.config |= {"description": full, "onboot": 1}
        in_session(lambda: PveApi(access), lambda adapter: adapter.mark("100", "it has moved"))
        assert server.wrong == []
    assert (vm.config["description"], vm.config["onboot"]) == (full, 0), "its owner's text goes first"
