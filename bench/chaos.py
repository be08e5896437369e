"""Chaos on PostgreSQL: three services, many jobs, random faults. `python -m bench.chaos --jobs 60 --faults 200 --seed 1`

A fault: kill -9 of a service (it is started again), SIGSTOP for a while and SIGCONT, a restart of the database in the middle of
all, or fencing a host that is alive. In the end every job is to have the right bytes, or a cause, and nothing is left: no
worker, no volume that no job has. While it goes on, no volume may have two writers.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psycopg

from synvirt.errors import SynvirtError
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.sizes import MIB
from tests import postgres
from tests.house import House, offline_plan

HOSTS = ("a", "b", "c")
LEASE_S = 6.0
DISK_BYTES = 3 * MIB
FAULTS = {"kill -9": 5, "SIGSTOP": 4, "database restart": 1, "fenced": 2}
WITHIN_S = 1800.0


class Service:
    """One host's engine, in a process of its own."""

    def __init__(self, host: str, folder: Path, url: str) -> None:
        self.host, self.folder, self._url = host, folder, url
        folder.mkdir()
        self.log = (folder / "log").open("ab")
        self.begin()

    def begin(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.migrations.engine_process", str(self.folder), self._url],
            stdout=self.log,
            stderr=self.log,
            env=os.environ | {"LEASE_S": str(LEASE_S), "HOST": self.host},
        )

    def keep(self) -> None:
        if self.process.poll() is not None:
            self.begin()


def submitted(house: House, host: str, number: int, content: bytes) -> Migration:
    folder = house.imports / f"appliance-{number}"
    folder.mkdir()
    (folder / "disk-0.raw").write_bytes(content)
    house.intake._host = host
    return house.intake.submit(offline_plan(folder, limits={"bandwidth_bps": MIB}))


def restart_database(url: str) -> None:
    folder = Path(parse_qs(urlsplit(url).query)["host"][0])
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)[0]
    account = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    options = f"-k {folder} -c listen_addresses='' -c fsync=off"
    argv = [*account, str(programs / "pg_ctl"), "-w", "-m", "fast", "-D", str(folder / "data"), "-l", str(folder / "log")]
    subprocess.run([*argv, "-o", options, "restart"], check=True, stdout=subprocess.DEVNULL, cwd=folder, timeout=120)


def writers() -> Counter[str]:
    """How many processes hold each volume open for writing."""
    found: Counter[str] = Counter()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            held = set()
            for descriptor in (process / "fd").iterdir():
                target = str(descriptor.readlink())
                if "/volumes/" in target:
                    flags = int((process / "fdinfo" / descriptor.name).read_text().split("flags:")[1].split()[0], 8)
                    if flags & (os.O_WRONLY | os.O_RDWR):
                        held.add(target)
            found.update(held)
        except (OSError, IndexError):
            continue
    return found


def fault(kind: str, service: Service, house: House, url: str, chance: random.Random) -> None:
    match kind:
        case "kill -9":
            service.process.kill()
            service.process.wait()
        case "SIGSTOP":
            service.process.send_signal(signal.SIGSTOP)
            time.sleep(chance.choice((0.5, LEASE_S, 2 * LEASE_S)))
            service.process.send_signal(signal.SIGCONT)
        case "database restart":
            restart_database(url)
        case _:
            house.store.hosts.fence(service.host)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--jobs", type=int, default=60)
    asked.add_argument("--faults", type=int, default=200)
    asked.add_argument("--seed", type=int, default=1)
    options = asked.parse_args()
    chance = random.Random(options.seed)
    contents = [random.Random(number).randbytes(DISK_BYTES) for number in range(options.jobs)]
    with tempfile.TemporaryDirectory() as folder, postgres.server() as server:
        with psycopg.connect(server % "postgres", autocommit=True) as connection:
            connection.execute("CREATE DATABASE chaos")
        url = server % "chaos"
        services = [Service(host, Path(folder) / host, url) for host in HOSTS]
        houses = {one.host: House(one.folder, store_url=url) for one in services}
        jobs = []
        for number, content in enumerate(contents):
            host = HOSTS[number % len(HOSTS)]
            jobs.append((submitted(houses[host], host, number, content), host, content))
        store = houses["a"].store
        began, done, doubled = time.monotonic(), Counter[str](), 0
        ended = 0
        while ended < len(jobs) and time.monotonic() - began < WITHIN_S:
            for service in services:
                service.keep()
            if sum(done.values()) < options.faults:
                kind = chance.choices(list(FAULTS), list(FAULTS.values()))[0]
                try:
                    fault(kind, chance.choice(services), houses["a"], url, chance)
                    done[kind] += 1
                except SynvirtError as error:
                    print(f"{kind}: {error.detail}", file=sys.stderr)
            time.sleep(chance.uniform(0.0, 0.3))
            doubled += sum(count > 1 for count in writers().values())
            try:
                ended = sum(store.get(job.id).ended for job, _, _ in jobs)
            except SynvirtError:
                continue
        last = [(store.get(job.id), host, content) for job, host, content in jobs]
        states = Counter(str(job.state) for job, _, _ in last)
        right = sum(
            job.state is State.COMPLETED and houses[host].volume(job).read_bytes() == content for job, host, content in last
        )
        known = {houses[host].volume(job) for job, host, _ in last if job.state is State.COMPLETED}
        left = [path for house in houses.values() for path in (house.folder / "volumes").rglob("*") if path.is_file()]
        causes = [job.last_error.message for job, _, _ in last if job.state is State.FAILED and job.last_error is not None]
        for service in services:
            service.process.kill()
        took_s = time.monotonic() - began
        print(
            f"{len(jobs)} jobs, {sum(done.values())} faults ({dict(done)}) in {took_s:.0f} s: {dict(states)}, "
            f"{right} with the right bytes, {doubled} double writers, {len(set(left) - known)} leftovers; failed of: {causes}"
        )
        for house in houses.values():
            house.close()
    well = right + states[str(State.FAILED)] == len(jobs) and not doubled and not set(left) - known
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
