"""A guest's side of a wire, in a network namespace of its own, with Linux' own stack.

    python -m tests.rehearsals.guest_child PORT [static | ADDRESS MAC]

It has 10.77.0.5/24 and a gateway, 10.77.0.1, where it is `static`; or another address, whose gateway is the first of its
/24. It reads lines of Python from its standard input, runs each, and says what came of it.
"""

import contextlib
import ctypes
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from synvirt.rehearsals.bubble import CLONE_NEWNET, FRAME_BYTES_MAX, TAP, Tap

ADDRESS, GATEWAY = "10.77.0.5", "10.77.0.1"


def pump(tap: Tap, wire: socket.socket) -> None:
    select, received = selectors.DefaultSelector(), bytearray()
    select.register(tap.descriptor, selectors.EVENT_READ)
    select.register(wire, selectors.EVENT_READ)
    while True:
        for key, _ in select.select():
            if key.fileobj is wire:
                came = wire.recv(1 << 16)
                if not came:
                    os._exit(0)
                received += came
                while len(received) >= 4 and len(received) >= (end := 4 + int.from_bytes(received[:4], "big")):
                    tap.write(bytes(received[4:end]))
                    del received[:end]
            else:
                frame = os.read(tap.descriptor, FRAME_BYTES_MAX)
                wire.sendall(len(frame).to_bytes(4, "big") + frame)


def serve(port: int) -> None:
    """Answers each connection as a page."""
    listener = socket.create_server(("", port))

    def answer() -> None:
        while True:
            with listener.accept()[0] as one:
                one.recv(4096)
                one.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")

    threading.Thread(target=answer, daemon=True).start()


def reached(address: str, port: int) -> str:
    """What comes of a connection there: connected, or why not."""
    try:
        socket.create_connection((address, port), 0.5).close()
    except OSError as error:
        return type(error).__name__
    return "connected"


def flood(address: str, port: int, count: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
        for _ in range(count):
            with contextlib.suppress(OSError):
                sending.sendto(b"x" * 1400, (address, port))


SCRIPT = """#!/bin/sh
[ "$1" = bound ] || exit 0
ip addr add $ip/$mask dev $interface; ip route add default via $router
echo $ip/$mask $router $dns >&2
"""


def lease(*wanted: str) -> str:
    """What busybox's client is given, which asks for an address or for none."""
    with tempfile.NamedTemporaryFile("w", suffix=".sh", delete=False) as script:
        script.write(SCRIPT)
    Path(script.name).chmod(0o755)
    asks = [word for address in wanted for word in ("-r", address)]
    argv = ["busybox", "udhcpc", "-i", TAP, "-n", "-q", "-f", "-t", "5", "-s", script.name, *asks]
    stderr = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False).stderr
    Path(script.name).unlink()
    return next((line for line in stderr.splitlines() if line.count(" ") == 2 and "/" in line), stderr)


def main() -> None:
    wire = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    assert ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0
    tap = Tap()
    address, gateway, mac = ADDRESS, GATEWAY, "52:54:00:11:22:33"
    if len(sys.argv) == 4:
        address, mac = sys.argv[2:]
        gateway = address.rpartition(".")[0] + ".1"
    static = (f"addr add {address}/24 dev {TAP}", f"route add default via {gateway}") if sys.argv[2:] else ()
    for words in (f"link set {TAP} address {mac}", "link set lo up", *static):
        subprocess.run(["ip", *words.split()], check=True)
    threading.Thread(target=pump, args=(tap, wire), daemon=True).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        result = eval(line)
        sys.stdout.write(f"{result!r}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
