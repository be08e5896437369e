"""python -m bench.service.memory: what the service's memory grows to, after 200 jobs and 10,000 calls of its API and its page.

Findings U19 saw 380 MB after twelve minutes. A real service, small real jobs that define a guest each; resident memory is read
after each part. What was needed once and is kept by the allocator counts: an operator sees it too.
"""

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import httpx

from bench.service.page import service
from synvirt.cli.client import Client
from synvirt.model.plan import MigrationPlan

JOBS, CALLS = 200, 10_000
# To reach, by issue: the service's resident memory at the end.
MEMORY_MIB_MAX = 200
DISK_MIB = 4
# This many jobs are submitted before the oldest of them is waited for.
AT_ONCE = 20


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.service.memory", description=__doc__)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--calls", type=int, default=CALLS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="synvirt-bench-") as folder, service(Path(folder)) as (pid, data_dir):
        disk = data_dir / "imports" / "disk.qcow2"
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", str(disk), f"{DISK_MIB}M"], check=True, timeout=60)
        subprocess.run(["qemu-io", "-c", f"write -P 7 0 {DISK_MIB}M", str(disk)], check=True, timeout=60, capture_output=True)
        socket_path = data_dir / "synvirt.sock"
        http = httpx.Client(transport=httpx.HTTPTransport(uds=str(socket_path)), base_url="http://synvirt", timeout=60)
        with http, Client.local(socket_path) as client:
            rows = [("at its start", _resident_mib(pid))]
            jobs = _jobs(client, disk, options.jobs)
            rows.append((f"after {len(jobs)} jobs", _resident_mib(pid)))
            calls = 0
            for part in (options.calls // 2, options.calls - options.calls // 2):
                made = 0
                for path in itertools.islice(_paths(jobs), part):
                    http.get(path).raise_for_status()
                    made += 1
                calls += made
                rows.append((f"after {calls} calls", _resident_mib(pid)))
    print("| the service's resident memory | MiB | reach |\n|---|---:|---:|")
    for name, mib in rows:
        print(f"| {name} | {mib:.0f} | {f'≤ {MEMORY_MIB_MAX}' if name == rows[-1][0] else ''} |")
    if rows[-1][1] > MEMORY_MIB_MAX:
        sys.exit("not reached")


def _jobs(client: Client, disk: Path, count: int) -> list[UUID]:
    jobs: list[UUID] = []
    for number in range(count):
        plan = {
            "source": {"Offline": "qcow2"},
            "source_ref": {"kind": "offline_host_path", "path": str(disk)},
            "mode": "Cold",
            "target": {"start": False, "name": f"memory-{number}"},
        }
        jobs.append(client.submit(MigrationPlan.model_validate(plan)).id)
        if number >= AT_ONCE:
            _completed(client, jobs[number - AT_ONCE])
    for job in jobs[-AT_ONCE:]:
        _completed(client, job)
    return jobs


def _completed(client: Client, job: UUID) -> None:
    while not (now := client.migration(job)).ended:
        time.sleep(0.05)
    if now.state != "Completed":
        sys.exit(f"a job failed: {now.last_error}")


def _paths(jobs: list[UUID]) -> Iterator[str]:
    """What a page that is open, a script and a monitor ask for, in turn."""
    for job in itertools.cycle(jobs):
        yield from (
            "/api/v1/migrator/migrations?limit=50",
            f"/api/v1/migrator/migrations/{job}",
            "/",
            f"/migrations/{job}",
            "/api/v1/migrator/sources",
            "/metrics",
            "/healthz",
            "/api/v1/backup/runs",
            "/waves",
            "/openapi.json",
        )


def _resident_mib(pid: int) -> float:
    found = re.search(r"^VmRSS:\s+([0-9]+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    if found is None:
        sys.exit("the service is gone")
    return int(found[1]) / 1024


if __name__ == "__main__":
    main()
