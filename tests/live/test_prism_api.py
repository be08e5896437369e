"""prism_api against a Prism of ours that is held to the vendor's schema, and the real servers of its bytes: the laws of
LiveAdapter by each way, then what is in a manifest, then what the platform may do wrong.

What this proves: the order of calls, the shapes, the bytes. What it cannot: a real cluster's timing, and its own tracking.
"""

import asyncio
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from synvirt.disks import open_reader
from synvirt.disks.specs import AllocatedSpec, ChangedSpec, DownloadSpec, IscsiSpec, NfsSpec
from synvirt.disks.vsphere.datastore import FileGone
from synvirt.errors import (
    AuthFailed,
    BadRequest,
    CbtReset,
    CbtUnsupported,
    DiskReadFailed,
    Internal,
    SnapshotFailed,
    SourceUnreachable,
)
from synvirt.live import GuestStaysOn, SourceAccess
from synvirt.live.nutanix import prism as prism_module
from synvirt.live.nutanix.adapter import PrismApi
from synvirt.live.recording import Recording, lines
from synvirt.model.kinds import LiveKind
from synvirt.model.machine import VmManifest
from tests.contracts.live import LiveCase, LiveContract, in_session, read
from tests.fakes.prism.server import Prisms
from tests.fakes.prism.state import BLOCK, VmState

T = TypeVar("T")
SIZE = 4 << 20


def content(seed: int = 0, size: int = SIZE) -> bytes:
    """Data, with holes: every third 256 KiB is zeros."""
    generator = random.Random(seed)
    return b"".join(bytes(1 << 18) if part % 3 == 2 else generator.randbytes(1 << 18) for part in range(size >> 18))


def ask(access: SourceAccess, use: Callable[[PrismApi], Awaitable[T]]) -> T:
    return in_session(lambda: PrismApi(access), use)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prism_module, "RETRY_PAUSES_S", (0.01, 0.01, 0.01))


def case_of(prisms: Prisms, access: SourceAccess) -> LiveCase:
    vm = prisms.state.add_vm("web", {"scsi.0": content(), "scsi.1": content(1, 1 << 20)})
    disk = prisms.state.path(vm.disks[0])

    def write(offset: int, data: bytes) -> None:
        assert prisms.state.guest_writes(vm.id, "scsi.0", offset, data)

    def lose_tracking() -> None:
        for kept in list(prisms.state.kept.values()):
            prisms.state.forget(kept)

    def restart() -> None:
        ask(access, lambda adapter: adapter.power_on(vm.id))
        ask(access, lambda adapter: adapter.shutdown(vm.id))

    return LiveCase(
        open=lambda: PrismApi(access),
        vm_id=vm.id,
        content=disk.read_bytes,
        write=write,
        snapshots=prisms.names,
        lose_tracking=lose_tracking,
        restart=restart,
        tracked_bytes=BLOCK,
    )


class TestLawsByNfsFromElementAlone(LiveContract):
    @pytest.fixture
    def case(self, by_nfs: Prisms) -> LiveCase:
        return case_of(by_nfs, by_nfs.access("element"))


class TestLawsByIscsi(LiveContract):
    @pytest.fixture
    def case(self, by_iscsi: Prisms) -> LiveCase:
        return case_of(by_iscsi, by_iscsi.access(transport="iscsi"))


# ── control plane ────────────────────────────────────────────────────────────────────────────────────────────────────


def machine(prisms: Prisms, **fields: Any) -> VmState:
    return prisms.state.add_vm("web", {"scsi.0": content(), "sata.1": content(1, 1 << 20)}, **fields)


