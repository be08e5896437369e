"""python -m bench.platforms.xen: a pool's VMs listed, and a disk read by NBD over TLS against nbdcopy from the same server.

Against the tests' stand-in of a pool, whose NBD server is a real nbdkit: a listing counts the stand-in's own work, too.
"""

import argparse
import gc
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.platforms.listed import listed_row, row, took
from synvirt.copying import copy
from synvirt.disks import open_reader
from synvirt.disks.passed import Nowhere
from synvirt.disks.specs import NbdTlsSpec
from synvirt.live.xen.adapter import XenApi
from tests.fakes.xenserver import XenServer, xenserver

NBD_REACH = 0.9
_THREADS = 8


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.platforms.xen", description=__doc__)
    parser.add_argument("--vms", type=int, default=2000, help="how many VMs the pool has, of two disks each")
    parser.add_argument("--data-mib", type=int, default=1024, help="size of the disk that is read, all of it data")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count; one goes before them")
    options = parser.parse_args()
    print("| row | median | each | reach | ok |\n|---|---:|---|---:|---|")
    with tempfile.TemporaryDirectory(prefix="synvirt-bench-", dir="/var/tmp") as folder:
        with xenserver(Path(folder) / "many") as pool:
            store = pool.pool.add_store()
            for number in range(options.vms):
                pool.pool.add_vm(f"web-{number}", [bytes(512), bytes(512)], store)
            seconds = took(lambda: XenApi(pool.access()), options.vms, options.rounds)
        listed_row(f"{options.vms} VMs listed", seconds)
        # Another pool: with the records of the first the collector of this process would stop the copy, which has one of its
        # own in the service.
        del pool
        gc.collect()
        with xenserver(Path(folder) / "one") as pool:
            ours, theirs = _read(pool, options.data_mib, options.rounds)
        for name, at in (("", 0), (", processor", 1)):
            our, their = [one[at] for one in ours], [one[at] for one in theirs]
            ratio = statistics.median(their) / statistics.median(our)
            row(f"NBD over TLS, nbdcopy{name}", their, "", ok=True)
            row(f"NBD over TLS, ours{name} ({ratio:.2f}x)", our, f">= {NBD_REACH}x", ok=ratio >= NBD_REACH)


Took = tuple[float, float]


def _read(pool: XenServer, data_mib: int, rounds: int) -> tuple[list[Took], list[Took]]:
    """Seconds of each round, of the clock and of processors, ours and nbdcopy's by turns. Nothing is written: the page cache of
    a target costs more than TLS does. On a machine that others use, too, the clock says who got more of it."""
    with (pool.pool.exports / "disk").open("wb") as disk:
        for _ in range(data_mib):
            disk.write(os.urandom(1 << 20))
    trusted = pool.folder / "keys-1"
    spec = NbdTlsSpec(host="127.0.0.1", port=pool.nbd.port, export="disk", trusted=str(trusted))
    uri = f"nbds://127.0.0.1:{pool.nbd.port}/disk?tls-certificates={trusted}"

    def ours() -> None:
        reader = open_reader(spec)
        copy(reader, Nowhere(data_mib << 20), threads=_THREADS)
        reader.close()

    def theirs() -> None:
        subprocess.run(["nbdcopy", uri, "null:"], check=True)

    pairs = [(timed(ours, resource.RUSAGE_SELF), timed(theirs, resource.RUSAGE_CHILDREN)) for _ in range(rounds + 1)][1:]
    return [one for one, _ in pairs], [one for _, one in pairs]


def timed(use: Callable[[], None], who: int) -> Took:
    before, began = resource.getrusage(who), time.monotonic()
    use()
    after = resource.getrusage(who)
    return time.monotonic() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
