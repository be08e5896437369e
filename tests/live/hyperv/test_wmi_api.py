"""wmi_api against a Hyper-V host of our own: who it is, what it lists, what its VMs are, and all that goes wrong."""

import asyncio
import importlib
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from synvirt.errors import (
    AuthFailed,
    CbtReset,
    CbtUnsupported,
    SnapshotFailed,
    SourceUnreachable,
    SynvirtError,
    UnsupportedFormat,
)
from synvirt.live.hyperv import journal, tracking
from synvirt.live.hyperv.adapter import WmiApi
from synvirt.live.hyperv.form import pairs
from synvirt.live.hyperv.places import Shares
from synvirt.live.hyperv.session import Address, Credentials, Session
from synvirt.live.odd import OddAnswer
from synvirt.live.sessions import StaysLoggedIn
from synvirt.machines.concerns import LEFT_OUT
from synvirt.model.machine import Disk, VmManifest
from synvirt.remote import retrying
from synvirt.texts import json_bounded
from synvirt.transport import Answer
from tests.contracts.live import in_session, read
from tests.fakes.hyperv.host import FakeHost
from tests.fakes.hyperv.model import FAILED, OFF, FakeVm
from tests.fakes.hyperv.wsman import Refusal, Wsman, served
from tests.servers.remote_servers import wire


def ask(host: FakeHost, use: Callable[[WmiApi], Awaitable[Any]], **options: Any) -> Any:
    return in_session(lambda: WmiApi(host.access(**options)), use)


@pytest.fixture
def vm(hyperv: FakeHost) -> FakeVm:
    return hyperv.hyperv.add_vm(f"vm-{uuid4().hex[:8]}", random.Random(1).randbytes(1 << 20))


def inspected(hyperv: FakeHost, vm: FakeVm) -> VmManifest:
    found: VmManifest = ask(hyperv, lambda adapter: adapter.inspect(vm.id))
    return found


def concerns(manifest: VmManifest) -> dict[str, str]:
    return {one.id: one.category for one in manifest.concerns}


# ── who is there ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_two_thousand_vms_are_one_question(hyperv: FakeHost) -> None:
    many = {str(uuid4()): f"vm {number} ü_x0041_ \u2028" for number in range(2000)}
    before = dict(hyperv.hyperv.vms)
    hyperv.hyperv.vms = {vm_id: FakeVm(vm_id, name) for vm_id, name in many.items()}
    try:
        called = len(hyperv.wsman.calls)
        rows = ask(hyperv, lambda adapter: adapter.list_vms())
        assert [name for name, _ in hyperv.wsman.calls[called:]].count("list") == 1
        assert len(rows) == 2000
        assert {row.vm_id for row in rows} == set(many)
        assert rows[7].name == "vm 7 ü_x0041_"
    finally:
        hyperv.hyperv.vms = before


def test_a_session_at_rest_keeps_its_shell_and_opens_another_where_the_host_ended_it(hyperv: FakeHost) -> None:
    before = set(hyperv.wsman.shells)

    async def use(adapter: WmiApi) -> None:
        assert isinstance(adapter, StaysLoggedIn)
        shells = set()
        for _ in range(5):
            await adapter.list_vms()
            shells |= set(hyperv.wsman.shells) - before
            await adapter.rest()
        assert len(shells) == 1
        hyperv.wsman.shells.pop(shells.pop())
        await adapter.list_vms()

    ask(hyperv, use)
    assert set(hyperv.wsman.shells) == before


