"""A service without its API: the engine over a house of fakes, in a process of its own that a test can kill.

python -m tests.migrations.engine_process FOLDER STORE_URL
"""

import sys
import time
from pathlib import Path
from typing import NoReturn

from synvirt.migrations.engine import Engine
from synvirt.migrations.slots import Turns
from tests.house import House


def serve(house: House, url: str) -> NoReturn:
    object.__setattr__(house.rooms, "turns", Turns(2))
    engine = Engine(house.rooms, url=url, host="local")
    engine.start()
    print("ready", flush=True)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    serve(House(Path(sys.argv[1]), store_url=sys.argv[2]), sys.argv[2])
