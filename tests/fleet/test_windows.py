"""Windows: RFC 5545 as python-dateutil reads it, clocks that change, lock-outs, hostile rules."""

import importlib
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from synvirt.errors import InvalidPlan
from synvirt.migrations.planning.openings import Openings, opening, shown
from synvirt.migrations.planning.windows import Span, joined, occurrences
from synvirt.model.windows import LockOut, Window
from synvirt.recurrence import WEEKDAYS, parse, starts

# It comes with moto's boto3, and has no types.
rrule: Any = importlib.import_module("dateutil.rrule")


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def window(start: str, end: str, rule: str | None = None, zone: str = "Europe/Berlin", lockouts: Any = ()) -> Window:
    cut = tuple(LockOut(start=at(a), end=at(b)) for a, b in lockouts)
    return Window(id="w", name="w", timezone=zone, rrule=rule, start=at(start), end=at(end), lockouts=cut)


def hours(spans: tuple[Span, ...]) -> list[float]:
    return [(span.end - span.start).total_seconds() / 3600 for span in spans]


def common(some: Iterable[Span], others: Iterable[Span]) -> tuple[Span, ...]:
    """What is in both, each of which has separate spans."""
    spans = (Span(max(a.start, b.start), min(a.end, b.end)) for a, b in product(some, others))
    return tuple(span for span in spans if span.start < span.end)


@st.composite
def rules(draw: st.DrawFn) -> str:
    freq = draw(st.sampled_from(("DAILY", "WEEKLY", "MONTHLY", "YEARLY")))
    parts = [f"FREQ={freq}"]
    if draw(st.booleans()):
        parts.append(f"INTERVAL={draw(st.integers(1, 5))}")
    months = draw(st.lists(st.integers(1, 12), max_size=3, unique=True))
    if months:
        parts.append("BYMONTH=" + ",".join(map(str, months)))
    month_days: list[int] = []
    if freq != "WEEKLY":
        month_days = draw(st.lists(st.sampled_from((1, 2, 15, 28, 29, 30, 31, -1, -2, -31)), max_size=2, unique=True))
        if month_days:
            parts.append("BYMONTHDAY=" + ",".join(map(str, month_days)))
    # Not mixed: dateutil takes «each Monday or the first Tuesday» for days that are both.
    numbered = freq in ("MONTHLY", "YEARLY") and not month_days and draw(st.booleans())
    ordinals = st.sampled_from(("1", "-1", "2", "5")) if numbered else st.just("")
    days = draw(st.lists(st.tuples(ordinals, st.sampled_from(WEEKDAYS)).map("".join), max_size=3, unique=True))
    if days:
        parts.append("BYDAY=" + ",".join(days))
    if (months or month_days or days) and draw(st.booleans()):
        parts.append(f"BYSETPOS={draw(st.sampled_from((1, 2, -1)))}")
    if freq == "WEEKLY" and draw(st.booleans()):
        parts.append("WKST=" + draw(st.sampled_from(WEEKDAYS)))
    match draw(st.integers(0, 2)):
        case 1:
            parts.append(f"COUNT={draw(st.integers(1, 9))}")
        case 2:
            parts.append("UNTIL=" + draw(st.sampled_from(("20270101T000000", "20270630T220000", "20290301T120000"))))
    return ";".join(parts)


@settings(max_examples=100)
@given(rules(), st.datetimes(at("2024-01-01"), at("2026-12-31")), st.integers(0, 900), st.integers(0, 900))
def test_a_rule_means_what_dateutil_reads_in_it(text: str, start: datetime, later: int, longer: int) -> None:
    start = start.replace(microsecond=0)
    rule = parse(text, "UTC")
    if rule.freq == "WEEKLY" and rule.positions:
        # dateutil counts positions in the days from the start on, in the first week alone.
        start -= timedelta(days=(start.weekday() - rule.week_start) % 7)
    since = start + timedelta(days=later)
    before = since + timedelta(days=longer)
    ours = list(starts(rule, start, since=since, before=before))
    with pytest.MonkeyPatch.context() as patch:
        # It looks for the next day until the last year there is: here that is 2040.
        patch.setattr(rrule, "datetime", SimpleNamespace(**{**vars(rrule.datetime), "MAXYEAR": 2040}))
        theirs = [one for one in rrule.rrulestr(text, dtstart=start) if since <= one < before]
    assert ours == theirs


