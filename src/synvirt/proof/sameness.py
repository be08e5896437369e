"""Whether the guest here is the one that runs, or ran, at its source: compares facts of both and grades them. Pure.

Facts have names (`model/facts.py`). A table with a row for each kind says how it is compared. If one side reports no facts at
all, that is one row, and the other side's facts are no differences. The same holds for one kind of facts, if it is one that not
every platform reports.
"""

import contextlib
import re
import zoneinfo
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from synvirt.model.facts import NOT_READ
from synvirt.model.job import Difference
from synvirt.model.rehearsal import Grade, Sameness

# A running guest writes: its used space may change by this much until its clone is read.
USED_SHARE, USED_BYTES = 0.1, 256 << 20
# Agents differ in whether they count the space reserved for root: one twentieth on ext4.
RESERVED_SHARE = 0.06
# A guest with a time server is within a second; one that just started has not asked the server yet.
CLOCK_S = 5.0
# Time zones are whole quarters of an hour apart.
QUARTER_S = 900.0
_FILE_SYSTEM = re.compile(r"(?P<kind>.*?)(, (?P<used>[0-9]+) of (?P<total>[0-9]+) bytes)?")
# Names of services, programs and users that belong to platforms' tools, of the source or of this host.
PLATFORM_TOOLS = re.compile(
    r"open-vm-tools|vmtoolsd|vmware|vm3dservice|vgauth|vgauthservice|hv[-_]?(kvp|vss|fcopy).*|vmic.*|xe-(linux-distribution|daemon)|xen(agent|svc|_?guest).*"
    r"|nutanix.*|ngt.*|qemu-(guest-agent|ga)|qga|spice-vdagentd?|cloud-init.*|balloonservice",
    re.IGNORECASE,
)

Judge = Callable[[str, str], tuple[Grade, str]]


@dataclass(frozen=True, slots=True)
class Kind:
    """`missing`: the grade of a fact that the source has and this guest lacks. `added`: the other way; None: not reported.
    `everywhere`: every agent of a guest here reports this kind, so that reporting none of it is a difference too. `tools`:
    names of a platform's tools, which come and go with it."""

    judge: Judge
    missing: tuple[Grade, str] = ("look", "the guest here does not have it, or does not say it")
    added: tuple[Grade, str] | None = ("look", "the source does not have it, or does not say it")
    everywhere: bool = False
    tools: bool = False


def compared(
    source: Mapping[str, str],
    here: Mapping[str, str],
    differences: Sequence[Difference],
    machines: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {}),
    *,
    is_expected: bool = False,
) -> tuple[Sameness, ...]:
    """The rows, the worst first. `source`, `here`: facts of the guests. `machines`: facts of their hardware, there and here;
    `differences`: those of the hardware that the move makes on purpose. `is_expected`: the source is one that reports what runs
    in its guests, so that facts missing on both sides are a row too."""
    rows = [Sameness(item=one.what, source=one.source, clone=one.here, grade="expected", reason=one.why) for one in differences]
    explained = {one.what for one in differences}
    rows += [one for one in _rows(*machines) if not {one.item, f"mac of {one.item}"} & explained]
    facts_there, facts_here = _read(source), _read(here)
    if facts_there and facts_here:
        rows += _rows(facts_there, facts_here)
    elif is_expected or facts_there or facts_here:
        where = "here" if facts_there else "at its source"
        rows.append(
            Sameness(
                item="what runs in it",
                source=_count(facts_there),
                clone=_count(facts_here),
                grade="look",
                reason=f"no agent and no tools report the guest {where}: it was not compared",
            )
        )
    rows += [
        Sameness(item=item, source=why, clone=None, grade="look", reason="what lies there was not compared")
        for item, why in source.items()
        if item not in facts_there
    ]
    return tuple(sorted(rows, key=lambda one: _ORDER.index(one.grade)))


_ORDER: tuple[Grade, ...] = ("wrong", "look", "expected", "same")


def is_settled(rows: Sequence[Sameness]) -> bool:
    """Whether the guest's late programs have started. Before that, missing ones may still come."""
    return not any(one.clone is None and one.grade != "expected" and kind_of(one.item) in _LATE for one in rows)


def _read(facts: Mapping[str, str]) -> dict[str, str]:
    return {item: value for item, value in facts.items() if not item.startswith(f"{NOT_READ} ")}


def _count(facts: Mapping[str, str]) -> str | None:
    return f"{len(facts)} facts" if facts else None


def of_disks(facts: Mapping[str, str]) -> dict[str, str]:
    """The facts that can be read from the disks of a guest that does not run, and the kinds that cannot."""
    read = _read(facts)
    return {item: value for item, value in facts.items() if kind_of(item) in _ON_DISKS or item not in read}


