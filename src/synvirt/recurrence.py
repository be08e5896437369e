"""Rules of recurrence: RFC 5545, section 3.3.10, for whole days. Local days, no time zone, no I/O.

A rule is a set of days within each period (day, week, month, year); a period's days are tried one by one. python-dateutil
implements the whole RFC but is not used: it looks for the next day until the year 9999 and cannot be stopped, 8 seconds for
FREQ=DAILY;BYMONTH=2;BYMONTHDAY=30. The tests compare this module with it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from itertools import count
from typing import Any
from zoneinfo import ZoneInfo

from synvirt.errors import InvalidPlan

WEEKDAYS = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")
# 150 years of days: 0.1 s of work.
DAYS_TRIED_MAX = 55_000
# 9,999 days, weeks, months or years: no window needs a longer wait.
NUMBER_MAX = 9_999
EXAMPLE = "for example FREQ=WEEKLY;BYDAY=FR,SA or FREQ=MONTHLY;BYDAY=1SU"
_ONE_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Rule:
    """`until`: the last local moment at which an occurrence may start. `week_days`: (ordinal, weekday), ordinal 0 for every
    one."""

    freq: str
    interval: int = 1
    count: int | None = None
    until: datetime | None = None
    months: tuple[int, ...] = ()
    month_days: tuple[int, ...] = ()
    week_days: tuple[tuple[int, int], ...] = ()
    positions: tuple[int, ...] = ()
    week_start: int = 0


def parse(text: str, timezone: str) -> Rule:
    """The rule. InvalidPlan, with a correct form. `timezone`: of the window, as UNTIL may be in UTC."""
    given: dict[str, str] = {}
    for part in text.upper().strip().removesuffix(";").split(";"):
        name, _, value = part.partition("=")
        if not value or name in given:
            raise _wrong(f"{part!r} is not a part of a rule, or occurs twice")
        if name not in _PARTS:
            known = ", ".join(("FREQ", *sorted(set(_PARTS) - {"FREQ"})))
            raise _wrong(f"{name} is not known in a rule here", f"known are {known}; the time of day is that of the start")
        given[name] = value
    if "FREQ" not in given:
        raise _wrong("the rule has no FREQ")
    if "COUNT" in given and "UNTIL" in given:
        raise _wrong("a rule ends by COUNT or by UNTIL, not by both")
    fields: dict[str, Any] = {}
    for name, value in given.items():
        field, read = _PARTS[name]
        try:
            fields[field] = read(value)
        except ValueError as error:
            raise _wrong(f"{name}={value} cannot be read: {error}") from None
    if fields.get("until") is not None and given["UNTIL"].endswith("Z"):
        fields["until"] = fields["until"].replace(tzinfo=UTC).astimezone(ZoneInfo(timezone)).replace(tzinfo=None)
    return _consistent(Rule(**fields))


def starts(rule: Rule, start: datetime, *, since: datetime, before: datetime) -> Iterator[datetime]:
    """The local starts in ascending order, from `since` and before `before`. `start` is the earliest possible one. InvalidPlan,
    if more days than DAYS_TRIED_MAX would have to be tried."""
    seen = tried = 0
    # With COUNT, occurrences are counted from the first.
    first = 0 if rule.count is not None else _periods_until(rule, start.date(), since.date())
    for number in count(first):
        days = _days_of_period(rule, start.date(), number)
        if not days or days[0] >= before.date() + _ONE_DAY:
            return
        tried += len(days)
        if tried > DAYS_TRIED_MAX:
            raise _wrong("the rule reaches over too many days", "let the window start later, or leave out COUNT")
        for day in _chosen(rule, start.date(), days):
            at = datetime.combine(day, start.time())
            if at < start:
                continue
            seen += 1
            if at >= before or (rule.until is not None and at > rule.until) or (rule.count is not None and seen > rule.count):
                return
            if at >= since:
                yield at


def _periods_until(rule: Rule, start: date, since: date) -> int:
    """The number of a period that does not end after `since`, or 0."""
    days = {"DAILY": 1, "WEEKLY": 7, "MONTHLY": 31, "YEARLY": 366}[rule.freq]
    return max(0, (since - start).days // (days * rule.interval) - 1)


def _days_of_period(rule: Rule, start: date, number: int) -> list[date]:
    """The days of a period. Empty, where the calendar ends."""
    step = number * rule.interval
    try:
        match rule.freq:
            case "DAILY":
                first, last = start + timedelta(days=step), start + timedelta(days=step)
            case "WEEKLY":
                first = start - timedelta(days=(start.weekday() - rule.week_start) % 7) + timedelta(weeks=step)
                last = first + timedelta(days=6)
            case "MONTHLY":
                first = _month(start.year * 12 + start.month - 1 + step)
                last = _month(start.year * 12 + start.month + step) - _ONE_DAY
            case _:
                first, last = date(start.year + step, 1, 1), date(start.year + step, 12, 31)
        return [first + timedelta(days=n) for n in range((last - first).days + 1)]
    except (OverflowError, ValueError):
        return []


def _month(number: int) -> date:
    return date(number // 12, number % 12 + 1, 1)


def _chosen(rule: Rule, start: date, days: list[date]) -> list[date]:
    found = [day for day in days if _matches(rule, start, day)]
    if not rule.positions:
        return found
    places = {place - 1 if place > 0 else len(found) + place for place in rule.positions}
    return [day for place, day in enumerate(found) if place in places]


def _matches(rule: Rule, start: date, day: date) -> bool:
    if rule.months and day.month not in rule.months:
        return False
    if rule.month_days:
        left = _ends(day, "month")[1]
        if day.day not in rule.month_days and -left not in rule.month_days:
            return False
    if rule.week_days:
        return _is_week_day(rule, day)
    if rule.month_days or rule.freq == "DAILY":
        return True
    if rule.freq == "WEEKLY":
        return day.weekday() == start.weekday()
    # The 31st comes in months that have one (RFC 5545: others are ignored).
    return day.day == start.day and (rule.freq == "MONTHLY" or bool(rule.months) or day.month == start.month)


def _is_week_day(rule: Rule, day: date) -> bool:
    of = "year" if rule.freq == "YEARLY" and not rule.months else "month"
    from_first, from_last = _ends(day, of)
    places = {0, (from_first - 1) // 7 + 1, -((from_last - 1) // 7 + 1)}
    return any(day.weekday() == weekday and ordinal in places for ordinal, weekday in rule.week_days)


def _ends(day: date, of: str) -> tuple[int, int]:
    """The day's position in its month or year, from the first and from the last, both from 1."""
    if of == "year":
        return (day - date(day.year, 1, 1)).days + 1, (date(day.year, 12, 31) - day).days + 1
    after = date(day.year, 12, 31) if day.month == 12 else date(day.year, day.month + 1, 1) - _ONE_DAY
    return day.day, (after - day).days + 1


