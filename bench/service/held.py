"""Jobs that are held for their cut-over: what they cost a service while nothing is due. `python -m bench.service.held 1000`

Prints: seconds until all are taken up after a start, share of a core while they wait, queries a second, resident memory.
"""

import resource
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

from sqlalchemy import event

from synvirt.jobs.slots import Turns
from synvirt.migrations.engine import Engine
from synvirt.migrations.memory import PassMemory, noting
from synvirt.model.job import Migration, Pass
from synvirt.model.kinds import Mode, State
from synvirt.model.values import now
from tests.house import VM, House, live_plan

WATCHED_S = 60.0


def held_job(house: House, manifest: object, passes: int = 21) -> Migration:
    moment = now()
    done = tuple(
        Pass(
            number=number,
            kind="full" if number == 1 else "delta",
            bytes=number,
            seconds=1.0,
            snapshot_at=moment - timedelta(minutes=passes - number),
            finished_at=moment,
        )
        for number in range(1, passes + 1)
    )
    job = Migration(
        id=uuid4(),
        name="held",
        plan=live_plan(warm={"cutover": "manual", "interval_s": 86_400}),
        mode_effective=Mode.WARM,
        state=State.DELTA_SYNCING,
        manifest=manifest,
        passes=done,
        created_at=moment,
    )
    house.store.add(job, host="local")
    house.store.memory.change(job.id, PassMemory, lambda before: noting(before, released_at=moment), passes)
    return job


def main(jobs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        house = House(Path(folder))
        house.platform.add_vm(VM, {"disk-0": bytes(4096)})
        manifest = house.run(house.intake.submit(live_plan("Cold")).id).manifest
        for _ in range(jobs):
            held_job(house, manifest)
        object.__setattr__(house.rooms, "turns", Turns(4))
        queries = [0]

        @event.listens_for(house.store._engine, "before_cursor_execute")
        def _count(*_: object) -> None:
            queries[0] += 1

        engine = Engine(house.rooms, host="local")
        began = time.monotonic()
        engine.start()
        while sum(bool(stop._asleep) for stop in list(engine._stops.values())) < jobs:
            time.sleep(0.05)
        taken_up_s = time.monotonic() - began
        time.sleep(2)
        before, queries[0] = resource.getrusage(resource.RUSAGE_SELF), 0
        time.sleep(WATCHED_S)
        after = resource.getrusage(resource.RUSAGE_SELF)
        share = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / WATCHED_S
        resident_mib = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20
        print(
            f"{jobs} held jobs: all taken up in {taken_up_s:.1f} s; then {100 * share:.1f} % of a core, "
            f"{queries[0] / WATCHED_S:.1f} queries a second, {resident_mib} MiB resident"
        )
        engine.close()
        house.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
