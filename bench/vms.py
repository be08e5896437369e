"""python -m bench.vms [--vms N]: how long a vSphere source takes to list its VMs, against VMware's own simulator.

The whole of a question: a session, the list, the session's end. The measure is under 2 s for 2,000 VMs.
"""

import argparse
import tempfile
from pathlib import Path

from bench.listed import listed_row, took
from synvirt.live.vsphere.adapter import VimApi
from tests.fakes.vcenter import vcenter


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.vms", description=__doc__)
    parser.add_argument("--vms", type=int, default=2000, help="how many VMs the source has: half of them in each of two pools")
    parser.add_argument("--rounds", type=int, default=5, help="questions that count")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="synvirt-bench-", dir="/var/tmp") as folder,
        vcenter(Path(folder), vms=options.vms // 2) as host,
    ):
        seconds = took(lambda: VimApi(host.access()), options.vms // 2 * 2, options.rounds)
    print("| row | median | each | reach | ok |\n|---|---:|---|---:|---|")
    listed_row(f"{options.vms} VMs listed", seconds)


if __name__ == "__main__":
    main()
