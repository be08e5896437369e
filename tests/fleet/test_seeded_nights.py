"""The laws of a wave, over sites and troubles that are drawn from seeds: thousands of VMs in sum, no real clock."""

import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from synvirt.fleet.model import (
    MEMBER_ENDS,
    Canary,
    Group,
    MemberState,
    RollBackRequest,
    WaveLimits,
    WaveRequest,
    WaveState,
)
from synvirt.model.windows import LockOut, Window
from tests.fleet.made import member, plan
from tests.fleet.world import BEGIN, HOSTS, Vm, World

S = MemberState
VMS = 200
# Windows of an hour and few slots move few in three nights.
MOVED_LEAST = 10


def _drawn(seed: int) -> tuple[random.Random, dict[str, Vm], WaveRequest]:
    drawn = random.Random(seed)
    night = BEGIN.replace(tzinfo=None) + timedelta(hours=8)
    windows = tuple(
        Window(
            id=f"w{n}",
            name=f"window {n}",
            rrule="FREQ=DAILY",
            start=night + timedelta(hours=2 * n),
            end=night + timedelta(hours=2 * n + drawn.choice((1, 3, 5))),
            # It shrinks: an hour in the middle of its second night is somebody else's.
            lockouts=(
                LockOut(start=night + timedelta(days=1, hours=2 * n + 1), end=night + timedelta(days=1, hours=2 * n + 2)),
            ),
        )
        for n in range(drawn.choice((0, 1, 3)))
    )
    groups = (Group(name="together-1"), Group(name="apart-1", rule="apart"), Group(name="together-2"))
    members, vms = [], {}
    for n in range(VMS):
        name = f"vm-{n}"
        p50 = drawn.uniform(60, 900)
        vms[name] = Vm(name, f"esx-{drawn.randrange(3)}", drawn.uniform(600, 20_000), p50, p50 * drawn.uniform(1.1, 2))
        fields: dict[str, Any] = {"priority": drawn.randint(1, 5)}
        if windows and n >= 12 and drawn.random() < 0.5:
            fields["window_id"] = drawn.choice(windows).id
        if n < 12:  # four in each group
            fields["group"] = groups[n // 4].name
            if windows:
                fields["window_id"] = windows[0].id
        after = []
        if n >= 16 and n % 4 == 0:
            after = sorted({f"vm-{drawn.randrange(12, n)}" for _ in range(drawn.randint(1, 2))})
        elif n == 15:
            after = ["together-1"]
        target = {"destination": drawn.choice(("fast", "large"))}
        made = plan(name)
        fields["plan"] = made.model_copy(update={"target": made.target.model_copy(update=target)})
        members.append(member(name, *after, **fields))
    return (
        drawn,
        vms,
        WaveRequest(
            name=f"seed {seed}",
            members=tuple(members),
            windows=windows,
            groups=groups,
            limits=WaveLimits(
                per_source_host=drawn.choice((None, 2, 6)),
                per_destination=drawn.choice((None, 8)),
                wave=drawn.choice((None, 12)),
            ),
            canary=drawn.choice((None, Canary(count=3))),
            on_failure=drawn.choice(("continue", "stop", "roll_back")),
        ),
    )


@pytest.mark.parametrize("seed", range(10))
def test_the_laws_of_a_wave_hold(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, vms, request = _drawn(seed)
    world = World(tmp_path / "world", drawn, vms, monkeypatch)
    try:
        wave = world.carry_out(request, days=3)
        assert world.broken == []
        world.calm()
        for one in wave.members:
            if one.state not in MEMBER_ENDS:
                reported = world.waves.rows.member(wave.id, one.id).waits_for
                assert reported or one.state in (S.SYNCING, S.CUTTING_OVER), f"nobody says why {one.id} is {one.state}"
                world.waves.skip(wave.id, one.id)
        wave = world.go_on(days=2)
        assert world.broken == []
        assert wave.state in (WaveState.COMPLETED, WaveState.FAILED)
        for one in wave.members:
            moved = one.state is S.HEALTHY
            assert (vms[one.id].here, vms[one.id].on) == (moved, not moved), f"{one.id} is {one.state}"
            assert moved or one.cause, f"{one.id} is {one.state} without a cause"
        assert all(world.seen[f"job on {host}"] > MOVED_LEAST // 3 for host in HOSTS), "one host did all"
        assert sum(one.state is S.HEALTHY for one in wave.members) > MOVED_LEAST, "little was moved: this shows nothing"
        world.waves.roll_back(wave.id, RollBackRequest())
        wave = world.go_on(days=2)
        assert world.broken == []
        assert wave.state is WaveState.ROLLED_BACK
        assert all(vm.on and not vm.here for vm in vms.values())
    finally:
        world.close()
