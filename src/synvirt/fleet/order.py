"""Checks a wave field by field, and gives the order of its dependencies. No I/O.

The graph has a node for each member and for each group. A member after a group waits for the group's node, which waits for each
of its members. So five thousand members after a group of five hundred are 5,500 edges, not 2.5 million.
"""

import heapq
import posixpath
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from types import MappingProxyType

from synvirt.errors import InvalidPlan
from synvirt.fleet.model import Group, MemberRequest, Wave, WaveRequest
from synvirt.migrations.planning.foreseen import PlanProblem
from synvirt.migrations.planning.windows import check as check_window
from synvirt.model.plan import HostPathRef, LiveVmRef, RemoteUrlRef, UploadRef
from synvirt.model.windows import Window
from synvirt.nearest import LISTED_MAX, did_you_mean, listed

# A list of ten thousand problems helps no reader.
PROBLEMS_MAX = 200
# The most names that a wrong one is compared with: 5 ms.
COMPARED_MAX = 300
# Of a longer cycle only the beginning is named.
CYCLE_NAMES_MAX = 100


@dataclass(frozen=True, slots=True)
class Order:
    """`sequence`: members, each after those that it waits for; then by priority, then in the document's order. `after`: for
    each member, names of members and groups. `members_of`: a group's members."""

    sequence: tuple[str, ...]
    after: Mapping[str, tuple[str, ...]]
    members_of: Mapping[str, tuple[str, ...]]

    def needs(self, member: str) -> tuple[str, ...]:
        """The members that it waits for directly; a group counts as its members."""
        found: dict[str, None] = {}
        for name in self.after.get(member, ()):
            found.update(dict.fromkeys(self.members_of.get(name, (name,))))
        return tuple(found)


def problems(wave: WaveRequest | Wave) -> tuple[PlanProblem, ...]:
    """All that prevents the wave from running, in the document's order; PROBLEMS_MAX at most. Empty, if it can run."""
    found = []
    for problem in _problems(wave):
        found.append(problem)
        if len(found) == PROBLEMS_MAX:
            break
    return tuple(found)


def order(wave: WaveRequest | Wave) -> Order:
    """The order of a wave without problems. Else InvalidPlan, which names a cycle."""
    found = problems(wave)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise InvalidPlan(f"{found[0].field}: {found[0].detail}{more}", hint=found[0].hint)
    return _ordered(wave.members)


def _problems(wave: WaveRequest | Wave) -> Iterator[PlanProblem]:
    yield from _named_twice(wave)
    yield from _windows(wave.windows)
    yield from _references(wave)
    yield from _same_vm(wave.members)
    yield from _same_file(wave.members)
    yield from _instant(wave.members)
    yield from _together(wave.members, wave.groups)
    groups = {group.name for group in wave.groups}
    if any(member.id in groups or member.id == member.group for member in wave.members):
        return  # a name of both a member and a group has no place in an order
    cycles = list(_cycle(wave.members))
    yield from cycles or _held_by_its_own(wave.members, wave.groups)


def _named_twice(wave: WaveRequest | Wave) -> Iterator[PlanProblem]:
    groups = {group.name for group in wave.groups}
    lists: tuple[tuple[str, Sequence[str]], ...] = (
        ("members[{}].id", [member.id for member in wave.members]),
        ("groups[{}].name", [group.name for group in wave.groups]),
        ("windows[{}].id", [window.id for window in wave.windows]),
    )
    for field, names in lists:
        seen: dict[str, int] = {}
        for place, name in enumerate(names):
            if name in seen:
                first = field.format(seen[name])
                yield PlanProblem(
                    field=field.format(place), detail=f"{name!r} is {first} already", hint="give it a name of its own"
                )
            seen.setdefault(name, place)
    for place, member in enumerate(wave.members):
        if member.id in groups:
            yield PlanProblem(
                field=f"members[{place}].id",
                detail=f"{member.id!r} is the name of a group too, and `after` could mean either",
                hint="give the member or the group another name",
            )


