"""vim_api against what a real site has and VMware's own simulator lacks: tests/fakes/vcsim/hosts.go says whose word that is.

What this proves: that we bear what is documented. What it cannot: what a real vCenter does at such a moment.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import pytest
from pyVmomi.VmomiSupport import IsChildVersion

from synvirt.disks import open_reader
from synvirt.disks.specs import DatastoreSpec, LeaseSpec, ReaderSpec
from synvirt.disks.vsphere.datastore import FileClosed, ReadForbidden
from synvirt.errors import SourceUnreachable, UnsupportedFormat
from synvirt.fleet.sheets.importing import known_vms
from synvirt.fleet.sheets.rows import TakenIn, take_in
from synvirt.live import SnapshotRef, VmRow
from synvirt.live.vsphere import files as vim_files
from synvirt.live.vsphere import machines
from synvirt.live.vsphere.adapter import VimApi
from synvirt.live.vsphere.session import library
from synvirt.live.vsphere.versions import chosen
from synvirt.migrations import passes
from synvirt.migrations.sources.registered import Inventory
from synvirt.model.kinds import LiveKind, State
from synvirt.model.sources import Source
from synvirt.model.values import now
from tests.contracts.live import in_session, read
from tests.fakes.vcenter import DISK_BYTES, VCenter, vcenter
from tests.house import SOURCE_ID
from tests.live.vsphere.api.asking import content
from tests.live.vsphere.test_vim_jobs import VM, VimHouse, plan, same
from tests.live.vsphere.test_vim_jobs import house as house  # noqa: PLC0414 - a fixture
from tests.live.vsphere.test_vim_ways import deep

# The simulator is built by whoever comes first.
pytestmark = pytest.mark.timeout(600)

T = TypeVar("T")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synvirt.disks.vsphere.datastore.RETRY_DELAYS_S", (0.01, 0.01, 0.01))


@pytest.fixture
def disk(platform: VCenter) -> Path:
    return platform.add_disk(VM, content())


def ask(platform: VCenter, use: Callable[[VimApi], Awaitable[T]], **options: Any) -> T:
    options.setdefault("fingerprint_sha256", platform.fingerprint)
    return in_session(lambda: VimApi(platform.access(**options)), use)


async def opened(adapter: VimApi, vm: str = VM) -> ReaderSpec:
    snapshot: SnapshotRef = await adapter.snapshot(vm, "synvirt-a-1")
    return await adapter.open_disk(vm, snapshot, (await adapter.inspect(vm)).disks[0], None)


def of_files(platform: VCenter) -> DatastoreSpec:
    """Of a snapshot that is there until the test ends."""
    spec = ask(platform, opened)
    assert isinstance(spec, DatastoreSpec)
    return spec


# ── locks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_running_vm_holds_the_files_that_it_writes_to_and_a_snapshots_are_open(platform: VCenter, disk: Path) -> None:
    frozen = of_files(platform)
    assert read(frozen)[0] == content()
    live = replace(frozen, path=f"{frozen.path.partition('/')[0]}/{disk.name}")
    with pytest.raises(FileClosed, match="500"):
        open_reader(live)
    ask(platform, lambda adapter: adapter.shutdown(VM))
    assert read(live)[0] == content()


# ── redirects ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_host_that_vcenter_sends_us_on_to_is_asked_and_shown_no_secret(platform: VCenter, disk: Path) -> None:
    names = platform.control("hosts")
    platform.control("redirect", to="host")
    spec = of_files(platform)
    assert {name for name, _ in spec.hosts} == set(names.values())
    assert read(spec)[0] == content()
    hosts = platform.hosts()
    assert sum(hosts[id_]["served"] for id_ in names) > 0
    assert [hosts[id_]["shown"] for id_ in names] == [[]] * len(names)
    # It is known by the certificate that vCenter names.
    others = tuple((name, "00:" * 19 + "00") for name, _ in spec.hosts)
    with pytest.raises(SourceUnreachable, match="is not the pinned one"):
        open_reader(replace(spec, hosts=others))


@pytest.mark.parametrize("to", ["stranger", "plain", "loop"])
def test_nobody_else_is_asked_whatever_vcenter_says(platform: VCenter, disk: Path, to: str) -> None:
    platform.control("hosts")
    spec = of_files(platform)
    platform.control("redirect", to=to)
    with pytest.raises(ReadForbidden, match=r"answers 307 .* no host of that datastore"):
        open_reader(spec)
    assert platform.hosts()["stranger"]["served"] == 0


# ── a host's files from the host itself ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def listening(platform: VCenter, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Its ESXi hosts, which listen: their names by their ids."""
    names: dict[str, str] = platform.control("hosts")
    port = platform.hosts()[next(iter(names))]["at"].rpartition(":")[2]
    monkeypatch.setattr(vim_files, "ESXI_PORT", int(port))
    return names


