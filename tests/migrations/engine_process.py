"""A service without its API: the engine over a house of fakes, in a process of its own that a test can kill.

python -m tests.migrations.engine_process FOLDER STORE_URL

HOST: its id. LEASE_S: how long a lease lasts, in seconds; all that hangs on it scales. SHARED: a folder that other hosts reach,
too; then jobs of lost hosts are taken over.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import NoReturn

from synvirt.jobs.lease import GRACE_S, LEASE_S, SELF_FENCE_S, HostLease, Pausable, Together
from synvirt.jobs.process import started
from synvirt.jobs.slots import Turns
from synvirt.jobs.wire import SILENCE_S
from synvirt.migrations.engine import Engine
from synvirt.migrations.hosts.about import AboutHost
from synvirt.migrations.hosts.taking_over import TakingOver, looking
from tests.house import House


def serve(house: House, beside: Callable[[Engine], AbstractContextManager[Pausable | None]] | None = None) -> NoReturn:
    """`beside`: something that runs on the engine, from when that goes on."""
    object.__setattr__(house.rooms, "turns", Turns(2))
    host = house.rooms.host
    scale = float(os.environ.get("LEASE_S", "60")) / LEASE_S
    object.__setattr__(house.rooms, "workers", partial(started, SILENCE_S * scale))
    engine = Engine(house.rooms, host=host)
    about = AboutHost(house.rooms.destinations, house.rooms.hypervisor)
    about.ask()
    kinds: list[Pausable] = [engine]
    together = Together(kinds)
    lease = HostLease(
        house.store,
        host,
        document=about.document,
        on_lost=together.pause,
        on_held=together.resume,
        lease_s=LEASE_S * scale,
    )
    lease.begin()
    taking_over = TakingOver(
        house.rooms,
        begin=engine.begin,
        held_for_s=lease.held_for_s,
        opens_source=lambda _: None,
        grace_s=GRACE_S * scale,
        silent_s=SELF_FENCE_S * scale,
    )
    engine.start()
    with (
        looking(taking_over, among_hosts="SHARED" in os.environ, every_s=0.3),
        beside(engine) if beside is not None else nullcontext() as other,
    ):
        kinds += [] if other is None else [other]
        print("ready", flush=True)
        while True:
            time.sleep(1)


if __name__ == "__main__":
    shared = os.environ.get("SHARED")
    serve(
        House(
            Path(sys.argv[1]),
            store_url=sys.argv[2],
            host=os.environ.get("HOST", "local"),
            shared=None if shared is None else Path(shared),
        )
    )