@pytest.mark.parametrize("which", ["central", "element"])
def test_a_manifest_has_what_the_platform_knows(cluster: Prisms, which: str) -> None:
    vm = machine(cluster, uefi=True, secure_boot=True, tpm=True, tools=True, guest="Microsoft Windows Server 2022", gpus=1)
    vm.disks.append(replace(vm.disks[0], id="g", device=vm.id, index=7, group=cluster.state.cluster_id))
    manifest = ask(cluster.access(which), lambda adapter: adapter.inspect(vm.id))
    assert (manifest.name, manifest.uuid, manifest.firmware, manifest.secure_boot, manifest.tpm) == (
        "web",
        vm.id,
        "uefi",
        True,
        True,
    )
    assert (manifest.cpu_count, manifest.memory_bytes, manifest.guest_os.family) == (2, 1 << 30, "windows")
    assert [(disk.key, disk.bus, disk.capacity_bytes) for disk in manifest.disks] == [
        ("scsi.0", "scsi", SIZE),
        ("sata.1", "sata", 1 << 20),
    ]
    assert manifest.disks[0].source_path.startswith("default/")
    nic = manifest.nics[0]
    assert (nic.mac, nic.network, nic.ip_addresses, nic.model) == ("50:6b:8d:aa:bb:cc", "vlan 12", ("10.1.2.3",), "virtio")
    found = {concern.id: concern.category for concern in manifest.concerns}
    group = f"nutanix.volume_group:{cluster.state.cluster_id}"
    assert {group: "Critical", "nutanix.gpu:0": "Warning", "nutanix.vtpm": "Warning"}.items() <= found.items()


@pytest.mark.parametrize("which", ["central", "element"])
def test_what_does_not_come_along_is_a_concern_with_its_name(cluster: Prisms, which: str) -> None:
    """GPUs each, devices by their number, a volume group once however many disks it has; nothing of a VM that has none."""
    plain = machine(cluster)
    vm = machine(cluster, gpus=2, passed_through=3 if which == "central" else 0)
    group = cluster.state.cluster_id
    vm.disks += [replace(vm.disks[0], id=str(number), device=vm.id, index=number, group=group) for number in (7, 8)]
    manifest = ask(cluster.access(which), lambda adapter: adapter.inspect(vm.id))
    reported = {concern.id: (concern.category, concern.assessment) for concern in manifest.concerns}
    assert reported["nutanix.gpu:0"] == ("Warning", "The guest has vGPU of its host; here it has none.")
    assert "nutanix.gpu:1" in reported
    assert reported[f"nutanix.volume_group:{group}"][0] == "Critical"
    assert group in reported[f"nutanix.volume_group:{group}"][1]
    assert [name for name in reported if name.startswith("nutanix.volume_group")] == [f"nutanix.volume_group:{group}"]
    # v3 has no word for them.
    assert reported.get("nutanix.passthrough") == (
        ("Warning", "3 devices of its host stay behind.") if which == "central" else None
    )
    # What is not moved is not among the disks.
    assert [disk.key for disk in manifest.disks] == ["scsi.0", "sata.1"]
    others = ask(cluster.access(which), lambda adapter: adapter.inspect(plain.id)).concerns
    assert {one.id for one in others} == {"nutanix.read_by", "nutanix.guest_tools"}


@pytest.mark.parametrize("which", ["central", "element"])
@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, "They are not seen: snapshots are as after a crash."),
        ({"tools": True}, "They are installed, and freeze its file systems for a snapshot."),
        ({"tools": True, "holds_still": False}, "They are installed, and do not freeze its file systems."),
        ({"tools": True, "power": "OFF"}, "They are installed, and do not freeze its file systems: it does not run."),
    ],
)
def test_the_state_of_guest_tools_is_reported(cluster: Prisms, which: str, fields: dict[str, Any], state: str) -> None:
    vm = machine(cluster, **fields)
    manifest = ask(cluster.access(which), lambda adapter: adapter.inspect(vm.id))
    assert [one.assessment for one in manifest.concerns if one.id == "nutanix.guest_tools"] == [state]


@pytest.mark.parametrize("which", ["central", "element"])
def test_2000_vms_are_listed_page_by_page(cluster: Prisms, which: str) -> None:
    for number in range(1203):
        vm = VmState(f"00000000-0000-0000-0000-{number:012}", f"vm {number}", [])
        cluster.state.vms[vm.id] = vm
    rows = ask(cluster.access(which), lambda adapter: adapter.list_vms())
    assert [row.name for row in rows] == [f"vm {number}" for number in range(1203)]
    assert rows[0].power_state == "on"


@pytest.mark.parametrize(("negotiates", "minor"), [(True, 0), (False, 0), (True, 9), (False, 2)])
def test_versions_are_asked_and_not_guessed(cluster: Prisms, negotiates: bool, minor: int) -> None:
    """An older server, one that does not know the question, one that is newer than we are."""
    cluster.central.negotiates, cluster.central.version["vmm"] = negotiates, minor
    machine(cluster)
    ask(cluster.access("central"), lambda adapter: adapter.list_vms())
    assert f"central GET /api/vmm/v4.{min(minor, 3)}/ahv/config/vms" in cluster.seen


