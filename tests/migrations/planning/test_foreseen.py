"""A mistake in a plan is reported when the plan is posted, with its field and the nearest right name, not after an outage."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from uuid import UUID, uuid4

import pytest

from synvirt.errors import Conflict, DomainDefineFailed, InvalidPlan, SourceUnreachable, SynvirtError, VmNotFound
from synvirt.live import LiveAdapter
from synvirt.migrations.intake import check_corrected, check_plan
from synvirt.migrations.planning.cutting_over import cut_over
from synvirt.migrations.planning.foreseen import dry_run, foresee, refuse
from synvirt.migrations.rooms import Rooms
from synvirt.model.job import Difference, Migration, Pass
from synvirt.model.kinds import LiveKind, Mode, State
from synvirt.model.machine import VmManifest
from synvirt.model.plan import MigrationPlan
from synvirt.model.times import Schedule
from synvirt.model.values import now
from synvirt.model.windows import Window
from synvirt.sizes import KIB, MIB
from tests.fakes.guests import FakePreparer
from tests.fakes.live import FakeAdapter
from tests.fakes.workers import in_process
from tests.house import SOURCE_ID, VM, House, live_plan, offline_plan
from tests.migrations.planning.test_outage import done_job


class Networked(FakeAdapter):
    """A platform whose cards are on a network with a name."""

    async def inspect(self, vm_id: str) -> VmManifest:
        found = await super().inspect(vm_id)
        return found.model_copy(update={"nics": tuple(nic.model_copy(update={"network": "VM Network"}) for nic in found.nics)})


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, preparer=FakePreparer(missing=True), workers=in_process)
    house.platform.add_vm(VM, {"disk-0": b"boot" * KIB, "disk-1": bytes(8 * KIB)})
    yield house
    house.store.close()


@pytest.fixture
def rooms(house: House) -> Rooms:
    async def connect(kind: LiveKind, source_id: UUID) -> LiveAdapter:
        return Networked(house.platform)

    return replace(house.rooms, connect=connect, check_source=lambda kind, source_id: None)


def problems(rooms: Rooms, plan: MigrationPlan) -> dict[str, tuple[str, str | None]]:
    return {one.field: (one.detail, one.hint) for one in dry_run(rooms, plan).problems}


RIGHT: dict[str, Any] = {"target": {"network_map": [{"source": "VM Network", "target": "bridge:br0"}]}}


def test_a_machine_with_more_memory_than_this_host_has_is_said_at_once(rooms: Rooms) -> None:
    """Where it is to start here; one that is left off may be given less before it is started."""
    too_much = {"network_map": RIGHT["target"]["network_map"], "memory_bytes": 65 << 30}
    detail, hint = problems(rooms, live_plan(target=too_much, skip_disks=["disk-1"]))["target.memory_bytes"]
    assert "65.0 GiB of memory, and this host has 64.0 GiB in all" in detail
    assert "target.start" in (hint or "")
    assert problems(rooms, live_plan(target={**too_much, "start": False}, skip_disks=["disk-1"])) == {}


def test_a_machine_with_more_processors_than_a_guest_can_have_is_said_at_once(rooms: Rooms) -> None:
    """More than the host has are slow, and start. A guest that is left off must be defined, too."""
    too_many = {"network_map": RIGHT["target"]["network_map"], "cpu_count": 256}
    for start in (True, False):
        plan = live_plan(target={**too_many, "start": start}, skip_disks=["disk-1"])
        said = "it would have 256 processors, and a guest of this host can have 255", "set target.cpu_count lower"
        assert problems(rooms, plan)["target.cpu_count"] == said
    assert problems(rooms, live_plan(target={**too_many, "cpu_count": 255}, skip_disks=["disk-1"])) == {}


def test_a_plan_without_mistakes_has_no_problems_and_says_how_it_would_run(rooms: Rooms, house: House) -> None:
    found = dry_run(rooms, live_plan(**RIGHT, skip_disks=["disk-1"]))
    assert found.problems == ()
    assert found.manifest is not None
    assert {way.disk_key: way.way for way in found.ways} == {"disk-0": "warm", "disk-1": "skipped"}
    assert found.forecast is not None
    assert (found.forecast.bytes_to_read, found.forecast.copy_s) == (4 * KIB, None)
    assert "no job" in found.forecast.basis
    assert any(one.what == "disk disk-1" for one in found.differences)
    assert not house.platform.vm(VM)["cbt_enabled"], "nothing at the source was changed"
    assert house.store.documents(limit=1)[0] == []
    check_plan(rooms, live_plan(**RIGHT))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mode": "Cold"},
        {"skip_disks": ["disk-1"]},
        {"target": {"cpu_count": 3, "memory_bytes": 512 * MIB, "disk_bus": "sata"}},
        {"target": {"name": "copy", "identity": "new"}},
        {"target": {"start": False}, "skip_disks": ["disk-0"]},
        {"mode": "Cold", "target": {"name": "other"}, "warm": {"max_passes": 1}},
    ],
)
@pytest.mark.parametrize("offline", [False, True])
def test_what_a_dry_run_says_is_what_then_runs(tmp_path: Path, fields: dict[str, Any], offline: bool) -> None:
    """The way of each disk, the machine, and each difference of it; that of a new identity is another one each time."""
    house = House(tmp_path, workers=in_process)
    house.platform.add_vm(VM, {"disk-0": b"boot" * KIB, "disk-1": bytes(8 * KIB)})
    folder = house.imports / "web"
    folder.mkdir()
    for number in range(2):
        (folder / f"disk-{number}.raw").write_bytes(bytes([number]) * 8 * KIB)
    plan = offline_plan(folder, **fields) if offline else live_plan(**fields)
    found = dry_run(replace(house.rooms, check_source=lambda kind, source_id: None), plan)
    assert found.problems == ()
    ended = house.run(house.intake.submit(found.plan).id)
    assert (ended.state, ended.plan) == (State.COMPLETED, plan)
    assert ended.domain is not None
    assert ended.manifest is not None
    assert found.manifest is not None
    copied = {one.disk_key for one in found.ways if one.way != "skipped"}
    assert {one.key for one in ended.disks if one.volume is not None} == copied
    ways = {one.way for one in found.ways} - {"skipped"}
    assert ways == {"file" if offline else str(ended.mode_effective).lower()}

    def rows(differences: Iterable[Difference]) -> list[tuple[str, str | None, str | None, str]]:
        return [
            (one.what, one.source, None if "mac" in one.what or one.what == "uuid" else one.here, one.why)
            for one in differences
        ]

    assert rows(found.differences) == rows(ended.domain.differences)
    assert [one.id for one in found.concerns] == [one.id for one in ended.manifest.concerns]
    house.close()


@pytest.mark.parametrize(("conversion", "bus"), [("auto", "virtio"), ("never", "sata")])
def test_a_dry_run_of_windows_says_the_machine_that_its_drivers_are_for(tmp_path: Path, conversion: str, bus: str) -> None:
    house = House(tmp_path, workers=in_process)
    house.platform.add_vm(VM, {"disk-0": b"boot" * KIB}, family="windows")
    plan = live_plan(conversion=conversion)
    found = dry_run(replace(house.rooms, check_source=lambda kind, source_id: None), plan)
    ended = house.run(house.intake.submit(plan).id)
    assert ended.domain is not None
    assert f'bus="{bus}"' in ended.domain.xml
    assert found.differences == ended.domain.differences
    house.close()


@pytest.mark.parametrize(
    ("fields", "field", "message", "hint"),
    [
        (
            {"target": {"network_map": [{"source": "VM Network", "target": "bridge:br9"}]}},
            "target.network_map[0].target",
            "bridge:br9",
            "did you mean bridge:br0?",
        ),
        (
            {"target": {"network_map": [{"source": "VM Netwrk", "target": "user"}]}},
            "target.network_map[0].source",
            "VM Netwrk",
            "did you mean VM Network?",
        ),
        ({"skip_disks": ["disk0"]}, "skip_disks[0]", "disk0", "did you mean disk-0?"),
        ({"skip_disks": ["disk-0", "disk-1"]}, "skip_disks", "every disk", "leave one to copy"),
        ({"waive_concerns": ["nosuch"]}, "waive_concerns[0]", "nosuch", None),
        ({"target": {"destination": "chosn"}}, "target.destination", "chosn", "did you mean chosen?"),
        ({"conversion": "always"}, "conversion", "virt-v2v-in-place", "apt-get install virt-v2v"),
    ],
)
def test_a_mistake_is_said_with_its_field_and_what_would_be_right(
    rooms: Rooms, fields: dict[str, Any], field: str, message: str, hint: str | None
) -> None:
    found = problems(rooms, live_plan(**fields))
    assert set(found) == {field}
    assert message in found[field][0]
    assert hint is None or found[field][1] == hint
    with pytest.raises(SynvirtError, match=message.replace("[", r"\[")):
        check_plan(rooms, live_plan(**fields))


def test_all_mistakes_are_said_together(rooms: Rooms) -> None:
    plan = live_plan(
        skip_disks=["nosuch"],
        waive_concerns=["nosuch"],
        target={"network_map": [{"source": "VM Netwrk", "target": "bridge:nosuch"}]},
    )
    assert set(problems(rooms, plan)) == {
        "skip_disks[0]",
        "waive_concerns[0]",
        "target.network_map[0].target",
        "target.network_map[0].source",
    }
    with pytest.raises(InvalidPlan, match=r"skip_disks\[0\]: .*; target\.network_map\[0\]\.source: "):
        check_plan(rooms, plan)


def test_a_map_for_many_machines_may_name_networks_that_this_one_lacks(rooms: Rooms) -> None:
    entries = [{"source": "VM Network", "target": "user"}, {"source": "DMZ", "target": "network:default"}]
    assert problems(rooms, live_plan(target={"network_map": entries})) == {}


@pytest.mark.parametrize("target", ["br0", "default", "user", "bridge:br0", "network:default"])
def test_networks_of_this_host_go_by_their_names_too(rooms: Rooms, target: str) -> None:
    entries = [{"source": "VM Network", "target": target}]
    assert problems(rooms, live_plan(target={"network_map": entries})) == {}


def test_a_windows_guest_without_the_driver_image_is_said_at_once(rooms: Rooms, house: House) -> None:
    house.platform.add_vm("win", {"disk-0": bytes(4 * KIB)}, family="windows")
    plan = live_plan(source_ref={"kind": "live_vm", "source_id": str(SOURCE_ID), "vm_id": "win"})
    assert set(problems(rooms, plan)) == {"conversion"}
    with pytest.raises(InvalidPlan, match="virt-v2v-in-place is not installed"):
        check_plan(rooms, plan)
    assert problems(rooms, plan.model_copy(update={"conversion": "never"})) == {}


def test_a_guest_that_cannot_be_defined_here_is_a_problem_of_its_plan(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 400, as a dry run says it; not with 500, as if the service was broken."""
    monkeypatch.setattr(rooms.hypervisor, "domain_xml", Mock(side_effect=DomainDefineFailed("this host has no UEFI firmware")))
    for skip, said in (([], "^this host has no UEFI"), (["nosuch"], r"skip_disks\[0\]: .*; target: this host has no UEFI")):
        with pytest.raises(InvalidPlan, match=said):
            check_plan(rooms, live_plan(skip_disks=skip))