# ── parts of a rule ──────────────────────────────────────────────────────────────────────────────────────────────────


def _consistent(rule: Rule) -> Rule:
    if any(ordinal for ordinal, _ in rule.week_days) and (rule.freq not in ("MONTHLY", "YEARLY") or rule.month_days):
        raise _wrong("BYDAY with a number goes with MONTHLY or YEARLY, and not with BYMONTHDAY")
    if rule.month_days and rule.freq == "WEEKLY":
        raise _wrong("BYMONTHDAY does not go with WEEKLY")
    if rule.positions and not (rule.months or rule.month_days or rule.week_days):
        raise _wrong("BYSETPOS goes with another BY part")
    return rule


def _one_of(*known: str) -> Callable[[str], str]:
    def read(value: str) -> str:
        if value not in known:
            raise ValueError(f"known are {', '.join(known)}")
        return value

    return read


def _number(value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 1 <= len(value) <= 4 or int(value) < 1:
        raise ValueError(f"give a number from 1 to {NUMBER_MAX}")
    return int(value)


def _numbers(most: int, *, backwards: bool) -> Callable[[str], tuple[int, ...]]:
    def read(value: str) -> tuple[int, ...]:
        return tuple(_signed(one, most, backwards=backwards) for one in value.split(","))

    return read


def _signed(value: str, most: int, *, backwards: bool) -> int:
    sign = -1 if value.startswith("-") else 1
    digits = value.removeprefix("-" if sign < 0 else "+")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 3 or not 1 <= int(digits) <= most:
        raise ValueError(f"give numbers from 1 to {most}")
    if sign < 0 and not backwards:
        raise ValueError("it is not counted backwards")
    return sign * int(digits)


def _week_days(value: str) -> tuple[tuple[int, int], ...]:
    found = []
    for one in value.split(","):
        if one[-2:] not in WEEKDAYS:
            raise ValueError(f"days of the week are {', '.join(WEEKDAYS)}")
        found.append((_signed(one[:-2], 53, backwards=True) if one[:-2] else 0, WEEKDAYS.index(one[-2:])))
    return tuple(found)


def _until(value: str) -> datetime:
    """The end by UNTIL. A date without a time includes the whole day."""
    for form in ("%Y%m%dT%H%M%SZ", "%Y%m%dT%H%M%S"):
        try:
            return datetime.strptime(value, form)  # noqa: DTZ007 - a window's local time
        except ValueError:
            continue
    try:
        day = datetime.strptime(value, "%Y%m%d").date()  # noqa: DTZ007 - a day
    except ValueError:
        raise ValueError("give a day like 20271231, or a time like 20271231T220000Z") from None
    return datetime.combine(day, time.max)


_PARTS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "FREQ": ("freq", _one_of("DAILY", "WEEKLY", "MONTHLY", "YEARLY")),
    "INTERVAL": ("interval", _number),
    "COUNT": ("count", _number),
    "UNTIL": ("until", _until),
    "BYMONTH": ("months", _numbers(12, backwards=False)),
    "BYMONTHDAY": ("month_days", _numbers(31, backwards=True)),
    "BYDAY": ("week_days", _week_days),
    "BYSETPOS": ("positions", _numbers(366, backwards=True)),
    "WKST": ("week_start", lambda value: WEEKDAYS.index(_one_of(*WEEKDAYS)(value))),
}


def _wrong(detail: str, hint: str = EXAMPLE) -> InvalidPlan:
    return InvalidPlan(detail, hint=hint)
