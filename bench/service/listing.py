"""python -m bench.service.listing 50000: how long the first page of GET /migrations takes among this many jobs, over the Unix
socket, as curl measures it.

The measure is 50 ms at most, among 50,000. Jobs as they are after an import: a manifest, three disks, a domain's XML,
a submitter.
"""

import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from uuid import uuid4

from synvirt.api import Server, create_app
from synvirt.api.callers.auth import Remembering
from synvirt.jobs.board import Board
from synvirt.migrations.intake import Intake
from synvirt.model.job import DiskProgress, Domain, Migration, StateVisit
from synvirt.model.kinds import Mode, OfflineKind, State
from synvirt.model.machine import Disk, VmManifest
from synvirt.model.plan import HostPathRef, MigrationPlan, PlanSource
from synvirt.model.submitter import Submitter
from synvirt.model.values import now
from synvirt.settings import Settings
from synvirt.settings.data_dir import prepare_data_dir
from synvirt.store import Store

JOBS, ROUNDS = 50_000, 21


def main(jobs: int) -> None:
    with tempfile.TemporaryDirectory(prefix="synvirt-bench-") as folder:
        settings = Settings(data_dir=Path(folder), listen="127.0.0.1:0")
        prepare_data_dir(settings)
        board = Board()
        store = Store(settings.store_url, on_commit=board.committed)
        for _ in range(jobs):
            store.add(job(), host="bench")
        intake = Intake(store, board, host="bench", check=lambda plan: None, begin=lambda job: None, wake=lambda job: None)
        server = Server(create_app(intake, settings, authenticate=Remembering(lambda user, password, address: None)), settings)
        ready = threading.Event()
        thread = threading.Thread(target=server.run, kwargs={"on_ready": ready.set})
        thread.start()
        ready.wait()
        try:
            seconds = [_listing(settings.socket_path) for _ in range(ROUNDS)]
        finally:
            server.stop()
            thread.join()
            store.close()
    print(f"the first page among {jobs} jobs: {statistics.median(seconds) * 1000:.0f} ms (best {min(seconds) * 1000:.0f} ms)")


def _listing(socket_path: Path) -> float:
    url = "http://synvirt/api/v1/migrator/migrations"
    command = ["curl", "--silent", "--fail", "--output", "/dev/null", "--write-out", "%{time_total}", "--unix-socket"]
    return float(subprocess.run([*command, socket_path, url], check=True, capture_output=True, text=True, timeout=60).stdout)


def job() -> Migration:
    gib = 1 << 30
    disks = [("0", "system", 40 * gib), ("1", "data", 200 * gib), ("2", "logs", 10 * gib)]
    return Migration(
        id=uuid4(),
        name="web",
        plan=MigrationPlan(
            source=PlanSource(Offline=OfflineKind.OVA_ARCHIVE),
            source_ref=HostPathRef(kind="offline_host_path", path="/imports/web.ova"),
            mode=Mode.COLD,
        ),
        state=State.COMPLETED,
        mode_effective=Mode.COLD,
        disks=tuple(DiskProgress(key=key, label=label, bytes_total=size) for key, label, size in disks),
        manifest=VmManifest(
            vm_id="web", name="web", disks=tuple(Disk(key=key, label=label, capacity_bytes=size) for key, label, size in disks)
        ),
        domain=Domain(name="web", uuid=str(uuid4()), xml="<domain/>" + " " * 3000),
        history=tuple(StateVisit(state=state, at=now()) for state in (State.QUEUED, State.COPYING_FULL, State.COMPLETED)),
        submitted_by=Submitter(account="oidc:Joe", role="operator", address="192.0.2.7"),
        created_at=now(),
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else JOBS)
