"""A guest's disks, opened for the process that reads them (`looker.py`), which may open nothing by itself. Blocking.

PATH                          a file or device of this host             its descriptor
PATH over a raw file          an overlay in qcow2                       two
nbd+unix:///?socket=PATH      what an export serves to the guest        a connection
rbd:POOL/IMAGE:id=…:conf=…    an image in a Ceph pool (disks/rbd.py)    a connection to a process that reads it (pool.py)
"""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import Final, NamedTuple

from synvirt.programs import inherited

# In front of a connection's descriptor, where the looker is called.
SERVED: Final = "nbd:"
_BY_SOCKET, _IN_A_POOL = "nbd+unix:///?socket=", "rbd:"
# What the processes that read a guest's disks get of ours.
ENVIRONMENT: Final = ("PATH", "PYTHONPATH")
_CONNECTED_WITHIN_S = 5.0


class Opened(NamedTuple):
    """A disk: the looker's argument for it, and the descriptors that the looker inherits."""

    argument: str
    descriptors: tuple[int, ...]


def by_socket(path: str) -> str:
    """The name, as `opened` takes it, of a disk that is served on this Unix socket."""
    return f"{_BY_SOCKET}{path}"


def opened(device: str, backing: str | None, closing: ExitStack) -> Opened:
    """Opens a disk until `closing` is closed. `backing`: of an overlay in qcow2, the raw file under it. OSError."""
    if device.startswith(_BY_SOCKET):
        return _connection(_connected(device.removeprefix(_BY_SOCKET)), closing)
    if device.startswith(_IN_A_POOL):
        return _connection(_read_by_a_process(device, closing), closing)
    files = (device,) if backing is None else (device, backing)
    descriptors = []
    for file in files:
        descriptors.append(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
        closing.callback(os.close, descriptors[-1])
    return Opened(":".join(map(str, descriptors)), tuple(descriptors))


def _connection(connected: socket.socket, closing: ExitStack) -> Opened:
    closing.callback(connected.close)
    return Opened(f"{SERVED}{connected.fileno()}", (connected.fileno(),))


def _connected(path: str) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.settimeout(_CONNECTED_WITHIN_S)
        connected.connect(path)
        connected.settimeout(None)
    except OSError:
        connected.close()
        raise
    return connected


def _read_by_a_process(device: str, closing: ExitStack) -> socket.socket:
    """Another process opens the image: the one that reads what a guest wrote has no network. It ends with its client."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "synvirt.guests.inside.pool", str(theirs.fileno()), device],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=inherited(ENVIRONMENT),
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
    closing.callback(child.wait)
    closing.callback(child.kill)
    return ours
