"""python -m bench.platforms.proxmox: a cluster's VMs listed; a guest's disk read by SSH against nbdcopy through the same
tunnel; deltas.

Against the tests' stand-in of a cluster, behind which sshd, QEMU and its NBD server are real: a listing counts the stand-in's
own work, too. Needs root, as the tests' nodes do.
"""

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from uuid import uuid4

from bench.platforms.listed import listed_row, row, took
from synvirt.copying import copy
from synvirt.disks import open_reader, open_writer
from synvirt.disks.specs import FileWriterSpec, NbdSpec
from synvirt.live.proxmox.adapter import PveApi
from tests.contracts.live import read
from tests.servers.pve_lab import PveLab, pve_lab

NBD_REACH = 0.9
DELTA_REACH = 1.02
_THREADS = 8
# In memory: what is measured is the way here, and not how a busy disk takes it.
_TARGETS = "/dev/shm"
_BLOCK = 65536


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.platforms.proxmox", description=__doc__)
    parser.add_argument("--vms", type=int, default=2000, help="how many VMs the cluster has")
    parser.add_argument("--data-mib", type=int, default=512, help="size of the disk that is read, all of it data")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count; one goes before them")
    options = parser.parse_args()
    print("| row | median | each | reach | ok |\n|---|---:|---|---:|---|")
    with pve_lab("pve1") as lab, tempfile.TemporaryDirectory(prefix="synvirt-bench-", dir=_TARGETS) as folder:
        for number in range(options.vms):
            lab.cluster.add(10_000 + number, scsi0="local-lvm:vm-1-disk-0,size=32G")
        listed_row(f"{options.vms} VMs listed", took(lambda: PveApi(lab.access()), options.vms, options.rounds))
        ours, theirs = asyncio.run(_read(lab, Path(folder), options.data_mib, options.rounds))
        ratio = statistics.median(theirs) / statistics.median(ours)
        row("disk of a running guest by SSH, nbdcopy", theirs, "", ok=True)
        row(f"disk of a running guest by SSH, ours ({ratio:.2f}x)", ours, f">= {NBD_REACH}x", ok=ratio >= NBD_REACH)
        more = asyncio.run(_delta(lab))
        judged = "yes" if more <= DELTA_REACH else "no"
        print(f"| bytes read of a delta, by what changed | {more:.3f} | | <= {DELTA_REACH} | {judged} |")


async def _read(lab: PveLab, folder: Path, data_mib: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each round, ours and nbdcopy's by turns, of one snapshot by one tunnel."""
    vm, name, target = lab.vm(f"{data_mib}M"), f"synvirt-{uuid4()}-1", folder / "target"
    (_, path, _), *_ = lab.disks(vm)
    with path.open("r+b") as disk:
        for _ in range(data_mib):
            disk.write(os.urandom(1 << 20))
    lab.start(vm.vmid)
    ours: list[float] = []
    theirs: list[float] = []
    adapter = PveApi(lab.access())
    await adapter.connect()
    try:
        snapshot = await adapter.snapshot(str(vm.vmid), name)
        disk_of = next(one for one in (await adapter.inspect(str(vm.vmid))).disks if one.key == "scsi0")
        spec = await adapter.open_disk(str(vm.vmid), snapshot, disk_of, None)
        assert isinstance(spec, NbdSpec)
        for _ in range(rounds + 1):
            began = time.monotonic()
            subprocess.run(["nbdcopy", "--flush", spec.uri, str(target)], check=True)
            theirs.append(time.monotonic() - began)
            target.unlink()
            target.touch()
            os.truncate(target, data_mib << 20)
            began = time.monotonic()
            reader, writer = open_reader(spec), open_writer(FileWriterSpec(path=str(target), size_bytes=data_mib << 20))
            copy(reader, writer, threads=_THREADS)
            ours.append(time.monotonic() - began)
            reader.close()
            writer.close()
            target.unlink()
    finally:
        await adapter.cleanup(str(vm.vmid), name)
        await adapter.close()
        lab.kill(vm.vmid)
    return ours[1:], theirs[1:]


async def _delta(lab: PveLab) -> float:
    """Blocks all over a disk: how many bytes a delta reads for each that changed."""
    vm, job, dice = lab.vm("256M"), uuid4(), random.Random(7)
    lab.start(vm.vmid)
    first, second = f"synvirt-{job}-1", f"synvirt-{job}-2"
    changed = sorted(dice.sample(range(4096), 60))
    adapter = PveApi(lab.access())
    await adapter.connect()
    try:
        await adapter.snapshot(str(vm.vmid), first)
        await adapter.release(str(vm.vmid), first)
        for at in changed:
            lab.write(vm, "scsi0", at * _BLOCK, dice.randbytes(_BLOCK))
        snapshot = await adapter.snapshot(str(vm.vmid), second)
        disk = (await adapter.inspect(str(vm.vmid))).disks[0]
        _, data_bytes = read(await adapter.open_disk(str(vm.vmid), snapshot, disk, first))
    finally:
        for name in (first, second):
            await adapter.cleanup(str(vm.vmid), name)
        await adapter.close()
    return data_bytes / (len(changed) * _BLOCK)


if __name__ == "__main__":
    main()