def test_a_vm_that_the_source_has_not(rooms: Rooms) -> None:
    plan = live_plan(source_ref={"kind": "live_vm", "source_id": str(SOURCE_ID), "vm_id": "nosuch"})
    with pytest.raises(VmNotFound):
        check_plan(rooms, plan)
    assert set(problems(rooms, plan)) == {"source_ref.vm_id"}


def test_a_source_that_does_not_answer_refuses_no_plan_and_a_dry_run_says_so(rooms: Rooms, house: House) -> None:
    house.platform.fault("unreachable", 2)
    check_plan(rooms, live_plan())
    found = dry_run(rooms, live_plan())
    assert [one.field for one in found.problems] == ["source_ref.vm_id"]
    assert (found.manifest, found.ways, found.forecast) == (None, (), None)


def test_a_kind_that_is_not_served(rooms: Rooms) -> None:
    def refuse_kind(kind: LiveKind, source_id: UUID) -> None:
        raise InvalidPlan(f"{kind} is not served in this version: it is to come")

    unserved = replace(rooms, check_source=refuse_kind)
    with pytest.raises(InvalidPlan, match="not served"):
        check_plan(unserved, live_plan())
    assert set(problems(unserved, live_plan())) == {"source_ref.source_id"}


def test_two_jobs_never_work_on_one_live_vm(rooms: Rooms, house: House) -> None:
    """The cold one powered the VM off under the warm one."""
    job = house.intake.submit(live_plan())
    cold = live_plan("Cold", target={"identity": "new"})
    with pytest.raises(Conflict, match=str(job.id)):
        check_plan(rooms, cold)
    assert set(problems(rooms, cold)) == {"source_ref.vm_id"}
    house.store.request_cancel(job.id)
    house.run(job.id)
    check_plan(rooms, cold)


