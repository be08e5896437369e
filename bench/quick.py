"""python -m bench.quick: whether a copy costs more processor time than when its bound was recorded. A minute or two.

Not how fast a copy is, which a busy machine cannot say, but how much work it is: our processor seconds by those of a peer
that does the same work in the same run, on one core. Where inflating is the work the peer is qemu-img; else it is
`yardstick.py`, for Python's start and the moving of memory cost another share of qemu-img's time on each machine. The least of
some rounds counts on both sides, for whatever else the machine does only ever adds. A row may take a fifth more than what was
recorded; `--record` writes new figures. Where there is no room in memory nothing is measured, and that is said.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.measure import RunFailed, commands, free_memory_bytes, processor, same_content, timed
from bench.rows import ROWS, Row
from bench.sources import MIB, Sources, original_of

PLACE = Path("/dev/shm")
RECORDED = Path(__file__).with_name("quick.json")
NAMES = ("raw", "qcow2", "qcow2 zlib", "qcow2 zstd", "vhdx", "ova")
# Held against the yardstick.
YARDSTICK = Path(__file__).with_name("yardstick.py")
BY_YARDSTICK = ("raw", "qcow2", "vhdx")
LOSS_MAX = 1.2
# A round that others disturbed says nothing: rounds go on until the row holds, and a true loss never does.
ROUNDS_MIN, ROUNDS_MAX = 3, 12
DATA_MIB = 250
# In units of the data: the disk, seven images of it, the target.
SPACE_NEEDED = 10


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor seconds, the least of all rounds."""

    ours: float
    peer: float

    @property
    def ratio(self) -> float:
        return self.ours / self.peer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quick", description=__doc__)
    parser.add_argument("--record", action="store_true", help=f"write {RECORDED.name}: what is measured now is the bound")
    parser.add_argument("--data-mib", type=int, default=DATA_MIB, help="real files on the disk")
    options = parser.parse_args()
    on, recorded = ("", {}) if options.record else _recorded()
    # On one core, all of them: how much two threads cost each other hangs on whether the other core is free just then.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = [row for row in ROWS if row.name in NAMES]
    measured: dict[str, Cost] = {}
    needed = SPACE_NEEDED * options.data_mib * MIB
    if not _has_room(needed):
        print(f"SKIPPED: {PLACE} has not {needed // MIB} MiB free in memory, and a disk's driver costs processor time too")
        return
    print("| row | ours, CPU-s | peer's, CPU-s | by it | bound | ok |\n|---|---:|---:|---:|---:|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="synvirt-bench-", dir=PLACE) as folder:
        sources = Sources(Path(folder), options.data_mib)
        for row in rows:
            bound = recorded[row.name] * LOSS_MAX if recorded else None
            measured[row.name] = cost = _cost(row, sources, Path(folder) / "target.raw", bound)
            judged = "" if bound is None else "yes" if cost.ratio <= bound else "no"
            shown = "" if bound is None else f"{bound:.2f}"
            print(f"| {row.name} | {cost.ours:.2f} | {cost.peer:.2f} | {cost.ratio:.2f} | {shown} | {judged} |", flush=True)
    if options.record:
        figures = {name: round(cost.ratio, 3) for name, cost in measured.items()}
        RECORDED.write_text(json.dumps({"processor": processor(), "rows": figures}, indent=1) + "\n")
        return
    lost = [name for name, cost in measured.items() if cost.ratio > recorded[name] * LOSS_MAX]
    if lost:
        message = f"more work than a fifth above what was recorded: {', '.join(lost)}"
        if on == processor():
            sys.exit(message)
        print(f"{message}; but on {on}, and this is {processor()}")


def _recorded() -> tuple[str, dict[str, float]]:
    """The processor, and what each row cost there."""
    found = json.loads(RECORDED.read_text())
    return str(found["processor"]), dict(found["rows"])


def _cost(row: Row, sources: Sources, target: Path, bound: float | None) -> Cost:
    """RunFailed. Until it is within its bound, by turns; where there is none, as many rounds as a row takes that holds."""
    ours_argv, peer_argv = commands(row, sources.get, target)
    original = sources.get(original_of(row.source))
    if row.name in BY_YARDSTICK:
        peer_argv = [sys.executable, "-SP", str(YARDSTICK), str(original), str(target)]
    ours, peers = [], []
    for number in range(ROUNDS_MAX):
        ours.append(timed(ours_argv).cpu_seconds)
        if number == 0 and not same_content(original, target):
            raise RunFailed(f"{row.name}: the copy is not its source")
        target.unlink()
        peers.append(timed(peer_argv).cpu_seconds)
        target.unlink()
        found = Cost(min(ours), min(peers))
        if number + 1 >= ROUNDS_MIN and (bound is None or found.ratio <= bound):
            break
    return found


def _has_room(needed_bytes: int) -> bool:
    return PLACE.is_dir() and min(shutil.disk_usage(PLACE).free, free_memory_bytes()) > needed_bytes


if __name__ == "__main__":
    main()
