"""Chooses the host of each member of a running wave while the member waits, stores it, and checks it again.

    hosts say what they have (`migrations.hosts`) ┐
    sources say what VMs need (`listed_vms`)      ┴▶ placement ─▶ member: host, destination, why ─▶ that host submits its job

A member keeps its place until it has a job, unless its host is gone, has filled up, or does not reach the source, or the
hypervisor or the destination is away; then another is chosen. Files and uploads are on one host, the leader: such a member is
not placed.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from synvirt.fleet.model import UNBEGUN, UNENDED, Member, MemberState, Wave
from synvirt.fleet.placement import Host, Need, Store, Taken, known, overfull, place
from synvirt.live import VmRow
from synvirt.migrations.hosts import about as ours
from synvirt.model.job import Migration
from synvirt.store.waves import MemberRow, WaveRows

# The largest wave is placed in twenty ticks, each of them short.
PLACED_A_LOOK = 500
# Hosts report their resources once a minute.
AGAIN_S = 30.0
_NOT_LISTED = "Its source has not reported yet how large it is."
NEXT = "A host for it is chosen next."
# A copy on the old host is not continued elsewhere.
_NO_PLACE: Mapping[str, object] = dict.fromkeys(("host", "destination", "placed", "retry_of"))

S = MemberState
Jobs = Mapping[UUID, tuple[str, Migration]]


@dataclass(slots=True)
class _Account:
    """What the members of a wave use, and when that was calculated."""

    at: float
    taken: list[Taken]


class Placing:
    """`hosts`: all hosts. `vm_of`: a VM in its source's list (ListedVms.of). `failure_of`: why a source does not list its VMs
    (ListedVms.failure_of)."""

    def __init__(
        self,
        rows: WaveRows,
        hosts: Callable[[], Sequence[ours.Host]],
        vm_of: Callable[[UUID, str], VmRow | None],
        failure_of: Callable[[UUID], str | None] = lambda source_id: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rows, self._hosts, self._vm_of, self._failure_of, self._clock = rows, hosts, vm_of, failure_of, clock
        self._accounts: dict[UUID, _Account] = {}
        self._refused: dict[tuple[UUID, str], tuple[float, str]] = {}
        self._known: frozenset[tuple[str, str]] = frozenset()
        self._shared: dict[tuple[str, str], str] = {}

    def look(
        self,
        wave: Wave,
        rows: Mapping[str, MemberRow],
        jobs: Jobs,
        *,
        under_way: Collection[UUID],
        stuck: Container[UUID] = (),
    ) -> tuple[dict[str, str], bool]:
        """Chooses places. Returns why members without a place still have none, and whether any member got or lost its place.
        `under_way`: all waves, as their members use resources too. `stuck`: those that cannot be read: no wave waits for
        them."""
        at, all_hosts = self._clock(), self._hosts()
        hosts = [_host(one) for one in all_hosts if one.state == "alive"]
        before, self._known = self._known, known(hosts)
        if self._known - before:  # what is back, or has just reported for the first time, is asked at once
            self._refused = {name: (at, why) for name, (_, why) in self._refused.items()}
        self._shared |= {(host.name, one.name): one.shared_id for host in hosts for one in host.stores if one.shared_id}
        for gone in self._accounts.keys() - set(under_way):
            del self._accounts[gone]
            self._refused = {name: refused for name, refused in self._refused.items() if name[0] != gone}
        movable = {one.id for one in wave.members if _may_move(one, rows[one.id], jobs) and is_placed(one)}
        unplaced = [one for one in wave.members if one.host is None and one.id in movable]
        todo = [one for one in unplaced if self._refused.get((wave.id, one.id), (at, ""))[0] <= at][:PLACED_A_LOOK]
        if todo or self._is_old(wave):
            account = self._counted(wave, jobs)
            todo += self._to_move(wave, account, hosts, movable)
        moved = False
        # A new leader places nothing before it knows what all waves use.
        if todo and all(id_ in self._accounts or id_ in stuck for id_ in under_way):
            # A group that is apart and larger than the fleet would wait forever.
            count = sum(one.state != "fenced" for one in all_hosts)
            sizes = Counter(one.group for one in wave.members)
            spread = {group.name for group in wave.groups if group.rule == "apart" and sizes[group.name] > count}
            moved = self._place(wave, todo, jobs, hosts, at=at, spread=spread)
        return {one.id: self._refused.get((wave.id, one.id), (at, NEXT))[1] for one in (*unplaced, *todo)}, moved

    def count(self, wave: Wave, jobs: Jobs) -> None:
        """Notes what the members of a wave use that has ended or is rolled back: its members get no places any more."""
        if self._is_old(wave):
            self._counted(wave, jobs)

    def _is_old(self, wave: Wave) -> bool:
        account = self._accounts.get(wave.id)
        return account is None or self._clock() >= account.at + AGAIN_S

    def _counted(self, wave: Wave, jobs: Jobs) -> _Account:
        account = self._accounts[wave.id] = _Account(self._clock(), list(self._taken(wave, jobs)))
        return account

    def where(self, host: str, destination: str) -> str:
        """A destination by a name of its own, the same from each host that reaches it."""
        return self._shared.get((host, destination)) or f"{host}/{destination}"

    def release(self, wave: Wave, rows: Mapping[str, MemberRow], jobs: Jobs) -> bool:
        """Members to roll back that were never submitted, on a fenced host: that host commits nothing any more, so the leader
        ends them. True, if there was such a member."""
        fenced = {one.id for one in self._hosts() if one.state == "fenced"}
        left = {
            one.id
            for one in wave.members
            if one.host in fenced and not rows[one.id].submitted and rows[one.id].rolling_back and _job(one, jobs) is None
        }
        if left:
            fields = dict.fromkeys(left, _NO_PLACE)
            self._rows.rewrite_members(wave.id, frozenset(S), Member, lambda one: _moved(one, fields), only=fields)
        return bool(left)

    def _to_move(self, wave: Wave, account: _Account, hosts: Sequence[Host], movable: set[str]) -> list[Member]:
        """The members that cannot stay on their host."""
        others = [one for id_, other in self._accounts.items() if id_ != wave.id for one in other.taken]
        out_of_reach = {host.name: host.out_of_reach for host in hosts}
        gone = set(overfull([*others, *account.taken], hosts, movable))
        gone |= {
            one.need.member
            for one in account.taken
            if one.need.member in movable and one.need.source in out_of_reach.get(one.host, ())
        }
        return [one for one in wave.members if one.id in gone]

    def _place(
        self, wave: Wave, todo: Sequence[Member], jobs: Jobs, hosts: Sequence[Host], *, at: float, spread: set[str]
    ) -> bool:
        names = {one.id for one in todo}
        account = self._accounts[wave.id]
        taken = [one for one in account.taken if one.need.member not in names]
        others = [
            Taken(_without_group(one.need), one.host, one.destination)
            for id_, account in self._accounts.items()
            if id_ != wave.id
            for one in account.taken
        ]
        needs = {one.id: self._need(one, _job(one, jobs)) for one in todo}
        stated = [need for need in needs.values() if need is not None]
        found = place(stated, hosts, wave.groups, taken=[*others, *taken], spread=spread)
        fields: dict[str, Mapping[str, object]] = {}
        for one in todo:
            placed = found.get(one.id)
            if placed is None or placed.host is None:
                self._refused[wave.id, one.id] = at + AGAIN_S, self._not_listed(one) if placed is None else placed.reason
                # If no other host takes it either, a begun member stays with its host, and is retried there.
                if one.state in UNBEGUN and one.host is not None:
                    fields[one.id] = _NO_PLACE
                continue
            self._refused.pop((wave.id, one.id), None)
            chosen = {"host": placed.host, "destination": placed.destination, "placed": placed.reason}
            fields[one.id] = {**_NO_PLACE, **chosen}
        if fields:
            self._rows.rewrite_members(wave.id, UNENDED, Member, lambda one: _moved(one, fields), only=fields)
        # At once, as the next wave is placed with it.
        now_taken = [
            Taken(need, placed.host, placed.destination)
            for need in stated
            if (placed := found[need.member]).host is not None and placed.destination is not None
        ]
        stay = [one for one in account.taken if one.need.member in names and one.need.member not in fields]
        account.taken = [*taken, *stay, *now_taken]
        return bool(fields)

    def _not_listed(self, member: Member) -> str:
        ref = member.plan.source_ref
        failure = self._failure_of(ref.source_id) if ref.kind == "live_vm" else None
        return _NOT_LISTED if failure is None else f"Its source does not list its VMs: {failure}."

    def _taken(self, wave: Wave, jobs: Jobs) -> Iterator[Taken]:
        for one in wave.members:
            if one.state not in UNENDED or one.host is None or one.destination is None:
                continue
            need = self._need(one, _job(one, jobs))
            if need is not None:
                yield Taken(need, one.host, one.destination)

    def _need(self, member: Member, job: Migration | None) -> Need | None:
        """The member's needs. None: not known yet."""
        plan = member.plan
        ref, target = plan.source_ref, plan.target
        size, memory, cpus, source = 0, 0, 0, ""
        if ref.kind == "live_vm":
            source = str(ref.source_id)
        if job is not None and job.manifest is not None:
            disks = [disk.capacity_bytes for disk in job.manifest.disks if disk.key not in plan.skip_disks]
            # Written bytes are already missing from the host's free space.
            size = max(0, sum(disks) - job.progress.bytes_done)
            memory, cpus = job.manifest.memory_bytes, job.manifest.cpu_count
        elif ref.kind == "live_vm":
            row = self._vm_of(ref.source_id, ref.vm_id)
            if row is None:
                return None
            # A retried member's volumes exist already.
            size = 0 if member.retry_of is not None else row.capacity_bytes or 0
            memory, cpus = row.memory_bytes or 0, row.cpu_count or 0
        return Need(
            member.id,
            size,
            target.memory_bytes or memory,
            target.cpu_count or cpus,
            source,
            frozenset(entry.target for entry in target.network_map) - {"user"},
            target.destination,
            member.group,
        )


