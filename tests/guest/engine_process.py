"""The engine over a house of fakes whose volumes are on zfs, in a process of its own that a test can kill.

python -m tests.guest.engine_process FOLDER NAMESPACE
"""

import sys
from pathlib import Path

from synvirt.destinations.zfs import ZfsDestination
from tests.guest.zvols import POOL
from tests.house import House
from tests.migrations.engine_process import serve

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    serve(House(folder, destination=ZfsDestination(POOL, sys.argv[2])))