def test_who_answers_and_which_ways_are_open_is_reported(by_nfs: Prisms) -> None:
    machine(by_nfs)
    open_ways: dict[tuple[str, ...], dict[str, bool]] = {}
    for which in (("central",), ("element",), ("central", "element")):
        about = ask(by_nfs.access(*which), lambda adapter: adapter.about())
        assert about.product == f"Nutanix Prism {which[0].title()}"
        assert all(check.ok for check in about.checks)
        open_ways[which] = {check.name: not check.warning for check in about.checks if check.name.startswith("way ")}
    assert open_ways == {
        ("central",): {"way nfs": False, "way iscsi": False, "way image": True},
        ("element",): {"way nfs": True, "way iscsi": False, "way image": True},
        ("central", "element"): {"way nfs": True, "way iscsi": False, "way image": True},
    }
    by_nfs.state.data_services = "10.0.0.9"
    about = ask(by_nfs.access("central"), lambda adapter: adapter.about())
    assert "iSCSI" in next(check.detail for check in about.checks if check.name == "ways")


def checks(prisms: Prisms, which: str = "central") -> dict[str, tuple[bool, bool, str]]:
    """(ok, warning, detail) of each."""
    about = ask(prisms.access(which), lambda adapter: adapter.about())
    return {check.name: (check.ok, check.warning, check.detail) for check in about.checks}


def test_a_role_is_reported_by_its_name(cluster: Prisms) -> None:
    machine(cluster)
    assert checks(cluster)["role"] == (True, False, "mover has the role Prism Admin")
    cluster.central.roles = ["Prism Viewer"]
    assert checks(cluster)["role"] == (False, False, "mover has the role Prism Viewer, which may change nothing")
    cluster.central.roles = ["Cluster Admin", "Prism Viewer"]
    assert checks(cluster)["role"][:2] == (True, False)
    cluster.central.roles = ["our movers"]
    assert checks(cluster)["role"] == (True, True, "mover has the role our movers, of which nothing is known here")


def test_a_role_that_is_not_known_is_no_obstacle(cluster: Prisms) -> None:
    """It comes by a group; it may not be seen; an older Prism Central has no roles of v4."""
    machine(cluster)
    cluster.central.by_group = True
    assert checks(cluster)["role"] == (True, True, "no authorization policy names mover: its role, if any, comes by a group")
    cluster.fault("authz/roles|authn/users", "403", 100)
    assert checks(cluster)["role"][:2] == (True, True)
    assert "cannot list users: 403" in checks(cluster)["role"][2]
    del cluster.central.version["iam"]
    assert checks(cluster)["role"][:2] == (True, True)
    assert "role" not in checks(cluster, "element")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("config/recovery-points", "privilege: see recovery points"),
        ("config/storage-containers", "privilege: see storage containers"),
        ("config/clusters", "privilege: see clusters"),
        ("config/tasks$", "privilege: see tasks"),
    ],
)
def test_a_list_that_is_not_shown_is_a_privilege_that_lacks(cluster: Prisms, path: str, name: str) -> None:
    machine(cluster)
    cluster.fault(path, "403", 1000)
    ok, _, detail = checks(cluster)[name]
    assert not ok
    assert "403" in detail


def test_a_start_that_moves_no_clock_is_seen_by_the_clusters_counter(cluster: Prisms) -> None:
    """On and off again within what a time stamp tells apart."""
    vm = machine(cluster, power="OFF")
    for which in (("element",), ("central", "element")):
        before = ask(cluster.access(*which), lambda adapter: adapter.last_start(vm.id))
        assert before == ask(cluster.access(*which), lambda adapter: adapter.last_start(vm.id))
        vm.version += 2
        assert before != ask(cluster.access(*which), lambda adapter: adapter.last_start(vm.id))


def test_a_wrong_password_is_reported_at_the_login(cluster: Prisms) -> None:
    for which in ("central", "element"):
        with pytest.raises(AuthFailed):
            ask(cluster.access(which, password="wrong"), lambda adapter: adapter.list_vms())


def test_half_a_login_of_elements_is_refused(cluster: Prisms) -> None:
    access = cluster.access()
    with pytest.raises(BadRequest):
        PrismApi(replace(access, credentials={**access.credentials, "element_user": "admin"}))