def test_a_manifest_says_what_the_vm_is_and_what_may_go_wrong(hyperv: FakeHost, vm: FakeVm) -> None:
    item = (
        '<INSTANCE CLASSNAME="Msvm_KvpExchangeDataItem"><PROPERTY NAME="Data" TYPE="string"><VALUE>{}</VALUE></PROPERTY>'
        '<PROPERTY NAME="Name" TYPE="string"><VALUE>{}</VALUE></PROPERTY></INSTANCE>'
    )
    nic = hyperv.hyperv.answers()("inspect", {"VmId": vm.id})["nics"][0] | {"vlan_mode": 1, "vlan": 42}
    vss, stop = "5CED1297-4598-4915-A5FC-AD21BB4D02A4", "9F8233AC-BE49-4C79-8EE3-E7E1985B2077"
    vm.extra = {
        "firmware": {"secure_boot": True, "template": "MicrosoftWindows", "boot": [{"bus": 1, "controller": 0, "location": 0}]},
        "security": {"tpm": True, "shielded": True}, "memory_dynamic": True, "replication": 4, "fibre_channel": 1,
        "ports": ["COM 1"],
        "dvds": ["D:\\iso\\virtio.iso"], "checkpoints": [{"id": "c", "name": "before", "created": "2026-11-01T00:00:00Z"}],
        "kvp": [item.format("Windows Server 2022 Datacenter", "OSName"), item.format("10.0.20348", "OSVersion"), "<broken"],
        "nics": [nic],
        "services": [{"id": f"Microsoft:{vm.id}\\{one}", "name": "", "enabled": False, "status": 2} for one in (vss, stop)],
    }  # fmt: skip
    manifest = inspected(hyperv, vm)
    assert (manifest.firmware, manifest.secure_boot, manifest.tpm) == ("uefi", True, True)
    assert (manifest.guest_os.family, manifest.guest_os.id) == ("windows", "10.0.20348")
    assert [one.name for one in manifest.snapshots] == ["before"]
    assert (manifest.nics[0].mac, manifest.nics[0].network) == ("00:15:5d:0a:0b:0c", "LAN")
    disk = manifest.disks[0]
    assert (disk.key, disk.bus, disk.boot_order, disk.capacity_bytes) == ("scsi0:0", "scsi", 1, 1 << 20)
    found = concerns(manifest)
    assert {
        "uefi-state-lost", "secure-boot", "tpm", "snapshots-present", "dynamic-memory", "media-left-out",
        "passthrough-device:Fibre Channel by its name", "hyperv.replication", "hyperv.no_vss", "hyperv.no_shutdown",
        "hyperv.vlan", "hyperv.read_by",
    } <= set(found)  # fmt: skip
    assert found["shielded"] == "Critical"
    assert any("COM 1" in one.assessment for one in manifest.concerns if one.id == LEFT_OUT)
    assert "VLAN 42" in next(one.assessment for one in manifest.concerns if one.id == "hyperv.vlan")


def test_a_guest_keeps_the_uuid_and_the_serial_number_that_it_sees(hyperv: FakeHost, vm: FakeVm) -> None:
    """Its firmware's, which is another than its VM's id; older answers, in recordings, lack it."""
    before = inspected(hyperv, vm)
    assert (before.uuid, before.serial) == (vm.id, None)
    vm.extra = {"bios_guid": "{967DF1BA-2C00-4998-9F1B-D60BCC0C4B90}", "bios_serial": "6534-0143-5923-8126-3170-4385-20"}
    found = inspected(hyperv, vm)
    assert found.serial == "6534-0143-5923-8126-3170-4385-20"
    assert (found.uuid, found.vm_id) == ("967df1ba-2c00-4998-9f1b-d60bcc0c4b90", vm.id)


def test_linux_of_generation_1_reads_its_uuid_in_reverse(hyperv: FakeHost, vm: FakeVm) -> None:
    assert inspected(hyperv, vm).uuid_reversed_for == ()
    vm.extra = {"generation": 1}
    assert inspected(hyperv, vm).uuid_reversed_for == ("linux",)


def test_the_firmware_of_generation_1_boots_the_first_place_whatever_the_list_begins_with(hyperv: FakeHost, vm: FakeVm) -> None:
    """The cmdlets give the disks as they were attached."""
    (drive,) = hyperv.hyperv.answers()("inspect", {"VmId": vm.id})["drives"]
    places = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)]
    drives = [drive | {"bus": bus, "controller": controller, "location": at} for bus, controller, at in places]
    vm.extra = {"generation": 1, "drives": drives}
    disks = inspected(hyperv, vm).disks
    assert [(disk.key, disk.boot_order) for disk in disks] == [
        ("ide0:0", 1),
        ("ide0:1", None),
        ("ide1:0", None),
        ("scsi0:0", None),
    ]


