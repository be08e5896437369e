"""python -m bench.service.page: what 1,000 clients of the stream and 200 users of the page cost a copy that runs meanwhile.

One job copies a disk of real files, held to a rate as a network would hold it; alone, and with all of them. They come by the
Unix socket, for an address has a limit of its own. Half of the users look at the list and half at the job, each by its stream,
and each loads its page again every half a minute. They are one process of the lowest priority: elsewhere they would not be on
our cores.
"""

import argparse
import itertools
import os
import re
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from bench.sources import Sources
from synvirt.cli.client import Client
from synvirt.model.plan import MigrationPlan

CLIENTS, USERS, RELOAD_S = 1000, 200, 30.0
STREAM = "/api/v1/migrator/migrations/stream"
# To reach: of the copy's speed alone; and what all of them may cost the service's memory.
SPEED_MIN, MEMORY_MIB_MAX = 0.95, 256


@dataclass(frozen=True, slots=True)
class Seen:
    """The copy's speed, from its first tenth to its last; of the service meanwhile: the share of a core, memory at most."""

    mib_per_s: float
    cores: float
    memory_mib: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.service.page", description=__doc__)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--users", type=int, default=USERS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data-mib", type=int, default=1000, help="real files on the disk")
    parser.add_argument("--rate-mib", type=int, default=100, help="MiB/s that the copy is held to; 0: as fast as it can")
    parser.add_argument("--crowd", nargs=3, metavar=("SOCKET", "CLIENTS", "USERS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.crowd:
        _Crowd(options.crowd[0], int(options.crowd[1]), int(options.crowd[2])).run()
        return
    with tempfile.TemporaryDirectory(prefix="synvirt-bench-", dir="/dev/shm") as folder, service(Path(folder)) as data:
        pid, data_dir = data
        sources = Sources(data_dir / "imports", options.data_mib)
        disk = sources.get("disk.qcow2")
        sources.drop("disk.raw")
        alone: list[Seen] = []
        crowded: list[Seen] = []
        events_bytes = 0
        for _ in range(options.rounds):
            alone.append(_copied(pid, data_dir, disk, options.rate_mib, 0, 0)[0])
            seen, sent_bytes = _copied(pid, data_dir, disk, options.rate_mib, options.clients, options.users)
            crowded.append(seen)
            events_bytes += sent_bytes
    _report(alone, crowded, events_bytes, options)


def _report(alone: list[Seen], crowded: list[Seen], events_bytes: int, options: argparse.Namespace) -> None:
    speeds = [statistics.median(seen.mib_per_s for seen in each) for each in (alone, crowded)]
    cores = [statistics.median(seen.cores for seen in each) for each in (alone, crowded)]
    # The kernel keeps the highest figure of the whole process: after the first crowd, "alone" would have the crowd's.
    memory = [alone[0].memory_mib, crowded[-1].memory_mib]
    speed = speeds[1] / speeds[0]
    print("| | alone | with them | to reach |\n|---|---:|---:|---:|")
    print(f"| the copy, MiB/s | {speeds[0]:.1f} | {speeds[1]:.1f} | |")
    print(f"| by its speed alone | 1 | {speed:.2f} | {SPEED_MIN} |")
    print(f"| the service's memory, MiB | {memory[0]:.0f} | {memory[1]:.0f} | + {MEMORY_MIB_MAX} |")
    print(f"| the service, of a core | {cores[0]:.2f} | {cores[1]:.2f} | |")
    print(
        f"\n{options.clients} clients and {options.users} users were sent "
        f"{events_bytes / options.rounds / 2**20:.1f} MiB a copy."
    )
    if speed < SPEED_MIN or memory[1] - memory[0] > MEMORY_MIB_MAX:
        sys.exit("not reached")


@contextmanager
def service(folder: Path, **settings: str) -> Iterator[tuple[int, Path]]:
    """Its process, and its folder. `settings` beside those of its folder."""
    data_dir = folder / "data"
    argv = [sys.executable, "-m", "synvirt", "serve", "--data-dir", str(data_dir), "--listen", "127.0.0.1:0"]
    # A file, not a pipe: a pipe that nobody empties is full after some hundred jobs, and then the service waits for us.
    log = folder / "log"
    environment = os.environ | {f"SYNVIRT_{name.upper()}": value for name, value in settings.items()}
    with log.open("w") as lines, subprocess.Popen(argv, stderr=lines, env=environment) as service:
        try:
            while "SynVirt serves at" not in log.read_text():
                if service.poll() is not None:
                    sys.exit("the service did not start")
                time.sleep(0.05)
            (data_dir / "imports").mkdir(exist_ok=True)
            yield service.pid, data_dir
        finally:
            service.terminate()


def _copied(pid: int, data_dir: Path, disk: Path, rate_mib: int, clients: int, users: int) -> tuple[Seen, int]:
    """One job, and how many bytes its listeners were sent."""
    limits = {"bandwidth_bps": rate_mib << 20} if rate_mib else {}
    plan = MigrationPlan.model_validate(
        {
            "source": {"Offline": "qcow2"},
            "source_ref": {"kind": "offline_host_path", "path": str(disk)},
            "mode": "Cold",
            "target": {"start": False, "name": f"page-{time.monotonic_ns()}"},
            "limits": limits,
        }
    )
    socket_path = data_dir / "synvirt.sock"
    # Those who listen are there before the copy begins: to connect is not what is measured.
    with Client.local(socket_path) as client, _crowd(socket_path, clients, users) as crowd:
        job = client.submit(plan)
        if crowd is not None and crowd.stdin is not None:
            crowd.stdin.write(f"{job.id}\n")
            crowd.stdin.flush()
        begun_with, began, before = _at_least(client, job.id, 0.1), time.monotonic(), _cpu_seconds(pid)
        ended_with = _at_least(client, job.id, 0.9)
        took, spent = time.monotonic() - began, _cpu_seconds(pid) - before
        seen = Seen((ended_with - begun_with) / took / 2**20, spent / took, _memory_mib(pid))
        # No guest is defined, and nothing is left.
        client.cancel(job.id)
        sent_bytes = _events(crowd) if crowd is not None else 0
        while not client.migration(job.id).ended:
            time.sleep(0.2)
    return seen, sent_bytes


def _at_least(client: Client, job_id: UUID, part: float) -> int:
    """Bytes, as soon as the copy has this much of the disk."""
    while (done := (now := client.migration(job_id)).progress.bytes_done) < max(1, part * now.progress.bytes_total):
        if now.ended:
            sys.exit(f"the copy failed: {now.last_error}")
        time.sleep(0.05)
    return done


def _events(crowd: "subprocess.Popen[str]") -> int:
    answer, _ = crowd.communicate("end\n", timeout=120)
    sent_bytes, cut = map(int, answer.split())
    if cut:
        sys.exit(f"{cut} streams were cut")
    return sent_bytes


@contextmanager
def _crowd(socket_path: Path, clients: int, users: int) -> Iterator["subprocess.Popen[str] | None"]:
    """A process that says «ready» when its clients and half of its users are there, takes a job's id for the other half, and
    says at its end how many bytes came. None where nobody is wanted."""
    if not clients and not users:
        yield None
        return
    argv = [
        "nice",
        "-n",
        "19",
        sys.executable,
        "-m",
        "bench.service.page",
        "--crowd",
        str(socket_path),
        str(clients),
        str(users),
    ]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as crowd:
        try:
            assert crowd.stdout is not None
            if crowd.stdout.readline() != "ready\n":
                sys.exit("the clients cannot reach the service")
            yield crowd
        finally:
            crowd.kill()


class _Crowd:
    def __init__(self, socket_path: str, clients: int, users: int) -> None:
        self._socket_path, self._clients, self._users = socket_path, clients, users
        self._selector = selectors.DefaultSelector()
        self._bytes, self._cut = 0, 0

    def run(self) -> None:
        for _ in range(self._clients):
            self._listen(STREAM)
        newest = self._newest()
        at_list = self._users // 2
        for _ in range(at_list):
            self._listen(f"/events?after={newest}")
        print("ready", flush=True)
        job = sys.stdin.readline().strip()
        for _ in range(self._users - at_list):
            self._listen(f"/migrations/{job}/events")
        pages = itertools.cycle(["/"] * at_list + [f"/migrations/{job}"] * (self._users - at_list)) if self._users else None
        self._selector.register(sys.stdin, selectors.EVENT_READ, None)
        load_at = time.monotonic()
        while True:
            for key, _ in self._selector.select(0.05):
                if key.data is None:
                    print(self._bytes, self._cut, flush=True)
                    return
                self._take(key.fileobj)
            if pages is not None and time.monotonic() >= load_at:
                self._listen(next(pages), last=True)
                load_at += RELOAD_S / self._users

    def _listen(self, path: str, *, last: bool = False) -> None:
        """`last`: an answer that ends."""
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        caller.connect(self._socket_path)
        closing = "Connection: close\r\n" if last else ""
        caller.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{closing}\r\n".encode())
        caller.setblocking(False)
        self._selector.register(caller, selectors.EVENT_READ, "page" if last else "stream")

    def _take(self, caller: Any) -> None:
        content = caller.recv(1 << 18)
        self._bytes += len(content)
        if not content:
            self._cut += self._selector.get_key(caller).data == "stream"
            self._selector.unregister(caller)
            caller.close()

    def _newest(self) -> str:
        """The number that the list's page begins its stream after."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.connect(self._socket_path)
            caller.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: caller.recv(1 << 16), b""))
        found = re.search(rb"events\?after=([0-9]+)", answer)
        if found is None:
            sys.exit("the page of the list has no stream")
        return found[1].decode()


def _cpu_seconds(pid: int) -> float:
    """Of the process alone, without its workers that have ended."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _memory_mib(pid: int) -> float:
    """At most, so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
