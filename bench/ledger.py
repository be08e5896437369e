"""python -m bench.ledger [MIB]: what the hashes of a receipt cost a copy: the same disk with and without, in turn.

From a file to a file; at the pace of a line (1 to 8 Gbit/s), and as fast as both files go. Seconds by the clock and
of the processor: medians of ROUNDS.
"""

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from uuid import uuid4

from synvirt.copying import copy
from synvirt.disks import open_reader, open_writer
from synvirt.disks.checking.block_hashes import BlockHashes, known_digests
from synvirt.disks.specs import FileWriterSpec, RawSpec
from synvirt.sizes import MIB

PACES = {"1 Gbit/s": 119 * MIB, "2.5 Gbit/s": 298 * MIB, "5 Gbit/s": 596 * MIB, "8 Gbit/s": 954 * MIB, "no pace": None}
ROUNDS = 3


def main() -> None:
    size = (int(sys.argv[1]) if len(sys.argv) > 1 else 512) * MIB
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="synvirt-bench-") as name:
        folder = Path(name)
        with (folder / "source").open("wb") as file:
            for seed in range(size // MIB):
                file.write(random.Random(seed).randbytes(MIB))
        for pace, bandwidth in PACES.items():
            found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
            for _ in range(ROUNDS):
                for hashed in (False, True):
                    found[hashed].append(_copied(folder, size, bandwidth, hashed=hashed))
            (plain, plain_cpu), (with_, with_cpu) = (
                (statistics.median(one[0] for one in found[hashed]), statistics.median(one[1] for one in found[hashed]))
                for hashed in (False, True)
            )
            print(
                f"{pace}: {plain:.2f} s without, {with_:.2f} s with hashes: {with_ / plain - 1:+.1%}; "
                f"of the processor {plain_cpu:.2f} and {with_cpu:.2f} s",
                flush=True,
            )


def _copied(folder: Path, size: int, bandwidth: int | None, *, hashed: bool) -> tuple[float, float]:
    """Seconds by the clock, and of the processor."""
    target, kept = folder / "target", folder / "hashes"
    for path in (target, kept):
        path.unlink(missing_ok=True)
    with target.open("wb") as file:
        file.truncate(size)
    reader, writer = (
        open_reader(RawSpec(path=str(folder / "source"))),
        open_writer(FileWriterSpec(path=str(target), size_bytes=size)),
    )
    wall, processor = time.monotonic(), time.process_time()
    token = uuid4()
    hashes = BlockHashes(kept, size, token) if hashed else None
    try:
        done = copy(
            reader if hashes is None else hashes.reading(reader, fresh=True, since=0),
            writer if hashes is None else hashes.writing(writer),
            fresh=True,
            bandwidth_bps=bandwidth,
        )
        writer.flush()
        if hashes is not None:
            hashes.settle(done.watermark)
            hashes.fill(reader)
        return time.monotonic() - wall, time.process_time() - processor
    finally:
        if hashes is not None:
            hashes.close()
            assert all(digest.strip(b"\0") for digest in known_digests(kept, size, token) or [b""]), "a block has no hash"
        writer.close()
        reader.close()


if __name__ == "__main__":
    main()
