"""Is the rehearsed guest the one that runs? Facts of both, compared and graded. Pure.

Facts have names (`kvm/agent.py`): what is compared how is a table. A fact that only one side tells is no difference where the
other tells nothing at all.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from synvirt.model.job import Difference
from synvirt.model.rehearsal import Grade, Sameness

# A guest that runs writes: so much more or less is used by the time that its clone is looked at.
USED_SHARE, USED_BYTES = 0.1, 256 << 20
# Agents differ in whether what only root may use counts: one part in twenty of ext4.
RESERVED_SHARE = 0.06
_FILE_SYSTEM = re.compile(r"(?P<kind>.*?)(, (?P<used>[0-9]+) of (?P<total>[0-9]+) bytes)?")

Judge = Callable[[str, str], tuple[Grade, str]]


def compared(source: Mapping[str, str], clone: Mapping[str, str], differences: Sequence[Difference]) -> tuple[Sameness, ...]:
    """What is wrong first. `differences`: of the domain here, which the move makes."""
    rows = [Sameness(item=one.what, source=one.source, clone=one.here, grade="expected", reason=one.why) for one in differences]
    if source and clone:
        rows += [_row(item, source.get(item), clone.get(item)) for item in dict.fromkeys([*source, *clone])]
    return tuple(sorted(rows, key=lambda one: _ORDER.index(one.grade)))


_ORDER: tuple[Grade, ...] = ("wrong", "look", "expected", "same")


def _row(item: str, source: str | None, clone: str | None) -> Sameness:
    grade, reason = _graded(item, source, clone)
    return Sameness(item=item, source=source, clone=clone, grade=grade, reason=reason)


def _graded(item: str, source: str | None, clone: str | None) -> tuple[Grade, str]:
    if source == clone:
        return "same", ""
    kind = next(word for word in (*JUDGES, item) if item == word or item.startswith(f"{word} "))
    if source is None:
        return "look", "the source does not have it, or does not say it"
    if clone is None:
        return MISSING.get(kind, "look"), "the rehearsed guest does not have it, or does not say it"
    return JUDGES.get(kind, _look)(source, clone)


def _wrong(_source: str, _clone: str) -> tuple[Grade, str]:
    return "wrong", "it should have moved as it is"


def _host_name(source: str, clone: str) -> tuple[Grade, str]:
    """Agents differ in whether they tell the domain."""
    if source.partition(".")[0].casefold() == clone.partition(".")[0].casefold():
        return "expected", "one of them has its domain with it"
    return _wrong(source, clone)


def _look(_source: str, _clone: str) -> tuple[Grade, str]:
    return "look", "it differs"


def _addresses(source: str, clone: str) -> tuple[Grade, str]:
    lost = sorted({*source.split(", ")} - {*clone.split(", "), ""})
    if lost:
        return "wrong", f"it has lost {', '.join(lost)}"
    return "look", "it has more of them"


def _differ(kind: str, other: str) -> bool:
    """Old tools do not tell which file system it is."""
    return bool(kind and other) and kind.casefold() != other.casefold()


def _file_system(source: str, clone: str) -> tuple[Grade, str]:
    here, there = _FILE_SYSTEM.fullmatch(source), _FILE_SYSTEM.fullmatch(clone)
    if here is None or there is None or _differ(here["kind"], there["kind"]):
        return "wrong", "it is another file system"
    if here["used"] is None or there["used"] is None:
        return "look", "one of them does not say how much of it is used"
    if abs(int(here["total"]) - int(there["total"])) > RESERVED_SHARE * int(here["total"]):
        return "look", "it is of another size"
    grown = abs(int(here["used"]) - int(there["used"]))
    if grown <= max(USED_BYTES, USED_SHARE * int(here["used"])):
        return "expected", "the guest has written since the clone's moment"
    return "look", "much more or less of it is used"


JUDGES: dict[str, Judge] = {
    "host name": _host_name,
    "system": _wrong,
    "kernel": _look,
    "time zone": _wrong,
    "addresses of": _addresses,
    "file system": _file_system,
}
MISSING: dict[str, Grade] = {"host name": "wrong", "file system": "wrong", "addresses of": "wrong"}