def test_a_position_in_a_week_is_that_in_the_whole_week() -> None:
    """Also in the week of the start, as in the month of the start: the set is that of the interval, and what of it lies before
    the start is left out."""
    tuesday, found = at("2024-01-02"), {}
    for place in (1, -1):
        rule = parse(f"FREQ=WEEKLY;BYDAY=MO,TU;BYSETPOS={place}", "UTC")
        found[place] = list(starts(rule, tuesday, since=tuesday, before=at("2024-01-10")))
    assert found == {1: [at("2024-01-08")], -1: [tuesday, at("2024-01-09")]}


def test_a_window_of_one_time_is_itself() -> None:
    once = window("2026-11-28T22:00:00", "2026-11-29T04:00:00")
    assert occurrences(once, utc("2026-11-01"), utc("2027-01-01")) == (
        Span(utc("2026-11-28T21:00:00"), utc("2026-11-29T03:00:00")),
    )
    # A piece that has begun is whole; one that is over is none.
    assert len(occurrences(once, utc("2026-11-29T02:59:59"), utc("2027-01-01"))) == 1
    assert occurrences(once, utc("2026-11-29T03:00:00"), utc("2027-01-01")) == ()
    assert occurrences(once, utc("2026-11-01"), utc("2026-11-28T21:00:00")) == ()


def test_a_night_ends_by_the_clock_on_the_wall_when_clocks_change() -> None:
    nights = window("2026-10-23T22:00:00", "2026-10-24T06:00:00", "FREQ=DAILY")
    found = occurrences(nights, utc("2026-10-23"), utc("2026-10-26T12:00:00"))
    assert hours(found) == [8, 9, 8]
    assert found[1] == Span(utc("2026-10-24T20:00:00"), utc("2026-10-25T05:00:00"))
    spring = window("2026-03-28T22:00:00", "2026-03-29T06:00:00")
    assert hours(occurrences(spring, utc("2026-03-01"), utc("2026-04-01"))) == [7]


def test_times_that_are_skipped_or_come_twice() -> None:
    # 02:30 is skipped on 29 March: it is 03:30, 01:30 UTC.
    skipped = window("2026-03-29T02:30:00", "2026-03-29T05:00:00")
    assert occurrences(skipped, utc("2026-03-01"), utc("2026-04-01")) == (
        Span(utc("2026-03-29T01:30:00"), utc("2026-03-29T03:00:00")),
    )
    gone = window("2026-03-29T02:30:00", "2026-03-29T03:00:00")
    assert occurrences(gone, utc("2026-03-01"), utc("2026-04-01")) == ()
    # 02:30 comes twice on 25 October: a window takes the first, a lock-out lasts to the second.
    twice = window("2026-10-25T00:00:00", "2026-10-25T02:30:00")
    assert occurrences(twice, utc("2026-10-01"), utc("2026-11-01"))[0].end == utc("2026-10-25T00:30:00")
    locked = window("2026-10-25T00:00:00", "2026-10-25T06:00:00", lockouts=[("2026-10-25T01:00:00", "2026-10-25T02:30:00")])
    assert [span.start for span in occurrences(locked, utc("2026-10-01"), utc("2026-11-01"))] == [
        utc("2026-10-24T22:00:00"),
        utc("2026-10-25T01:30:00"),
    ]


def test_lock_outs_cut_a_window_into_pieces() -> None:
    year_end = [("2026-12-24T00:00:00", "2027-01-04T00:00:00"), ("2026-12-20T01:00:00", "2026-12-20T02:00:00")]
    nights = window("2026-12-19T22:00:00", "2026-12-20T06:00:00", "FREQ=WEEKLY;BYDAY=WE,SA", lockouts=year_end)
    found = occurrences(nights, utc("2026-12-19"), utc("2027-01-08"))
    assert [(span.start.isoformat()[5:16], span.end.isoformat()[5:16]) for span in found] == [
        ("12-19T21:00", "12-20T00:00"),
        ("12-20T01:00", "12-20T05:00"),
        ("12-23T21:00", "12-23T23:00"),
        ("01-06T21:00", "01-07T05:00"),
    ]


