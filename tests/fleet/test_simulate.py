"""The simulation: laws that hold in every run of a drawn fleet, and forecasts that can be reckoned by hand."""

from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synvirt.errors import InvalidPlan
from synvirt.fleet.gantt import gantt
from synvirt.fleet.model import Canary, Group, MemberRequest, MemberState, Wave, WaveLimits, WaveRequest
from synvirt.fleet.order import order, problems
from synvirt.fleet.simulation.changes import Change, changed, difference_in_words
from synvirt.fleet.simulation.drawing import Draws
from synvirt.fleet.simulation.explaining import forecast_of
from synvirt.fleet.simulation.forecast import simulate
from synvirt.fleet.simulation.nouns import Load, Simulation, Site
from synvirt.fleet.simulation.running import Run, Setting
from synvirt.fleet.waves import check
from synvirt.migrations.planning.openings import openings_of, spans_of
from synvirt.model.kinds import Mode
from synvirt.model.windows import LockOut, Window
from synvirt.sizes import GIB, KIB, MIB
from tests.fleet.made import member, plan, wave

NOW = datetime(2026, 11, 23, 8, tzinfo=UTC)
EXACT = (1.0,)


def window(
    name: str, start: str, hours: float, rule: str | None = None, zone: str = "UTC", locked: int | None = None
) -> Window:
    first = datetime.fromisoformat(start)
    cut = (
        () if locked is None else (LockOut(start=first + timedelta(days=locked), end=first + timedelta(days=locked, hours=3)),)
    )
    end = first + timedelta(hours=hours)
    return Window(id=name, name=name, timezone=zone, rrule=rule, start=first, end=end, lockouts=cut)


def drawn_fleet(drawn: Random) -> tuple[WaveRequest, dict[str, Load], Site]:
    groups = [Group(name=f"g{n}", rule=drawn.choice(("together", "apart"))) for n in range(drawn.randint(0, 2))]
    windows = [
        window(
            f"w{n}",
            f"2026-11-{drawn.randint(20, 30)}T{drawn.randint(0, 23):02d}:00:00",
            drawn.choice((0.5, 2, 8)),
            drawn.choice((None, "FREQ=DAILY", "FREQ=WEEKLY", "FREQ=DAILY;COUNT=2")),
            drawn.choice(("UTC", "Europe/Berlin", "America/St_Johns")),
            drawn.choice((None, 0, 1)),
        )
        for n in range(drawn.randint(0, 3))
    ]
    # Members of a group share what together means: one window, or none.
    at_home = {group.name: drawn.choice([None, *[one.id for one in windows]]) for group in groups}
    members = []
    for n in range(drawn.randint(1, 18)):
        group = drawn.choice([None, None, *[one.name for one in groups]])
        home = at_home[group] if group is not None else drawn.choice([None, *[one.id for one in windows]])
        before = [f"m{place}" for place in range(n)]
        after = tuple(drawn.sample(before, drawn.randint(0, min(2, n)))) if drawn.random() < 0.4 else ()
        budget = drawn.choice((None, None, None, 400.0))
        members.append(
            member(f"m{n}", *after, group=group, window_id=home, priority=drawn.randint(1, 5), outage_budget_s=budget)
        )
    limits = WaveLimits(
        per_source_host=drawn.choice((None, 1, 2)),
        per_destination=drawn.choice((None, 1, 3)),
        wave=drawn.choice((None, 2, 5)),
        bandwidth_bps=drawn.choice((None, 50 * MIB)),
    )
    canary = Canary(count=2, gate=drawn.choice(("success", "approval"))) if drawn.random() < 0.3 else None
    made = wave(*members, groups=groups, windows=windows, limits=limits, canary=canary)
    loads = {
        one.id: Load(
            size_bytes=drawn.choice((0, GIB, 300 * GIB, 3000 * GIB)),
            source_host=f"esx-{drawn.randint(1, 3)}",
            destination=f"kvm/{drawn.randint(1, 2)}",
            change_bps=drawn.choice((0.0, 64e3, 5e6)),
            outage_s=drawn.choice((30.0, 600.0, 3000.0)),
        )
        for one in members
    }
    site = Site(source_host_bps=drawn.choice((None, 200.0 * MIB)), network_bps=drawn.choice((None, 300.0 * MIB)))
    return made, loads, site


