"""Which of our hosts and destinations takes which VM, and why. Pure: no I/O, the same answer each time.

Large VMs are placed first, each where the fullest of space, memory and processors stays emptiest: so hosts fill evenly, and
there is room for one more VM as long as possible. A group that is «apart» never has two members on one host; if it is larger
than the fleet, it is spread evenly. A group that is «together» goes to one host if it fits, as its members communicate.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from synvirt.fleet.model import Group
from synvirt.sizes import GIB, TIB

# Causes shown for a VM that no host takes.
_CAUSES_MAX = 4


@dataclass(frozen=True, slots=True)
class Store:
    """A destination of a host. `free_bytes`: None, if it does not answer this host: it takes nothing. `shared_id`: the same on
    each host that reaches the same space."""

    name: str
    free_bytes: int | None
    shared_id: str | None = None


@dataclass(frozen=True, slots=True)
class Host:
    """The free resources of a host: `free_memory_bytes`, and `free_cpus`, virtual ones with its overcommitment.
    `out_of_reach`: sources that did not answer it. `away`: its hypervisor does not answer: it takes nothing."""

    name: str
    free_memory_bytes: int
    free_cpus: float
    stores: tuple[Store, ...]
    networks: frozenset[str] = frozenset()
    out_of_reach: frozenset[str] = frozenset()
    away: bool = False


@dataclass(frozen=True, slots=True)
class Need:
    """A member's needs. `networks`: of our hosts, as its plan maps them. `destination`: if its plan names one."""

    member: str
    size_bytes: int
    memory_bytes: int
    cpu_count: int
    source: str = ""
    networks: frozenset[str] = frozenset()
    destination: str | None = None
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """What a placed member uses."""

    need: Need
    host: str
    destination: str


@dataclass(frozen=True, slots=True)
class Placed:
    """`host` and `destination` are None where no host takes it. `reason`: a sentence."""

    member: str
    host: str | None
    destination: str | None
    reason: str


