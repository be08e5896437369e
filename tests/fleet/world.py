"""A site drawn from a seed, for waves that are carried out by the real scheduler: hosts that die, sources that slow down or do
not answer, jobs that fail, outages longer than forecast. Jobs lie in a real store; only their copying is made up.

    World.step ─▶ jobs go on by the clock of the night ─▶ each living host ticks ─▶ the laws are looked at
"""

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest

from synvirt.errors import Conflict, SourceUnreachable
from synvirt.fleet import host_side
from synvirt.fleet.carrying import Carrying
from synvirt.fleet.changing import failed
from synvirt.fleet.host_side import HostSide
from synvirt.fleet.model import ApprovalRequest, Member, MemberState, Wave, WaveRequest, WaveState
from synvirt.fleet.placing import Placing
from synvirt.fleet.records import member_of, wave_of
from synvirt.fleet.waves import Waves
from synvirt.jobs.board import Board
from synvirt.live import VmRow
from synvirt.migrations.hosts.about import Host, HostDestination, HostRoom
from synvirt.migrations.intake import Intake
from synvirt.migrations.planning.openings import spans_of
from synvirt.migrations.rooms import Rooms
from synvirt.model.job import Domain, Forecast, OutageForecast, Pass
from synvirt.model.kinds import ENDS, State
from synvirt.model.machine import VmManifest
from synvirt.model.plan import MigrationPlan
from synvirt.model.problems import Problem
from synvirt.proof.health import Checker
from synvirt.sizes import GIB
from synvirt.store import Store
from synvirt.store import store as store_module
from synvirt.store.waves import MemberRow

BEGIN = datetime(2026, 12, 1, 12, tzinfo=UTC)
# Within a window a look more often, since a cut-over is noted in one, asked for in the next, and begins before the third.
STEP, LONG_STEP = timedelta(minutes=10), timedelta(minutes=40)
HOSTS = ("a", "b")
# As often as an operator tries one VM again.
TRIES = 2
S = MemberState
VM_MEMORY = 4 * GIB
# Of these nothing runs here.
LOST = frozenset({State.FAILED, State.CANCELLED})


@dataclass(slots=True)
class Vm:
    """`on`: runs at its source; `here`: its guest runs at the destination."""

    name: str
    source_host: str
    copy_s: float
    outage_p50_s: float
    outage_p95_s: float
    on: bool = True
    here: bool = False


@dataclass(slots=True)
class _Job:
    id: UUID
    vm: Vm
    host: str
    due: datetime | None = None
    state: State = State.QUEUED


