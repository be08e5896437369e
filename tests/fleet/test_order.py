"""A wave's order, and what is wrong with a wave, field by field."""

from datetime import datetime
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synvirt.errors import InvalidPlan
from synvirt.fleet.model import Group
from synvirt.fleet.order import PROBLEMS_MAX, order, problems
from synvirt.model.plan import MigrationPlan
from synvirt.model.windows import Window
from tests.fleet.made import SOURCE, member, plan, wave


def night(name: str, rrule: str | None = None) -> Window:
    start, end = datetime.fromisoformat("2026-11-28T22:00:00"), datetime.fromisoformat("2026-11-29T04:00:00")
    return Window(id=name, name=name, rrule=rrule, start=start, end=end)


def problems_of(made: object) -> list[tuple[str, str, str | None]]:
    return [(one.field, one.detail, one.hint) for one in problems(made)]  # type: ignore[arg-type]


def test_members_come_behind_what_they_wait_for_then_by_priority() -> None:
    made = wave(
        member("web", "app"),
        member("late", priority=5),
        member("db", group="data"),
        member("app", "data", priority=1),
        member("cache", group="data", priority=1),
        groups=[Group(name="data")],
    )
    found = order(made)
    assert found.sequence == ("cache", "db", "late", "app", "web")
    assert found.needs("app") == ("db", "cache")
    assert found.needs("web") == ("app",)
    assert problems(made) == ()


def test_a_member_that_would_start_at_once_is_refused() -> None:
    """A wave that is rolled back would lose what its guest wrote, without asking anybody."""
    made = wave(member("a"), member("erp", plan=plan("erp").model_copy(update={"instant": True})))
    [(field, detail, hint)] = problems_of(made)
    assert field == "members[1].plan.instant"
    assert "'erp'" in detail
    assert hint


def of_file(ref: dict[str, str], name: str | None = None) -> MigrationPlan:
    source = {"Offline": "qcow2"}
    return MigrationPlan.model_validate({"source": source, "source_ref": ref, "mode": "Cold", "target": {"name": name}})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"kind": "offline_host_path", "path": "/srv/a.qcow2"}, {"kind": "offline_host_path", "path": "/srv/./x/../a.qcow2"}),
        ({"kind": "upload", "upload_id": str(SOURCE)}, {"kind": "upload", "upload_id": str(SOURCE)}),
        (
            {"kind": "remote_url", "url": "https://nas.example/a.qcow2"},
            {"kind": "remote_url", "url": "https://nas.example/a.qcow2"},
        ),
    ],
)
def test_one_machine_of_one_file_is_one_member(one: dict[str, str], other: dict[str, str]) -> None:
    """Two members with names of their own are two guests from one template."""
    [(field, detail, hint)] = problems_of(wave(member("a", plan=of_file(one)), member("b", plan=of_file(other))))
    assert field == "members[1].plan.source_ref"
    assert "'b' is the machine that 'a' is" in detail
    assert hint
    assert problems(wave(member("a", plan=of_file(one, "a")), member("b", plan=of_file(other, "b")))) == ()
    parts = [{**ref, "vm": vm} for ref, vm in ((one, "1"), (other, "2"))]
    assert problems(wave(*(member(ref["vm"], plan=of_file(ref)) for ref in parts))) == ()


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (wave(member("a", "b"), member("b", "a")), "a → b → a"),
        (wave(member("c", "a"), member("a", "b"), member("b", "c"), member("x", "a")), "a → b → c → a"),
        (
            wave(member("a", "g"), member("b", "a", group="g"), groups=[Group(name="g")]),
            "a → g (group) → b → a",
        ),
    ],
)
def test_a_cycle_is_named_in_full(made: object, shown: str) -> None:
    [(field, detail, hint)] = problems_of(made)
    assert field == "members[0].after" or field.startswith("members[")
    assert detail.endswith(f": {shown}")
    assert hint
    with pytest.raises(InvalidPlan, match="waits for itself"):
        order(made)  # type: ignore[arg-type]


def test_who_waits_for_his_own_group_is_reported() -> None:
    [(_, detail, _)] = problems_of(wave(member("a", "g", group="g"), groups=[Group(name="g")]))
    assert detail == "'a' waits for itself: a → g (group) → a"


def test_each_wrong_name_is_reported_with_the_nearest() -> None:
    made = wave(
        member("db-1"),
        member("app", "db-11", group="dta", window_id="nite"),
        member("x", "x"),
        groups=[Group(name="data")],
        windows=[night("night")],
    )
    assert problems_of(made) == [
        ("members[1].after[0]", "the wave has no member or group called 'db-11'", "did you mean db-1?"),
        ("members[1].group", "the wave has no group called 'dta'", "did you mean data?"),
        ("members[1].window_id", "the wave has no window called 'nite'", "did you mean night?"),
        ("members[2].after[0]", "'x' waits for itself", "leave it out"),
    ]


def test_what_stands_twice_is_reported() -> None:
    made = wave(
        member("a"),
        member("a", plan=plan("other")),
        member("data"),
        member("again", plan=plan("a")),
        groups=[Group(name="data"), Group(name="data")],
        windows=[night("n"), night("n")],
    )
    assert [field for field, _, _ in problems_of(made)] == [
        "members[1].id",
        "groups[1].name",
        "windows[1].id",
        "members[2].id",
        "members[3].plan.source_ref",
    ]


def test_a_window_that_cannot_be_is_a_problem_of_its_rule() -> None:
    [(field, detail, hint)] = problems_of(wave(member("a"), windows=[night("ok"), night("n", "FREQ=SECONDLY")]))
    assert field == "windows[1].rrule"
    assert "SECONDLY" in detail
    assert hint


def test_a_group_that_cuts_over_together_has_one_window() -> None:
    windows = [night("n1"), night("n2")]
    made = [member("a", group="g", window_id="n1"), member("b", group="g", window_id="n2")]
    [(field, detail, _)] = problems_of(wave(*made, groups=[Group(name="g")], windows=windows))
    assert field == "members[1].window_id"
    assert "'a' has n1 and 'b' has n2" in detail
    assert problems_of(wave(*made, groups=[Group(name="g", rule="apart")], windows=windows)) == []


def test_a_broken_wave_of_thousands_is_reported_in_short() -> None:
    assert len(problems(wave(*[member(f"m{n}", "nobody", plan=plan(f"{n}")) for n in range(1000)]))) == PROBLEMS_MAX


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=25))
def test_a_wave_has_an_order_or_a_cycle_that_is_one(edges: list[tuple[int, int]]) -> None:
    after: dict[int, list[int]] = {n: [] for n in range(12)}
    for a, b in edges:
        if a != b and b not in after[a]:
            after[a].append(b)
    made = wave(*[member(f"m{n}", *[f"m{one}" for one in names]) for n, names in after.items()])
    try:
        found = order(made).sequence
    except InvalidPlan as error:
        names = [int(name[1:]) for name in error.detail.rpartition(": ")[2].split(" → ")]
        assert names[0] == names[-1]
        assert all(b in after[a] for a, b in pairwise(names))
    else:
        place = {name: at for at, name in enumerate(found)}
        assert len(place) == 12
        assert all(place[f"m{b}"] < place[f"m{a}"] for a, names in after.items() for b in names)


def test_a_member_that_is_called_as_its_own_group_is_reported_and_no_cycle_is_looked_for() -> None:
    found = problems(wave(member("db", group="db"), groups=[Group(name="db")]))
    assert "is the name of a group too" in found[0].detail
    assert "called" in problems(wave(member("db", group="db")))[0].detail
