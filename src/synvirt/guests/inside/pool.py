"""Serves an image in a Ceph pool to the process that reads a guest's disks: python -P -m synvirt.guests.inside.pool DESCRIPTOR
DEVICE, where DESCRIPTOR is a connection to that process. It ends when the connection does."""

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from synvirt.cage import Cage, Network, enter
from synvirt.disks.nbd.server import NbdServer
from synvirt.disks.rbd import RbdReader, spec_of
from synvirt.errors import SynvirtError

MEMORY_BYTES = 4 << 30


def main(argv: Sequence[str]) -> int:
    """The process's exit code: 1, where the image cannot be read; its client sees the end of the connection."""
    spec = spec_of(argv[2])
    # Ceph's keys lie next to its settings. librbd starts threads: they get the cage that this one enters before.
    enter(Cage(reads=(str(Path(spec.place.conf).parent),), network=Network.ELSEWHERE, memory_bytes=MEMORY_BYTES))
    with socket.socket(fileno=int(argv[1])) as connected:
        try:
            server = NbdServer(RbdReader(spec))
        except SynvirtError as error:
            sys.stderr.write(f"{error.detail}\n")
            return 1
        server.serve(connected)
    return 0


if __name__ == "__main__":
    code = main(sys.argv)
    sys.stderr.flush()
    os._exit(code)  # librados' threads may wait for a cluster that is away
