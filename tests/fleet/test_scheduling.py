"""What a wave does now, and the sentence that says why each other member waits."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from synvirt.errors import InvalidPlan
from synvirt.fleet.facts import Estimate, Facts
from synvirt.fleet.model import Canary, Group, MemberState, WaveLimits, WaveRequest
from synvirt.fleet.scheduling import Decision, Scheduler, decide
from synvirt.migrations.planning.openings import openings_of
from synvirt.model.windows import LockOut, Window
from tests.fleet.made import member, wave

S = MemberState
# A Friday; the window opens on Saturday at 22:00 for four hours, each week.
NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)
NIGHT = datetime(2026, 11, 28, 22, tzinfo=UTC)
SATURDAYS = Window(
    id="sat",
    name="Saturday nights",
    rrule="FREQ=WEEKLY;BYDAY=SA",
    start=datetime.fromisoformat("2026-11-28T22:00:00"),
    end=datetime.fromisoformat("2026-11-29T02:00:00"),
)


def facts(host: str = "esx-1", to: str = "kvm1/fast", copy: float = 3600, outage: float | None = 600) -> Facts:
    return Facts(host, to, Estimate(copy, copy), None if outage is None else Estimate(outage, outage))


def ask(
    made: WaveRequest, now: datetime, known: Mapping[str, Facts] | None = None, /, *, more: Any = None, **states: MemberState
) -> tuple[Decision, dict[str, str]]:
    each = {one.id: facts() for one in made.members} | dict(known or {})
    return decide(made, {name.replace("_", "-"): state for name, state in states.items()}, each, now, **(more or {}))


def test_without_windows_and_limits_all_begin_at_once_by_priority() -> None:
    made = wave(member("b"), member("a", priority=1), member("c", "b"))
    decision, reasons = ask(made, NOW)
    assert decision == Decision(("a", "b", "c"), ())
    assert reasons == {}


def test_a_member_cuts_over_once_those_it_waits_for_are_healthy() -> None:
    made = wave(member("web", "db"), member("db"))
    decision, reasons = ask(made, NOW, web=S.READY, db=S.READY)
    assert decision.cut_over == ("db",)
    assert reasons == {"web": "It waits for db, which is being cut over."}
    assert ask(made, NOW, web=S.READY, db=S.HEALTHY)[0].cut_over == ("web",)
    assert ask(made, NOW, web=S.READY, db=S.FAILED)[1] == {"web": "It waits for db, which has failed."}


def test_after_a_group_means_all_of_it() -> None:
    members = [member("web", "data"), *(member(f"db{n}", group="data") for n in range(5))]
    made = wave(*members, groups=[Group(name="data", rule="apart")])
    states = {"web": S.READY, "db0": S.HEALTHY, "db1": S.FAILED, "db2": S.SYNCING, "db3": S.SYNCING, "db4": S.SYNCING}
    _, reasons = ask(made, NOW, **states)
    assert reasons["web"] == (
        "It waits for group data: 4 of 5 are not healthy: db1 (failed), db2 (being copied), db3 (being copied) and 1 more."
    )
    decision, _ = ask(made, NOW, web=S.READY, **{f"db{n}": S.HEALTHY for n in range(5)})
    assert decision.cut_over == ("web",)


def test_a_cut_over_waits_for_its_window_and_for_one_that_it_fits_into() -> None:
    made = wave(member("a", window_id="sat"), windows=[SATURDAYS])
    assert ask(made, NOW, a=S.READY)[1] == {"a": "Window sat opens on 2026-11-28 22:00 UTC."}
    assert ask(made, NIGHT, a=S.READY)[0].cut_over == ("a",)
    late = NIGHT + timedelta(hours=3, minutes=55)
    decision, reasons = ask(made, late, a=S.READY)
    assert decision.cut_over == ()
    assert reasons == {
        "a": "Its outage takes up to 10 min, and window sat is open for 5 min more; it fits on 2026-12-05 22:00 UTC."
    }
    _, reasons = ask(made, NIGHT, {"a": facts(outage=5 * 3600)}, a=S.READY)
    assert reasons["a"] == "Its outage takes up to 5 h, and window sat is open for 4 h more, and never opens for as long again."
    # Just long enough to end with the window.
    assert ask(made, late - timedelta(minutes=5), a=S.READY)[0].cut_over == ("a",)


def test_a_window_that_is_over_or_locked_out_is_reported() -> None:
    once = SATURDAYS.model_copy(update={"rrule": None})
    made = wave(member("a", window_id="sat"), windows=[once])
    later = NIGHT + timedelta(days=2)
    assert ask(made, later, a=S.READY)[1]["a"] == "Window sat does not open again: give it another window."
    cut = LockOut(start=datetime.fromisoformat("2026-11-28T00:00:00"), end=datetime.fromisoformat("2026-11-29T00:00:00"))
    locked = wave(member("a", window_id="sat"), windows=[SATURDAYS.model_copy(update={"lockouts": (cut,)})])
    assert ask(locked, NIGHT, a=S.READY)[1]["a"] == "Window sat opens on 2026-11-29 00:00 UTC."


def test_a_member_of_no_window_takes_any_of_the_wave() -> None:
    made = wave(member("a"), windows=[SATURDAYS])
    assert ask(made, NOW, a=S.READY)[1] == {"a": "A window of the wave opens on 2026-11-28 22:00 UTC."}
    assert ask(made, NIGHT, a=S.READY)[0].cut_over == ("a",)


def test_a_copy_begins_a_fortnight_before_its_window_or_sooner_where_it_takes_long() -> None:
    made = wave(member("a", window_id="sat"), windows=[SATURDAYS])
    early = NIGHT - timedelta(days=30)
    _, reasons = ask(made, early)
    assert reasons["a"] == (
        "Its copy begins on 2026-11-14 22:00 UTC, in time for window sat, which opens on 2026-11-28 22:00 UTC."
    )
    assert ask(made, NIGHT - timedelta(days=14))[0].begin == ("a",)
    assert ask(made, early, {"a": facts(copy=10 * 86400)})[0].begin == ("a",)


def test_limits_hold_per_source_host_per_destination_and_in_the_wave() -> None:
    known = {f"m{n}": facts(host=f"esx-{n % 2}", to=f"kvm/{n % 3}") for n in range(8)}
    members = [member(f"m{n}") for n in range(8)]
    decision, reasons = ask(wave(*members, limits=WaveLimits(per_source_host=1)), NOW, known)
    assert decision.begin == ("m0", "m1")
    assert reasons["m2"] == "1 of 1 copies from source host esx-0 run: m0."
    decision, reasons = ask(wave(*members, limits=WaveLimits(per_destination=1)), NOW, known)
    assert decision.begin == ("m0", "m1", "m2")
    assert reasons["m3"] == "1 of 1 copies to destination kvm/0 run: m0."
    decision, reasons = ask(wave(*members, limits=WaveLimits(wave=5)), NOW, known)
    assert len(decision.begin) == 5
    assert reasons["m7"] == "5 of 5 copies of the wave run: m0, m1, m2 and 2 more."
    # Cut-overs are counted by themselves.
    states = {f"m{n}": S.SYNCING if n < 2 else S.READY for n in range(8)}
    decision, reasons = ask(wave(*members, limits=WaveLimits(wave=2)), NOW, known, **states)
    assert decision == Decision((), ("m2", "m3"))
    assert reasons["m4"] == "2 of 2 cut-overs of the wave run: m2 and m3."


def test_who_is_blocked_takes_nobodys_slot() -> None:
    made = wave(member("web", "db", priority=1), member("db"), member("other"), limits=WaveLimits(wave=1))
    assert ask(made, NOW, web=S.READY, db=S.SYNCING, other=S.READY)[0].cut_over == ("other",)


@pytest.mark.parametrize("gate", ["success", "approval"])
def test_the_canary_goes_first(gate: str) -> None:
    made = wave(member("a"), member("b"), member("c"), canary=Canary(count=1, gate=gate))
    decision, reasons = ask(made, NOW)
    assert decision.begin == ("a",)
    assert reasons == dict.fromkeys("bc", "It waits for the canary: a (being copied).")
    decision, reasons = ask(made, NOW, a=S.HEALTHY)
    if gate == "success":
        assert decision.begin == ("b", "c")
    else:
        assert decision.begin == ()
        assert reasons["b"] == "The canary is healthy; an approval is awaited before the others move."
        assert ask(made, NOW, a=S.HEALTHY, more={"canary_approved": True})[0].begin == ("b", "c")
    assert "a (failed)" in ask(made, NOW, a=S.FAILED)[1]["b"]


@pytest.mark.parametrize("gate", ["success", "approval"])
def test_a_canary_that_was_approved_early_still_goes_first(gate: str) -> None:
    """In a draft, or by who took it for healthy: nobody has seen yet how it fares."""
    made, approved = wave(member("a"), member("b"), canary=Canary(count=1, gate=gate)), {"canary_approved": True}
    assert ask(made, NOW, more=approved)[0].begin == ("a",)
    for state in (S.SYNCING, S.READY, S.CUTTING_OVER):
        decision, reasons = ask(made, NOW, a=state, more=approved)
        assert (decision.begin, reasons["b"][:26]) == ((), "It waits for the canary: a")
    for state in (S.HEALTHY, S.FAILED, S.SKIPPED, S.ROLLED_BACK):
        assert ask(made, NOW, a=state, more=approved)[0].begin == ("b",)


def test_a_canary_takes_along_all_without_which_it_could_not_move() -> None:
    members = [member("db", priority=5), member("app", "db"), member("pal", group="g"), member("one", group="g", priority=1)]
    made = wave(*members, groups=[Group(name="g")], canary=Canary(count=1))
    assert set(ask(made, NOW)[0].begin) == {"one", "pal"}


def test_a_member_waits_for_every_approval() -> None:
    made = wave(member("a", approvers=("Alice", "Bob")))
    assert ask(made, NOW, a=S.READY)[1] == {"a": "It waits for the approval of Alice and Bob."}
    assert ask(made, NOW, a=S.READY, more={"approved": {"a": ["Bob"]}})[1] == {"a": "It waits for the approval of Alice."}
    assert ask(made, NOW, a=S.READY, more={"approved": {"a": ["Bob", "Alice"]}})[0].cut_over == ("a",)


def test_a_group_cuts_over_together_or_not_at_all() -> None:
    pair = [member("db", group="g", window_id="sat"), member("app", "db", group="g", window_id="sat")]
    made = wave(*pair, groups=[Group(name="g")], windows=[SATURDAYS])
    _, reasons = ask(made, NIGHT, db=S.READY, app=S.SYNCING)
    assert reasons == {"db": "Its group g cuts over together, and waits for app (being copied)."}
    assert ask(made, NIGHT, db=S.READY, app=S.READY)[0].cut_over == ("db",)
    # One after the other they need 20 minutes.
    late = NIGHT + timedelta(hours=3, minutes=45)
    decision, reasons = ask(made, late, db=S.READY, app=S.READY)
    assert decision.cut_over == ()
    assert reasons["db"] == (
        "Group g, which cuts over together, needs up to 20 min, and window sat is open for 15 min more; "
        "it fits on 2026-12-05 22:00 UTC."
    )
    # Once begun, each is judged by itself.
    begun = {"cut_over_at": {"db": NIGHT + timedelta(hours=3, minutes=30)}}
    assert ask(made, late, db=S.HEALTHY, app=S.READY, more=begun)[0].cut_over == ("app",)
    begun = {"cut_over_at": {"db": NIGHT - timedelta(days=7)}}
    assert "in part in an opening before" in ask(made, NIGHT, db=S.HEALTHY, app=S.READY, more=begun)[1]["app"]


def test_a_group_waits_for_the_approvals_and_dependencies_of_all() -> None:
    members = [member("a", group="g"), member("b", group="g", approvers=("Eve",)), member("c", "x", group="g"), member("x")]
    made = wave(*members, groups=[Group(name="g")])
    states = {"a": S.READY, "b": S.READY, "c": S.READY, "x": S.SYNCING}
    assert ask(made, NOW, **states)[1]["a"] == "Its group g cuts over together, and b waits for an approval."
    given = {"approved": {"b": ["Eve"]}}
    decision, reasons = ask(made, NOW, **states, more=given)
    assert decision.cut_over == ()
    assert reasons["a"] == "Its group g cuts over together, and c waits for others outside of the group."
    states["x"] = S.HEALTHY
    assert ask(made, NOW, **states, more=given)[0].cut_over == ("a", "b", "c")


def test_a_group_that_waits_for_itself_by_way_of_another_is_refused() -> None:
    members = [member("a", group="g"), member("x", "a"), member("b", "x", group="g")]
    with pytest.raises(InvalidPlan, match=r"cuts over together, but would wait for itself: g \(group\) → x → g"):
        ask(wave(*members, groups=[Group(name="g")]), NOW)
    assert ask(wave(*members, groups=[Group(name="g", rule="apart")]), NOW)[0].begin


def test_members_apart_are_never_cut_over_at_once() -> None:
    made = wave(member("n1", group="dc"), member("n2", group="dc"), groups=[Group(name="dc", rule="apart")])
    decision, reasons = ask(made, NOW, n1=S.READY, n2=S.READY)
    assert decision.cut_over == ("n1",)
    assert reasons == {"n2": "n1 of its group dc is being cut over, and only one of them may be at a time."}
    assert ask(made, NOW, n1=S.HEALTHY, n2=S.READY)[0].cut_over == ("n2",)


def test_an_outage_over_its_budget_or_unknown_is_held() -> None:
    made = wave(member("a", outage_budget_s=300), member("b", group="g"), groups=[Group(name="g", outage_budget_s=60)])
    _, reasons = ask(made, NOW, {"b": facts(outage=90)}, a=S.READY, b=S.READY)
    assert reasons == {
        "a": "Its outage of up to 10 min is over its budget of 5 min.",
        "b": "Its outage of up to 1 min 30 s is over its budget of 1 min.",
    }
    _, reasons = ask(made, NOW, {"a": facts(outage=None)}, a=S.READY, b=S.HEALTHY)
    assert reasons == {"a": "Its outage is not known yet: a delta of it has to be copied first."}


def test_a_held_wave_and_one_that_has_not_started_begin_nothing() -> None:
    made = wave(member("a"), member("b"), start_at=NOW + timedelta(days=1))
    assert ask(made, NOW) == (Decision((), ()), dict.fromkeys("ab", "The wave starts on 2026-11-28 12:00 UTC."))
    decision, reasons = ask(wave(member("a"), member("b")), NOW, b=S.READY, more={"hold": "The wave is held."})
    assert decision == Decision((), ())
    assert reasons == dict.fromkeys("ab", "The wave is held.")


def test_an_outage_that_became_shorter_is_looked_at_again_in_the_same_window() -> None:
    made = wave(member("a", window_id="sat"), windows=[SATURDAYS])
    scheduler = Scheduler(made, openings_of(made, NOW), {"a": facts(outage=5 * 3600)})
    scheduler.put("a", S.READY)
    assert scheduler.decide(NIGHT).cut_over == ()
    assert scheduler.decide(NIGHT + timedelta(minutes=1)).cut_over == ()
    scheduler.update("a", facts(outage=600))
    assert scheduler.decide(NIGHT + timedelta(minutes=2)).cut_over == ("a",)
    # A window missed: its source is on again, and its turn comes again.
    scheduler.put("a", S.READY)
    assert scheduler.decide(NIGHT + timedelta(minutes=3)).cut_over == ("a",)


def test_time_alone_changes_what_is_decided_when_it_says() -> None:
    made = wave(member("a", window_id="sat"), windows=[SATURDAYS], start_at=NOW + timedelta(hours=1))
    scheduler = Scheduler(made, openings_of(made, NOW), {"a": facts()})
    # A window's opening is nothing to a member that is not ready.
    assert scheduler.next_change(NOW + timedelta(hours=2)) is None
    scheduler.put("a", S.READY)
    assert scheduler.next_change(NOW) == NOW + timedelta(hours=1)
    assert scheduler.next_change(NOW + timedelta(hours=2)) == NIGHT
    assert scheduler.next_change(NIGHT) == NIGHT + timedelta(days=7)
    free = wave(member("a"))
    assert Scheduler(free, openings_of(free, NOW), {"a": facts()}).next_change(NOW) is None


def test_a_member_of_which_nothing_is_known_is_not_lost() -> None:
    made = wave(member("a"))
    assert decide(made, {}, {}, NOW)[0].begin == ("a",)
    assert "not known yet" in decide(made, {"a": S.READY}, {}, NOW)[1]["a"]


def test_with_a_limit_per_host_nobody_begins_whose_host_is_not_known_yet() -> None:
    limited = wave(member("a"), member("b"), limits=WaveLimits(per_source_host=2))
    known = {"a": facts(), "b": replace(facts(), placed=False)}
    decision, reasons = decide(limited, {}, known, NOW)
    assert decision.begin == ("a",)
    assert "has not reported yet which of its hosts" in reasons["b"]
    free, _ = decide(wave(member("a"), member("b")), {}, known, NOW)
    assert free.begin == ("a", "b")