def is_placed(member: Member) -> bool:
    return member.plan.source_ref.kind in ("live_vm", "remote_url")


def _may_move(member: Member, row: MemberRow, jobs: Jobs) -> bool:
    """Whether nothing of it is on a host yet."""
    if member.state not in UNENDED or row.rolling_back or row.submitted:
        return False
    return _job(member, jobs) is None


def _job(member: Member, jobs: Jobs) -> Migration | None:
    found = None if member.job_id is None else jobs.get(member.job_id)
    return None if found is None else found[1]


def _moved(member: Member, fields: Mapping[str, Mapping[str, object]]) -> Member:
    return member.model_copy(update=fields[member.id])


def _without_group(need: Need) -> Need:
    """Groups belong to one wave."""
    return Need(need.member, need.size_bytes, need.memory_bytes, need.cpu_count, need.source)


def _host(reported: ours.Host) -> Host:
    stores = tuple(Store(one.name, one.free_bytes, one.shared_id) for one in reported.destinations)
    if reported.room is None:
        return Host(reported.id, 0, 0.0, stores, away=True)
    # A plan may name `network:default` or `default`.
    names = {name for one in reported.room.networks for name in (one, one.partition(":")[2]) if name}
    return Host(
        reported.id,
        reported.room.free_memory_bytes,
        reported.room.free_cpus,
        stores,
        networks=frozenset(names),
        out_of_reach=frozenset(map(str, reported.room.unreachable_sources)),
    )
