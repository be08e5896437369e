"""The files of the Hyper-V host of the tests: they hold what the guest wrote, whatever it wrote and however much."""

import random
from pathlib import Path
from typing import Any

import pytest

from synvirt.programs import run
from tests.fakes.hyperv import files
from tests.fakes.hyperv.files import DiskFiles

MIB = 1 << 20
# Parts of sectors, writes that touch, scattered ones, and a whole MiB.
WRITES = [(0, 100), (700, 20), (5000, 4096), (9096, 512), *((2 * MIB + at, 512) for at in range(0, MIB, 8192)), (3 * MIB, MIB)]


@pytest.mark.parametrize("merged", [False, True], ids=["at once", "by a merge"])
def test_one_program_writes_all_that_a_guest_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, merged: bool) -> None:
    """A program for each write was hundreds of programs where a snapshot was merged: a job waited minutes for it."""
    started: list[str] = []

    def counted(argv: list[str], **more: Any) -> Any:
        started.append(argv[0])
        return run(argv, **more)

    disk = DiskFiles.made(tmp_path, "disk", random.Random(1).randbytes(4 * MIB), tmp_path)
    monkeypatch.setattr(files, "run", counted)
    if merged:
        disk.checkpoint()
    for offset, length in WRITES:
        disk.guest_writes(offset, random.Random(offset).randbytes(length))
    if merged:
        disk.merged()
    disk.settled()
    assert started == ["qemu-io"]
    run(["qemu-img", "compare", "-f", "raw", "-F", "vhdx", str(disk.raw), str(disk.chain[0])], timeout_s=60)