def test_what_cannot_be_read_or_tracked_is_said_of_its_disk(hyperv: FakeHost) -> None:
    vm = hyperv.hyperv.add_vm(f"vm-{uuid4().hex[:8]}", bytes(1 << 20), bytes(1 << 20), bytes(1 << 20))
    vm.disks[1].physical = vm.disks[2].shared = True
    vm.disks[0].sector_bytes = 4096
    manifest = inspected(hyperv, vm)
    found = concerns(manifest)
    assert found["disk-sectors:scsi0:0"] == "Critical"
    assert "disk-sectors:scsi0:2" not in found
    assert [disk.sector_bytes for disk in manifest.disks] == [4096, 512, 512]
    assert (found["disk-physical:scsi0:1"], found["disk-shared:scsi0:2"]) == ("Critical", "Critical")
    assert manifest.disks[0].cbt_reason is None
    assert manifest.cbt_reason_without({"scsi0:1", "scsi0:2"}) is None
    with pytest.raises(CbtUnsupported):
        ask(hyperv, lambda adapter: adapter.enable_cbt(vm.id, ["scsi0:1"]))
    vm.version = "5.0"
    assert "configuration version is 5.0" in (inspected(hyperv, vm).disks[0].cbt_reason or "")


def test_what_our_user_lacks_is_reported(hyperv: FakeHost) -> None:
    hyperv.hyperv.about = {"administrator": False, "hyperv_administrator": False}
    try:
        checks = {one.name: one for one in ask(hyperv, lambda adapter: adapter.about(), shares="").checks}
    finally:
        hyperv.hyperv.about = {}
    assert not checks["privileges"].ok
    assert checks["shares"].warning
    assert "options.shares" in (checks["shares"].hint or "")


# ── where disks lie ──────────────────────────────────────────────────────────────────────────────────────────────────

SHARES = Shares("hv01", 445, "LAB\\mover", "secret", {"D:\\VMs": "vms", "D:\\VMs\\fast": "fast"})


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("D:\\VMs\\web\\a.vhdx", (None, "vms", "web/a.vhdx")),
        ("d:\\vms\\FAST\\a.vhdx", (None, "fast", "a.vhdx")),
        ("D:\\VMs2\\a.vhdx", (None, "D$", "VMs2/a.vhdx")),
        ("C:\\ClusterStorage\\Volume1\\web\\a.vhdx", (None, "C$", "ClusterStorage/Volume1/web/a.vhdx")),
        ("\\\\?\\C:\\x\\a.vhdx", (None, "C$", "x/a.vhdx")),
        ("\\\\sofs.lab\\vms\\web\\a.vhdx", ("sofs.lab", "vms", "web/a.vhdx")),
        ("\\\\?\\UNC\\sofs\\vms\\a.vhdx", ("sofs", "vms", "a.vhdx")),
    ],
)
def test_windows_paths_as_shares(path: str, place: tuple[str | None, str, str]) -> None:
    found = SHARES.place(path)
    assert (found.host, found.share, found.name) == place
    remote = SHARES.remote(found)
    assert dict(remote.credentials) == {"username": "mover", "password": "secret", "domain": "LAB"}
    # A host that Hyper-V names is no way back to this machine.
    assert remote.of_source == (place[0] is None)
    assert "secret" not in repr(remote)


@pytest.mark.parametrize(
    "path", ["\\\\?\\Volume{3f}\\a.vhdx", "relative.vhdx", "\\\\server\\share", "\\\\.\\PHYSICALDRIVE1", ""]
)
def test_what_no_share_leads_to_is_refused(path: str) -> None:
    with pytest.raises(UnsupportedFormat):
        SHARES.place(path)


def test_a_chain_over_two_shares_is_refused() -> None:
    chain = [{"path": "D:\\VMs\\a.avhdx", "format": 3}, {"path": "E:\\base.vhdx", "format": 3}]
    with pytest.raises(UnsupportedFormat, match="over several shares"):
        SHARES.reader(chain)


def test_pairs() -> None:
    assert pairs("A=1; B = c:2 ;") == {"A": "1", "B": "c:2"}
    for wrong in ("A", "=x", "A=", "A=1;B"):
        with pytest.raises(ValueError, match="NAME=VALUE"):
            pairs(wrong)


# ── the journal ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("notes", ["", "one", "one\r\ntwo\r\n", "\n", "ü\n\nx"])
def test_notes_are_afterwards_as_they_were_before(notes: str) -> None:
    kept = journal.written(notes, {"synvirt-x-1": journal.Entry(s="a", b=("b",), q=())})
    assert journal.read(kept)["synvirt-x-1"] == journal.Entry(s="a", b=("b",), q=())
    assert journal.written(journal.written(kept, {"synvirt-x-1": journal.Entry(p="p")}), {}) == notes
    marked = journal.noted(kept, "moved")
    assert journal.noted(marked, "moved") == marked
    assert journal.read(marked) == journal.read(kept)