def test_a_host_is_read_directly_by_a_ticket_for_each_request(platform: VCenter, listening: dict[str, str], disk: Path) -> None:
    spec = of_files(platform)
    assert spec.direct is not None
    assert spec.direct[0] in listening.values()
    assert read(spec)[0] == content()
    hosts = platform.hosts()
    served = sum(hosts[id_]["served"] for id_ in listening)
    assert served == platform.calls("AcquireGenericServiceTicket") > 1
    assert [hosts[id_]["shown"] for id_ in listening] == [[]] * len(listening)
    assert platform.calls("folder") == 0
    # A deep test measures it beside vCenter's own /folder.
    _, checks = deep(platform)
    assert not any(checks[f"way esxi {name}"].warning for name in listening.values()), checks
    # It is known by the certificate that vCenter names, and what vCenter does not name is not asked.
    others = tuple((name, "00:" * 19 + "00") for name, _ in spec.hosts)
    with pytest.raises(SourceUnreachable, match="is not the pinned one"):
        open_reader(replace(spec, hosts=others, direct_only=True))
    assert platform.sessions() == 0


@pytest.mark.parametrize("kind", ["status:401", "status:404", "refuse"])
def test_a_host_that_sends_nothing_is_left_out_for_a_while(
    platform: VCenter, listening: dict[str, str], disk: Path, kind: str
) -> None:
    platform.fault("esxi", kind, times=1000)

    async def often(adapter: VimApi) -> list[ReaderSpec]:
        return [await opened(adapter) for _ in range(len(listening) + 2)]

    specs = ask(platform, often)
    assert platform.calls("esxi") == len(listening)  # each once
    for spec in (specs[0], specs[-1]):
        assert isinstance(spec, DatastoreSpec)
        assert spec.direct is None
        assert read(spec)[0] == content()


def test_a_host_that_goes_away_in_the_middle_is_followed_by_vcenter(
    platform: VCenter, listening: dict[str, str], disk: Path
) -> None:
    spec = of_files(platform)
    reader = open_reader(spec)
    platform.fault("esxi", "status:503", times=1000)
    found = bytearray(DISK_BYTES)
    reader.read_into(0, memoryview(found))
    reader.close()
    assert found == content()
    assert platform.calls("folder") > 0


def test_by_the_operators_choice_hosts_alone_are_asked_or_vcenter_alone(
    platform: VCenter, listening: dict[str, str], disk: Path
) -> None:
    by_vcenter = ask(platform, opened, fingerprint_sha256=platform.fingerprint, transport="datastore")
    assert isinstance(by_vcenter, DatastoreSpec)
    assert by_vcenter.direct is None
    assert platform.calls("esxi") == 0
    before = platform.calls("folder")
    platform.fault("esxi", "status:503", times=1000)
    with pytest.raises(SourceUnreachable, match="503"):
        ask(platform, opened, fingerprint_sha256=platform.fingerprint, transport="esxi")
    platform.control("nofaults")
    by_host = ask(platform, opened, fingerprint_sha256=platform.fingerprint, transport="esxi")
    assert read(by_host)[0] == content()
    assert platform.calls("folder") == before