def test_a_lock_out_is_never_shorter_than_it_may_mean() -> None:
    """Where one lies within another, and where it begins in an hour that comes twice."""
    year_end = [("2026-12-20T00:00:00", "2027-01-04T00:00:00"), ("2026-12-24T00:00:00", "2026-12-26T00:00:00")]
    nights = window("2026-12-27T22:00:00", "2026-12-28T06:00:00", lockouts=year_end)
    assert occurrences(nights, utc("2026-12-01"), utc("2027-02-01")) == ()
    twice = window("2026-10-25T00:00:00", "2026-10-25T06:00:00", lockouts=[("2026-10-25T02:30:00", "2026-10-25T06:00:00")])
    assert occurrences(twice, utc("2026-10-01"), utc("2026-11-01")) == (
        Span(utc("2026-10-24T22:00:00"), utc("2026-10-25T00:30:00")),
    )


@pytest.mark.parametrize(
    "one",
    [
        window("2026-03-20T18:00:00", "2026-03-23T06:00:00", "FREQ=WEEKLY"),
        window("2026-03-20T01:50:00", "2026-03-20T02:30:00", "FREQ=DAILY"),  # on 29 March it ends at 03:30
        window("2026-10-20T02:30:00", "2026-10-20T03:00:00", "FREQ=DAILY"),
    ],
)
@pytest.mark.parametrize("day", ["2026-03-28T12:00:00", "2026-10-24T12:00:00"])
def test_what_is_open_is_found_from_any_moment_of_it(one: Window, day: str) -> None:
    before = utc(day) + timedelta(days=3)
    found = occurrences(one, utc(day) - timedelta(days=9), before)
    for step in range(24):
        moment = utc(day) + timedelta(hours=10, minutes=15 * step)
        assert occurrences(one, moment, before) == tuple(span for span in found if span.end > moment)


def test_an_opening_begins_with_its_first_moment_and_is_over_at_its_end() -> None:
    """What ends as the other begins is one opening: an outage may go on over both."""
    first, second, third = (Span(utc(f"2026-05-04T{hour}"), utc(f"2026-05-04T{end}")) for hour, end in WITHIN_A_DAY)
    openings = Openings({"one": (first,), "two": (second, third)}, has_windows=True)
    assert joined((third, second, first)) == [Span(first.start, second.end), third]
    for name, span in (("one", first), ("two", second), ("", Span(first.start, second.end))):
        moment = timedelta(microseconds=1)
        assert [openings.open(name, at) for at in (span.start, span.end - moment)] == [span, span]
        assert openings.open(name, span.start - moment) is None
        assert openings.open(name, span.end) is None
        assert [openings.first(name, at) for at in (span.start - moment, span.end - moment)] == [span.start, span.start]
    assert (openings.upcoming("two", first.start), openings.upcoming("two", second.start)) == (second, third)
    assert openings.first("two", second.end) == openings.next_start(second.start) == third.start
    assert (openings.first("one", first.end), openings.next_start(third.start)) == (None, None)


WITHIN_A_DAY = (("08:00", "10:00"), ("10:00", "11:00"), ("12:00", "13:00"))


def test_what_overlaps_is_one_piece() -> None:
    days = window("2026-12-01T00:00:00", "2026-12-02T06:00:00", "FREQ=DAILY;COUNT=3", zone="UTC")
    assert occurrences(days, utc("2026-01-01"), utc("2027-01-01")) == (Span(utc("2026-12-01"), utc("2026-12-04T06:00:00")),)


