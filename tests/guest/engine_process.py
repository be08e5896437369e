"""The engine over a house of fakes whose volumes are on zfs, in a process of its own that a test can kill.

python -m tests.guest.engine_process FOLDER NAMESPACE
"""

import sys
import time
from pathlib import Path

from synvirt.destinations.zfs import ZfsDestination
from synvirt.migrations.engine import Engine
from tests.guest.zvols import POOL
from tests.house import House


def main() -> None:
    folder = Path(sys.argv[1])
    house = House(folder, destination=ZfsDestination(POOL, sys.argv[2]))
    engine = Engine(house.rooms, url=f"sqlite:///{folder / 'store.db'}", host="local", jobs_at_once=2)
    engine.start()
    print("ready", flush=True)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