@pytest.mark.parametrize(
    "line", ["#SYNVIRT# {", "#SYNVIRT# []", '#SYNVIRT# {"a": 1}', '#SYNVIRT# {"a": {"s": 1}}', "#SYNVIRT# " + "[" * 9999]
)
def test_a_journal_that_was_edited_is_none(line: str) -> None:
    assert journal.read(f"text\n{line}") == {}


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("unauthorized", AuthFailed, "refused the login"),
        ("quota", SourceUnreachable, "MaxShellsPerUser"),
        ("envelope", SynvirtError, "MaxEnvelopeSizekb"),
        ("hang_up", SourceUnreachable, "cannot"),
        ("status", SourceUnreachable, "404"),
    ],
)
def test_a_fault_of_winrm_is_reported_and_the_next_session_works(
    hyperv: FakeHost, vm: FakeVm, fault: str, error: type[SynvirtError], words: str
) -> None:
    hyperv.wsman.faults[fault] = 1
    with pytest.raises(error) as raised:
        inspected(hyperv, vm)
    assert words in f"{raised.value.detail} {raised.value.hint}"
    assert inspected(hyperv, vm).name == vm.name
    assert hyperv.wsman.shells == {}


def test_a_host_that_takes_its_time_is_waited_for(hyperv: FakeHost, vm: FakeVm) -> None:
    hyperv.wsman.faults["timed_out"] = 3
    assert inspected(hyperv, vm).name == vm.name


def test_a_shell_that_the_host_has_ended_is_opened_again(hyperv: FakeHost, vm: FakeVm) -> None:
    async def use(adapter: WmiApi) -> str:
        await adapter.inspect(vm.id)
        hyperv.wsman.shells.clear()
        return (await adapter.inspect(vm.id)).name

    assert ask(hyperv, use) == vm.name
    assert hyperv.wsman.shells == {}


def test_another_certificate_is_refused_before_anything_is_sent(hyperv: FakeHost) -> None:
    called = len(hyperv.wsman.calls)
    with pytest.raises(SourceUnreachable, match="certificate"):
        ask(hyperv, lambda adapter: adapter.list_vms(), fingerprint_sha256="AB" * 32)
    with pytest.raises(SourceUnreachable):
        ask(hyperv, lambda adapter: adapter.list_vms(), fingerprint_sha256=None)
    assert len(hyperv.wsman.calls) == called


def test_secrets_go_over_tls_alone(hyperv: FakeHost) -> None:
    access = hyperv.access()
    with pytest.raises(SynvirtError, match="in the clear"):
        WmiApi(replace(access, endpoint="http://127.0.0.1:5985"))


def test_a_guest_that_cannot_be_quiet_is_taken_as_after_a_crash(hyperv: FakeHost, vm: FakeVm) -> None:
    hyperv.hyperv.quiet_fails = True
    try:
        ask(hyperv, lambda adapter: adapter.snapshot(vm.id, "synvirt-x-1"))
    finally:
        hyperv.hyperv.quiet_fails = False
    assert [one.level for one in vm.snapshots] == [2]
    ask(hyperv, lambda adapter: adapter.cleanup(vm.id, "synvirt-x-1"))
    assert hyperv.snapshots(vm) == []


def test_a_snapshot_that_fails_says_why_and_leaves_nothing(hyperv: FakeHost, vm: FakeVm) -> None:
    full = Refusal("CreateSnapshot", FAILED, "There is not enough space on the disk. (0x80070070)")
    for _ in range(2):
        hyperv.hyperv.refuse("take", full)
    with pytest.raises(SnapshotFailed, match="not enough space"):
        ask(hyperv, lambda adapter: adapter.snapshot(vm.id, "synvirt-x-1"))
    ask(hyperv, lambda adapter: adapter.cleanup(vm.id, "synvirt-x-1"))
    assert hyperv.snapshots(vm) == []
    busy = Refusal("CreateSnapshot", 32774)
    for _ in range(2):
        hyperv.hyperv.refuse("take", busy)
    with pytest.raises(SourceUnreachable, match="busy"):
        ask(hyperv, lambda adapter: adapter.snapshot(vm.id, "synvirt-x-1"))
    ask(hyperv, lambda adapter: adapter.cleanup(vm.id, "synvirt-x-1"))