def test_a_live_vm_that_does_not_fit(rooms: Rooms, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said at once; not by the job, which may run at night."""

    class Full(Networked):
        async def inspect(self, vm_id: str) -> VmManifest:
            found = await super().inspect(vm_id)
            disks = tuple(disk.model_copy(update={"used_bytes": disk.capacity_bytes}) for disk in found.disks)
            return found.model_copy(update={"disks": disks})

    async def connect(kind: LiveKind, source_id: UUID) -> LiveAdapter:
        return Full(house.platform)

    rooms = replace(rooms, connect=connect)
    monkeypatch.setattr(house.rooms.destination, "free_bytes", lambda: 10 * KIB)
    assert [(field, "target-too-small" in message) for field, (message, _) in problems(rooms, live_plan()).items()] == [
        ("waive_concerns", True)
    ]
    assert problems(rooms, live_plan(skip_disks=["disk-1"])) == {}
    assert problems(rooms, live_plan(waive_concerns=["target-too-small"])) == {}


def test_a_name_that_is_taken_here(rooms: Rooms, house: House) -> None:
    house.hypervisor.add_foreign("web", UUID(int=1))
    assert set(problems(rooms, live_plan(target={"name": "web"}))) == {"target"}
    with pytest.raises(Conflict, match="web"):
        check_plan(rooms, live_plan(target={"name": "web"}))


def test_a_mac_address_that_is_taken_here(rooms: Rooms, house: House) -> None:
    manifest = dry_run(rooms, live_plan()).manifest
    assert manifest is not None
    mac = manifest.nics[0].mac
    assert mac is not None
    house.hypervisor.add_foreign("another", UUID(int=1), mac)
    assert mac.lower() in problems(rooms, live_plan())["target"][0]
    assert problems(rooms, live_plan(target={"identity": "new", "name": "copy"})) == {}


def test_an_offline_plan_is_looked_at_too(rooms: Rooms, house: House) -> None:
    folder = house.imports / "web"
    folder.mkdir()
    (folder / "disk-0.raw").write_bytes(bytes(4 * KIB))
    found = dry_run(rooms, offline_plan(folder, skip_disks=["disk0"]))
    assert [(one.field, one.hint) for one in found.problems] == [("skip_disks[0]", "did you mean disk-0?")]
    assert [(way.disk_key, way.way) for way in found.ways] == [("disk-0", "file")]
    gone = dry_run(rooms, offline_plan(house.imports / "nosuch"))
    assert [one.field for one in gone.problems] == ["source_ref"]


def test_a_warm_plan_that_will_run_cold_says_so(rooms: Rooms, house: House) -> None:
    """Files do not change: there the plan is refused, if it wants warm or nothing. A platform may track changes by then."""
    folder = house.imports / "web"
    folder.mkdir()
    (folder / "disk-0.raw").write_bytes(bytes(4 * KIB))
    house.platform.add_vm("untracked", {"disk-0": bytes(4 * KIB)}, cbt=False)
    ref = {"kind": "live_vm", "source_id": str(SOURCE_ID), "vm_id": "untracked"}
    planned: Callable[..., MigrationPlan]
    for planned in (partial(offline_plan, folder), partial(live_plan, source_ref=ref)):
        assert "runs-cold" not in [one.id for one in dry_run(rooms, planned(mode="Cold")).concerns]
        found = dry_run(rooms, planned(mode="Warm"))
        assert "runs-cold" in [one.id for one in found.concerns]
        assert found.problems == ()
        check_plan(rooms, planned(mode="Warm"))
    never: dict[str, Any] = {"mode": "Warm", "warm": {"untracked": "fail"}}
    assert set(problems(rooms, offline_plan(folder, **never))) == {"mode"}
    with pytest.raises(InvalidPlan, match="cannot be copied warm"):
        check_plan(rooms, offline_plan(folder, **never))
    check_plan(rooms, live_plan(source_ref=ref, **never))
    assert "runs-cold" not in [one.id for one in dry_run(rooms, live_plan()).concerns]


def test_the_forecast_is_of_jobs_that_ended_here(rooms: Rooms, house: House) -> None:
    for number, downtime_s in enumerate((4.0, 5.0, 6.0)):
        full = Pass(number=1, kind="full", bytes=4096 * (number + 1), seconds=2.0, finished_at=now())
        final = Pass(number=2, kind="final", bytes=512, seconds=1.0, finished_at=now())
        job = Migration(
            id=uuid4(),
            name="before",
            plan=live_plan(),
            state=State.COMPLETED,
            mode_effective=Mode.WARM,
            passes=(full, final),
            downtime_s=downtime_s,
            created_at=now(),
        )
        house.store.add(job, host="local")
    forecast = dry_run(rooms, live_plan(target={"start": False})).forecast
    assert forecast is not None
    # 4 KiB and 8 KiB of disks, at the median of 2, 4 and 6 KiB/s.
    assert (forecast.bytes_to_read, forecast.copy_s) == (12 * KIB, 3.0)
    assert [(part.name, part.measured) for part in forecast.outage_parts] == [("shutdown", 3), ("last copy", 3)]
    assert forecast.outage_p50_s is not None
    assert forecast.outage_p95_s is not None
    assert 4 < forecast.outage_p50_s < 6 < forecast.outage_p95_s
    limited = dry_run(rooms, live_plan(limits={"bandwidth_bps": 64 * KIB})).forecast
    assert limited is not None
    assert limited.copy_s == 3.0


def test_before_any_job_the_forecast_is_of_what_a_deep_test_measured(rooms: Rooms, house: House) -> None:
    class Measured(Networked):
        async def inspect(self, vm_id: str) -> VmManifest:
            found = await super().inspect(vm_id)
            ways = zip(found.disks, ("datastore", "lease"), strict=True)
            return found.model_copy(update={"disks": tuple(disk.model_copy(update={"read_by": way}) for disk, way in ways)})

    async def connect(kind: LiveKind, source_id: UUID) -> LiveAdapter:
        return Measured(house.platform)

    rooms = replace(rooms, connect=connect)
    found = dry_run(rooms, live_plan("Cold"))
    assert found.forecast is not None
    assert found.forecast.copy_s is None
    assert "a deep test of the source measures" in found.forecast.basis
    assert [way.reason.partition("; ")[2] for way in found.ways] == ["read by datastore", "read by lease"]
    rates = {"datastore": 2.0 * KIB, "lease": 1.0 * KIB}
    rooms = replace(rooms, rates_of=lambda source_id: rates if source_id == SOURCE_ID else {})
    cold = dry_run(rooms, live_plan("Cold", target={"start": False})).forecast
    assert cold is not None
    # 4 KiB by the first way, 8 KiB by the second; the guest is off meanwhile, and while it shuts down.
    assert cold.copy_s == 10.0
    assert cold.outage_p50_s is not None
    assert cold.outage_p50_s > 10.0
    assert "the last deep test of the source: datastore" in cold.basis
    warm = dry_run(rooms, live_plan()).forecast
    assert warm is not None
    assert (warm.copy_s, warm.outage_p50_s) == (10.0, None)


def test_a_copy_of_an_empty_disk_is_no_measured_speed(rooms: Rooms, house: House) -> None:
    empty = Pass(number=1, kind="full", bytes=0, seconds=1.2, finished_at=now())
    job = Migration(
        id=uuid4(), name="before", plan=live_plan("Cold"), state=State.COMPLETED, mode_effective=Mode.COLD, created_at=now()
    )
    house.store.add(job.model_copy(update={"passes": (empty,)}), host="local")
    found = dry_run(replace(rooms, rates_of=lambda source_id: {"datastore": 0.0}), live_plan("Cold")).forecast
    assert found is not None
    assert (found.copy_s, "no job of this source" in found.basis) == (None, True)


def test_problems_are_refused_by_the_first_ones_own_error(rooms: Rooms, house: House) -> None:
    house.hypervisor.add_foreign("web", UUID(int=1))
    found = foresee(rooms, live_plan(target={"name": "web", "destination": "nosuch"}))
    with pytest.raises(InvalidPlan, match=r"target\.destination: .*; target: "):
        refuse(found)
    assert not any(isinstance(error, SourceUnreachable) for _, error in found.refused)


def test_a_machine_that_another_job_has_by_another_source_is_refused(rooms: Rooms, house: House) -> None:
    """One vCenter was registered twice. A cold job would power the guest off under a warm one that holds."""
    name, uuid = "web", str(uuid4())

    class Named(Networked):
        async def inspect(self, vm_id: str) -> VmManifest:
            return (await super().inspect(vm_id)).model_copy(update={"name": name, "uuid": uuid})

    async def connect(kind: LiveKind, source_id: UUID) -> LiveAdapter:
        return Named(house.platform)

    rooms = replace(rooms, connect=connect)
    fits = {**RIGHT, "skip_disks": ["disk-1"]}
    ours = live_plan(**fits)
    by_other = ours.model_copy(update={"source_ref": ours.source_ref.model_copy(update={"source_id": uuid4()})})
    manifest = dry_run(rooms, ours).manifest
    held = Migration(id=uuid4(), name="held", plan=by_other, mode_effective=Mode.WARM, created_at=now(), manifest=manifest)
    house.store.add(held.model_copy(update={"state": State.DELTA_SYNCING}), host="kvm2")

    detail, _ = problems(rooms, live_plan("Cold", **fits, warm={"max_passes": 1}))["source_ref.vm_id"]
    assert f"job {held.id} (held) is at work on the machine web of UUID {uuid}, by another source" in detail
    name = "web, cloned with its UUID"
    assert problems(rooms, ours) == {}
    name = "web"
    house.store.change(held.id, State.DELTA_SYNCING, lambda one: one.model_copy(update={"state": State.CANCELLED}))
    assert problems(rooms, ours) == {}


def _window(**fields: Any) -> Window:
    at = now().replace(tzinfo=None)
    return Window(id="saturdays", name="s", start=at + timedelta(days=1), end=at + timedelta(days=2)).model_copy(update=fields)


def test_a_window_that_is_not_there_is_said_with_the_nearest_name(rooms: Rooms, house: House) -> None:
    house.store.windows.add(_window())
    plan = live_plan(**RIGHT, skip_disks=["disk-1"], warm={"window_id": "saturday"})
    detail, hint = problems(rooms, plan)["warm.window_id"]
    assert (detail, hint) == ("there is no window called 'saturday'", "did you mean saturdays?")
    assert dry_run(rooms, plan).cut_over is None
    with pytest.raises(InvalidPlan, match="no window called"):
        check_plan(rooms, plan)
    with pytest.raises(InvalidPlan, match="no window called"):
        check_corrected(rooms, plan, None)
    check_plan(rooms, live_plan(**RIGHT, skip_disks=["disk-1"], warm={"window_id": "saturdays"}))
    over = {"start": datetime.fromisoformat("2020-01-01"), "end": datetime.fromisoformat("2020-01-02")}
    house.store.windows.change("saturdays", lambda before: before.model_copy(update=over))
    detail, _ = problems(rooms, live_plan(**RIGHT, skip_disks=["disk-1"], warm={"window_id": "saturdays"}))["warm.window_id"]
    assert "does not open within three years" in detail


def test_a_dry_run_says_when_the_cut_over_would_be(rooms: Rooms, house: House) -> None:
    window = _window()
    house.store.windows.add(window)
    plan = live_plan(**RIGHT, skip_disks=["disk-1"], warm={"window_id": "saturdays"})
    found = dry_run(rooms, plan)
    assert found.problems == ()
    assert found.cut_over is not None
    assert (found.cut_over.window_id, found.cut_over.not_before) == ("saturdays", window.start.replace(tzinfo=UTC))
    assert found.cut_over.not_after == window.end.replace(tzinfo=UTC)
    started = plan.model_copy(update={"schedule": Schedule(start_at=now() + timedelta(hours=36))})
    late = dry_run(rooms, started).cut_over
    assert late is not None
    assert late.not_before == started.schedule.start_at, "the window is open by then"
    for _ in range(9):
        house.store.add(done_job(100, 100, 100), host="local")
    soon = {"end": window.start + timedelta(seconds=99)}
    house.store.windows.change("saturdays", lambda before: before.model_copy(update=soon))
    short = dry_run(rooms, plan).cut_over
    assert short is not None
    assert (short.not_before, short.not_after) == (None, None), "an outage takes longer"
    assert dry_run(rooms, live_plan(**RIGHT, skip_disks=["disk-1"])).cut_over is None


def test_a_cut_over_waits_for_the_first_copy_which_begins_no_earlier_than_now(rooms: Rooms, house: House) -> None:
    began = now()
    opens = (began - timedelta(hours=1)).replace(tzinfo=None)
    house.store.windows.add(_window().model_copy(update={"start": opens, "end": opens + timedelta(hours=9)}))
    plan = live_plan(**RIGHT, warm={"window_id": "saturdays"}, schedule={"start_at": began - timedelta(days=2)})
    found = cut_over(rooms, plan, copy_s=3600, outage_s=60)
    assert found is not None
    assert found.not_before is not None
    assert began + timedelta(hours=1) <= found.not_before <= now() + timedelta(hours=1)