def most_at_once(spans: Iterable[tuple[datetime, datetime]]) -> int:
    changes = sorted((at, change) for start, end in spans for at, change in ((start, 1), (end, -1)))
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def laws(made: WaveRequest | Wave, loads: dict[str, Load], run: Run) -> None:
    openings = spans_of(made, NOW)
    anyway = [span for spans in openings.values() for span in spans]
    needs = order(made)
    apart: dict[str, list[tuple[datetime, datetime]]] = defaultdict(list)
    together: dict[str, set[datetime]] = defaultdict(set)
    rules = {group.name: group.rule for group in made.groups}
    for one in made.members:
        if one.id not in run.cuts:
            continue
        begun, ended = run.cuts[one.id], run.healthy[one.id]
        if made.windows:
            inside = [span for span in (openings[one.window_id] if one.window_id else anyway) if span.start <= begun < span.end]
            assert inside, f"{one.id} is cut over outside of its window"
            # Openings of several windows may touch: one of them, or all of them together, hold it.
            assert ended <= max(span.end for span in inside) or not one.window_id, f"{one.id} lasts beyond its window"
        for name in needs.needs(one.id):
            assert run.healthy[name] <= begun, f"{one.id} is cut over before {name} is healthy"
        if one.group is not None and rules[one.group] == "apart":
            apart[one.group].append((begun, ended))
        elif one.group is not None and made.windows:
            together[one.group].add(max(span.start for span in inside))
    assert all(most_at_once(spans) == 1 for spans in apart.values())
    if all(one.window_id for one in made.members):
        assert all(len(starts) == 1 for starts in together.values()), "a group is cut over in two openings"
    copies = {name: (run.begins[name], run.ready[name]) for name in run.ready}
    cuts = {name: (run.cuts[name], run.healthy[name]) for name in run.cuts}
    for running in (copies, cuts):
        by_host, by_destination = defaultdict(list), defaultdict(list)
        for name, span in running.items():
            by_host[loads[name].source_host].append(span)
            by_destination[loads[name].destination].append(span)
        limits = made.limits
        assert all(most_at_once(spans) <= (limits.per_source_host or 99) for spans in by_host.values())
        assert all(most_at_once(spans) <= (limits.per_destination or 99) for spans in by_destination.values())
        assert most_at_once(running.values()) <= (limits.wave or 99)
    for one in made.members:
        assert one.id in run.healthy or len(forecast_of(run, one.id).reason) > 10, f"{one.id} neither ends nor says why"


@settings(max_examples=40)
@given(st.integers(0, 1 << 32))
def test_the_laws_hold_in_every_run(seed: int) -> None:
    made, loads, site = drawn_fleet(Random(seed))
    if problems(made):  # a group that would wait for itself: its members wait for nobody then
        free = tuple(one.model_copy(update={"after": ()}) for one in made.members)
        made = made.model_copy(update={"members": free})
    setting = Setting(made, loads, site, order(made), openings_of(made, NOW), NOW)
    for draws in (None, Draws(site.residuals, seed), Draws((0.1, 9.0), seed)):
        run = Run(setting, draws)
        run.go()
        laws(made, loads, run)
        # As forecast, nothing is begun that its window is too short for.
        assert draws is not None or not run._missed


def test_the_same_question_has_the_same_answer() -> None:
    made, loads, site = drawn_fleet(Random(4))
    assert simulate(made, loads, site, NOW, seed=3) == simulate(made, loads, site, NOW, seed=3)


def forecast(made: WaveRequest, loads: dict[str, Load], site: Site) -> Simulation:
    return simulate(made, loads, site, NOW)


def load(size: int = 60, host: str = "esx-1", to: str = "kvm1/fast", outage: float = 300) -> Load:
    return Load(size_bytes=size * GIB, source_host=host, destination=to, change_bps=0.0, outage_s=outage)


def test_copies_share_a_source_host() -> None:
    site = Site(copy_bps=100 * MIB, source_host_bps=100 * MIB, residuals=EXACT)
    found = forecast(wave(member("a"), member("b")), {"a": load(), "b": load()}, site)
    # 120 GiB at 100 MiB/s: 1,229 s for both, not 614 s each.
    assert found.members[0].ready_at is not None
    assert abs((found.members[0].ready_at - NOW).total_seconds() - 1229) <= 60
    assert found.forecast is not None
    assert found.forecast.bottleneck.startswith("source host esx-1: 21 min")
    two = forecast(wave(member("a"), member("b")), {"a": load(), "b": load(host="esx-2")}, site)
    assert two.members[0].ready_at is not None
    assert abs((two.members[0].ready_at - NOW).total_seconds() - 614) <= 60


def test_what_is_kept_fresh_takes_its_share() -> None:
    site = Site(copy_bps=200 * MIB, source_host_bps=100 * MIB, residuals=EXACT)
    busy = Load(GIB, "esx-1", "d", change_bps=50.0 * MIB, outage_s=1)
    made = wave(member("busy", window_id="w"), member("a"), windows=[window("w", "2026-12-01T00:00:00", 1)])
    found = simulate(made, {"busy": busy, "a": load(600)}, site, NOW)
    ready = found.members[1].ready_at
    assert ready is not None
    assert (ready - NOW).total_seconds() > 1.8 * 6144