class Dies(Exception):
    pass


@pytest.mark.parametrize("script", ["take", "convert"])
@pytest.mark.parametrize("others", [False, True])
def test_what_a_crash_left_is_found_and_goes(hyperv: FakeHost, vm: FakeVm, script: str, *, others: bool) -> None:
    """Made by Hyper-V, and the answer is lost. What another program made at the same time stays."""
    name, done = "synvirt-x-1", getattr(hyperv.hyperv, f"_{script}")
    other = {"id": "another's", "type": 2, "level": 1, "disks": [], "trackings": []}

    def loses(*args: Any, **parameters: Any) -> Any:
        done(*args, **parameters)
        raise Refusal("", 32772)

    if script == "convert":
        ask(hyperv, lambda adapter: adapter.snapshot(vm.id, name))
    setattr(hyperv.hyperv, f"_{script}", loses)
    try:
        with pytest.raises(SynvirtError):
            ask(hyperv, lambda adapter: getattr(adapter, "snapshot" if script == "take" else "release")(vm.id, name))
    finally:
        delattr(hyperv.hyperv, f"_{script}")
    assert len(vm.snapshots) + len(vm.points) == 1
    if others:
        vm.points.append(other)
    if script == "convert":  # what changed since a point that nobody answered for is not asked
        ask(hyperv, lambda adapter: adapter.release(vm.id, name))
        with pytest.raises(CbtReset):
            ask(hyperv, lambda adapter: since(adapter, vm, name))
        ask(hyperv, lambda adapter: adapter.cleanup(vm.id, "synvirt-x-2"))
    ask(hyperv, lambda adapter: adapter.cleanup(vm.id, name))
    ambiguous = others and script == "convert"
    assert vm.points == ([vm.points[0], other] if ambiguous else [other] if others else [])
    assert (vm.snapshots, vm.notes) == ([], "")


async def since(adapter: WmiApi, vm: FakeVm, name: str) -> None:
    snapshot = await adapter.snapshot(vm.id, "synvirt-x-2")
    await adapter.open_disk(vm.id, snapshot, Disk(key="scsi0:0", label="", capacity_bytes=1 << 20), name)


def test_a_snapshot_that_somebody_removed_is_reported(hyperv: FakeHost, vm: FakeVm) -> None:
    async def use(adapter: WmiApi) -> None:
        snapshot = await adapter.snapshot(vm.id, "synvirt-x-1")
        hyperv.hyperv.answers()("destroy", {"VmId": vm.id, "SnapshotId": snapshot.id, "PointId": ""})
        disk = (await adapter.inspect(vm.id)).disks[0]
        await adapter.open_disk(vm.id, snapshot, disk, None)

    with pytest.raises(SnapshotFailed):
        ask(hyperv, use)
    ask(hyperv, lambda adapter: adapter.cleanup(vm.id, "synvirt-x-1"))
    assert hyperv.snapshots(vm) == []


def test_a_vm_that_is_off_is_read_once_its_files_are_merged(
    hyperv: FakeHost, vm: FakeVm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "MERGE_PAUSE_S", 0.01)
    hyperv.hyperv.power(vm, OFF)
    vm.status = "MergingDisks"
    before = hyperv.called("state")

    def ends(node: str, vm_id: str) -> Any:
        if hyperv.called("state") > before + 3:
            vm.status = "None"
        return type(hyperv.hyperv)._state(hyperv.hyperv, node, vm_id)

    monkeypatch.setattr(hyperv.hyperv, "_state", ends, raising=False)
    assert ask(hyperv, lambda adapter: adapter.snapshot(vm.id, "synvirt-x-1")).id == tracking.OFF
    assert vm.status == "None"


def test_a_share_that_refuses_us_is_named(hyperv: FakeHost, vm: FakeVm) -> None:
    async def use(adapter: WmiApi) -> None:
        snapshot = await adapter.snapshot(vm.id, "synvirt-x-1")
        disk = (await adapter.inspect(vm.id)).disks[0]
        spec = await adapter.open_disk(vm.id, snapshot, disk, None)
        await asyncio.to_thread(read, spec)

    hyperv.hyperv.power(vm, OFF)
    with pytest.raises(SynvirtError, match="not-there"):
        ask(hyperv, use, shares="D:\\=not-there")


