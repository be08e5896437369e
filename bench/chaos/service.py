"""One host of the chaos: its engine over a house of fakes, with disks of its own, and a pool that all hosts reach.

python -m bench.chaos.service FOLDER STORE_URL

HOST, LEASE_S, SHARED: see tests.migrations.engine_process. The file `clock` in FOLDER has by how many seconds this host's clock
is wrong. libfaketime cannot do that: Debian 12's (0.9.10) breaks sleeping by the monotonic clock, which Python does.
"""

import os
import sys
import time
from datetime import UTC, datetime, tzinfo
from pathlib import Path

from synvirt.destinations.directory import DirectoryDestination
from synvirt.jobs import runner
from synvirt.migrations import tidying
from synvirt.model import values
from tests.fleet.wave_service import KeptHypervisor
from tests.house import House, SharedDirectory
from tests.migrations.engine_process import serve

LOCAL, POOL = "local", "pool"
# Over all hosts, and fewer than want one.
PER_SOURCE, PER_SOURCE_IN_ALL, PER_DESTINATION = 3, 4, 3


def house_of(folder: Path, url: str, host: str, shared: Path) -> House:
    """What a host has; who watches has one too."""
    folder.mkdir(exist_ok=True)
    (folder / "volumes").mkdir(exist_ok=True)
    house = House(
        folder,
        store_url=url,
        host=host,
        shared=shared,
        hypervisor=KeptHypervisor(folder, folder / "ill"),
        destination=DirectoryDestination(folder / "volumes"),
    )
    destinations = {LOCAL: house.destination, POOL: SharedDirectory(shared / "pool")}
    limits = {
        "destinations": destinations,
        "jobs_per_source": PER_SOURCE,
        "jobs_per_source_in_all": PER_SOURCE_IN_ALL,
        "jobs_per_destination": PER_DESTINATION,
    }
    for name, value in limits.items():
        object.__setattr__(house.rooms, name, value)
    return house


def go_wrong(by: Path) -> None:
    """The clock of the wall, as this process sees it. What measures time is the monotonic one, which no clock jump moves."""
    real = time.time

    def shown() -> float:
        return real() + (float(by.read_text()) if by.exists() else 0.0)

    class Wrong(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(time.time(), tz or UTC)

    time.time = shown
    vars(values)["datetime"] = Wrong


def main() -> None:
    folder, url = Path(sys.argv[1]), sys.argv[2]
    go_wrong(folder / "clock")
    # Who submits is another process: jobs are found, and not begun; and what is left is looked for at once.
    runner.RECONCILE_EVERY_S, runner.STORE_PAUSE_S = 1.0, 0.5
    tidying.LOOK_EVERY_S, tidying.FIRST_PAUSE_S = 1.0, 1.0
    serve(house_of(folder, url, os.environ["HOST"], Path(os.environ["SHARED"])))


if __name__ == "__main__":
    main()
