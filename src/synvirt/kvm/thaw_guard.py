"""Thaws a guest when nothing else does: `python thaw_guard.py LIBVIRT_URI DOMAIN_UUID [DESCRIPTOR]`, a process of its own.

    stdout  «ready», once it is able to thaw
    stdin   «hold»: the guest is being frozen from now on;  «thawed»: it is thawed, nothing is left to do

If stdin ends, as it does when the service is killed, or «thawed» does not come in HOLD_S, it thaws the guest, again and again
until the guest's agent or the service reports it thawed. DESCRIPTOR is an open connection to the agent's socket, for the
embedded driver, which libvirt in another process could not use. While the service lives the guard reads nothing from it: if
another process reads an answer, libvirt takes that for the connection's end, and the guest has no agent until one of the two is
restarted. libvirt ignores an extra answer. The guard imports nothing of this package, so it starts in milliseconds.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

# In Windows VSS lets no writer wait longer; and ten seconds are no outage.
HOLD_S = 10.0
ANSWER_S = 5
KEEP_TRYING_S = 600.0
PAUSE_S = 1.0
# What an agent answers here fits in a line.
READ_BYTES = 65536
THAW, STATUS = "guest-fsfreeze-thaw", "guest-fsfreeze-status"


# Whether the service is gone ─▶ whether the agent reports it thawed.
Thaw = Callable[[bool], bool]


def by_libvirt(uri: str, uuid: str) -> Thaw:
    """How to thaw a guest through libvirt's own daemon."""
    import libvirt
    import libvirt_qemu

    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    domain = libvirt.open(uri).lookupByUUIDString(uuid)

    def ask(command: str) -> Any:
        return json.loads(libvirt_qemu.qemuAgentCommand(domain, json.dumps({"execute": command}), ANSWER_S, 0))["return"]

    def thaw(_alone: bool) -> bool:
        nonlocal domain
        try:
            ask(THAW)
            return bool(ask(STATUS) == "thawed")
        except libvirt.libvirtError:
            # The daemon may have been restarted together with the service: the next try uses a new connection.
            domain = libvirt.open(uri).lookupByUUIDString(uuid)
            raise

    return thaw


def by_descriptor(descriptor: int) -> Thaw:
    """How to thaw a guest through a connection to its agent's socket."""
    connection = socket.socket(fileno=descriptor)

    def thaw(alone: bool) -> bool:
        """The agent answers its commands in order: an answer of «thawed» comes after the thaw."""
        for command in (THAW, STATUS) if alone else (THAW,):
            connection.send(json.dumps({"execute": command}).encode() + b"\n", socket.MSG_DONTWAIT)
        if not alone:
            return False
        until, answers = time.monotonic() + ANSWER_S, b""
        while b'"thawed"' not in answers and time.monotonic() < until:
            if select.select([connection], [], [], PAUSE_S)[0]:
                answers = answers[-READ_BYTES:] + connection.recv(READ_BYTES, socket.MSG_DONTWAIT)
        return b'"thawed"' in answers

    return thaw


def main() -> int:
    """The guard as a process. Exit 0: the guest is thawed, or was never frozen."""
    # A stop of the service also signals its processes: this one ends by itself.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    service = os.getppid()
    uri, uuid, *rest = sys.argv[1:]
    thaw = by_descriptor(int(rest[0])) if rest else by_libvirt(uri, uuid)
    os.write(1, b"ready\n")
    if os.read(0, 64) != b"hold\n":
        return 0
    if select.select([0], [], [], HOLD_S)[0] and os.read(0, 64) == b"thawed\n":
        return 0
    until = time.monotonic() + KEEP_TRYING_S
    while time.monotonic() < until:
        with contextlib.suppress(Exception):  # whatever the error is, it tries again
            if thaw(os.getppid() != service):
                return 0
        if _service_has_thawed():
            return 0
    return 1


def _service_has_thawed() -> bool:
    """Whether the service says «thawed» within PAUSE_S."""
    if not select.select([0], [], [], PAUSE_S)[0]:
        return False
    line = os.read(0, 64)
    if not line:
        time.sleep(PAUSE_S)
    return line == b"thawed\n"


if __name__ == "__main__":
    sys.exit(main())