@pytest.mark.parametrize(
    ("made", "loads", "reported"),
    [
        (wave(member("a", window_id="w"), windows=[window("w", "2026-11-28T22:00:00", 4)]), {"a": load()}, "window w: 5 d"),
        (wave(member("a")), {"a": load(900, outage=1)}, "one copy's own rate"),
        (
            wave(member("a"), member("b"), member("c"), limits=WaveLimits(per_source_host=1)),
            dict.fromkeys("abc", load(300)),
            "limit of source host esx-1",
        ),
        (wave(member("a"), member("b"), canary=Canary(count=1)), {"a": load(600), "b": load(1)}, "the canary"),
        (wave(member("a", "b"), member("b")), {"a": load(1), "b": load(2, outage=9000)}, "cut-overs themselves"),
    ],
)
def test_what_holds_a_wave_back_is_named(made: WaveRequest, loads: dict[str, Load], reported: str) -> None:
    found = forecast(made, loads, Site(copy_bps=100 * MIB, source_host_bps=None, residuals=EXACT))
    assert found.forecast is not None
    assert found.forecast.bottleneck.startswith(reported)


def test_who_never_cuts_over_says_why() -> None:
    over = window("over", "2026-11-01T00:00:00", 4)
    short = window("short", "2026-11-28T00:00:00", 0.1, "FREQ=DAILY")
    made = wave(member("a", window_id="over"), member("b", "a"), member("c", window_id="short"), windows=[over, short])
    found = forecast(made, {"a": load(), "b": load(), "c": load(outage=1000)}, Site(residuals=EXACT))
    assert found.unfinished == 3
    assert found.forecast is None
    assert [one.reason for one in found.members] == [
        "Window over does not open again: give it another window.",
        "It waits for a, which is not cut over yet.",
        "Its outage takes up to 16 min 40 s, and window short is open for 6 min more, and never opens for as long again.",
    ]


def test_p95_is_later_where_the_site_was_unsteady() -> None:
    loads = {f"m{n}": load(200) for n in range(10)}
    made = wave(*[member(name) for name in loads], limits=WaveLimits(per_source_host=1))
    steady = forecast(made, loads, Site(residuals=EXACT))
    shaky = forecast(made, loads, Site(residuals=(0.5, 1.0, 3.0)))
    assert steady.forecast is not None
    assert shaky.forecast is not None
    assert steady.forecast.ends_p95 == steady.forecast.ends_p50 == shaky.forecast.ends_p50
    length = shaky.forecast.ends_p50 - NOW
    assert 1.3 * length < shaky.forecast.ends_p95 - NOW < 3.1 * length


def test_what_if_one_number_were_another() -> None:
    loads = {f"m{n}": load(300, to="kvm1/fast") for n in range(6)}
    made = wave(*[member(name) for name in loads], limits=WaveLimits(per_destination=1))
    site = Site(copy_bps=100 * MIB, source_host_bps=None, network_bps=100 * MIB, residuals=EXACT)
    before = simulate(made, loads, site, NOW)
    # A second destination alone does not help, where the network is full; with ten times the network it takes half as long.
    one_more = simulate(*changed(made, loads, site, Change(more_destinations=1)), NOW)
    both = simulate(*changed(made, loads, site, Change(more_destinations=1, network_bps=1000 * MIB)), NOW)
    for found in (before, one_more, both):
        assert found.forecast is not None
    assert before.forecast and one_more.forecast and both.forecast  # noqa: PT018 - for the types
    assert (before.forecast.ends_p50 - NOW) > 1.9 * (both.forecast.ends_p50 - NOW)
    assert (one_more.forecast.ends_p50 - NOW) > 1.7 * (both.forecast.ends_p50 - NOW)
    assert "sooner, on 2026-11-23" in difference_in_words(before, both)
    assert "later" in difference_in_words(both, before)
    opened = Change(windows=(window("w", "2026-12-24T00:00:00", 9),))
    assert simulate(*changed(made, loads, site, opened), NOW).members[0].planned_at == datetime(2026, 12, 24, tzinfo=UTC)


def cold(name: str, **fields: Any) -> MemberRequest:
    return member(name, plan=plan(name).model_copy(update={"mode": Mode.COLD}), outage_budget_s=3600, **fields)


