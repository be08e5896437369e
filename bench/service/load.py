"""python -m bench.service.load: how long the API and the page answer with 5,000 jobs and a wave of 5,000 members in the tables.

Half of the members are healthy, the others wait; the wave is held, so that the service itself looks at it meanwhile. The
service is a process of its own; each address is asked several times over its Unix socket. The tables are SQLite's, or with
--postgresql those of a server of the bench's own.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import psycopg

from bench.service.fleet import NOW, fleet
from bench.service.listing import job
from bench.service.page import service
from synvirt.fleet.changing import change_members
from synvirt.fleet.model import MemberState
from synvirt.fleet.records import member_of
from synvirt.fleet.waves import Waves
from synvirt.settings import Settings
from synvirt.settings.data_dir import prepare_data_dir
from synvirt.store import Store
from tests.servers import postgres

VMS, REACH_S = 5000, 0.3
API, HOST = "/api/v1", "load"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.service.load", description=__doc__)
    parser.add_argument("--vms", type=int, default=VMS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--postgresql", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="synvirt-bench-", dir="/dev/shm"))
        database = {"database_url": _database(stack)} if options.postgresql else {}
        settings = Settings.model_validate(
            {"data_dir": Path(folder) / "data", "listen": "127.0.0.1:0", "host_id": HOST} | database
        )
        prepare_data_dir(settings)
        store = Store(settings.store_url)
        wave_id, job_id = _filled(store, options.vms)
        store.close()
        with service(Path(folder), **database, host_id=HOST) as (_, _):
            asked = {name: path.format(wave=wave_id, job=job_id) for name, path in PATHS.items()}
            for path in asked.values():
                _took(settings.socket_path, path)
            slow = False
            print(f"| {options.vms} jobs, a wave of {options.vms} | median | longest | size | reach | ok |")
            print("|---|---:|---:|---:|---:|---|")
            for name, path in asked.items():
                each = [_took(settings.socket_path, path) for _ in range(options.rounds)]
                seconds = [took for took, _ in each]
                median = statistics.median(seconds)
                slow = slow or median > REACH_S
                print(
                    f"| {name} | {median * 1000:.0f} ms | {max(seconds) * 1000:.0f} ms | {each[0][1] / 1024:.0f} KiB "
                    f"| ≤ {REACH_S * 1000:.0f} ms | {'yes' if median <= REACH_S else 'no'} |"
                )
    if slow:
        sys.exit("not reached")


PATHS = {
    "page: jobs": "/",
    "page: a job": "/migrations/{job}",
    "page: waves": "/waves",
    "page: a wave": "/waves/{wave}",
    "page: a wave's last members": "/waves/{wave}?after=4900",
    "page: a wave's members that wait": "/waves/{wave}?state=waiting",
    "API: jobs": f"{API}/migrator/migrations",
    "API: a job": f"{API}/migrator/migrations/{{job}}",
    "API: waves": f"{API}/waves",
    "API: members": f"{API}/waves/{{wave}}/members?limit=200",
    "API: a whole wave": f"{API}/waves/{{wave}}",
    "API: its report as CSV": f"{API}/waves/{{wave}}/report?format=csv",
    "API: its report as JSON": f"{API}/waves/{{wave}}/report?format=json",
    "API: its report as HTML": f"{API}/waves/{{wave}}/report?format=html",
    "API: its export as CSV": f"{API}/waves/{{wave}}/export?format=csv",
    "API: its export as JSON": f"{API}/waves/{{wave}}/export?format=json",
}


def _database(stack: ExitStack) -> str:
    server = stack.enter_context(postgres.server())
    with psycopg.connect(server % "postgres", autocommit=True) as connection:
        connection.execute("CREATE DATABASE load")
    return server % "load"


def _filled(store: Store, vms: int) -> tuple[UUID, UUID]:
    """The ids of the wave and of a job."""
    jobs = [job() for _ in range(vms)]
    for one in jobs:
        store.add(one, host=HOST)
    asked, _ = fleet(vms, 40, 26)
    waves = Waves(store.waves)
    wave = waves.create(asked)
    rows, _ = store.waves.members(wave.id)
    healthy = []
    for place, (row, made) in enumerate(zip(rows, jobs, strict=True)):
        if place % 2:
            at = NOW + timedelta(minutes=place)
            fields = {
                "state": MemberState.HEALTHY,
                "job_id": made.id,
                "planned_at": at,
                "cut_over_at": at,
                "outage_s": 60.0 + place,
            }
            healthy.append(member_of(row).model_copy(update=fields))
    change_members(store.waves, wave.id, healthy, {MemberState.WAITING}, {})
    store.waves.put_reasons(wave.id, {row.member_id: "It waits for its window." for row in rows[::2]})
    waves.go(wave.id)
    waves.hold(wave.id)
    return wave.id, jobs[0].id


def _took(socket_path: Path, path: str) -> tuple[float, int]:
    """Seconds and bytes, as curl measures them."""
    command = ["curl", "--silent", "--fail", "--output", "/dev/null", "--write-out", "%{time_total} %{size_download}"]
    command += ["--unix-socket", str(socket_path), f"http://synvirt{path}"]
    seconds, size = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split()
    return float(seconds), int(size)


if __name__ == "__main__":
    main()