def _windows(windows: Sequence[Window]) -> Iterator[PlanProblem]:
    for place, window in enumerate(windows):
        try:
            check_window(window)
        except InvalidPlan as error:
            part = "rrule" if window.rrule is not None else "start"
            yield PlanProblem(field=f"windows[{place}].{part}", detail=error.detail, hint=error.hint)


def _references(wave: WaveRequest | Wave) -> Iterator[PlanProblem]:
    members = {member.id for member in wave.members}
    groups = {group.name for group in wave.groups}
    windows = {window.id for window in wave.windows}
    both = members | groups
    for place, member in enumerate(wave.members):
        for at, name in enumerate(member.after):
            if name not in both:
                yield _unknown(f"members[{place}].after[{at}]", "member or group", name, both)
            elif name == member.id:
                yield PlanProblem(
                    field=f"members[{place}].after[{at}]", detail=f"{name!r} waits for itself", hint="leave it out"
                )
        if member.group is not None and member.group not in groups:
            yield _unknown(f"members[{place}].group", "group", member.group, groups)
        if member.window_id is not None and member.window_id not in windows:
            yield _unknown(f"members[{place}].window_id", "window", member.window_id, windows)


def _unknown(field: str, what: str, name: str, known: Collection[str]) -> PlanProblem:
    alike = sorted(one for one in known if one[:1].lower() == name[:1].lower() and abs(len(one) - len(name)) <= 3)
    hint = did_you_mean(name, alike[:COMPARED_MAX]) or listed(heapq.nsmallest(LISTED_MAX, known))
    return PlanProblem(field=field, detail=f"the wave has no {what} called {name!r}", hint=hint)


def _same_vm(members: Sequence[MemberRequest]) -> Iterator[PlanProblem]:
    for place, member, other in _alike(members, _vm):
        yield PlanProblem(
            field=f"members[{place}].plan.source_ref",
            detail=f"{member.id!r} is the VM that {other!r} is: VM {_vm(member)[1]} of the same source",
            hint="leave one of them out",
        )


def _same_file(members: Sequence[MemberRequest]) -> Iterator[PlanProblem]:
    """One machine of one file, under one name: the second job would be refused by the name. Two names are two guests from one
    template."""
    for place, member, other in _alike(members, _file):
        yield PlanProblem(
            field=f"members[{place}].plan.source_ref",
            detail=f"{member.id!r} is the machine that {other!r} is: of the same file, under the same name",
            hint="leave one of them out; or give each a target.name of its own, if both are to come from one template",
        )


def _alike(
    members: Sequence[MemberRequest], key_of: Callable[[MemberRequest], tuple[object, ...]]
) -> Iterator[tuple[int, MemberRequest, str]]:
    """Each member with the key of one before it: its place, itself, and the id of the first. An empty key is like no other."""
    seen: dict[tuple[object, ...], str] = {}
    for place, member in enumerate(members):
        key = key_of(member)
        if key and key in seen:
            yield place, member, seen[key]
        seen.setdefault(key, member.id)


def _vm(member: MemberRequest) -> tuple[object, ...]:
    ref = member.plan.source_ref
    return (ref.source_id, ref.vm_id) if isinstance(ref, LiveVmRef) else ()


def _file(member: MemberRequest) -> tuple[object, ...]:
    match ref := member.plan.source_ref:
        case HostPathRef():
            file = posixpath.normpath(ref.path)
        case UploadRef():
            file = str(ref.upload_id)
        case RemoteUrlRef():
            file = ref.url
        case LiveVmRef():
            return ()
    return ref.kind, file, ref.vm, member.plan.target.name


def _instant(members: Sequence[MemberRequest]) -> Iterator[PlanProblem]:
    """Refuses instant starts: a wave rolls back, and is cancelled, without asking an operator, and such a guest's writes would
    be lost."""
    for place, member in enumerate(members):
        if member.plan.instant:
            yield PlanProblem(
                field=f"members[{place}].plan.instant",
                detail=f"{member.id!r} would start at once, and what its guest writes is lost where the wave is rolled back",
                hint="leave instant out; or import it by a job of its own",
            )