@settings(max_examples=60)
@given(
    rules(),
    st.integers(1, 80),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 100)), max_size=8),
    st.sampled_from(("Europe/Berlin", "UTC", "America/St_Johns", "Australia/Lord_Howe", "Pacific/Apia")),
)
@example(
    "FREQ=DAILY", 8, [(24 * 60, 2), (24 * 61 + 6, 2), (24 * 62 + 8, 2), (24 * 64 - 2, 2), (24 * 65, 8)], "UTC"
)  # at the edges
def test_pieces_ascend_apart_and_never_touch_a_lock_out(
    text: str, length: int, lockouts: list[tuple[int, int]], zone: str
) -> None:
    first = at("2026-03-01T22:00:00")
    cut = tuple(LockOut(start=first + timedelta(hours=a), end=first + timedelta(hours=a + b)) for a, b in lockouts)
    one = Window(id="w", name="w", timezone=zone, rrule=text, start=first, end=first + timedelta(hours=length), lockouts=cut)
    free = one.model_copy(update={"lockouts": ()})
    after, before = utc("2026-04-01"), utc("2026-08-01")
    found, whole = occurrences(one, after, before), occurrences(free, after, before)
    assert all(span.start < span.end for span in found)
    assert all(a.end < b.start for a, b in pairwise(found))
    zoned = [(out.start.replace(tzinfo=ZoneInfo(zone)), out.end.replace(tzinfo=ZoneInfo(zone))) for out in cut]
    for span in found:
        assert any(big.start <= span.start and span.end <= big.end for big in whole)
        assert not any(a.astimezone(UTC) < span.end and span.start < b.astimezone(UTC) for a, b in zoned)
    # Nor is more cut away than is locked. A lock-out lasts to the later of two moments.
    locked = joined(Span(a.astimezone(UTC), b.replace(fold=1).astimezone(UTC)) for a, b in zoned)
    period = (Span(after, before),)
    taken = common(common(whole, locked), period)
    assert sum(hours(common(found, period))) == pytest.approx(sum(hours(common(whole, period))) - sum(hours(taken)))


@pytest.mark.parametrize(
    ("rule", "reported"),
    [
        ("FREQ=SECONDLY", "known are DAILY, WEEKLY, MONTHLY, YEARLY"),
        ("FREQ=WEEKLY;BYDAY=XX", "days of the week are MO"),
        ("FREQ=WEEKLY;BYDAY=2SU", "BYDAY with a number goes with MONTHLY or YEARLY"),
        ("FREQ=DAILY;BYHOUR=1", "BYHOUR is not known in a rule here"),
        ("FREQ=DAILY;INTERVAL=0", "a number from 1 to 9999"),
        ("FREQ=DAILY;INTERVAL=99999999999999999999", "a number from 1 to 9999"),
        ("FREQ=DAILY;COUNT=2;UNTIL=20270101", "not by both"),
        ("FREQ=DAILY;UNTIL=tomorrow", "a day like 20271231"),
        ("FREQ=MONTHLY;BYMONTHDAY=32", "numbers from 1 to 31"),
        ("FREQ=MONTHLY;BYSETPOS=1", "BYSETPOS goes with another BY part"),
        ("INTERVAL=2", "the rule has no FREQ"),
        ("FREQ=DAILY;FREQ=DAILY", "occurs twice"),
        ("every Friday", "is not a part of a rule"),
        ("FREQ=DAILY;INTERVAL=²", "a number from 1 to 9999"),
    ],
)
def test_a_rule_that_cannot_be_says_why(rule: str, reported: str) -> None:
    wrong = window("2026-11-28T22:00:00", "2026-11-29T04:00:00", rule)
    with pytest.raises(InvalidPlan) as error:
        occurrences(wrong, utc("2026-11-01"), utc("2027-01-01"))
    assert reported in f"{error.value.detail} {error.value.hint}"
    assert error.value.hint


def test_until_in_utc_is_that_moment_of_the_zone() -> None:
    nights = window("2026-12-01T23:00:00", "2026-12-02T01:00:00", "FREQ=DAILY;UNTIL=20261203T220000Z")
    assert len(occurrences(nights, utc("2026-01-01"), utc("2027-01-01"))) == 3


@pytest.mark.parametrize(
    "rule",
    [
        "FREQ=DAILY;BYMONTH=2;BYMONTHDAY=30",
        "FREQ=DAILY;INTERVAL=7;BYDAY=TU",
        "FREQ=MONTHLY;BYDAY=MO;BYSETPOS=300",
        "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30;COUNT=1",
        "FREQ=YEARLY;INTERVAL=9999",
    ],
)
def test_a_rule_that_never_comes_ends_its_search(rule: str) -> None:
    """One that goes on forever ends by the test's own limit."""
    never = window("2026-11-28T22:00:00", "2026-11-29T04:00:00", rule)
    assert occurrences(never, utc("2026-12-01"), utc("2031-01-01")) == ()


