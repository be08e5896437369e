"""Does the service answer while 1,000 connections say nothing and 200 servers do not answer it? `python -m
bench.service.silence`

`/healthz` is asked ten times a second; its slowest answer counts, and 1 s is the most that it may take.
"""

import contextlib
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.fakes.service import PASSWORD, USER, Service

IDLE, SERVERS, SECONDS = 1000, 200, 25.0
# Each address may have 256 connections.
ADDRESSES = 5
WITHIN_S = 1.0


@contextlib.contextmanager
def silent_server(held: list[socket.socket]) -> Iterator[int]:
    """Takes connections into `held`, and says nothing."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)

    def take() -> None:
        with contextlib.suppress(OSError):
            while True:
                held.append(listening.accept()[0])

    threading.Thread(target=take, daemon=True).start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.close()
        for one in held:
            one.close()


def idle_connections(port: int, count: int) -> tuple[list[socket.socket], int]:
    """Those that stand, and how many were refused."""
    held, refused = [], 0
    for number in range(count):
        try:
            held.append(socket.create_connection(("127.0.0.1", port), 5, (f"127.0.1.{1 + number % ADDRESSES}", 0)))
        except OSError:
            refused += 1
    return held, refused


def ask_silent_ones(client: httpx.Client, source: str) -> None:
    with contextlib.suppress(httpx.HTTPError):
        client.post(f"/api/v1/migrator/sources/{source}/test", timeout=120)


def main() -> None:
    waiting: list[socket.socket] = []
    with tempfile.TemporaryDirectory() as name, silent_server(waiting) as silent:
        service = Service(Path(name), tls=False)
        with service.served() as server, httpx.Client(base_url=server.address, auth=(USER, PASSWORD)) as client:
            sources = []
            for number in range(SERVERS):
                source = {
                    "name": f"silent {number}",
                    "kind": "pve_api",
                    "endpoint": f"https://127.0.0.1:{silent}",
                    "credentials": {"user": "a@pam", "password": "b"},
                    "options": {"verify_tls": False},
                }
                made = client.post("/api/v1/migrator/sources", json=source)
                assert made.status_code == 201, made.text
                sources.append(made.json()["id"])
            held, refused = idle_connections(int(server.address.rpartition(":")[2]), IDLE)
            # As many at once as a client has connections; each by its own.
            for source in sources:
                mine = httpx.Client(base_url=server.address, auth=(USER, PASSWORD))
                threading.Thread(target=ask_silent_ones, args=(mine, source), daemon=True).start()
            slowest, asked, until = 0.0, 0, time.monotonic() + SECONDS
            while time.monotonic() < until:
                begun = time.monotonic()
                assert httpx.get(f"{server.address}/healthz", timeout=60).status_code == 200
                slowest, asked = max(slowest, time.monotonic() - begun), asked + 1
                time.sleep(0.1)
            good = slowest <= WITHIN_S and waiting
            print(
                f"{len(held)} idle connections ({refused} refused), {SERVERS} silent servers ({len(waiting)} are waited for): "
                f"/healthz asked {asked} times, slowest {slowest:.2f} s: {'ok' if good else 'NOT OK'}",
                flush=True,
            )
            shutil.rmtree(name, ignore_errors=True)
            # What waits for silent servers is not waited for.
            os._exit(0 if good else 1)


if __name__ == "__main__":
    main()