def _together(members: Sequence[MemberRequest], groups: Sequence[Group]) -> Iterator[PlanProblem]:
    """Members that cut over together must name the same window."""
    together = {group.name for group in groups if group.rule == "together"}
    windows: dict[str, tuple[str, str | None]] = {}
    for place, member in enumerate(members):
        if member.group not in together or member.group is None:
            continue
        first, window = windows.setdefault(member.group, (member.id, member.window_id))
        if window != member.window_id:
            yield PlanProblem(
                field=f"members[{place}].window_id",
                detail=f"group {member.group!r} cuts over in one window, but {first!r} has {window or 'any'} "
                f"and {member.id!r} has {member.window_id or 'any'}",
                hint="give all members of the group the same window",
            )


def _cycle(members: Sequence[MemberRequest]) -> Iterator[PlanProblem]:
    try:
        _ordered(members)
    except InvalidPlan as error:
        place = next((place for place, member in enumerate(members) if f"{member.id!r}" in error.detail), 0)
        yield PlanProblem(field=f"members[{place}].after", detail=error.detail, hint=error.hint)


def _held_by_its_own(members: Sequence[MemberRequest], groups: Sequence[Group]) -> Iterator[PlanProblem]:
    """No member of a group that cuts over together may wait for an outside member that waits for the group: neither would
    begin."""
    together = {group.name for group in groups if group.rule == "together"}
    stands_for = {member.id: member.group if member.group in together and member.group else member.id for member in members}
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for member in members:
        mine = stands_for[member.id]
        sorter.add(mine, *(one for name in member.after if (one := stands_for.get(name, name)) != mine))
        if member.group is not None and member.group not in together:
            sorter.add(member.group, mine)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = list(reversed(error.args[1]))
        group = next(name for name in cycle if name in together)
        at = next(place for place, member in enumerate(members) if member.group == group)
        yield PlanProblem(
            field=f"members[{at}].group",
            detail=f"group {group!r} cuts over together, but would wait for itself: {_shown(cycle, together)}",
            hint="take one of these into the group, or out of an `after`",
        )


def _ordered(members: Sequence[MemberRequest]) -> Order:
    members_of: dict[str, list[str]] = {}
    for member in members:
        if member.group is not None:
            members_of.setdefault(member.group, []).append(member.id)
    known = {member.id for member in members} | set(members_of)
    # An empty group delays no member; a member that waits for itself was reported above.
    after = {member.id: tuple(name for name in member.after if name in known and name != member.id) for member in members}
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for group, inside in members_of.items():
        sorter.add(group, *inside)
    for name, names in after.items():
        sorter.add(name, *names)
    try:
        sorter.prepare()
    except CycleError as error:
        raise _cyclic(list(reversed(error.args[1])), members_of) from None
    rank = {member.id: (member.priority, place) for place, member in enumerate(members)}
    sequence: list[str] = []
    while sorter.is_active():
        ready = sorter.get_ready()
        sequence += sorted((name for name in ready if name in rank), key=rank.__getitem__)
        sorter.done(*ready)
    opened = {group: tuple(inside) for group, inside in members_of.items()}
    return Order(tuple(sequence), MappingProxyType(after), MappingProxyType(opened))


def _cyclic(cycle: Sequence[str], groups: Collection[str]) -> InvalidPlan:
    return InvalidPlan(
        f"{next(name for name in _turned(cycle) if name not in groups)!r} waits for itself: {_shown(cycle, groups)}",
        hint="take one of these out of the `after` of the one before it",
    )


def _turned(cycle: Sequence[str]) -> list[str]:
    """`cycle`: each waits for the next; the first is also the last. Returns the same cycle, starting at its smallest name."""
    first = cycle.index(min(cycle[:-1]))
    return [*cycle[first:-1], *cycle[:first], cycle[first]]


def _shown(cycle: Sequence[str], groups: Collection[str]) -> str:
    names = [f"{name} (group)" if name in groups else name for name in _turned(cycle)]
    more = len(names) - CYCLE_NAMES_MAX
    return " → ".join(names[:CYCLE_NAMES_MAX]) + (f" → … ({more} more)" if more > 0 else "")
