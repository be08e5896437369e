"""python -m bench.platforms.nutanix [--vms N] [--mib N]: how long Prism takes to list its VMs, and how fast disks come by NFS.

The list: a session, all pages, the session's end, against our stand-in (its own time counts too). The measure is under 2 s for
2,000 VMs. NFS: a file of a real nfs-ganesha, read by the product's reader into memory, against libnfs' own nfs-cp into memory.
The measure is 0.9 of nfs-cp.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.platforms.listed import REACH_S, took
from synvirt.disks import open_reader
from synvirt.disks.specs import NfsSpec
from synvirt.live.nutanix.adapter import PrismApi
from tests.fakes.prism.lab import HERE
from tests.fakes.prism.nfs import nfs_server
from tests.fakes.prism.server import prisms
from tests.fakes.prism.state import VmState

REACH = 0.9
STEP_BYTES = 4 << 20


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.platforms.nutanix", description=__doc__)
    parser.add_argument("--vms", type=int, default=2000, help="how many VMs the cluster has")
    parser.add_argument("--mib", type=int, default=512, help="how large the file is")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    options = parser.parse_args()
    print("| row | ours | peer's | each | reach | ok |\n|---|---:|---:|---|---:|---|")
    with tempfile.TemporaryDirectory(prefix="synvirt-bench-", dir="/dev/shm") as folder:
        list_vms(Path(folder) / "prism", options.vms, options.rounds)
        read_by_nfs(Path(folder), options.mib, options.rounds)


def list_vms(folder: Path, vms: int, rounds: int) -> None:
    with prisms(folder) as cluster:
        # What is measured is a Prism's client: no answer is held against the schema.
        cluster.checked = False
        for number in range(vms):
            vm = VmState(f"00000000-0000-0000-0000-{number:012}", f"vm {number}", [])
            cluster.state.vms[vm.id] = vm
        for which in ("central", "element"):
            seconds = took(lambda: PrismApi(cluster.access(which)), vms, rounds)  # noqa: B023 - called at once
            middle = statistics.median(seconds)
            each = " ".join(f"{one:.2f}" for one in seconds)
            print(f"| {vms} VMs by {which} | {middle:.2f} s | | {each} | < {REACH_S} s | {_verdict(middle < REACH_S)} |")


def read_by_nfs(folder: Path, mib: int, rounds: int) -> None:
    with prisms(folder / "bytes") as cluster:
        cluster.state.cluster_list.append(HERE)
        file = cluster.state.folder / "default" / "disk"
        with file.open("wb") as made:
            for _ in range(mib):
                made.write(os.urandom(1 << 20))
        with nfs_server(folder / "nfs", cluster.state) as ports:
            spec = NfsSpec(host="127.0.0.1", export="/default", path="/disk", nfs_port=ports[0], mount_port=ports[1])
            url = f"nfs://127.0.0.1/default/disk?version=3&nfsport={ports[0]}&mountport={ports[1]}"
            ours, theirs = [], []
            for _ in range(rounds + 1):
                ours.append(_read(spec, folder / "ours"))
                theirs.append(_copied(url, folder / "theirs"))
            assert (folder / "ours").read_bytes() == file.read_bytes()
    ratios = [peer / our for our, peer in zip(ours[1:], theirs[1:], strict=True)]
    middle = statistics.median(ratios)
    rate, peer = (mib / statistics.median(took[1:]) for took in (ours, theirs))
    each = " ".join(f"{one:.2f}" for one in ratios)
    print(f"| {mib} MiB by NFS | {rate:.0f} MiB/s | {peer:.0f} MiB/s | {each} | ≥ {REACH} | {_verdict(middle >= REACH)} |")


def _read(spec: NfsSpec, to: Path) -> float:
    began = time.monotonic()
    reader = open_reader(spec)
    try:
        with to.open("wb") as file:
            file.truncate(reader.size)

            def part(at: int) -> None:
                buffer = bytearray(min(STEP_BYTES, reader.size - at))
                reader.read_into(at, memoryview(buffer))
                os.pwrite(file.fileno(), buffer, at)

            with ThreadPoolExecutor(reader.max_readers) as pool:
                list(pool.map(part, range(0, reader.size, STEP_BYTES)))
    finally:
        reader.close()
    return time.monotonic() - began


def _copied(url: str, to: Path) -> float:
    to.unlink(missing_ok=True)
    began = time.monotonic()
    subprocess.run(["nfs-cp", url, str(to)], check=True, capture_output=True, timeout=600)
    return time.monotonic() - began


def _verdict(kept: bool) -> str:
    return "yes" if kept else "no"


if __name__ == "__main__":
    main()