def test_a_server_that_is_no_prism_is_reported(cluster: Prisms) -> None:
    cluster.fault("/", "404", 100)
    with pytest.raises(Internal, match="neither"):
        ask(cluster.access("central"), lambda adapter: adapter.list_vms())


@pytest.mark.parametrize("status", ["409", "429", "502", "503", "504", "cut"])
def test_passing_trouble_is_asked_again(cluster: Prisms, status: str) -> None:
    vm = machine(cluster)
    cluster.fault("GET .*vms/", status, 2)
    assert ask(cluster.access("central"), lambda adapter: adapter.inspect(vm.id)).name == "web"


def test_trouble_that_stays_is_reported_with_its_words(cluster: Prisms) -> None:
    vm = machine(cluster)
    cluster.fault("GET .*vms/", "503", 1000)
    with pytest.raises(SourceUnreachable, match="503, a fault of the test's"):
        ask(cluster.access("central"), lambda adapter: adapter.inspect(vm.id))


def test_a_vm_that_changed_meanwhile_is_looked_at_again(cluster: Prisms) -> None:
    """412: somebody else changed it between our look and our wish."""
    vm = machine(cluster)
    cluster.fault("POST .*/shutdown", "412", 2)
    cluster.fault("PUT .*/vms/", "412", 2)
    ask(cluster.access("central"), lambda adapter: adapter.shutdown(vm.id))
    ask(cluster.access("central"), lambda adapter: adapter.mark(vm.id, "moved"))
    assert (vm.power, vm.description) == ("OFF", "moved")


@pytest.mark.parametrize("which", ["central", "element"])
@pytest.mark.parametrize("tools", [False, True])
def test_a_guest_that_is_deaf_is_powered_off(cluster: Prisms, which: str, tools: bool) -> None:
    vm = machine(cluster, deaf=True, tools=tools)
    # The job's own deadline goes before that of its source.
    with pytest.raises(GuestStaysOn, match="after 0 s"):
        ask(cluster.access(which, shutdown_timeout_s=600), lambda adapter: adapter.shutdown(vm.id, "hold", 0))
    ask(cluster.access(which, shutdown_timeout_s=0), lambda adapter: adapter.shutdown(vm.id))
    assert vm.power == "OFF"


def test_a_cluster_that_lets_nobody_describe_its_vms_costs_no_job(cluster: Prisms) -> None:
    vm = machine(cluster)
    cluster.element.refuses_put = True
    ask(cluster.access("element"), lambda adapter: adapter.mark(vm.id, "moved"))
    assert vm.description == ""


# ── the ways ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def opened(adapter: PrismApi, vm_id: str, name: str = "synvirt-a-1", since: str | None = None) -> Any:
    """Of the first disk: its reader's spec."""
    snapshot = await adapter.snapshot(vm_id, name)
    return await adapter.open_disk(vm_id, snapshot, (await adapter.inspect(vm_id)).disks[0], since)


def test_zeros_are_never_read_and_reads_are_the_snapshots(by_nfs: Prisms) -> None:
    vm = machine(by_nfs)
    spec = ask(by_nfs.access("element"), lambda adapter: opened(adapter, vm.id))
    assert isinstance(spec, AllocatedSpec)
    copy, data_bytes = read(spec, os.urandom(SIZE))
    assert copy == content()
    assert data_bytes == 11 << 18


def test_a_delta_says_what_became_zero_and_does_not_read_it(by_nfs: Prisms) -> None:
    vm = machine(by_nfs)

    async def use(adapter: PrismApi) -> Any:
        first = await adapter.snapshot(vm.id, "synvirt-a-1")
        by_nfs.state.guest_writes(vm.id, "scsi.0", 0, bytes(BLOCK))
        by_nfs.state.guest_writes(vm.id, "scsi.0", 5 * BLOCK, b"new")
        return await opened(adapter, vm.id, "synvirt-a-2", first.change_ids["scsi.0"])

    spec = ask(by_nfs.access("element"), use)
    assert isinstance(spec, ChangedSpec)
    copy, data_bytes = read(spec, content())
    assert copy == by_nfs.state.path(vm.disks[0]).read_bytes()
    assert data_bytes == BLOCK


