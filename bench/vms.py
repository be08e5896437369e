"""python -m bench.vms [--vms N]: how long a vSphere source takes to list its VMs, against VMware's own simulator.

The whole of a question: a session, the list, the session's end. The measure is under 2 s for 2,000 VMs.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from synvirt.live import SourceAccess
from synvirt.live.vsphere.adapter import VimApi
from tests.fakes.vcenter import vcenter

REACH_S = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.vms", description=__doc__)
    parser.add_argument("--vms", type=int, default=2000, help="how many VMs the source has: half of them in each of two pools")
    parser.add_argument("--rounds", type=int, default=5, help="questions that count")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="synvirt-bench-", dir="/var/tmp") as folder,
        vcenter(Path(folder), vms=options.vms // 2) as host,
    ):
        took = [asyncio.run(_listed(host.access(), options.vms // 2 * 2)) for _ in range(options.rounds + 1)][1:]
    middle = statistics.median(took)
    verdict = "yes" if middle < REACH_S else "no"
    print("| row | median | each | reach | ok |\n|---|---:|---|---:|---|")
    print(
        f"| {options.vms} VMs listed | {middle:.2f} s | {' '.join(f'{one:.2f}' for one in took)} | < {REACH_S} s | {verdict} |"
    )


async def _listed(access: SourceAccess, expected: int) -> float:
    began = time.monotonic()
    adapter = VimApi(access)
    try:
        await adapter.connect()
        found = await adapter.list_vms()
    finally:
        await adapter.close()
    assert len(found) == expected
    return time.monotonic() - began


if __name__ == "__main__":
    main()