class World:
    """`broken`: laws that did not hold, each a sentence."""

    def __init__(self, folder: Path, drawn: random.Random, vms: dict[str, Vm], monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.drawn, self.vms = BEGIN, drawn, vms
        self.broken: list[str] = []
        self.jobs: dict[UUID, _Job] = {}
        self.seen: Counter[str] = Counter()
        self.tries_again = True
        self._tried: Counter[str] = Counter()
        self._down: dict[str, datetime] = {}
        self._deaf_until = BEGIN
        self._memory = (len(vms) * 5 // 8 + 2) * VM_MEMORY
        self._slow: dict[str, float] = {}
        self._members: list[MemberRow] = []
        self._before_ticks: Wave | None = None
        self._parsed: dict[str, tuple[str, Member]] = {}
        self._leads = HOSTS[0]
        self._ticking = HOSTS[0]
        folder.mkdir(parents=True)
        self.store = Store(f"sqlite:///{folder}/world.db")
        self.waves = Waves(self.store.waves)
        monkeypatch.setattr(store_module, "time", SimpleNamespace(time=self._time))
        monkeypatch.setattr(self.store.waves, "leading", self._leading)
        for name in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S"):
            monkeypatch.setattr(host_side, name, 0.0)
        self._sides: dict[str, HostSide] = {}
        self._carrying: dict[str, Carrying] = {}
        for host in HOSTS:
            self._come_up(host)

    def _time(self) -> float:
        return self.at.timestamp()

    def close(self) -> None:
        for side in self._sides.values():
            side.close()
        self.store.close()

    # ── the wave ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def carry_out(self, request: WaveRequest, *, days: int) -> Wave:
        """Until the wave has ended, or for this many days."""
        self._wave_id = self.waves.create(request).id
        self.spans = spans_of(request, BEGIN)
        self.waves.go(self._wave_id)
        return self.go_on(days=days)

    def go_on(self, *, days: int) -> Wave:
        """An operator lets a wave that is held go on, tries again what failed or went back, and approves of a canary that is
        not well within a day."""
        until = self.at + timedelta(days=days)
        while self.at < until:
            self.step()
            wave = self._whole()
            self._look_at(wave)
            if wave.state is WaveState.HELD:
                self.seen["held"] += 1
                self.waves.go(self._wave_id)
            elif wave.canary is not None and wave.canary_approval is None and self.at > BEGIN + timedelta(days=1):
                self.waves.approve(self._wave_id, ApprovalRequest(canary=True))
            elif wave.state is WaveState.RUNNING and self.tries_again:
                self._try_again(wave)
            elif wave.state not in (WaveState.RUNNING, WaveState.ROLLING_BACK):
                break
        return self._whole()

    def _whole(self) -> Wave:
        """Without what its members wait for. Only members that have changed are parsed: two hundred of them, a hundred times,
        are most of a night's work otherwise."""
        head, self._members = self.waves.load(self._wave_id)
        return wave_of(head, [self._member(row) for row in self._members])

    def _member(self, row: MemberRow) -> Member:
        text, member = self._parsed.get(row.member_id, ("", None))
        if member is None or text != row.document:
            member = member_of(row)
            self._parsed[row.member_id] = row.document, member
        return member

    def _try_again(self, wave: Wave) -> None:
        for one in wave.members:
            if one.state in (S.FAILED, S.ROLLED_BACK) and self._tried[one.id] < TRIES:
                with suppress(Conflict):  # it is on its way back to its source
                    self.waves.retry(wave.id, one.id)
                    self._tried[one.id] += 1

    def step(self) -> None:
        spans = [span for found in self.spans.values() for span in found]
        near = any(span.start < self.at + LONG_STEP and self.at < span.end + STEP for span in spans)
        self.at += STEP if near else LONG_STEP
        self._strike()
        # A job looks for its own wishes each time. None is made while the jobs move, so one look finds who has any.
        wished = {wish.job_id for host in HOSTS for wish in self.store.wishes(host=host)}
        for job in list(self.jobs.values()):
            if self._is_up(job.host):
                self._move(job, job.id in wished)
        self._before_ticks = None
        for host in HOSTS:
            if self._is_up(host):
                self._ticking = host
                self._carrying[host].tick()
                wait(self._sides[host]._checking.values())

    # ── what befalls it ──────────────────────────────────────────────────────────────────────────────────────────────

    def calm(self) -> None:
        """Nothing befalls it any more, and what failed stays so."""
        self.tries_again = False
        self._strike = lambda: None  # type: ignore[method-assign]
        for host in [*self._down]:
            self._come_up(host)
        self._down.clear()
        self._deaf_until = self.at

    def _strike(self) -> None:
        draw = self.drawn.random()
        if draw < 0.02 and not self._down:
            host = self.drawn.choice(HOSTS)
            self._down[host] = self.at + timedelta(minutes=self.drawn.choice((10, 60, 600)))
            self.seen["host died"] += 1
            if host == self._leads:
                self._leads = next(other for other in HOSTS if other != host)
        elif draw < 0.04:
            self._deaf_until = self.at + timedelta(minutes=self.drawn.choice((10, 120)))
            self.seen["source deaf"] += 1
        elif draw < 0.06:
            self._slow[f"esx-{self.drawn.randrange(3)}"] = self.drawn.choice((0.5, 1, 3, 10))
            self.seen["source slow"] += 1
        for host, until in [*self._down.items()]:
            if until <= self.at:
                del self._down[host]
                self._come_up(host)

    def _is_up(self, host: str) -> bool:
        return host not in self._down

    def _come_up(self, host: str) -> None:
        """With nothing in memory."""
        if host in self._sides:
            self._sides[host].close()
        intake = Intake(
            self.store, Board(), host=host, check=self._check, begin=partial(self._begun, host), wake=lambda job_id: None
        )
        rooms = SimpleNamespace(
            host=host, destinations={"fast": None}, store=self.store, hypervisor=self, connect=self._connect
        )
        self._sides[host] = HostSide(
            cast("Rooms", rooms),
            Checker(cast("Any", self)),
            cancel=intake.cancel,
            failed=partial(failed, self.store.waves),
        )
        placing = Placing(self.store.waves, self._hosts, self._listed, clock=self._time)
        self._carrying[host] = Carrying(intake, self._sides[host], placing, vm_of=self._listed, clock=lambda: self.at)

    def _hosts(self) -> list[Host]:
        """Half of the fleet and a little more fits on each."""
        return [
            Host(
                id=host,
                name=host,
                state="alive" if self._is_up(host) else "fenced",
                seen_at=self.at,
                version="",
                jobs=0,
                destinations=tuple(HostDestination(name=name, kind="zfs", free_bytes=1 << 50) for name in ("fast", "large")),
                room=HostRoom(free_memory_bytes=self._memory - self.memory_on(host), free_cpus=10_000),
            )
            for host in HOSTS
        ]

    def memory_on(self, host: str) -> int:
        newest = {job.vm.name: job for job in self.jobs.values() if job.state not in LOST}
        return VM_MEMORY * sum(job.vm.here for job in newest.values() if job.host == host)

    def _listed(self, _source_id: UUID, vm_id: str) -> VmRow:
        return VmRow(vm_id, vm_id, "", memory_bytes=VM_MEMORY, host=self.vms[vm_id].source_host)

    @contextmanager
    def _leading(self) -> Iterator[bool]:
        yield self._ticking == self._leads

    # ── what the service asks of it ──────────────────────────────────────────────────────────────────────────────────

    def _check(self, plan: MigrationPlan) -> None:
        if self.at < self._deaf_until:
            raise SourceUnreachable("the source does not answer")

    async def _connect(self, kind: object, source_id: UUID) -> Any:
        async def nothing() -> None:
            self._check(cast("Any", None))

        async def found(vm_id: str) -> VmManifest:
            return VmManifest(vm_id=vm_id, name=vm_id)

        async def power_on(vm_id: str) -> None:
            vm = self.vms[vm_id]
            self._law(not vm.here, f"{vm_id} is powered on at its source while its guest runs here")
            vm.on = True

        return SimpleNamespace(connect=nothing, close=nothing_at_all, inspect=found, power_on=power_on)

    def undefine(self, uuid: UUID, job_id: UUID) -> None:
        self.jobs[job_id].vm.here = False

    def _begun(self, host: str, job_id: UUID) -> None:
        job = self.store.get(job_id)
        assert job.plan.source_ref.kind == "live_vm"
        vm = self.vms[job.plan.source_ref.vm_id]
        others = [other for other in self.jobs.values() if other.vm is vm and other.state not in ENDS]
        self._law(not others, f"{vm.name} has two jobs at once")
        self.jobs[job_id] = _Job(job_id, vm, host, self.at)
        self.seen[f"job on {host}"] += 1

    # ── a job ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _move(self, job: _Job, is_wished: bool) -> None:
        if job.state in ENDS:
            return
        if is_wished and self.store.cancel_requested(job.id):
            self._back(job)
            self._to(job, State.CANCELLED)
        elif job.state is State.DELTA_SYNCING and job.due is None:
            if is_wished and self.store.cutover_requested(job.id):
                self._cut_over(job)
        elif job.due is not None and job.due <= self.at:
            self._arrived(job)

    def _arrived(self, job: _Job) -> None:
        """At the end of what it did."""
        match job.state:
            case State.QUEUED:
                manifest = VmManifest(vm_id=job.vm.name, name=job.vm.name, host=job.vm.source_host, memory_bytes=VM_MEMORY)
                job.due = self.at + timedelta(seconds=job.vm.copy_s * self._slow.get(job.vm.source_host, 1))
                self._to(job, State.COPYING_FULL, manifest=manifest)
            case State.COPYING_FULL if self.drawn.random() < 0.03:
                self._fail(job, "the copy failed")
            case State.COPYING_FULL:
                job.due = self.at + STEP
                self._to(job, State.DELTA_SYNCING, passes=(Pass(number=1, kind="full", finished_at=self.at),))
            case State.DELTA_SYNCING:
                job.due = None
                self._to(job, State.DELTA_SYNCING, **self._forecast(job.vm))
            case State.CUTTING_OVER if self.drawn.random() < 0.05:
                self._back(job)
                self._fail(job, "the guest did not boot")
            case State.CUTTING_OVER:
                self._law(not job.vm.on, f"{job.vm.name} runs at its source while its guest is started here")
                job.vm.here = True
                domain = Domain(name=job.vm.name, uuid=str(uuid4()), xml="<domain/>")
                self._to(job, State.COMPLETED, domain=domain, downtime_s=job.vm.outage_p50_s)

    def _forecast(self, vm: Vm) -> dict[str, object]:
        outage = OutageForecast(p50_s=vm.outage_p50_s, p95_s=vm.outage_p95_s, at=self.at)
        forecast = Forecast(
            change_rate_bps=1, throughput_bps=2, expected_delta_bytes=1, expected_downtime_s=1, converges=True, at=self.at
        )
        passes = (Pass(number=1, kind="full", finished_at=self.at), Pass(number=2, kind="delta", finished_at=self.at))
        return {"passes": passes, "outage": outage, "forecast": forecast}

    def _cut_over(self, job: _Job) -> None:
        # While the jobs move nobody changes a member.
        self._before_ticks = wave = self._before_ticks or self._whole()
        vm = job.vm
        (member,) = [one for one in wave.members if one.id == vm.name]
        groups = {name: [one for one in wave.members if one.group == name] for name in {one.group for one in wave.members}}
        by_id = {one.id: one for one in wave.members}
        for name in member.after:
            for other in groups.get(name) or [by_id[name]]:
                self._law(other.state is S.HEALTHY, f"{vm.name} cuts over before {other.id}, which is {other.state}")
        if wave.windows:
            spans = self.spans[member.window_id] if member.window_id else [one for each in self.spans.values() for one in each]
            is_open = any(span.start <= self.at < span.end for span in spans)
            self._law(is_open, f"{vm.name} cuts over at {self.at}, outside of its window")
        self.store.record(job.id, "source_power", vm.name)
        vm.on = False
        # One in twenty takes longer than its p95, as a p95 has it.
        late = self.drawn.random() < 0.05
        took_s = vm.outage_p95_s * (3 if late else self.drawn.uniform(0.4, 1))
        job.due = self.at + timedelta(seconds=took_s)
        self._to(job, State.CUTTING_OVER)

    def _fail(self, job: _Job, why: str) -> None:
        self.seen[why] += 1
        error = Problem(code="E_MIG_INTERNAL", message=why, fatal=True, at=self.at, state=job.state)
        self._to(job, State.FAILED, last_error=error)

    def _back(self, job: _Job) -> None:
        if not job.vm.on and not job.vm.here:
            job.vm.on = True
            self.store.strike(job.id, "source_power", job.vm.name)

    def _to(self, job: _Job, state: State, **fields: object) -> None:
        self.store.change(job.id, job.state, lambda before: before.model_copy(update={"state": state, **fields}))
        job.state = state

    # ── the laws ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _law(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.broken.append(otherwise)

    def _look_at(self, wave: Wave) -> None:
        limits = wave.limits
        # One that is rolled back takes no slot any more: its job is being cancelled.
        back = {row.member_id for row in self._members if row.rolling_back}
        for state, what in ((S.SYNCING, "copies"), (S.CUTTING_OVER, "cut-overs")):
            run = [one for one in wave.members if one.state is state and one.id not in back]
            self._law(limits.wave is None or len(run) <= limits.wave, f"{len(run)} {what} of the wave at {self.at}")
            for host, number in Counter(self.vms[one.id].source_host for one in run).items():
                allowed = limits.per_source_host
                self._law(allowed is None or number <= allowed, f"{number} {what} from {host} at {self.at}")
            for to, number in Counter(f"{one.host}/{one.destination}" for one in run).items():
                allowed = limits.per_destination
                self._law(allowed is None or number <= allowed, f"{number} {what} to {to} at {self.at}")
        for host in HOSTS:
            self._law(self.memory_on(host) <= self._memory, f"{host} runs guests with {self.memory_on(host)} of {self._memory}")
        self._look_at_groups(wave)

    def _look_at_groups(self, wave: Wave) -> None:
        sizes = Counter(one.group for one in wave.members)
        here = Counter(
            (one.group, one.host)
            for one in wave.members
            if (one.group or "").startswith("apart") and sizes[one.group] <= len(HOSTS) and self.vms[one.id].here
        )
        for (name, host), number in here.items():
            self._law(number <= 1, f"{number} of {name} run on {host} at {self.at}")
        apart = Counter(
            one.group
            for one in wave.members
            if one.state is S.CUTTING_OVER and one.group is not None and one.group.startswith("apart")
        )
        for name, number in apart.items():
            self._law(number <= 1, f"{number} of {name} cut over at once at {self.at}")


async def nothing_at_all() -> None:
    pass
