"""What a site knows of a wave's members, put before the simulation."""

import asyncio
import statistics
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from synvirt.errors import SourceUnreachable
from synvirt.fleet import forecasting
from synvirt.fleet.changing import change_members
from synvirt.fleet.forecasting import SIZE_ASSUMED, Forecaster, WaveSimulation, WhatIf, loads_of, site_of
from synvirt.fleet.model import Member, MemberState, Wave, WaveLimits
from synvirt.fleet.simulation.nouns import CHANGE_BPS_ASSUMED, COPY_BPS_ASSUMED, OUTAGE_ASSUMED_S, RESIDUALS_ASSUMED
from synvirt.fleet.waves import Waves
from synvirt.live import VmRow
from synvirt.model.job import Forecast, Migration, OutageForecast, OutagePart, Pass, Progress
from synvirt.model.kinds import Mode, State
from synvirt.model.machine import Disk, VmManifest
from synvirt.model.values import now
from synvirt.sizes import GIB
from synvirt.store import Store
from tests.fleet.made import SOURCE, member, plan, wave

ROWS: Mapping[str, VmRow] = {
    "a": VmRow("a", "a", "on", capacity_bytes=40 * GIB, host="esx1"),
    "b": VmRow("b", "b", "on", capacity_bytes=20 * GIB),
    "c": VmRow("c", "c", "on"),
}


def job(vm: str, **fields: object) -> Migration:
    return Migration.model_validate(
        {"id": uuid4(), "name": vm, "plan": plan(vm), "mode_effective": Mode.WARM, "created_at": now(), **fields}
    )


def of_site(name: str | None) -> str:
    return f"kvm1/{name or 'fast'}"


