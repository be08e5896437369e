"""python -m bench.xen: a pool's VMs listed, and a disk read by NBD over TLS against nbdcopy from the same server.

Against the tests' stand-in of a pool, whose NBD server is a real nbdkit: a listing counts the stand-in's own work, too.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from synvirt.copying import copy
from synvirt.disks import open_reader, open_writer
from synvirt.disks.specs import FileWriterSpec, NbdTlsSpec
from synvirt.live import SourceAccess
from synvirt.live.xen.adapter import XenApi
from tests.fakes.xenserver import XenServer, xenserver

LISTED_REACH_S = 2.0
NBD_REACH = 0.9
_THREADS = 8


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.xen", description=__doc__)
    parser.add_argument("--vms", type=int, default=2000, help="how many VMs the pool has, of two disks each")
    parser.add_argument("--data-mib", type=int, default=1024, help="size of the disk that is read, all of it data")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count; one goes before them")
    options = parser.parse_args()
    print("| row | median | each | reach | ok |\n|---|---:|---|---:|---|")
    with (
        tempfile.TemporaryDirectory(prefix="synvirt-bench-", dir="/var/tmp") as folder,
        xenserver(Path(folder) / "pool") as pool,
    ):
        store = pool.pool.add_store()
        for number in range(options.vms):
            pool.pool.add_vm(f"web-{number}", [bytes(512), bytes(512)], store)
        took = [asyncio.run(_listed(pool.access(), options.vms)) for _ in range(options.rounds + 1)][1:]
        _row(f"{options.vms} VMs listed", took, f"< {LISTED_REACH_S} s", ok=statistics.median(took) < LISTED_REACH_S)
        ours, theirs = _read(pool, Path(folder), options.data_mib, options.rounds)
        ratio = statistics.median(theirs) / statistics.median(ours)
        _row("NBD over TLS, nbdcopy", theirs, "", ok=True)
        _row(f"NBD over TLS, ours ({ratio:.2f}x)", ours, f">= {NBD_REACH}x", ok=ratio >= NBD_REACH)


def _row(name: str, took: list[float], reach: str, *, ok: bool) -> None:
    each = " ".join(f"{one:.2f}" for one in took)
    print(f"| {name} | {statistics.median(took):.2f} s | {each} | {reach} | {'yes' if ok else 'no'} |")


async def _listed(access: SourceAccess, expected: int) -> float:
    began = time.monotonic()
    adapter = XenApi(access)
    try:
        await adapter.connect()
        found = await adapter.list_vms()
    finally:
        await adapter.close()
    assert len(found) == expected
    return time.monotonic() - began


def _read(pool: XenServer, folder: Path, data_mib: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each round, ours and nbdcopy's by turns."""
    with (pool.pool.exports / "disk").open("wb") as disk:
        for _ in range(data_mib):
            disk.write(os.urandom(1 << 20))
    trusted, target = pool.folder / "keys-1", folder / "target"
    spec = NbdTlsSpec(host="127.0.0.1", port=pool.nbd.port, export="disk", trusted=str(trusted))
    uri = f"nbds://127.0.0.1:{pool.nbd.port}/disk?tls-certificates={trusted}"
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(rounds + 1):
        began = time.monotonic()
        subprocess.run(["nbdcopy", "--flush", uri, str(target)], check=True)
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
    return ours[1:], theirs[1:]


if __name__ == "__main__":
    main()
