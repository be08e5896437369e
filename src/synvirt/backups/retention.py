"""How many restore points of a guest stay, and the reason for each."""

from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated
from uuid import UUID

from pydantic import Field

from synvirt.model.values import Received

Count = Annotated[int, Field(ge=0, le=100_000)]


class Retention(Received):
    """How many points to keep: the newest ones, and the last of each hour, day, week (ISO 8601), month and year that has one.

    A point that any line keeps is kept. All None: all are kept. Times are UTC.
    """

    keep_last: Count | None = None
    keep_hourly: Count | None = None
    keep_daily: Count | None = None
    keep_weekly: Count | None = None
    keep_monthly: Count | None = None
    keep_yearly: Count | None = None


# The period of a time, for each line.
_PERIODS = {
    "keep_hourly": "%Y-%m-%dT%H",
    "keep_daily": "%Y-%m-%d",
    "keep_weekly": "%G-%V",
    "keep_monthly": "%Y-%m",
    "keep_yearly": "%Y",
}


def keeps_less(before: Retention, after: Retention) -> bool:
    """Whether the rules after a change may remove a point that those before it keep."""
    old, new = before.model_dump(), after.model_dump()
    if all(count is None for count in new.values()):
        return False
    return all(count is None for count in old.values()) or any((new[line] or 0) < (old[line] or 0) for line in old)


def kept(points: Iterable[tuple[UUID, datetime]], retention: Retention) -> dict[UUID, list[str]]:
    """The points of one guest that stay, each with the lines that keep it."""
    newest_first = sorted(points, key=lambda point: (point[1], point[0]), reverse=True)
    reasons: dict[UUID, list[str]] = defaultdict(list)
    rules = retention.model_dump()
    if all(count is None for count in rules.values()):
        return {point_id: ["all"] for point_id, _ in newest_first}
    for point_id, _ in newest_first[: rules["keep_last"] or 0]:
        reasons[point_id].append("keep_last")
    for line, form in _PERIODS.items():
        seen: set[str] = set()
        for point_id, at in newest_first:
            period = at.astimezone(UTC).strftime(form)
            if period not in seen and len(seen) < (rules[line] or 0):
                seen.add(period)
                reasons[point_id].append(line)
    if newest_first:
        reasons[newest_first[0][0]] = reasons[newest_first[0][0]] or ["newest"]  # at least one point always stays
    return {point_id: lines for point_id, lines in reasons.items() if lines}