def test_a_member_weighs_what_its_job_or_else_its_source_says() -> None:
    outage = OutageForecast(
        p50_s=100,
        p95_s=200,
        parts=(
            OutagePart(name="shutdown", p50_s=60, p95_s=90, measured=3),
            OutagePart(name="last copy", p50_s=40, p95_s=50, measured=3),
        ),
        at=now(),
    )
    disks = (
        Disk(key="0", label="0", capacity_bytes=90 * GIB, used_bytes=30 * GIB),
        Disk(key="1", label="1", capacity_bytes=GIB),
    )
    copied = job(
        "j",
        state=State.COPYING_FULL,
        manifest=VmManifest(vm_id="j", name="j", host="esx7", disks=disks),
        progress=Progress(bytes_total=31 * GIB, bytes_done=11 * GIB),
        outage=outage,
    )
    requests = [member(name) for name in "abc"] + [member("j")]
    members = tuple(Member(**{**vars(one), "job_id": copied.id if one.id == "j" else None}) for one in requests)
    wave = Wave(id=uuid4(), name="night", members=members, created_at=now())
    listed = {(SOURCE, vm): row for vm, row in ROWS.items()}
    loads, assumed = loads_of(wave, {copied.id: copied}, listed, destination=of_site)
    assert {name: load.size_bytes // GIB for name, load in loads.items()} == {"a": 40, "b": 20, "c": 31, "j": 31}
    assert assumed == ("c",), "its size is the median of what is known"
    assert [loads[name].source_host for name in "jab"] == [f"{SOURCE}/esx7", f"{SOURCE}/esx1", str(SOURCE)]
    assert (loads["j"].left_bytes, loads["j"].outage_s) == (20 * GIB, 60)
    assert {load.destination for load in loads.values()} == {"kvm1/fast"}
    nothing, all_of_them = loads_of(wave, {}, {}, destination=of_site)
    assert ({one.size_bytes for one in nothing.values()}, len(all_of_them)) == ({SIZE_ASSUMED}, 4)


def test_a_site_is_as_fast_as_its_jobs_were() -> None:
    assert (site_of([]).copy_bps, site_of([]).residuals) == (COPY_BPS_ASSUMED, RESIDUALS_ASSUMED)
    speeds = [100, 300, 200]
    done = [
        job(
            "x",
            passes=(
                Pass(number=1, kind="full", bytes=speed * 10, seconds=10),
                Pass(number=2, kind="final", bytes=1, seconds=9),
            ),
            downtime_s=30,
            forecast=Forecast(
                change_rate_bps=4096,
                throughput_bps=1,
                expected_delta_bytes=1,
                expected_downtime_s=1,
                converges=True,
                at=now(),
            ),
            outage=OutageForecast(p50_s=20, p95_s=40, parts=(), at=now()),
        )
        for speed in speeds
    ]
    site = site_of(done)
    assert site.copy_bps == statistics.median(speeds)
    assert (site.outage_s, site.change_bps) == (21, 4096), "what its guests took without the bytes of the last pass"
    unknown = site_of([job("x", downtime_s=500)])
    assert (unknown.outage_s, unknown.change_bps) == (OUTAGE_ASSUMED_S, CHANGE_BPS_ASSUMED)
    assert sorted(site.residuals) == sorted([1.5, 1.5, 1.5, *RESIDUALS_ASSUMED])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with_file = Store(f"sqlite:///{tmp_path / 'store.db'}")
    yield with_file
    with_file.close()


def test_a_wave_keeps_its_forecast_and_what_if_changes_nothing(store: Store) -> None:
    waves, source_ids = Waves(store.waves), []

    async def rows(source_id: UUID) -> Mapping[str, VmRow]:
        source_ids.append(source_id)
        return ROWS

    forecaster = Forecaster(waves, store, rows, host="kvm1", destination="fast")
    made = waves.create(wave(member("a"), member("b", "a"), member("c")))
    found = asyncio.run(forecaster.forecast(made.id, WhatIf()))
    assert source_ids == [SOURCE], "once, for all of its members"
    assert found.forecast is not None
    kept = waves.whole(made.id).forecast
    assert kept is not None
    assert kept.model_dump(mode="json") == found.forecast.model_dump(mode="json")
    assert (found.assumed, found.unfinished, found.difference) == (("c",), 0, None)
    at = {one.id: one.healthy_at for one in found.members}
    planned = {one.id: one.planned_at for one in found.members}
    assert at["a"] is not None
    assert planned["b"] is not None
    assert at["a"] <= planned["b"]
    slower = asyncio.run(forecaster.forecast(made.id, WhatIf(limits=WaveLimits(wave=1))))
    assert slower.difference is not None
    assert "later" in slower.difference
    assert slower.forecast is not None
    assert slower.forecast.ends_p50 - found.forecast.ends_p50 > timedelta(minutes=1)
    assert waves.whole(made.id).forecast == kept


def test_sources_are_asked_at_once_and_one_that_hangs_holds_the_forecast_up_no_longer_than_it_may(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecasting, "SOURCE_WITHIN_S", 1.0)
    asked: list[UUID] = []

    async def rows(source_id: UUID) -> Mapping[str, VmRow]:
        asked.append(source_id)
        while len(asked) < 3 or source_id != SOURCE:
            await asyncio.sleep(0.01)
        return ROWS

    waves = Waves(store.waves)
    made = waves.create(wave(member("x", plan=plan("x", uuid4())), member("a"), member("y", plan=plan("y", uuid4()))))
    forecaster = Forecaster(waves, store, rows, host="kvm1", destination="fast")

    async def answered() -> WaveSimulation:
        async with asyncio.timeout(20):
            return await forecaster.forecast(made.id, WhatIf())

    assert asyncio.run(answered()).assumed == ("x", "y")


def test_a_source_that_does_not_answer_leaves_its_members_assumed(store: Store) -> None:
    async def rows(source_id: UUID) -> Mapping[str, VmRow]:
        raise SourceUnreachable("the vCenter does not answer")

    waves = Waves(store.waves)
    made = waves.create(wave(member("a"), member("b")))
    change_members(
        store.waves, made.id, waves.whole(made.id).members[:1], {MemberState.WAITING}, {"state": MemberState.SKIPPED}
    )
    found = asyncio.run(Forecaster(waves, store, rows, host="kvm1", destination="fast").forecast(made.id, WhatIf()))
    assert found.assumed == ("a", "b")
    assert [one.id for one in found.members if one.healthy_at is not None] == ["b"]
