"""A whole service for one job, as `synvirt demo` runs it: `python -m tests.real.one_job DATA_DIR`, a plan on stdin.

A process of its own, since libvirt opens one embedded driver a process; SYNVIRT_* variables set it, as they do any service. It
prints what came of the job, what the guest's agent reads in the sample's id file, the UUID and the serial number that its
firmware shows, and the SHA-256 of the volumes of a guest without an agent, as JSON, and leaves no guest running.
"""

import hashlib
import json
import sys
import threading
from pathlib import Path
from uuid import UUID

from synvirt.cli.client import Client
from synvirt.cli.migrating.watching import display, watch
from synvirt.logs import log_to
from synvirt.main import service
from synvirt.model.kinds import State
from synvirt.model.plan import MigrationPlan
from synvirt.sample import ID_PATH
from synvirt.settings import load


def main() -> None:
    settings = load(flags={"data_dir": Path(sys.argv[1]), "listen": "127.0.0.1:0"})
    log_to("info", sys.stderr)
    plan = MigrationPlan.model_validate_json(sys.stdin.read())
    with service(settings, announce=lambda text: None) as running, Client.local(settings.socket_path) as client:
        ready = threading.Event()
        server = threading.Thread(target=running.run, kwargs={"on_ready": ready.set})
        server.start()
        try:
            if not ready.wait(60):
                raise TimeoutError("the service did not start")
            with display(quiet=True) as show:
                job = watch(client, client.submit(plan), show=show)
            found: str | None = None
            shown: list[str] = []
            digests = []
            if job.state == State.COMPLETED and job.domain is not None:
                if job.boot_sign == "agent":
                    found = running.read_guest_file(UUID(job.domain.uuid), ID_PATH).decode().strip()
                    firmware = [f"/sys/class/dmi/id/product_{name}" for name in ("uuid", "serial")]
                    shown = [running.read_guest_file(UUID(job.domain.uuid), path).decode().strip() for path in firmware]
                else:
                    digests = [digest(settings.data_dir / "volumes" / str(disk.volume)) for disk in job.disks]
                running.remove(job)
        finally:
            running.stop()
            server.join()
    sys.stdout.write(json.dumps({"job": job.model_dump(mode="json"), "id": found, "shown": shown, "digests": digests}))


def digest(volume: Path) -> str:
    with volume.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