def are_read(facts: Mapping[str, str]) -> bool:
    """Whether the facts contain more than unread kinds."""
    return bool(_read(facts))


def _rows(source: Mapping[str, str], here: Mapping[str, str]) -> list[Sameness]:
    kinds = ({kind_of(item) for item in source}, {kind_of(item) for item in here})
    found = []
    for item in dict.fromkeys([*source, *here]):
        kind = kind_of(item)
        expected = kind in kinds[0] if KINDS.get(kind, UNKNOWN).everywhere else kind in kinds[0] & kinds[1]
        if expected or not kind:
            row = _row(item, source.get(item), here.get(item))
            found += [row] if row is not None else []
    return found


def kind_of(item: str) -> str:
    return next((word for word in KINDS if item == word or item.startswith(f"{word} ")), "")


def _row(item: str, source: str | None, here: str | None) -> Sameness | None:
    kind = KINDS.get(kind_of(item), UNKNOWN)
    if source == here:
        grade, reason = ("same", "")  # type: tuple[Grade, str]
    elif source is None or here is None:
        verdict = kind.missing if here is None else kind.added
        if verdict is None:
            return None
        grade, reason = verdict
        if kind.tools and _is_a_tool(item):
            grade, reason = "expected", "it belongs to the platform that the guest came from, or came to"
    else:
        grade, reason = kind.judge(source, here)
    return Sameness(item=item, source=source, clone=here, grade=grade, reason=reason)


def _is_a_tool(item: str) -> bool:
    name = item.removeprefix(kind_of(item)).strip().removesuffix(".service").removesuffix(".exe")
    return PLATFORM_TOOLS.fullmatch(name) is not None


def _wrong(_source: str, _here: str) -> tuple[Grade, str]:
    return "wrong", "it should have moved as it is"


def _look(_source: str, _here: str) -> tuple[Grade, str]:
    return "look", "it differs"


def _host_name(source: str, here: str) -> tuple[Grade, str]:
    """Agents differ in whether they report the domain."""
    if source.partition(".")[0].casefold() == here.partition(".")[0].casefold():
        return "expected", "one of them has its domain with it"
    return _wrong(source, here)


def _system(source: str, here: str) -> tuple[Grade, str]:
    """Some platforms report less of it."""
    shorter, longer = sorted((source.casefold(), here.casefold()), key=len)
    return ("expected", "one of them says less of it") if longer.startswith(shorter) else _wrong(source, here)


def _user(source: str, here: str) -> tuple[Grade, str]:
    if "has an account" in (source, here):
        return "expected", "one of them says only that there is one"
    return _wrong(source, here)


def _time_zone(source: str, here: str) -> tuple[Grade, str]:
    """Agents report the zone's present short name, disks its full name: CET and Europe/Berlin."""
    for one, other in ((source, here), (here, source)):
        with contextlib.suppress(ValueError, OSError):  # ZoneInfoNotFoundError is a KeyError; the names come from a guest
            try:
                zone = zoneinfo.ZoneInfo(one)
            except KeyError:
                continue
            if other in {datetime(2000, month, 1, tzinfo=zone).tzname() for month in (1, 7)}:
                return "expected", "one of them reports the zone by the name that it has at this time of the year"
    return _wrong(source, here)


def _clock(source: str, here: str) -> tuple[Grade, str]:
    """Both in seconds ahead of the host that asked."""
    try:
        ahead, there = float(here.removesuffix(" s")), float(source.removesuffix(" s"))
    except ValueError:
        return _look(source, here)
    if abs(ahead) <= CLOCK_S or abs(ahead - there) <= CLOCK_S:
        return "expected", "it runs within seconds of this host's clock, or of its source's"
    if abs(ahead - QUARTER_S * round(ahead / QUARTER_S)) <= CLOCK_S:
        return "wrong", "it is off by a time zone: the guest takes the machine's clock for local time, or does not any more"
    return "look", "it is off; a guest that asks a time server sets it later"


def _addresses(source: str, here: str) -> tuple[Grade, str]:
    """Some platforms do not report the length of an address' prefix."""
    theirs, ours = ({*text.split(", ")} - {""} for text in (source, here))
    if not (any("/" in one for one in theirs) and any("/" in one for one in ours)):
        theirs, ours = ({one.partition("/")[0] for one in side} for side in (theirs, ours))
        if theirs == ours:
            return "expected", "one of them does not say how large its network is"
    if lost := sorted(theirs - ours):
        return "wrong", f"it has lost {', '.join(lost)}"
    return "look", "it has more of them"


def _differ(kind: str, other: str) -> bool:
    """Old tools do not report the kind of file system."""
    return bool(kind and other) and kind.casefold() != other.casefold()