def test_what_is_cold_is_copied_within_its_cut_over() -> None:
    """As it will be: not in the days before, while nobody waits for it."""
    night = window("w", "2026-11-28T22:00:00", 8, "FREQ=DAILY")
    opens = datetime(2026, 11, 28, 22, tzinfo=UTC)
    site = Site(copy_bps=100 * MIB, source_host_bps=200 * MIB, residuals=EXACT)
    made = wave(*(cold(name) for name in "abcd"), member("e"), windows=[night], limits=WaveLimits(wave=4))
    found = forecast(made, {name: load(360) for name in "abcde"}, site)
    assert found.forecast is not None
    by_name = {one.id: one for one in found.members}
    for name in "abcd":
        one = by_name[name]
        assert one.ready_at is not None
        assert one.healthy_at is not None
        assert one.planned_at == opens
        assert one.ready_at < opens - timedelta(days=4), "it is ready at once, as nothing is copied in advance"
        # 1,440 GiB at 200 MiB/s, then 300 s each.
        assert abs((one.healthy_at - opens).total_seconds() - 7373 - 300) <= 120
    first, last = by_name["a"].healthy_at, by_name["e"].planned_at
    assert first is not None
    assert last is not None
    assert timedelta() <= last - first <= timedelta(minutes=1), "it waits for a slot"
    slow = forecast(wave(cold("a"), windows=[night]), {"a": load(10_000)}, site)
    assert slow.members[0].reason == "Its cut-over did not fit into 3 openings of its window; its source is on."
    alone = forecast(wave(cold("a")), {"a": load(360)}, site)
    assert alone.forecast is not None
    assert alone.forecast.bottleneck.startswith("one copy's own rate: 1 h 2 min")
    assert abs((alone.forecast.ends_p50 - NOW).total_seconds() - 3686 - 300) <= 120


def test_a_running_wave_is_taken_up_where_it_is() -> None:
    half = load(60)
    loads = {
        "a": Load(60 * GIB, "h", "d", 0.0, 60, MemberState.SYNCING, 30 * GIB),
        "b": Load(60 * GIB, "h", "d", 0.0, 60, MemberState.READY),
        "c": Load(60 * GIB, "h", "d", 0.0, 60, MemberState.CUTTING_OVER),
        "d": Load(60 * GIB, "h", "d", 0.0, 60, MemberState.HEALTHY),
        "e": Load(60 * GIB, "h", "d", 0.0, 60, MemberState.FAILED),
        "f": half,
    }
    found = forecast(wave(*[member(name, *(["e"] if name == "f" else [])) for name in loads]), loads, Site(residuals=EXACT))
    by_name = {one.id: one for one in found.members}
    assert by_name["a"].ready_at is not None
    assert by_name["b"].planned_at == NOW
    assert by_name["c"].healthy_at == NOW + timedelta(seconds=60)
    assert by_name["f"].reason == "It waits for e, which has failed."
    assert found.unfinished == 2


def test_a_fleet_of_no_vms_is_no_error() -> None:
    found = simulate(wave(), {}, Site(), NOW)
    assert found.forecast is None
    assert found.members == ()


@pytest.mark.parametrize("size", [0, 2**62])
def test_a_source_may_claim_any_size(size: int) -> None:
    made = wave(member("a"), member("b"), limits=WaveLimits(bandwidth_bps=64 * KIB))
    found = simulate(made, dict.fromkeys(("a", "b"), Load(size, "h", "d")), Site(), NOW)
    assert found.forecast is not None
    assert found.forecast.ends_p50 <= found.forecast.ends_p95
    assert gantt(found).startswith("<svg ")


def test_a_wave_begins_within_the_years_of_windows() -> None:
    made = wave(member("a")).model_copy(update={"start_at": datetime(9999, 12, 31, 23, 59, tzinfo=UTC)})
    with pytest.raises(InvalidPlan, match="start_at is outside of the years"):
        check(made)
    check(made.model_copy(update={"start_at": datetime(2200, 12, 31, tzinfo=UTC)}))


def test_a_busy_guest_is_kept_fresh_more_often_as_its_job_does() -> None:
    """The pace of the job that holds: a delta grows to what a cut-over may copy, or for an hour."""
    quiet, busy = 16.0 * 1024, float(MIB)
    site = Site(copy_bps=100.0 * MIB, source_host_bps=None, residuals=EXACT)
    loads = {
        name: Load(100 * GIB, "esx-1", "d", change_bps=change, outage_s=100.0) for name, change in (("a", quiet), ("b", busy))
    }
    found = {one.id: one for one in forecast(wave(member("a"), member("b")), loads, site).members}
    took = {
        name: (one.healthy_at - one.planned_at).total_seconds()
        for name, one in found.items()
        if one.healthy_at and one.planned_at
    }
    # An hour of 16 KiB a second is not half a second of copying; 300 s of 1 MiB a second are three seconds.
    assert took["a"] == pytest.approx(100.6, abs=0.5)
    assert took["b"] == pytest.approx(103, abs=0.5)