def test_an_array_that_powershell_wrapped_is_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one of too many values is not parsed."""
    control = Wsman(lambda name, _: {"vms": {"value": [{"value": 1}, {"Count": 2}], "Count": 2}}, "u", "p")
    with served(control, None) as port:
        session = Session(Address("127.0.0.1", port, tls=False), Credentials("ntlm", "u", "p"))
        plain = importlib.import_module("pypsrp.wsman").WSMan(
            "127.0.0.1", port=port, ssl=False, auth="basic", encryption="never", username="u", password="p"
        )
        session._connection = lambda: plain  # type: ignore[method-assign]
        assert session.run("take") == {"vms": [{"value": 1}, {"Count": 2}]}
        monkeypatch.setattr(json_bounded, "VALUES_MAX", 5)
        with pytest.raises(OddAnswer, match=r"answers take\.ps1 with more than 5 values"):
            session.run("take")
        session.close()


def test_a_broken_connection_that_does_not_close_hides_no_error() -> None:
    def broken() -> None:
        raise OSError("it does not even close")

    session = Session(Address("127.0.0.1", 1, tls=False), Credentials("ntlm", "u", "p"))
    session._connection = lambda: SimpleNamespace(close=broken)  # type: ignore[method-assign]
    with pytest.raises(SourceUnreachable, match="open a session"):
        session.open()


class Kept:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str, Any, Any]] = []

    def answered(self, method: str, path: str, query: Mapping[str, str], sent: bytes | None, answer: Answer) -> None:
        self.calls.append((method, path, json.loads(sent or b"null"), answer.json()))


def test_a_recorder_is_given_each_script_its_parameters_and_its_answer(hyperv: FakeHost, vm: FakeVm) -> None:
    kept = Kept()
    vm.notes = "call Anna, 555-0123"
    in_session(lambda: WmiApi(replace(hyperv.access(), recorder=kept)), lambda adapter: adapter.inspect(vm.id))
    assert [(method, path) for method, path, *_ in kept.calls] == [("POST", "/wsman/about.ps1"), ("POST", "/wsman/inspect.ps1")]
    assert kept.calls[1][2] == {"VmId": vm.id}
    assert kept.calls[1][3]["name"] == vm.name
    assert not any(one in str(kept.calls) for one in ("p@ss", "Anna", "mover"))


def test_a_share_that_is_cut_in_the_middle_is_read_on(hyperv: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "PAUSES_S", (0.05,) * 7)
    content = random.Random(8).randbytes(6 << 20)
    vm = hyperv.hyperv.add_vm(f"vm-{uuid4().hex[:8]}", content)
    hyperv.hyperv.power(vm, OFF)
    with wire(hyperv.files.port) as between:
        # Whose connections these are: the library's, and those of Samba's own client.
        between.cuts = {1: 1 << 20, 2: 3 << 19, 3: 1 << 19, 4: 2 << 20}

        async def use(adapter: WmiApi) -> bytes:
            snapshot = await adapter.snapshot(vm.id, "synvirt-x-1")
            disk = (await adapter.inspect(vm.id)).disks[0]
            spec = await adapter.open_disk(vm.id, snapshot, disk, None)
            return (await asyncio.to_thread(read, spec))[0]

        assert ask(hyperv, use, smb_port=between.port) == content
        assert between.connections > 2


def test_a_share_that_knows_another_password_is_named(hyperv: FakeHost, vm: FakeVm) -> None:
    hyperv.hyperv.power(vm, OFF)
    access = hyperv.access()
    wrong = replace(access, credentials={**access.credentials, "smb_user": "root", "smb_password": "another"})

    async def use(adapter: WmiApi) -> None:
        disk = (await adapter.inspect(vm.id)).disks[0]
        spec = await adapter.open_disk(vm.id, await adapter.snapshot(vm.id, "synvirt-x-1"), disk, None)
        await asyncio.to_thread(read, spec)

    with pytest.raises(AuthFailed, match="disks"):
        in_session(lambda: WmiApi(wrong), use)