class _Left:
    """What is free after all placements."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.memory = {host.name: float(host.free_memory_bytes) for host in hosts}
        self.cpus = {host.name: host.free_cpus for host in hosts}
        self.space: dict[str, float] = {}
        for host, store in _places(hosts).values():
            key = space_key(host, store)
            # Two hosts may have asked a shared destination at different moments: the smaller answer is safe.
            self.space[key] = min(self.space.get(key, float("inf")), float(store.free_bytes or 0))
        self.all_memory, self.all_cpus, self.all_space = dict(self.memory), dict(self.cpus), dict(self.space)

    def take(self, need: Need, host: Host, store: Store, sign: int = 1) -> None:
        self.memory[host.name] -= sign * need.memory_bytes
        self.cpus[host.name] -= sign * need.cpu_count
        self.space[space_key(host, store)] -= sign * need.size_bytes

    def is_over(self, need: Need, host: Host, store: Store) -> bool:
        """Whether more than available was used of something that this member needs."""
        return (
            (need.memory_bytes > 0 and self.memory[host.name] < 0)
            or (need.cpu_count > 0 and self.cpus[host.name] < 0)
            or (need.size_bytes > 0 and self.space[space_key(host, store)] < 0)
        )

    def fullest(self, need: Need, host: Host, store: Store) -> float:
        """The used share of the fullest resource after placing it; over 1: it does not fit."""
        key = space_key(host, store)
        return max(
            _share(self.all_memory[host.name], self.memory[host.name] - need.memory_bytes),
            _share(self.all_cpus[host.name], self.cpus[host.name] - need.cpu_count),
            _share(self.all_space[key], self.space[key] - need.size_bytes),
        )


def space_key(host: Host, store: Store) -> str:
    return store.shared_id or f"{host.name}/{store.name}"


def place(
    needs: Iterable[Need],
    hosts: Sequence[Host],
    groups: Iterable[Group] = (),
    *,
    taken: Iterable[Taken] = (),
    spread: Collection[str] = (),
) -> dict[str, Placed]:
    """Places by member, in the order of `needs`. `taken`: of placed members; their groups are those given here. `spread`:
    groups that are apart and larger than the fleet."""
    wanted = list(needs)
    rules = {group.name: "spread" if group.name in spread else group.rule for group in groups}
    left = _Left(hosts)
    used_by: dict[str, Counter[str]] = {}
    places = _places(hosts)
    for one in taken:
        if (at := places.get((one.host, one.destination))) is not None:
            left.take(one.need, *at)
        if one.need.group is not None:
            used_by.setdefault(one.need.group, Counter())[one.host] += 1
    found: dict[str, Placed] = {}
    for need in sorted(wanted, key=_size, reverse=True):
        rule = rules.get(need.group) if need.group is not None else None
        used = used_by.setdefault(need.group, Counter()) if need.group is not None else Counter()
        placed, chosen = _placed(need, hosts, left, used, rule)
        found[need.member] = placed
        if chosen is not None:
            left.take(need, *chosen)
            used[chosen[0].name] += 1
    return {need.member: found[need.member] for need in wanted}


def overfull(taken: Sequence[Taken], hosts: Sequence[Host], movable: Collection[str]) -> list[str]:
    """The movable members, last first, that must move so that no host promises more than it has: other work fills hosts too. A
    member whose host or destination is gone must also move."""
    left, places = _Left(hosts), _places(hosts)
    gone: list[str] = []
    for one in taken:
        if (at := places.get((one.host, one.destination))) is not None:
            left.take(one.need, *at)
        elif one.need.member in movable:
            gone.append(one.need.member)
    for one in reversed(taken):
        at = places.get((one.host, one.destination))
        if at is not None and one.need.member in movable and left.is_over(one.need, *at):
            left.take(one.need, *at, sign=-1)
            gone.append(one.need.member)
    return gone


def _places(hosts: Sequence[Host]) -> dict[tuple[str, str], tuple[Host, Store]]:
    """Where anything may be placed: what is away has no room."""
    return {
        (host.name, store.name): (host, store)
        for host in hosts
        if not host.away
        for store in host.stores
        if store.free_bytes is not None
    }


def known(hosts: Sequence[Host]) -> frozenset[tuple[str, str]]:
    """The hosts and destinations that may take something."""
    return frozenset(_places(hosts))


def _size(need: Need) -> tuple[int, int, int]:
    return need.memory_bytes, need.size_bytes, need.cpu_count


def _placed(
    need: Need, hosts: Sequence[Host], left: _Left, used: Mapping[str, int], rule: str | None
) -> tuple[Placed, tuple[Host, Store] | None]:
    refused: dict[str, list[str]] = {}
    fits: list[tuple[int, float, str, str]] = []
    by_name: dict[tuple[str, str], tuple[Host, Store]] = {}
    for host in hosts:
        why = _why_not(need, host, left, used if rule == "apart" else {})
        stores = [] if why else [store for store in host.stores if need.destination in (None, store.name)]
        roomy = [
            store for store in stores if store.free_bytes is not None and left.space[space_key(host, store)] >= need.size_bytes
        ]
        if not roomy:
            refused.setdefault(why or _why_no_store(need, stores), []).append(host.name)
        for store in roomy:
            beside = int(rule == "together" and bool(used) and not used.get(host.name))
            if rule == "spread":
                beside = used.get(host.name, 0)
            fits.append((beside, left.fullest(need, host, store), host.name, store.name))
            by_name[host.name, store.name] = (host, store)
    if not fits:
        return Placed(need.member, None, None, _reason(refused)), None
    beside, _, host_name, store_name = min(fits)
    host, store = by_name[host_name, store_name]
    reason = (
        f"{host_name}/{store_name}: {_bytes(left.space[space_key(host, store)] - need.size_bytes)} of space, "
        f"{_bytes(left.memory[host_name] - need.memory_bytes)} of memory and "
        f"{left.cpus[host_name] - need.cpu_count:.0f} CPUs stay free; {len(fits)} could take it."
    )
    if rule == "together" and used:
        reason += f" The others of group {need.group} are " + ("elsewhere: there it has no room." if beside else "there.")
    return Placed(need.member, host_name, store_name, reason), (host, store)


def _why_not(need: Need, host: Host, left: _Left, others: Mapping[str, int]) -> str | None:
    """A cause without the host's name, so that hosts with the same cause are listed together."""
    missing = sorted(need.networks - host.networks)
    causes = (
        (host.away, "gets no answer from its hypervisor"),
        (need.source in host.out_of_reach, f"does not reach source {need.source}"),
        (bool(missing), f"has no network {missing[0] if missing else ''}"),
        (bool(others.get(host.name)), f"has another of group {need.group}, which is apart"),
        (left.memory[host.name] < need.memory_bytes, f"has no {_bytes(need.memory_bytes)} of memory left"),
        (left.cpus[host.name] < need.cpu_count, f"has no {need.cpu_count} CPUs left"),
    )
    return next((cause for is_so, cause in causes if is_so), None)


def _why_no_store(need: Need, stores: Sequence[Store]) -> str:
    if not stores:
        return f"has no destination {need.destination}" if need.destination else "has no destination"
    if all(store.free_bytes is None for store in stores):
        return f"gets no answer from destination {', '.join(store.name for store in stores)}"
    return f"has no {_bytes(need.size_bytes)} of space left"


def _reason(refused: Mapping[str, Sequence[str]]) -> str:
    if not refused:
        return "There is no host."
    causes = sorted(refused.items(), key=lambda item: (-len(item[1]), item[0]))
    shown = [
        f"{names[0] if len(names) == 1 else f'each of {len(names)} hosts'} {cause}" for cause, names in causes[:_CAUSES_MAX]
    ]
    more = len(causes) - _CAUSES_MAX
    return f"No host takes it: {'; '.join(shown)}{f'; and {more} more causes' if more > 0 else ''}."


def _share(whole: float, left: float) -> float:
    return 1 - left / whole if whole > 0 else float(left < 0)


def _bytes(number: float) -> str:
    return f"{number / TIB:.1f} TiB" if number >= TIB else f"{number / GIB:.0f} GiB"
