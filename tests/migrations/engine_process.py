"""A service without its API: the engine over a house of fakes, in a process of its own that a test can kill.

python -m tests.migrations.engine_process FOLDER STORE_URL
"""

import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from synvirt.jobs.lease import HostLease
from synvirt.jobs.slots import Turns
from synvirt.migrations.engine import Engine
from tests.house import House


def serve(house: House) -> NoReturn:
    object.__setattr__(house.rooms, "turns", Turns(2))
    host = os.environ.get("HOST", "local")
    engine = Engine(house.rooms, host=host)
    # As long as a lease lasts here, in seconds.
    lease_s = float(os.environ.get("LEASE_S", "60"))
    HostLease(house.store, host, on_lost=engine.pause, on_held=engine.resume, lease_s=lease_s).begin()
    engine.start()
    print("ready", flush=True)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    serve(House(Path(sys.argv[1]), store_url=sys.argv[2]))
