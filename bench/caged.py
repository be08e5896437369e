"""python -m bench.caged [--rounds 9] [--mib 2048] [--disks 5]: what the cage costs.

A raw disk is copied by the product's own worker, in its cage and without it (then `enter` does nothing), in turn: several times
in one order, which is as long as a copy is, and once with 1 MiB, which is nearly all start. Of each the shortest counts: what
others took of the machine is not the cage's. And a service is asked to look into an appliance, which a caged child does. To
reach: a speed of 0.98 of that without, and a look in 1 s. The first byte of a job: `python -m bench.service.first_byte`.
"""

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.service.page import service
from synvirt.cage import layers
from synvirt.cli.client import Client
from synvirt.disks.specs import FileWriterSpec, RawSpec
from synvirt.jobs.orders import CopyOrder, DiskOrder
from synvirt.sample import build

RUN = "import runpy, synvirt.cage as c; {}; runpy.run_module('synvirt.worker', run_name='__main__')"
WORKER = {"with": RUN.format("pass"), "without": RUN.format("c.enter = lambda cage: ()")}
LEAST_SPEED, LOOK_MAX_S = 0.98, 1.0
LOOKS = 9


def copied(how: str, source: Path, target: Path, disks: int = 1) -> tuple[float, float]:
    """Seconds by the clock and of processors, from the worker's start to its end, of an order that copies the disk
    `disks` times."""
    target.unlink(missing_ok=True)
    size = source.stat().st_size
    with target.open("wb") as made:
        made.truncate(size)
    writer = FileWriterSpec(path=str(target), size_bytes=size)
    order = CopyOrder(disks=tuple(DiskOrder(key=str(n), reader=RawSpec(path=str(source)), writer=writer) for n in range(disks)))
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with subprocess.Popen(
        [sys.executable, "-P", "-c", WORKER[how]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(order.to_line())
        worker.stdin.flush()
        worker.stdout.read()
        code = worker.wait()
    took, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    if code != 0 or _head(target) != _head(source):
        sys.exit(f"the copy {how} a cage ended with {code}")
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1 << 20)


def speed(folder: Path, rounds: int, mib: int, disks: int) -> bool:
    source, small, target = folder / "disk.raw", folder / "small.raw", folder / "volume.raw"
    for path, count in ((source, mib), (small, 1)):
        with path.open("wb") as made:
            for number in range(count):
                made.write(random.Random(number).randbytes(1 << 20))
    orders = {"start": (small, 1), "copy": (source, disks)}
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number in range(rounds + 1):
        for name, (path, count) in orders.items():
            for how in ("with", "without") if number % 2 else ("without", "with"):
                found = copied(how, path, target, count)
                if number:  # the first warms the page cache
                    taken.setdefault((name, how), []).append(found)
    best = {key: tuple(min(one[at] for one in each) for at in (0, 1)) for key, each in taken.items()}
    clock, processors = (best["copy", "without"][at] / best["copy", "with"][at] for at in (0, 1))
    bytes_alone = [(best["copy", how][0] - best["start", how][0]) for how in ("without", "with")]
    pairs = [without[0] / caged[0] for without, caged in zip(taken["copy", "without"], taken["copy", "with"], strict=True)]
    moved = mib * disks
    start = [1000 * best["start", how][0] for how in ("with", "without")]
    print(f"| a worker's start in the cage, with 1 MiB | {start[0]:.0f} ms | without {start[1]:.0f} ms | |")
    alone, median = bytes_alone[0] / bytes_alone[1], statistics.median(pairs)
    print(
        f"| copy of {moved / 1024:.0f} GiB in the cage, of one without | {clock:.3f} | median of pairs {median:.3f}, "
        f"without their starts {alone:.3f}, processors {processors:.3f}, {moved / best['copy', 'with'][0]:.0f} MiB/s "
        f"| ≥ {LEAST_SPEED} |"
    )
    return clock >= LEAST_SPEED


def looked(folder: Path) -> bool:
    seconds = []
    with service(folder) as (_, data_dir), Client.local(data_dir / "synvirt.sock") as client:
        ova = build(data_dir / "imports", payload_mib=200).ova
        for _ in range(LOOKS):
            begun = time.monotonic()
            client.ask("POST", "/host-files/inspect", json={"path": str(ova)})
            seconds.append(time.monotonic() - begun)
    print(f"| a look into an appliance | {statistics.median(seconds):.2f} s | max {max(seconds):.2f} s | ≤ {LOOK_MAX_S:g} s |")
    return max(seconds) <= LOOK_MAX_S


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--disks", type=int, default=5)
    asked = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}; layers: {', '.join(name for name, has in layers().items() if has)}")
    with tempfile.TemporaryDirectory(prefix="synvirt-caged-") as name:
        good = [speed(Path(name), asked.rounds, asked.mib, asked.disks), looked(Path(name))]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
