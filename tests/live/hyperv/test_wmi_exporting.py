"""The second way of wmi_api to a disk's bytes: Hyper-V exports a snapshot, whole or what changed, to a share."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from synvirt.disks.specs import ImageSpec
from synvirt.errors import BadRequest, CbtReset, Internal, SnapshotFailed, SourceUnreachable, SynvirtError
from synvirt.live import SnapshotRef, SourceAccess
from synvirt.live.hyperv import exporting, journal
from synvirt.live.hyperv.adapter import WmiApi
from synvirt.live.hyperv.exporting import Exports
from synvirt.live.hyperv.places import Shares
from tests.contracts.live import in_session, read
from tests.fakes.hyperv.host import EXPORTING, FakeHost
from tests.fakes.hyperv.model import FAILED, RUNNING, FakeVm
from tests.fakes.hyperv.wsman import Refusal

FULL = "There is not enough space on the disk. (0x80070070)"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "POLL_S", 0.01)


@pytest.fixture
def vm(hyperv: FakeHost) -> FakeVm:
    hyperv.hyperv.exported.clear()
    return hyperv.hyperv.add_vm(f"vm-{uuid4().hex[:8]}", random.Random(1).randbytes(2 << 20))


def ask(host: FakeHost, use: Callable[[WmiApi], Awaitable[Any]], **options: Any) -> Any:
    return in_session(lambda: WmiApi(host.access(**(EXPORTING | options))), use)


async def opened(adapter: WmiApi, vm: FakeVm, name: str, since: str | None = None) -> tuple[SnapshotRef, ImageSpec]:
    snapshot = await adapter.snapshot(vm.id, name)
    spec = await adapter.open_disk(vm.id, snapshot, (await adapter.inspect(vm.id)).disks[0], since)
    assert isinstance(spec, ImageSpec)
    return snapshot, spec


def parts(hyperv: FakeHost) -> list[str]:
    return [f"{folder.rpartition(chr(92))[2]}{' by changes' if base else ''}" for folder, base in hyperv.hyperv.exported]


def cleaned(hyperv: FakeHost, vm: FakeVm, *names: str) -> None:
    for name in names:
        ask(hyperv, lambda adapter: adapter.cleanup(vm.id, name))  # noqa: B023
    assert hyperv.snapshots(vm) == []


# ── which way ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_way_is_chosen_when_the_vm_is_planned_and_shown(hyperv: FakeHost, vm: FakeVm) -> None:
    """Exported where options say so, or where no share leads to all files of a disk; else read in place."""

    def way(**options: str) -> tuple[str, str]:
        access = hyperv.access(**options)
        found = in_session(lambda: WmiApi(access), lambda adapter: adapter.inspect(vm.id))
        return next((one.category, one.assessment) for one in found.concerns if one.id == "hyperv.read_by")

    to = {"export_to": "D:\\Exports"}
    for options in ({}, to, to | {"read_by": "in_place"}):
        assert way(**options)[0] == "Information"
        assert "In place, over SMB. scsi0:0: \\\\127.0.0.1\\disks (SMB 3.1.1, signed)" in way(**options)[1]
    assert "Hyper-V exports them to D:\\Exports, as options.read_by says" in way(**EXPORTING)[1]
    nowhere = way(shares="D:\\=not-there")
    assert nowhere[0] == "Warning"
    assert "not-there" in nowhere[1]


def test_a_chain_over_two_shares_is_exported() -> None:
    shares = Shares("hv01", 445, "mover", "secret", {"D:\\VMs": "vms"})
    drives = [{"physical": False, "chain": [{"path": "D:\\VMs\\a.avhdx", "format": 3}, {"path": "E:\\base.vhdx", "format": 3}]}]
    exports = Exports(shares, "\\\\files.lab\\exports\\ours", always=False)
    assert "over several shares" in (exports.why(drives) or "")
    assert exports.why([{"physical": False, "chain": [{"path": "D:\\VMs\\a.vhdx", "format": 3}]}]) is None
    remote, name = exports.remote(exports.path("synvirt-x-1"))
    # The operator named that host: it is spoken to.
    assert (remote.url, name, remote.of_source) == ("smb://files.lab:445/exports/", "ours/synvirt-x-1", True)


@pytest.mark.parametrize(
    "options",
    [
        {"read_by": "export"},
        {"export_to": "D:\\"},
        {"export_to": "D:\\x\\..\\y"},
        {"export_to": "\\\\.\\pipe"},
        {"export_to": "\\\\?\\D:\\x"},
        {"export_to": "D:\\a*b"},
        {"export_to": "relative"},
        {"read_by": "both"},
    ],
)
def test_where_nothing_may_be_exported_to(options: dict[str, str]) -> None:
    with pytest.raises(BadRequest):
        WmiApi(SourceAccess("https://hv01", {"user": "u", "password": "p"}, options))


def test_only_folders_of_ours_are_removed(hyperv: FakeHost) -> None:
    kept = hyperv.files.folder / "Exports" / "another's (1)"
    kept.mkdir(parents=True)
    shares = Shares("127.0.0.1", hyperv.files.port, "root", "p", {"D:\\": "disks"})
    for path in ("D:\\Exports\\another's (1)", "D:\\Exports\\..", "D:\\"):
        with pytest.raises(Internal):
            exporting.remove(Exports(shares, "D:\\Exports", always=True), path)
    assert kept.exists()
    kept.rmdir()


# ── whole, and what changed ──────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_on_the_share_goes_with_the_pass(hyperv: FakeHost, vm: FakeVm) -> None:
    """A pass that is started over finds its export as it is; released, it is gone, and what changed since can be had."""
    share = hyperv.files.folder / "Exports"

    async def first(adapter: WmiApi) -> bytes:
        _, spec = await opened(adapter, vm, "synvirt-x-1")
        return (await asyncio.to_thread(read, spec))[0]

    before = hyperv.hyperv.content(vm)
    assert ask(hyperv, first) == ask(hyperv, first) == before
    assert parts(hyperv) == ["whole"]
    assert [one.name for one in share.iterdir()] == ["synvirt-x-1"]
    for _ in range(2):
        ask(hyperv, lambda adapter: adapter.release(vm.id, "synvirt-x-1"))
    assert list(share.iterdir()) == []
    hyperv.hyperv.guest_writes(vm, 70_000, b"changed")

    async def second(adapter: WmiApi) -> tuple[bytes, int]:
        _, spec = await opened(adapter, vm, "synvirt-x-2", "synvirt-x-1")
        assert spec.alone
        return await asyncio.to_thread(read, spec, before)

    assert ask(hyperv, second) == (hyperv.hyperv.content(vm), 4096)
    assert parts(hyperv) == ["whole", "since-1 by changes"]
    assert hyperv.called("changes") == 0
    cleaned(hyperv, vm, "synvirt-x-1", "synvirt-x-2")


@pytest.mark.parametrize("lost", ["job", "half", "journal"])
def test_an_export_that_was_cut_off(hyperv: FakeHost, vm: FakeVm, lost: str) -> None:
    """Hyper-V has forgotten the job; the service died before the job was noted; the notes were edited."""
    hyperv.hyperv.job_asks = 1
    if lost == "journal":

        async def edited(adapter: WmiApi) -> None:
            snapshot = await adapter.snapshot(vm.id, "synvirt-x-1")
            vm.notes = ""
            await adapter.open_disk(vm.id, snapshot, (await adapter.inspect(vm.id)).disks[0], None)

        with pytest.raises(SnapshotFailed, match="notes"):
            ask(hyperv, edited)
        hyperv.hyperv.answers()("destroy", {"VmId": vm.id, "SnapshotId": vm.snapshots[0].id, "PointId": ""})
        return
    hyperv.hyperv.job_asks, before = 10**9, hyperv.called("job")

    async def dies(adapter: WmiApi) -> None:
        opening = asyncio.create_task(opened(adapter, vm, "synvirt-x-1"))
        while not hyperv.called("job") > before:
            await asyncio.sleep(0.01)
        await adapter.close()
        with pytest.raises(SourceUnreachable, match="session was closed"):
            await opening

    ask(hyperv, dies)
    hyperv.hyperv.job_asks = 1
    entry = journal.read(vm.notes)["synvirt-x-1"]
    if lost == "job":
        hyperv.hyperv.jobs.clear()
    else:
        vm.notes = journal.written(vm.notes, {"synvirt-x-1": entry.model_copy(update={"e": {"whole": ""}})})
    _, spec = ask(hyperv, lambda adapter: opened(adapter, vm, "synvirt-x-1"))
    assert read(spec)[0] == hyperv.hyperv.content(vm)
    assert parts(hyperv) == ["whole", "whole"]
    cleaned(hyperv, vm, "synvirt-x-1")


def test_an_export_goes_on_while_nobody_looks(hyperv: FakeHost, vm: FakeVm) -> None:
    """A new session waits for the job of the one before, and begins none of its own."""
    ask(hyperv, lambda adapter: opened(adapter, vm, "synvirt-x-1"))
    entry = journal.read(vm.notes)["synvirt-x-1"]
    assert (entry.x, entry.e) == ("D:\\Exports\\synvirt-x-1", {"whole": "done"})
    job = next(reversed(hyperv.hyperv.jobs))
    hyperv.hyperv.jobs[job] = 3
    vm.notes = journal.written(vm.notes, {"synvirt-x-1": entry.model_copy(update={"e": {"whole": job}})})
    ask(hyperv, lambda adapter: opened(adapter, vm, "synvirt-x-1"))
    assert parts(hyperv) == ["whole"]
    assert hyperv.hyperv.jobs[job] <= 0
    cleaned(hyperv, vm, "synvirt-x-1")


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("by_job", [False, True])
def test_a_share_that_is_full_is_said_and_nothing_is_left(hyperv: FakeHost, vm: FakeVm, *, by_job: bool) -> None:
    model = hyperv.hyperv
    if by_job:
        model.job_fails = (-2147024784, FULL)
    else:
        model.refuse("export", Refusal("ExportSystemDefinition", 32768, FULL), VmId=vm.id)
    try:
        with pytest.raises(SnapshotFailed, match="no space in D:"):
            ask(hyperv, lambda adapter: opened(adapter, vm, "synvirt-x-1"))
    finally:
        model.job_fails = None
    cleaned(hyperv, vm, "synvirt-x-1")


@pytest.mark.parametrize(
    ("code", "since", "error"),
    [(FAILED, None, SnapshotFailed), (FAILED, "synvirt-x-1", CbtReset), (32774, "synvirt-x-1", SourceUnreachable)],
)
def test_an_export_that_fails(hyperv: FakeHost, vm: FakeVm, code: int, since: str | None, error: type[SynvirtError]) -> None:
    """By its changes: they are not known, and all is exported once. A VM that is busy is waited for."""
    ask(hyperv, lambda adapter: adapter.snapshot(vm.id, "synvirt-x-1"))
    ask(hyperv, lambda adapter: adapter.release(vm.id, "synvirt-x-1"))
    hyperv.hyperv.refuse("export", Refusal("ExportSystemDefinition", code, "it says"), VmId=vm.id)
    with pytest.raises(error, match="ExportSystemDefinition failed"):
        ask(hyperv, lambda adapter: opened(adapter, vm, "synvirt-x-2", since))
    cleaned(hyperv, vm, "synvirt-x-1", "synvirt-x-2")


def test_a_share_that_may_not_be_written_to_is_named(hyperv: FakeHost, vm: FakeVm) -> None:
    with pytest.raises(SynvirtError, match="not-there"):
        ask(hyperv, lambda adapter: opened(adapter, vm, "synvirt-x-1"), shares="D:\\=not-there")
    assert hyperv.hyperv.exported == []
    # What is noted there is looked for there: the share may be back by then.
    cleaned(hyperv, vm, "synvirt-x-1")


def test_an_export_without_the_disk_is_reported_with_what_there_is(
    hyperv: FakeHost, vm: FakeVm, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = hyperv.hyperv._job

    def renamed(node: str, job_id: str) -> Any:
        for path in (hyperv.files.folder / "Exports").rglob("*.vhdx"):
            path.rename(path.with_name("another.vhdx"))
        return done(node, job_id)

    monkeypatch.setattr(hyperv.hyperv, "_job", renamed)
    with pytest.raises(Internal, match=r"no file of .*but another\.vhdx"):
        ask(hyperv, lambda adapter: opened(adapter, vm, "synvirt-x-1"))
    cleaned(hyperv, vm, "synvirt-x-1")


def test_what_was_exported_of_a_vm_that_is_no_more_goes_too(hyperv: FakeHost, vm: FakeVm) -> None:
    ask(hyperv, lambda adapter: opened(adapter, vm, "synvirt-x-1"))
    gone = hyperv.hyperv.vms.pop(vm.id)
    assert list((hyperv.files.folder / "Exports").iterdir())
    ask(hyperv, lambda adapter: adapter.cleanup(vm.id, "synvirt-x-1"))
    assert list((hyperv.files.folder / "Exports").iterdir()) == []
    hyperv.hyperv.vms[vm.id] = gone
    assert gone.state == RUNNING
    cleaned(hyperv, vm, "synvirt-x-1")
