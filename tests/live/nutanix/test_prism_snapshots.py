"""Snapshots of Prism Element and the power of its VMs, on a cluster of a few lines: whose they are, and what is left."""

from collections.abc import Callable
from threading import Lock
from types import SimpleNamespace
from typing import Any, cast

import pytest

from synvirt.errors import SnapshotFailed, SourceUnreachable
from synvirt.live import SnapshotRef
from synvirt.live.nutanix import power, snapshots
from synvirt.live.nutanix.central import Central
from synvirt.live.nutanix.element import Element
from synvirt.live.nutanix.form import Options
from synvirt.live.nutanix.prism import Prism
from synvirt.live.nutanix.snapshots import Snapshots
from synvirt.model.machine import Disk

VM, OTHER = "vm-1", "vm-2"
FIRST, SECOND = "synvirt-job-1", "synvirt-job-2"


class Cluster:
    """Its snapshots by their ids, with name and VM. `refuses`: the id of a snapshot that is listed and has failed."""

    def __init__(self) -> None:
        self.there: dict[str, tuple[str, str]] = {}
        self.refuses = ""
        self.restored: list[str] = []
        self.host = "prism"

    def snapshots(self) -> list[dict[str, Any]]:
        return [
            {"metadata": {"uuid": id_}, "status": {"name": name, "resources": {"entity_uuid": vm}}}
            for id_, (name, vm) in self.there.items()
        ]

    def take(self, vm: str, name: str, _expires_ms: int, *, quiesce: bool) -> str:
        id_ = f"{'quiet' if quiesce else 'crash'}-{len(self.there)}"
        self.there[id_] = (name, vm)
        if quiesce:
            self.refuses = id_
        return id_

    def snapshot(self, id_: str) -> dict[str, Any]:
        if id_ not in self.there or id_ == self.refuses:
            raise SnapshotFailed(f"snapshot {id_} is not there")
        files = [
            {"file_path": f"/container/.acropolis/vmdisk/{name}", "snapshot_file_path": f"/container/.snapshot/1/{name}"}
            for name in ("own", "of-another", "of-nobody")
        ]
        return {"status": {"snapshot_file_list": files}}

    def virtual_disk(self, name: str) -> dict[str, str]:
        owner = {"own": VM, "of-another": OTHER, "of-nobody": ""}[name]
        return {
            "attached_vm_uuid": owner,
            "disk_address": {"own": "SCSI.0", "of-another": "SCSI.1", "of-nobody": "SCSI.2"}[name],
        }

    def remove(self, id_: str) -> None:
        del self.there[id_]

    def forget(self, name: str) -> None:
        pass

    def read_here(self) -> frozenset[str]:
        return frozenset({FIRST, SECOND})

    def restore(self) -> None:
        self.restored.append("restored")


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def by_nfs(cluster: Any) -> Snapshots:
    return Snapshots(cluster, Options(), cluster)


def vm(*, quiescible: bool = False) -> Any:
    return SimpleNamespace(id=VM, name="web", power="on", quiescible=quiescible, disks=[])


def test_a_snapshot_that_could_not_be_quiesced_is_gone_before_another_is_made(cluster: Cluster) -> None:
    made = by_nfs(cluster).take(vm(quiescible=True), FIRST, None)
    assert list(cluster.there) == [made.id.removeprefix("snapshot:")], "a retry would find the one that failed"


def test_a_snapshots_files_are_the_disks_of_its_vm(cluster: Cluster) -> None:
    cluster.there["1"] = (FIRST, VM)
    made = by_nfs(cluster).take(vm(), FIRST, ["scsi.0", "scsi.1", "scsi.2"])
    assert sorted(made.change_ids) == ["scsi.0", "scsi.2"]


def test_the_snapshot_of_another_vm_is_neither_found_nor_removed(cluster: Cluster) -> None:
    cluster.there |= {"1": (FIRST, OTHER), "2": (FIRST, VM)}
    by_nfs(cluster).cleanup(VM, FIRST)
    assert cluster.there == {"1": (FIRST, OTHER)}
    assert by_nfs(cluster).take(vm(), FIRST, None).id != "snapshot:1"


def test_the_allow_list_is_as_it_was_after_the_last_snapshot_only(cluster: Cluster) -> None:
    cluster.there |= {"1": (FIRST, VM), "2": (SECOND, OTHER)}
    by_nfs(cluster).cleanup(VM, FIRST)
    assert cluster.restored == []
    by_nfs(cluster).cleanup(OTHER, SECOND)
    assert cluster.restored == ["restored"]