def test_an_old_start_costs_nothing_and_too_much_is_refused() -> None:
    old = window("1971-01-01T22:00:00", "1971-01-02T04:00:00", "FREQ=DAILY;INTERVAL=3")
    assert len(occurrences(old, utc("2190-01-01"), utc("2190-02-01"))) in (10, 11)
    counted = window("1971-01-01T22:00:00", "1971-01-02T04:00:00", "FREQ=YEARLY;COUNT=9999")
    with pytest.raises(InvalidPlan, match="reaches over too many days"):
        occurrences(counted, utc("2190-01-01"), utc("2190-02-01"))
    with pytest.raises(InvalidPlan, match="more than 5000 times"):
        occurrences(window("2026-01-01T22:00:00", "2026-01-02T04:00:00", "FREQ=DAILY"), utc("2026-01-01"), utc("2060-01-01"))
    with pytest.raises(InvalidPlan, match="outside of the years"):
        occurrences(window("0001-01-01T00:00:00", "0001-01-02T00:00:00"), utc("2026-01-01"), utc("2027-01-01"))
    ancient = [("0001-01-01T00:00:00", "0001-01-02T00:00:00")]
    with pytest.raises(InvalidPlan, match="outside of the years"):
        occurrences(
            window("2026-01-01T00:00:00", "2026-01-02T00:00:00", lockouts=ancient), utc("2026-01-01"), utc("2027-01-01")
        )
    with pytest.raises(InvalidPlan, match="lasts 31 days, 0:00:01; 31 days are the most"):
        occurrences(window("2026-01-01T00:00:00", "2026-02-01T00:00:01"), utc("2026-01-01"), utc("2027-01-01"))
    assert hours(occurrences(window("2026-01-01T00:00:00", "2026-02-01T00:00:00"), utc("2026-01-01"), utc("2027-01-01"))) == [
        744
    ]


@settings(max_examples=50)
@given(rules(), st.datetimes(at("2024-01-01"), at("2026-12-31")), st.integers(1, 48), st.integers(-900, 900), st.floats(0, 48))
def test_a_cut_over_begins_in_the_first_opening_that_is_long_enough(
    rule: str, start: datetime, length: int, later: int, needed: float
) -> None:
    one = Window(id="w", name="w", rrule=rule, start=start, end=start + timedelta(hours=length))
    now = (start + timedelta(days=later)).replace(tzinfo=UTC)
    try:
        spans = occurrences(one, now, now + timedelta(days=3 * 366))
    except InvalidPlan:
        return
    fit = [span for span in spans if (span.end - max(now, span.start)).total_seconds() >= needed * 3600]
    found = opening(one, now, needed_s=needed * 3600)
    # The search begins with the day of `now`, so that it is made once a day, and ends with the day that many years later.
    if fit and fit[0].start < now + timedelta(days=3 * 366 - 1):
        assert found == fit[0]
    elif found is not None:
        assert found.start >= now + timedelta(days=3 * 366 - 1)


def test_a_window_is_shown_with_its_present_or_its_next_opening() -> None:
    night = window("2026-11-28T22:00:00", "2026-11-29T04:00:00", "FREQ=WEEKLY;COUNT=2")
    before, in_it, between, after = (utc(f"2026-{at}:00:00") for at in ("11-28T20", "11-28T21", "11-29T03", "12-07T00"))
    assert [shown(night, now).open for now in (before, in_it, between, after)] == [False, True, False, False]
    assert opening(night, in_it, needed_s=6 * 3600) == Span(in_it, between)
    assert opening(night, in_it, needed_s=6 * 3600 + 1) is None
    assert shown(night, before).opens_at == shown(night, in_it).opens_at == utc("2026-11-28T21:00:00")
    assert shown(night, in_it).closes_at == utc("2026-11-29T03:00:00")
    assert shown(night, between).opens_at == utc("2026-12-05T21:00:00")
    assert (shown(night, after).opens_at, shown(night, after).closes_at) == (None, None)


@pytest.mark.parametrize("rule", [None, "FREQ=WEEKLY"])
def test_a_window_that_first_opens_years_from_now_is_shown_with_that_opening(rule: str | None) -> None:
    """It was shown as one that does not open again, and was no window for a plan."""
    far = window("2035-01-05T22:00:00", "2035-01-06T04:00:00", rule)
    assert shown(far, utc("2026-11-28T20:00:00")).opens_at == utc("2035-01-05T21:00:00")


def test_a_window_after_the_last_year_is_refused_and_not_searched() -> None:
    with pytest.raises(InvalidPlan, match="outside of the years"):
        shown(window("9999-12-30T22:00:00", "9999-12-31T04:00:00", "FREQ=DAILY"), utc("2026-11-28T20:00:00"))
