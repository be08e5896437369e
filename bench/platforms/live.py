"""python -m bench.platforms.live [--data-mib N] [--rounds N]: a running guest's disk on another libvirt host, whole and what
changed.

A real libvirtd and QEMU, as the tests start them. Whole: the copy worker against nbdcopy on the same export, by this host's
socket and through SSH. Delta: how many bytes a pass reads beyond what changed. Medians; content is compared.
"""

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from bench.measure import same_content
from synvirt.disks.specs import FileWriterSpec, ReaderSpec
from synvirt.jobs.orders import CopyOrder, DiskOrder
from synvirt.jobs.wire import Flushed, message_of
from synvirt.live import SnapshotRef
from synvirt.live.libvirt.adapter import LibvirtRemote, libvirt_remote
from synvirt.sizes import MIB
from tests.servers.libvirt_lab import LibvirtLab, lab

T = TypeVar("T")
KEY = "vda"
BLOCK_BYTES = 64 << 10
# A worker waits for its order by then.
START_S = 1.0
# A file system gives up a file's blocks a little after the file.
SETTLE_S = 2.0
WHOLE_REACH, DELTA_REACH = 0.9, 1.02


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.platforms.live", description=__doc__)
    parser.add_argument("--data-mib", type=int, default=1024, help="incompressible data on the disk")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side that count")
    options = parser.parse_args()
    with lab() as host, tempfile.TemporaryDirectory(prefix="synvirt-bench-", dir="/var/tmp") as folder:
        domain = _running(host, options.data_mib)
        print("| row | ours | peer or limit | ratio | reach | ok |\n|---|---:|---:|---:|---:|---|")
        for transport in ("local", "ssh"):
            asyncio.run(_measured(host, domain, transport, Path(folder), options.rounds))


def _running(host: LibvirtLab, data_mib: int) -> Any:
    raw, disk = host.folder / "data.raw", host.disk("1M")
    with raw.open("wb") as file:
        for number in range(data_mib):
            file.write(random.Random(number).randbytes(MIB))
    subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", str(raw), str(disk)], check=True)
    raw.unlink()
    domain = host.domain(disk)
    domain.create()
    return domain


async def _measured(host: LibvirtLab, domain: Any, transport: str, folder: Path, rounds: int) -> None:
    vm_id, name = domain.UUIDString(), f"synvirt-bench-{transport}"
    ours, peer = folder / "ours.raw", folder / "peer.raw"

    async def session(use: Callable[[LibvirtRemote], Awaitable[T]]) -> T:
        adapter = libvirt_remote(host.access(transport))
        try:
            await adapter.connect()
            return await use(adapter)
        finally:
            await adapter.close()

    async def whole(adapter: LibvirtRemote) -> SnapshotRef:
        await adapter.enable_cbt(vm_id, [KEY])
        snapshot = await adapter.snapshot(vm_id, f"{name}-1")
        disk = (await adapter.inspect(vm_id)).disks[0]
        spec = await adapter.open_disk(vm_id, snapshot, disk, None)
        await asyncio.to_thread(_whole, transport, spec, disk.capacity_bytes, ours, peer, rounds)
        await adapter.release(vm_id, f"{name}-1")
        return snapshot

    async def delta(adapter: LibvirtRemote, before: SnapshotRef) -> None:
        snapshot = await adapter.snapshot(vm_id, f"{name}-2")
        disk = (await adapter.inspect(vm_id)).disks[0]
        spec = await adapter.open_disk(vm_id, snapshot, disk, before.change_ids[KEY])
        await asyncio.to_thread(_delta, transport, spec, disk.capacity_bytes, changed, ours)
        for number in (1, 2):
            await adapter.cleanup(vm_id, f"{name}-{number}")

    before = await session(whole)
    blocks = random.Random(transport).sample(range(host.size(domain, KEY) // BLOCK_BYTES), 1024)
    changed = len(blocks) * BLOCK_BYTES
    for block in blocks:
        host.write(domain, KEY, block * BLOCK_BYTES, random.Random(block).randbytes(BLOCK_BYTES))
    await session(lambda adapter: delta(adapter, before))
    ours.unlink()


def _whole(transport: str, spec: ReaderSpec, size: int, ours: Path, peer: Path, rounds: int) -> None:
    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    for turn in range(rounds + 1):
        _away(ours)
        ours.touch()
        os.truncate(ours, size)
        with _worker() as copy:
            took = _timed(lambda copy=copy: copy(_order(spec, size, ours, fresh=True)))  # type: ignore[misc]
        _away(peer)
        other = _timed(lambda: subprocess.run(["nbdcopy", "--flush", spec.uri, str(peer)], check=True))  # type: ignore[union-attr]
        if turn:  # a first round warms the memory up
            seconds["ours"].append(took)
            seconds["peer"].append(other)
    equal = same_content(peer, ours)
    peer.unlink()
    mine, theirs = (statistics.median(seconds[side]) for side in ("ours", "peer"))
    verdict = "yes" if equal and theirs / mine >= WHOLE_REACH else "no" if equal else "wrong content"
    print(
        f"| {transport}, {size // MIB} MiB whole, against nbdcopy | {mine:.2f} s | {theirs:.2f} s | {theirs / mine:.2f}"
        f" | ≥ {WHOLE_REACH} | {verdict} |",
        flush=True,
    )


def _away(path: Path) -> None:
    """No such file, and none of the work left that its going makes for the disk: it is not the next one's."""
    path.unlink(missing_ok=True)
    os.sync()
    time.sleep(SETTLE_S)


def _delta(transport: str, spec: ReaderSpec, size: int, changed: int, ours: Path) -> None:
    last: list[Flushed] = []
    with _worker() as copy:
        took = _timed(lambda: last.append(copy(_order(spec, size, ours, fresh=False, sample="bench"))))
    read = last[0].bytes_total + last[0].bytes_checked
    verdict = "yes" if changed <= read <= DELTA_REACH * changed else "no"
    print(
        f"| {transport}, delta of {changed // MIB} MiB in {took:.2f} s | {read} B | {changed} B | {read / changed:.4f}"
        f" | ≤ {DELTA_REACH} | {verdict} |",
        flush=True,
    )


def _timed(do: Callable[[], object]) -> float:
    began = time.monotonic()
    do()
    return time.monotonic() - began


@contextlib.contextmanager
def _worker() -> Iterator[Callable[[DiskOrder], Flushed]]:
    """As the engine runs it: a process of its own, which starts while disks are opened, and then gets a line. What it
    does ends with its last message."""
    with subprocess.Popen([sys.executable, "-m", "synvirt.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        time.sleep(START_S)

        def copy(disk: DiskOrder) -> Flushed:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(CopyOrder(disks=(disk,)).to_line())
            child.stdin.flush()
            message = [message_of(line) for line in child.stdout][-1]
            child.wait()  # before its stdin is closed, which means that the service is gone
            if not isinstance(message, Flushed) or child.returncode != 0:
                sys.exit(f"the worker failed: {message}")
            return message

        yield copy


def _order(spec: ReaderSpec, size: int, path: Path, *, fresh: bool, sample: str | None = None) -> DiskOrder:
    return DiskOrder(key=KEY, reader=spec, writer=FileWriterSpec(path=str(path), size_bytes=size), fresh=fresh, sample=sample)


if __name__ == "__main__":
    main()