def test_a_site_that_names_no_host_has_none_to_ask(platform: VCenter, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vim_files, "_hosts", lambda session, within: ())
    with pytest.raises(UnsupportedFormat, match="names no ESXi host"):
        ask(platform, opened, fingerprint_sha256=platform.fingerprint, transport="esxi")


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["503", "reset"])
def test_a_platform_with_room_for_two_transfers_is_read_by_two(platform: VCenter, disk: Path, how: str) -> None:
    spec = of_files(platform)
    platform.control("limit", most=2, how=how)
    reader = open_reader(spec)
    found, size = bytearray(DISK_BYTES), DISK_BYTES // 32

    def each_fourth(first: int) -> None:
        for at in range(first * size, DISK_BYTES, 4 * size):
            reader.read_into(at, memoryview(found)[at : at + size])

    threads = [threading.Thread(target=each_fourth, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader.close()
    assert found == content()
    at = platform.hosts()["vcenter"]
    assert at["most"] == 2
    assert 0 < at["refused"] <= 6  # each one is learnt from


def test_a_host_with_no_room_at_all_is_lost_and_not_asked_for_ever(platform: VCenter, disk: Path) -> None:
    spec = of_files(platform)
    reader = open_reader(spec)
    platform.fault("folder", "status:503", times=1000)
    with pytest.raises(SourceUnreachable, match="503"):
        reader.read_into(0, memoryview(bytearray(512)))
    reader.close()


@pytest.mark.parametrize(("way", "most", "how"), [("datastore", 2, "503"), ("lease", 1, "reset")])
def test_jobs_share_what_a_site_has_room_for_and_all_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, most: int, how: str
) -> None:
    """Three VMs of one ESXi host, which has room for fewer transfers: no job fails, and none waits forever."""
    monkeypatch.setattr(passes, "RETRY_PAUSES_S", (0.3,) * 200)
    with vcenter(tmp_path / "vcenter", vms=3) as platform:
        vms = [row.vm_id for row in ask(platform, lambda adapter: adapter.list_vms())][:3]
        disks = [platform.add_disk(vm, content(number)) for number, vm in enumerate(vms)]
        if way == "lease":
            platform.control("hosts")
        platform.control("limit", most=most, how=how, meet=1)
        house = VimHouse(tmp_path / "house", platform, transport=way)
        jobs = [house.intake.submit(plan("Cold", vm=vm)) for vm in vms]
        with ThreadPoolExecutor(len(jobs)) as threads:
            ended = list(threads.map(house.run, [job.id for job in jobs]))
        assert [job.state for job in ended] == [State.COMPLETED] * len(jobs), [job.last_error for job in ended]
        assert [same(house, job, disk) for job, disk in zip(ended, disks, strict=True)] == [True] * len(jobs)
        rooms = platform.hosts()
        assert sum(room["refused"] for room in rooms.values()) > 0
        assert max(room["most"] for room in rooms.values()) == most
        assert (platform.leases(), platform.snapshots(), platform.sessions()) == (0, [], 0)
        house.close()


# ── a spreadsheet ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_row_of_rvtools_finds_its_vm_by_vcenter_and_id_whatever_it_is_called(platform: VCenter) -> None:
    async def use(adapter: VimApi) -> tuple[str, list[VmRow]]:
        return (await adapter.about()).instance_id, await adapter.list_vms()

    instance_id, rows = ask(platform, use)
    source = Source(id=SOURCE_ID, name="lab", kind=LiveKind.VIM_API, endpoint=platform.url, created_at=now())
    known = known_vms(Inventory(source, instance_id, True, tuple(rows)))

    def taken(vcenter: str) -> TakenIn:
        row = f"renamed;{rows[0].vm_id};{vcenter};poweredOn"
        return take_in(f"VM;VM ID;VI SDK UUID;Powerstate\n{row}\n".encode(), known)

    found = taken(instance_id.upper())
    assert found.problems == ()
    assert [member.plan.source_ref for member in found.members] == [known[0].plan.source_ref]
    assert [one.row for one in taken(str(UUID(int=1))).problems] == [2]  # another vCenter has a VM of that id, too


# ── several hosts ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_two_hosts_of_one_vcenter_send_their_vms_disks_at_once(platform: VCenter, disk: Path) -> None:
    """By leases, each from the host that its VM is on; no host sees the session, which is vCenter's."""
    names = platform.control("hosts")

    async def use(adapter: VimApi) -> list[tuple[str, str]]:
        return [(row.vm_id, (await adapter.inspect(row.vm_id)).host) for row in await adapter.list_vms()]

    found = ask(platform, use)
    other = next(vm for vm, host in found if host != dict(found)[VM])
    data = platform.add_disk(other, content(2))

    async def exported(vm: str) -> bytes:
        adapter = VimApi(platform.access(fingerprint_sha256=platform.fingerprint, transport="lease"))
        await adapter.connect()
        try:
            spec = await opened(adapter, vm)
            assert isinstance(spec, LeaseSpec)
            assert (spec.host, spec.cookie) == (dict(found)[vm], "")
            return (await asyncio.to_thread(read, spec))[0]
        finally:
            await adapter.cleanup(vm, "synvirt-a-1")
            await adapter.close()

    async def both() -> list[bytes]:
        return [*await asyncio.gather(exported(VM), exported(other))]

    assert asyncio.run(both()) == [disk.read_bytes(), data.read_bytes()]
    hosts = platform.hosts()
    assert sum(hosts[id_]["served"] > 0 for id_ in names) == 2
    assert [hosts[id_]["shown"] for id_ in names] == [[]] * len(names)
    assert (platform.leases(), platform.snapshots(), platform.sessions()) == (0, [], 0)


# ── a restart ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_vcenter_that_restarts_costs_a_warm_job_nothing(
    house: VimHouse, platform: VCenter, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It forgets sessions and tasks, resets connections, answers 503, and is there again."""
    monkeypatch.setattr(passes, "RETRY_PAUSES_S", (0.3,) * 60)
    job = house.intake.submit(plan(warm={"delta_threshold_bytes": 0, "max_passes": 20}))
    before: list[int] = []

    def committed() -> None:
        house.store.on_commit = lambda: None
        if house.store.get(job.id).state is State.DELTA_SYNCING and platform.snapshots():
            before.append(platform.calls("Login"))
            platform.guest_writes(VM, 777, b"meanwhile")
            platform.control("restart", ms=500)
        else:
            house.store.on_commit = committed

    house.store.on_commit = committed
    ended = house.run(job.id)
    assert ended.state is State.COMPLETED, ended.last_error
    assert before
    assert platform.calls("Login") > before[0]
    assert same(house, ended, disk)
    assert (platform.snapshots(), platform.tracked(), platform.sessions()) == ([], [], 0)


# ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("theirs", "version"),
    [
        ([], "6.5"),
        (["6.5", "6.0", "5.5"], "6.5"),
        (["6.7.3", "6.7.2", "6.7.1", "6.7", "6.5", "6.0", "2.5u2"], "6.5"),
        (["8.0.2.0", "8.0.1.0", "7.0.3.0", "6.7", "6.5", "6.0"], "6.5"),
        (["9.0.0.0", "8.0.2.0", "8.0.1.0", "7.0.3.0"], "7.0.3.0"),
        (["nonsense", "", "6.5.", "²"], "6.5"),
        (["99.0", "6.7.3"], "6.7.3"),
    ],
)
def test_the_oldest_version_that_has_all_we_need_is_spoken(theirs: list[str], version: str) -> None:
    assert chosen("vc", theirs, library().versions) == version


@pytest.mark.parametrize(("theirs", "message"), [(["6.0", "5.5"], "up to 6.0"), (["99.1", "99.0"], "from 99.0 on")])
def test_a_platform_that_is_too_old_or_too_new_is_refused_with_the_reason(theirs: list[str], message: str) -> None:
    with pytest.raises(UnsupportedFormat, match=message):
        chosen("vc", theirs, library().versions)


@pytest.mark.parametrize("versions", ["6.5,6.0,5.5", "8.0.2.0,8.0.1.0,7.0.3.0"])
def test_whatever_a_platform_speaks_a_disk_is_read_and_all_sessions_end(platform: VCenter, disk: Path, versions: str) -> None:
    """It refuses each request in a version that it does not list: those of the control plane, the reader, and the guard."""
    platform.control("versions", list=versions)
    assert read(of_files(platform))[0] == content()
    assert platform.sessions() == 0


def test_a_vcenter_6_0_gets_no_password(platform: VCenter) -> None:
    platform.control("versions", list="6.0,5.5,5.1")
    with pytest.raises(UnsupportedFormat, match=r"up to 6.0; what is needed came with 6.5"):
        ask(platform, lambda adapter: adapter.list_vms())
    assert platform.calls("Login") == 0


def paths() -> Iterable[tuple[Any, str]]:
    vim = library().vim
    yield from ((vim.VirtualMachine, path) for path in {*machines.LISTED, *machines.INSPECTED})
    yield from ((getattr(vim, kind.removeprefix("vim.")), path) for kind, named in _OTHERS for path in named)


_OTHERS = (
    ("Datastore", ("name", "parent", "host", "summary.name", "summary.type", "summary.freeSpace", "summary.capacity")),
    ("HostSystem", ("name", "runtime.connectionState", "summary.config.product", "summary.config.sslThumbprint")),
    ("HttpNfcLease", ("state", "error", "info.deviceUrl", "info.leaseTimeout")),
    ("Task", ("info.state", "info.error", "info.result")),
)


def test_a_vcenter_6_5_has_every_property_that_is_asked_for() -> None:
    """One that it lacks would fail the whole question (InvalidProperty), and with it every list and every look at a VM."""
    oldest = library().versions["6.5"]
    for kind, path in paths():
        holder: Any = kind
        for name in path.split("."):
            known = holder._GetPropertyInfo(name)
            assert IsChildVersion(oldest, known.version), path
            holder = known.type