def test_a_disk_that_became_another_file_is_no_delta(by_nfs: Prisms) -> None:
    vm = machine(by_nfs)

    async def use(adapter: PrismApi) -> None:
        first = await adapter.snapshot(vm.id, "synvirt-a-1")
        old, vm.disks[0].id = by_nfs.state.path(vm.disks[0]), "0" * 8 + vm.disks[0].id[8:]
        old.rename(by_nfs.state.path(vm.disks[0]))
        await opened(adapter, vm.id, "synvirt-a-2", first.change_ids["scsi.0"])

    with pytest.raises(CbtReset, match="not the same file"):
        ask(by_nfs.access("element"), use)


def test_a_guest_is_quiet_for_its_snapshot_where_it_can_be(by_nfs: Prisms) -> None:
    """And as after a crash, where that fails."""
    vm = machine(by_nfs, tools=True)
    ask(by_nfs.access("element"), lambda adapter: adapter.snapshot(vm.id, "synvirt-a-1"))
    vm.tools = False
    ask(by_nfs.access("element"), lambda adapter: adapter.snapshot(vm.id, "synvirt-a-2"))
    vm.tools = True
    by_nfs.fault("POST .*/vm_snapshots$", "422")
    ask(by_nfs.access("element"), lambda adapter: adapter.snapshot(vm.id, "synvirt-a-3"))
    kinds = {one.name: one.kind for one in by_nfs.state.kept.values()}
    assert [kinds[f"synvirt-a-{number}"] for number in (1, 2, 3)] == ["APPLICATION_CONSISTENT", *["CRASH_CONSISTENT"] * 2]


def test_snapshots_expire_by_themselves_where_nobody_comes_back(by_nfs: Prisms) -> None:
    vm = machine(by_nfs)
    ask(by_nfs.access("element", expire_days=2), lambda adapter: adapter.snapshot(vm.id, "synvirt-a-1"))
    expires = next(iter(by_nfs.state.kept.values())).expires
    assert 0 < expires / 1000 - time.time() < 2.1 * 86400


def test_a_token_that_runs_out_in_the_middle_is_fetched_again(by_iscsi: Prisms) -> None:
    """And the answer's pages go on where they were."""
    by_iscsi.central.token_uses = 1
    vm = by_iscsi.state.add_vm("web", {"scsi.0": b"".join((os.urandom(BLOCK), bytes(BLOCK))[part % 2] for part in range(40))})
    spec = ask(by_iscsi.access(transport="iscsi"), lambda adapter: opened(adapter, vm.id))
    copy, data_bytes = read(spec, os.urandom(40 * BLOCK))
    assert copy == by_iscsi.state.path(vm.disks[0]).read_bytes()
    assert data_bytes == 20 * BLOCK
    discovered = [one for one in by_iscsi.seen if one.endswith("discover-cluster")]
    assert len(discovered) == 5
    ask(by_iscsi.access(transport="iscsi"), lambda adapter: adapter.cleanup(vm.id, "synvirt-a-1"))
    assert by_iscsi.names() == []


def test_a_cluster_that_is_away_costs_a_cold_copy_its_holes_and_ends_a_warm_one(by_iscsi: Prisms) -> None:
    """It alone tells what changed: a job that cannot ask it is to say so before it has copied for hours."""
    vm = machine(by_iscsi)
    by_iscsi.central.element_address = "127.0.0.3"  # nothing listens there
    access = by_iscsi.access("central", transport="iscsi")
    with pytest.raises(SourceUnreachable, match=r"127\.0\.0\.3 port 9440") as failure:
        ask(access, lambda adapter: opened(adapter, vm.id))
    assert "TCP 9440" in (failure.value.hint or "")
    vm.power = "OFF"
    assert isinstance(ask(access, lambda adapter: opened(adapter, vm.id)), IscsiSpec)
    ask(access, lambda adapter: adapter.cleanup(vm.id, "synvirt-a-1"))
    assert by_iscsi.names() == []


def test_the_cluster_may_serve_another_revision_than_its_central(by_iscsi: Prisms) -> None:
    by_iscsi.central.content_version = "v4.0"
    vm = machine(by_iscsi)
    spec = ask(by_iscsi.access(transport="iscsi"), lambda adapter: opened(adapter, vm.id))
    assert isinstance(spec, AllocatedSpec)
    assert any("/api/dataprotection/v4.0/content" in one for one in by_iscsi.seen)


