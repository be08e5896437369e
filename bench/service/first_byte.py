"""python -m bench.service.first_byte: from POST /migrations to the first byte on the volume.

The measure is half a second at the most. A real service, a real OVA; the volume is looked at every 5 ms.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench.service.page import service
from synvirt.cli.client import Client
from synvirt.model.plan import MigrationPlan
from synvirt.sample import build

ROUNDS = 5


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="synvirt-bench-") as folder,
        service(Path(folder)) as (_, data_dir),
        Client.local(data_dir / "synvirt.sock") as client,
    ):
        ova = build(data_dir / "imports", payload_mib=200).ova
        seconds = [_round(client, data_dir, ova) for _ in range(ROUNDS)]
    print(f"| submit to first byte | {statistics.median(seconds):.2f} s | max {max(seconds):.2f} s | ≤ 0.5 s |")


def _round(client: Client, data_dir: Path, ova: Path) -> float:
    plan = MigrationPlan.model_validate(
        {
            "source": {"Offline": "ova_archive"},
            "source_ref": {"kind": "offline_host_path", "path": str(ova)},
            "mode": "Cold",
            "target": {"start": False, "name": f"first-byte-{time.monotonic_ns()}"},
        }
    )
    started = time.monotonic()
    job = client.submit(plan)
    while not _written(data_dir / "volumes" / str(job.id)):
        if (now := client.migration(job.id)).ended:
            sys.exit(f"the job ended without a byte: {now.last_error}")
        time.sleep(0.005)
    took = time.monotonic() - started
    while not client.migration(job.id).ended:
        time.sleep(0.1)
    return took


def _written(folder: Path) -> bool:
    return any(volume.stat().st_blocks for volume in folder.glob("*.raw"))


if __name__ == "__main__":
    main()