def _file_system(source: str, here: str) -> tuple[Grade, str]:
    there, now = _FILE_SYSTEM.fullmatch(source), _FILE_SYSTEM.fullmatch(here)
    if there is None or now is None or _differ(there["kind"], now["kind"]):
        return "wrong", "it is another file system"
    if there["used"] is None or now["used"] is None:
        return "look", "one of them does not say how much of it is used"
    if abs(int(there["total"]) - int(now["total"])) > RESERVED_SHARE * int(there["total"]):
        return "look", "it is of another size"
    grown = abs(int(there["used"]) - int(now["used"]))
    if grown <= max(USED_BYTES, USED_SHARE * int(there["used"])):
        return "expected", "the guest has written since the clone's moment"
    return "look", "much more or less of it is used"


def _application(source: str, here: str) -> tuple[Grade, str]:
    if "runs" in (source, here):
        return "expected", "it runs; one of them does not say which version"
    return "look", "another version of it runs"


def _disk(source: str, here: str) -> tuple[Grade, str]:
    there, now = (int(text.partition(" ")[0]) if text.partition(" ")[0].isdigit() else None for text in (source, here))
    if there is not None and now is not None and now > there:
        return "expected", "its volume is rounded up to what the destination has"
    return "wrong", "a part of it is missing"


def _mount(source: str, here: str) -> tuple[Grade, str]:
    """A device's name depends on its bus: sda here is vda there. A conversion writes the new one."""
    if source.partition(" ")[2] == here.partition(" ")[2] and source.startswith("/dev/") and here.startswith("/dev/"):
        return "expected", "the device is on another bus here, and has that one's name"
    return "look", "it is mounted from elsewhere, or otherwise"


def _network_file(source: str, here: str) -> tuple[Grade, str]:
    lost = sorted({*source.partition(";")[0].split(", ")} - {*here.partition(";")[0].split(", ")} - {""})
    return ("wrong", f"it has lost {', '.join(lost)}") if lost else ("look", "it was changed")


_NOT_HERE: tuple[Grade, str] = ("wrong", "the guest here does not have it, or does not say it")
UNKNOWN = Kind(_look, everywhere=True)
KINDS: dict[str, Kind] = {
    "host name": Kind(_host_name, _NOT_HERE, everywhere=True),
    "system": Kind(_system, everywhere=True),
    "kernel": Kind(_look, everywhere=True),
    "time zone": Kind(_time_zone),
    "clock": Kind(_clock),
    "addresses of": Kind(_addresses, _NOT_HERE, everywhere=True),
    "route": Kind(_look, ("look", "there is no such way here"), ("look", "the source has no such way")),
    "file system": Kind(_file_system, _NOT_HERE),
    "application": Kind(_application, ("look", "it does not run here"), None, tools=True),
    "listens on": Kind(_look, ("wrong", "nothing listens there"), ("look", "nothing listens there at the source"), tools=True),
    "service": Kind(_look, ("wrong", "it does not run here"), ("look", "it does not run at the source"), tools=True),
    "enabled": Kind(
        _look,
        ("wrong", "it does not start by itself any more"),
        ("look", "it does not start by itself at the source"),
        tools=True,
    ),
    "user": Kind(_user, ("wrong", "the user is not there"), ("look", "the source has no such user"), tools=True),
    "mount": Kind(_mount, ("wrong", "it is not mounted any more"), ("look", "the source does not mount it")),
    "finds": Kind(_mount, ("look", "it does not look for that any more"), ("look", "the source does not look for that")),
    "configures": Kind(_look, ("look", "it does not configure that any more"), ("look", "the source does not configure that")),
    "drivers in": Kind(_look, ("look", "it does not start by that any more"), ("look", "the source does not start by that")),
    "volume": Kind(_file_system, ("wrong", "the file system is not there"), ("look", "the source does not have it")),
    "network file": Kind(_network_file, ("wrong", "it is not there"), ("look", "the source does not have it")),
    # Facts of machines, which both sides report.
    "firmware": Kind(_wrong, _NOT_HERE, everywhere=True),
    "boot order": Kind(_wrong, _NOT_HERE, everywhere=True),
    "processors": Kind(_wrong, _NOT_HERE, everywhere=True),
    "memory": Kind(_wrong, _NOT_HERE, everywhere=True),
    "disk": Kind(_disk, ("wrong", "it is not there"), everywhere=True),
    "network card": Kind(_wrong, ("wrong", "it is not there"), everywhere=True),
}
_ON_DISKS = frozenset(
    {
        "host name",
        "system",
        "time zone",
        "enabled",
        "user",
        "mount",
        "finds",
        "configures",
        "drivers in",
        "volume",
        "network file",
    }
)
_LATE = frozenset({"service", "listens on", "application", "addresses of", "route", "file system"})
