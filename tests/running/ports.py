"""Ports for servers that must know their port before they listen."""

import itertools
import os
import socket

# Below those that the kernel gives to whoever asks for any (net.ipv4.ip_local_port_range, from 32768 on): none of these is
# taken by a connection's own end, or by another worker's test, between the moment it is chosen and the server's start.
FIRST, COUNT = 12_000, 20_000
_numbers: "dict[int, itertools.count[int]]" = {}


def free_port() -> int:
    """Another one at each call in this process. Each forked process begins elsewhere."""
    for number in _numbers.setdefault(os.getpid(), itertools.count(os.getpid() * 97)):
        port = FIRST + number % COUNT
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("there is no end to numbers")
