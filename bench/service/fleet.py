"""A fleet simulated: 5,000 VMs of 40 hosts in 26 windows, by seconds and memory. `python -m bench.service.fleet VMS HOSTS
WINDOWS`

The fleet is drawn from a seed: sizes of 20 GiB to 4 TiB, one in three VMs behind others, tiers as groups, limits per host.
"""

import random
import resource
import sys
import time
from datetime import UTC, datetime, timedelta
from uuid import UUID

from synvirt.fleet.model import MemberRequest, WaveLimits, WaveRequest
from synvirt.fleet.order import order
from synvirt.fleet.simulation.forecast import simulate
from synvirt.fleet.simulation.nouns import Load, Site
from synvirt.model.plan import MigrationPlan
from synvirt.model.windows import Window
from synvirt.sizes import GIB, MIB

NOW = datetime(2026, 11, 23, 8, tzinfo=UTC)


def fleet(vms: int, hosts: int, windows: int, seed: int = 1) -> tuple[WaveRequest, dict[str, Load]]:
    drawn = random.Random(seed)
    first = datetime.fromisoformat("2026-12-04T20:00:00")
    made = tuple(
        Window(
            id=f"w{n}",
            name=f"window {n}",
            timezone="Europe/Berlin",
            rrule="FREQ=WEEKLY",
            start=first + timedelta(days=n % 7, hours=n % 3),
            end=first + timedelta(days=n % 7, hours=n % 3 + 6),
        )
        for n in range(windows)
    )
    members = []
    loads: dict[str, Load] = {}
    for n in range(vms):
        after = tuple({f"vm-{drawn.randrange(n)}" for _ in range(drawn.randint(1, 2))}) if n > 50 and n % 3 == 0 else ()
        source = {"kind": "live_vm", "source_id": str(UUID(int=1)), "vm_id": f"vm-{n}"}
        plan = MigrationPlan.model_validate({"source": {"Live": "vim_api"}, "source_ref": source, "mode": "Warm"})
        members.append(
            MemberRequest(
                id=f"vm-{n}",
                vm=f"vm-{n}",
                plan=plan,
                after=after,
                priority=drawn.randint(1, 5),
                window_id=f"w{drawn.randrange(windows)}" if windows else None,
            )
        )
        loads[f"vm-{n}"] = Load(
            size_bytes=int(min(4096, 20 + drawn.expovariate(1 / 80)) * GIB),
            source_host=f"esx-{n % hosts}",
            destination=f"kvm-{n % 8}/fast",
            change_bps=drawn.expovariate(1 / 65536),
            outage_s=drawn.uniform(90, 600),
        )
    limits = WaveLimits(per_source_host=4, per_destination=24)
    return WaveRequest(name="fleet", members=tuple(members), windows=made, limits=limits), loads


def main() -> None:
    vms, hosts, windows = (int(sys.argv[n]) if len(sys.argv) > n else default for n, default in ((1, 5000), (2, 40), (3, 26)))
    wave, loads = fleet(vms, hosts, windows)
    began = time.perf_counter()
    order(wave)
    ordered = time.perf_counter() - began
    began, spent = time.perf_counter(), time.process_time()
    found = simulate(wave, loads, Site(network_bps=5000 * MIB), NOW)
    took, spent = time.perf_counter() - began, time.process_time() - spent
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        f"{vms} VMs, {hosts} hosts, {windows} windows: order {ordered:.2f} s, simulation {took:.1f} s ({spent:.1f} s of a core)"
    )
    print(f"{found.runs} runs, {memory} MiB at the most, {found.unfinished} unfinished")
    print(found.forecast)


if __name__ == "__main__":
    main()