def test_a_job_that_begins_during_anothers_last_cleanup_stays_let_in(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds its place on the allow-list, and would lose it in the middle of its pass."""
    cluster.there["1"] = (FIRST, VM)
    remove = cluster.remove

    def slowly(id_: str) -> None:
        cluster.there["2"] = (SECOND, OTHER)
        remove(id_)

    monkeypatch.setattr(cluster, "remove", slowly)
    by_nfs(cluster).cleanup(VM, FIRST)
    assert cluster.restored == []


def test_a_snapshot_that_is_gone_is_not_read(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file may be there for a while, and vanish during the pass."""
    monkeypatch.setattr(snapshots, "knock", lambda spec: None)
    monkeypatch.setattr(cluster, "regions", lambda *_: [], raising=False)
    disk = Disk(key="scsi.0", label="scsi.0", capacity_bytes=1 << 20)
    gone = SnapshotRef(id="snapshot:9", change_ids={"scsi.0": "9 /container/.snapshot/9/own"})
    with pytest.raises(SnapshotFailed, match="snapshot 9 is not there"):
        by_nfs(cluster).open(vm(), gone, disk, None)


@pytest.mark.parametrize("goes", [0, 498, 499])
@pytest.mark.parametrize("what", ["snapshots", "images", "vms"])
def test_a_list_that_changes_while_it_is_read_lacks_nothing(what: str, goes: int) -> None:
    """Another job removes one between two pages: all later ones move up, and a cleanup would not see ours."""
    there = [{"metadata": {"uuid": str(number)}, "status": {"name": f"synvirt-{number}"}} for number in range(1002)]
    asked: list[int] = []

    def ask(_method: str, _path: str, *, json: dict[str, Any], **_: Any) -> Any:
        asked.append(json["offset"])
        if len(asked) == 2:
            del there[goes]
        page, total = there[json["offset"] : json["offset"] + json["length"]], len(there)
        return SimpleNamespace(json=lambda: {"entities": page, "metadata": {"total_matches": total}})

    cluster = Element(cast(Prism, SimpleNamespace(host="prism", ask=ask)))
    lists: dict[str, Callable[[], list[str]]] = {
        "snapshots": lambda: [one["metadata"]["uuid"] for one in cluster.snapshots()],
        "images": lambda: [id_ for id_, _, _ in cluster.images("synvirt-")],
        "vms": lambda: [one["metadata"]["uuid"] for one in cluster.vms()],
    }
    found = lists[what]()
    assert found == [one["metadata"]["uuid"] for one in there]


def test_a_list_that_never_holds_still_lacks_nothing_either() -> None:
    there = [{"metadata": {"uuid": str(number)}} for number in range(1002)]

    def ask(_method: str, _path: str, *, json: dict[str, Any], **_: Any) -> Any:
        page = there[json["offset"] : json["offset"] + json["length"]]
        del there[0]
        return SimpleNamespace(json=lambda: {"entities": page})

    found = {one["metadata"]["uuid"] for one in Element(cast(Prism, SimpleNamespace(host="prism", ask=ask))).snapshots()}
    assert found >= {one["metadata"]["uuid"] for one in there}


class Pages:
    """Prism Central's VMs, page by page; `meanwhile` happens between the answers to two questions."""

    def __init__(self, count: int, meanwhile: Callable[[int, list[dict[str, Any]]], None]) -> None:
        self.there: list[dict[str, Any]] = [{"extId": str(number)} for number in range(count)]
        self.asked, self.meanwhile = 0, meanwhile
        self.one_by_one = Lock()

    def ask(self, method: str, _path: str, *, query: dict[str, str] | None = None, **_: Any) -> Any:
        if method == "OPTIONS" or query is None:
            return SimpleNamespace(json=lambda: {"data": "v4.0"})
        with self.one_by_one:
            self.asked += 1
            self.meanwhile(self.asked, self.there)
            page, limit = int(query["$page"]), int(query["$limit"])
            shown, total = self.there[page * limit : (page + 1) * limit], len(self.there)
        return SimpleNamespace(json=lambda: {"data": shown or None, "metadata": {"totalAvailableResults": total}})

    def listed(self) -> list[str]:
        prism = cast(Prism, SimpleNamespace(host="prism", ask=self.ask))
        return [one["extId"] for one in Central(prism, lambda _: prism).vms()]


@pytest.mark.parametrize("count", [0, 1, 100, 101, 250, 2000])
def test_a_list_of_prism_central_that_holds_still_is_read_once(count: int) -> None:
    pages = Pages(count, lambda *_: None)
    assert pages.listed() == [one["extId"] for one in pages.there]
    assert pages.asked <= 1 + count // 85


@pytest.mark.parametrize(("goes", "comes"), [(0, None), (99, None), (100, None), (0, 349), (120, 349), (None, 30), (None, 160)])
@pytest.mark.parametrize("count", [199, 350])
def test_a_list_of_prism_central_that_changes_while_it_is_read_lacks_nothing(
    count: int, goes: int | None, comes: int | None
) -> None:
    """One goes, and one may come for it, so that they are as many as before: a schedule does that to recovery points."""

    def meanwhile(asked: int, there: list[dict[str, Any]]) -> None:
        if asked == 2:
            if goes is not None:
                del there[goes]
            if comes is not None:
                there.insert(comes, {"extId": "new"})

    pages = Pages(count, meanwhile)
    found = pages.listed()
    assert {*found} - {"new"} == {one["extId"] for one in pages.there} - {"new"}


def test_a_list_of_prism_central_that_never_holds_still_lacks_nothing_either() -> None:
    pages = Pages(350, lambda _, there: there.__delitem__(0))
    assert set(pages.listed()) >= {one["extId"] for one in pages.there}


@pytest.mark.parametrize(
    ("wanted", "call"),
    [("off", lambda control: power.shut_down(control, VM, 0, "force")), ("on", lambda control: power.power_on(control, VM))],
)
def test_a_vm_that_does_not_come_off_or_on_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch, wanted: str, call: Callable[[Any], None]
) -> None:
    monkeypatch.setattr(power, "SWITCHED_TIMEOUT_S", 0.0)
    state = SimpleNamespace(name="web", power="off" if wanted == "on" else "on")
    control = SimpleNamespace(vm=lambda _: state, force_off=lambda _: None, on=lambda _: None)
    with pytest.raises(SourceUnreachable, match=f"is not {wanted}"):
        call(control)
