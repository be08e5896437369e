"""A disk as a new qcow2 file: what is reported where it cannot be written."""

import os
from pathlib import Path

import pytest

from synvirt.copying import Bucket, Copied
from synvirt.disks.nbd.qcow2_writer import write_qcow2
from synvirt.errors import DiskWriteFailed
from synvirt.programs import ENDED_HINT
from synvirt.sizes import MIB
from tests.fakes.disks import MemoryReader
from tests.needs import need

FULL = "qemu-img: error while writing at byte {}: No space left on device"
# qemu-img's own messages, and what is reported of them.
REPORTED = {
    "\n".join(FULL.format(offset) for offset in (77594624, 90177536, 88080384)): (
        "web.qcow2 cannot be written: error while writing at byte 77594624: No space left on device",
        "free space at the destination; if the job has failed, start it again then",
    ),
    'qemu-img: {}: Failed to get "write" lock': ('web.qcow2 cannot be written: web.qcow2: Failed to get "write" lock', None),
    "": ("web.qcow2 cannot be written: qemu-img gives no reason", None),
}


@pytest.mark.parametrize("messages", REPORTED, ids=["full", "locked", "silent"])
def test_a_failure_is_one_line_with_its_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: str) -> None:
    """On a full disk, qemu-img has a message for each of its writes that were under way."""
    target = tmp_path / "web.qcow2"
    program = tmp_path / "bin/qemu-img"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{messages.replace('{}', str(target))}\nEND\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    with pytest.raises(DiskWriteFailed) as failed:
        write_qcow2(MemoryReader("AB"), target)
    assert (failed.value.detail, failed.value.hint) == REPORTED[messages]


def test_a_qemu_img_that_something_else_ended_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/qemu-img").write_text("#!/bin/sh\nkill -9 $$\n")
    (tmp_path / "bin/qemu-img").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(DiskWriteFailed, match=r"^web\.qcow2 cannot be written: qemu-img was ended by SIGKILL$") as failed:
        write_qcow2(MemoryReader("AB"), tmp_path / "web.qcow2")
    assert failed.value.hint == ENDED_HINT


def test_a_limit_holds_for_all_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("qemu-img", "qemu-utils")
    passed: list[int] = []
    moved: list[Copied] = []
    monkeypatch.setattr(Bucket, "take", lambda bucket, amount, *_: passed.append(amount))
    write_qcow2(MemoryReader("AB"), tmp_path / "web.qcow2", bandwidth_bps=MIB, on_progress=moved.append)
    assert sum(passed) == moved[-1].bytes_done == len(MemoryReader("AB").content)