@pytest.mark.parametrize("which", ["central", "element"])
def test_a_vm_that_is_off_is_read_by_images_where_no_better_way_is_open(cluster: Prisms, which: str) -> None:
    vm = machine(cluster, power="OFF")
    access = cluster.access(which)

    async def use(adapter: PrismApi) -> tuple[VmManifest, Any]:
        manifest = await adapter.inspect(vm.id)
        spec = await opened(adapter, vm.id)
        with pytest.raises(CbtUnsupported):
            await adapter.enable_cbt(vm.id, ["scsi.0"])
        return manifest, spec

    manifest, spec = ask(access, use)
    assert isinstance(spec, DownloadSpec)
    assert "s3cret" not in repr(spec)
    assert not manifest.cbt_available
    assert "image download cannot report changes" in str(manifest.cbt_reason)
    assert "by an image" in manifest.concerns[0].assessment
    assert read(spec)[0] == content()
    assert cluster.names() == ["image synvirt-a-1 sata.1", "image synvirt-a-1 scsi.0"]
    ask(access, lambda adapter: adapter.cleanup(vm.id, "synvirt-a-1"))
    assert cluster.names() == []


def test_an_image_of_a_vm_that_runs_is_refused(cluster: Prisms) -> None:
    vm = machine(cluster)
    with pytest.raises(SnapshotFailed, match="is on"):
        ask(cluster.access("element"), lambda adapter: adapter.snapshot(vm.id, "synvirt-a-1"))
    assert cluster.names() == []


def test_a_download_that_is_cut_says_where(cluster: Prisms) -> None:
    vm = machine(cluster, power="OFF")
    spec = ask(cluster.access("element"), lambda adapter: opened(adapter, vm.id))
    image = next(one for one in cluster.state.images.values() if one.name.endswith("scsi.0"))
    image.path.write_bytes(image.path.read_bytes()[:-5])
    with pytest.raises(DiskReadFailed, match="sends 4194299 bytes"):
        open_reader(spec)
    image.path.unlink()
    del cluster.state.images[image.id]
    with pytest.raises(DiskReadFailed, match="404"):
        open_reader(spec)


def test_a_way_that_the_operator_chose_and_that_is_not_open_is_reported_before_the_job(cluster: Prisms) -> None:
    vm = machine(cluster)
    manifest = ask(cluster.access("central", transport="nfs"), lambda adapter: adapter.inspect(vm.id))
    assert (manifest.concerns[0].category, manifest.cbt_available) == ("Critical", False)
    assert "no Prism Element is named" in manifest.concerns[0].assessment


# ── who is let in ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_host_that_is_not_on_the_allow_list_is_reported_when_the_job_is_planned(by_nfs: Prisms) -> None:
    vm = machine(by_nfs)
    by_nfs.state.cluster_list.clear()
    by_nfs.state.on_list()
    manifest = ask(by_nfs.access("element"), lambda adapter: adapter.inspect(vm.id))
    assert "does not let this host mount /default" in str(manifest.cbt_reason)


def test_a_host_may_put_itself_on_the_list_and_takes_itself_off_again(by_nfs: Prisms, tmp_path: Path) -> None:
    """Of a container that inherits: nobody else loses his place meanwhile, and it inherits again in the end."""
    vm, state = machine(by_nfs), by_nfs.state
    state.cluster_list[:] = ["127.0.0.7/255.255.255.255"]
    state.on_list()
    access = by_nfs.access("element", folder=tmp_path / "own", extend_allow_list=True, client_address="127.0.0.1")
    spec = ask(access, lambda adapter: opened(adapter, vm.id))
    assert state.listed("default") == ["127.0.0.7/255.255.255.255", "127.0.0.1/255.255.255.255"]
    assert read(spec)[0] == content()
    ask(access, lambda adapter: adapter.cleanup(vm.id, "synvirt-a-1"))
    kept = state.containers["default"]
    assert (kept["nfs_whitelist"], kept["nfs_whitelist_inherited"]) == ([], True)
    assert list((tmp_path / "own").iterdir()) == []


def test_what_others_did_to_the_list_meanwhile_stays(by_nfs: Prisms, tmp_path: Path) -> None:
    vm, state = machine(by_nfs), by_nfs.state
    state.containers["default"] |= {"nfs_whitelist": ["127.0.0.7/255.255.255.255"], "nfs_whitelist_inherited": False}
    state.on_list()
    access = by_nfs.access("element", folder=tmp_path / "own", extend_allow_list=True, client_address="127.0.0.1")
    ask(access, lambda adapter: opened(adapter, vm.id))
    state.containers["default"]["nfs_whitelist"].append("127.0.0.8/255.255.255.255")
    ask(access, lambda adapter: adapter.cleanup(vm.id, "synvirt-a-1"))
    assert state.listed("default") == ["127.0.0.7/255.255.255.255", "127.0.0.8/255.255.255.255"]


def test_a_list_that_was_put_back_is_not_put_back_twice(by_nfs: Prisms, tmp_path: Path) -> None:
    """A service that was killed between the two: the container inherits again, and nobody is shut out of it."""
    vm, state, own = machine(by_nfs), by_nfs.state, tmp_path / "own"
    state.cluster_list[:] = ["127.0.0.7/255.255.255.255"]
    state.on_list()
    access = by_nfs.access("element", folder=own, extend_allow_list=True, client_address="127.0.0.1")
    ask(access, lambda adapter: opened(adapter, vm.id))
    (note,) = own.iterdir()
    kept = note.read_bytes()
    ask(access, lambda adapter: adapter.cleanup(vm.id, "synvirt-a-1"))
    note.write_bytes(kept)
    ask(access, lambda adapter: adapter.cleanup(vm.id, "synvirt-a-1"))
    assert state.listed("default") == ["127.0.0.7/255.255.255.255"]
    assert list(own.iterdir()) == []


def test_a_cluster_that_lets_a_strangers_mount_hang_is_reported_in_time(by_nfs: Prisms) -> None:
    """As Nutanix does: it takes the connection, and says nothing."""
    vm = machine(by_nfs)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        access = by_nfs.access("element", mount_port=silent.getsockname()[1])
        began = time.monotonic()
        manifest = ask(access, lambda adapter: adapter.inspect(vm.id))
    assert "no answer within" in str(manifest.cbt_reason)
    assert time.monotonic() - began < 60  # its limit is 10 s; this machine may be busy


def test_a_file_that_goes_while_it_is_read_is_reported_and_does_not_hang(by_nfs: Prisms) -> None:
    """Its export goes, and with it the handle that we read by."""
    vm = machine(by_nfs)
    spec = ask(by_nfs.access("element"), lambda adapter: opened(adapter, vm.id))
    assert isinstance(spec, AllocatedSpec)
    assert isinstance(spec.over, NfsSpec)
    with pytest.raises(FileGone, match="No such file"):
        open_reader(replace(spec.over, path=f"{spec.over.path}x"))
    reader = open_reader(spec)
    reader.read_into(0, memoryview(bytearray(4096)))
    kept = by_nfs.state.containers.pop("default")
    by_nfs.state.on_list()
    try:
        with pytest.raises((FileGone, AuthFailed)):
            reader.read_into(0, memoryview(bytearray(4096)))
    finally:
        by_nfs.state.containers["default"] = kept
        reader.close()


def test_many_questions_at_once_share_a_session(cluster: Prisms) -> None:
    vm = machine(cluster)

    async def use(adapter: PrismApi) -> list[VmManifest]:
        return await asyncio.gather(*(adapter.inspect(vm.id) for _ in range(8)))

    assert len(ask(cluster.access("central"), use)) == 8


def test_a_session_is_recorded_without_secrets_and_names(cluster: Prisms) -> None:
    """As `sources record` asks; what a token opens is never in it."""
    vm = cluster.state.add_vm("payroll-7", {"scsi.0": bytes(1 << 20)}, description="ask Jane")
    recording = Recording()
    for which in ("central", "element"):
        access = replace(cluster.access(which), recorder=recording)
        rows = ask(access, lambda adapter: adapter.list_vms())
        ask(access, lambda adapter: adapter.inspect(vm.id))
    about = ask(cluster.access("element"), lambda adapter: adapter.about())
    reported = "\n".join(lines(recording, LiveKind.PRISM_API, about, [row.name for row in rows], ["s3cret", "mover"]))
    assert len(recording.exchanges) > 4
    assert "/ahv/config/vms" in reported
    assert '"powerState"' in reported or "powerState" in reported
    for kept_back in ("s3cret", "payroll-7", "Jane", vm.id, "50:6b:8d:aa:bb:cc", "10.1.2.3"):
        assert kept_back not in reported, kept_back
