"""Orders that a copy worker does not understand, and a service that does not speak any more."""

import asyncio
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from synvirt.disks.specs import FileWriterSpec, QemuSpec
from synvirt.errors import Internal, SynvirtError
from synvirt.jobs import process
from synvirt.jobs.orders import CopyOrder, DiskOrder
from synvirt.jobs.process import Ended, WorkerDied

PASSWORD = "correct-horse-battery-staple"


def test_an_order_that_is_not_understood_is_not_repeated_in_the_log() -> None:
    """It may hold a password, and the service logs what a worker says."""
    order = {
        "kind": "copy",
        "disks": [{"key": "k", "reader": {"format": "datastore", "password": PASSWORD}, "writer": PASSWORD}],
    }
    argv = [sys.executable, "-m", "synvirt.worker"]
    done = subprocess.run(argv, input=json.dumps(order) + "\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "not an order" in done.stderr
    assert PASSWORD not in done.stdout + done.stderr


def test_a_worker_ends_when_its_service_says_nothing_any_more() -> None:
    """A service that is frozen holds the pipe open; another host may take its jobs over."""
    code = (
        "import sys, time; import synvirt.jobs.worker as worker; worker.SILENCE_S = 1.0; from synvirt.worker import TASKS; "
        "worker.carry_out = lambda *_: time.sleep(300); sys.exit(worker.main(TASKS))"
    )
    order = {"kind": "copy", "disks": [], "threads": 1, "bandwidth_bps": None, "flush_every_s": 1.0}
    worker = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert worker.stdin is not None
    assert worker.stderr is not None
    worker.stdin.write(json.dumps(order).encode() + b"\n\n")
    worker.stdin.flush()
    assert worker.wait(60) == 1, worker.stderr.read().decode()
    assert worker.stderr.read() == b""
    worker.stdin.close()
    worker.stderr.close()


# A reader's library, or an image that took it over, may end the process as if nothing was wrong.
ENDS_WELL = """
import os, sys
if "synvirt.worker" in sys.orig_argv:
    from synvirt.jobs import copying_disks
    copying_disks.copy_disks = lambda *_: os._exit(0)
"""


def test_a_worker_that_ends_before_its_order_is_carried_out_has_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ended() -> Ended:
        async def heard(message: object) -> None: ...

        async with process.started() as worker:
            return await worker.carry_out(CopyOrder(disks=()), heard, lambda: False)

    asyncio.run(ended()).check()
    (tmp_path / "sitecustomize.py").write_text(ENDS_WELL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    died = asyncio.run(ended())
    assert died.returncode == 0
    with pytest.raises(WorkerDied, match="exit code 0"):
        died.check()


def test_nothing_stays_of_the_temporary_folder_of_a_worker_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot remove its own: in its cage it writes in that folder, and not beside it."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "image").write_bytes(bytes(1 << 20))
    writer = FileWriterSpec(path=str(tmp_path / "volume"), size_bytes=512)
    disk = DiskOrder(key="a", reader=QemuSpec(driver="qed", path=str(tmp_path / "image")), writer=writer)
    made: list[str] = []

    async def ended() -> Ended:
        async def heard(message: object) -> None: ...

        async with process.started() as worker:
            found = await worker.carry_out(CopyOrder(disks=(disk,)), heard, lambda: False)
            made.extend(one.name for one in (tmp_path / "tmp").iterdir())
            return found

    with pytest.raises(SynvirtError):
        asyncio.run(ended()).check()
    assert len(made) == 1
    assert list((tmp_path / "tmp").iterdir()) == []


# One of the host's own troubles, in the worker alone.
TROUBLES = {
    "no thread": (
        'import threading\n    def start(_):\n        raise RuntimeError("can\'t start new thread")\n'
        "    threading.Thread.start = start"
    ),
    "no thread for the copy": (
        "from synvirt.jobs import copying_disks\n    def copy(*_):\n"
        "        raise copying_disks.Internal('the copy broke') from RuntimeError(\"can't start new thread\")\n"
        "    copying_disks.copy_disks = copy"
    ),
    "no room": "import tempfile\n    tempfile.tempdir = '/proc/self'",
}


@pytest.mark.parametrize(
    ("trouble", "error", "says", "hint"),
    [
        ("no thread", WorkerDied, "can't start new thread", "TasksMax"),
        ("no thread for the copy", WorkerDied, "the copy broke: can't start new thread", "TasksMax"),
        ("no room", Internal, "No such file or directory: '/proc/self/", "TMPDIR"),
    ],
)
def test_a_worker_that_lacks_something_of_the_host_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str, error: type[Internal], says: str, hint: str
) -> None:
    """It ended with «exit code 1», or failed its job at once, which a worker that cannot be started does not."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nif 'synvirt.worker' in sys.orig_argv:\n    {TROUBLES[trouble]}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    writer = FileWriterSpec(path=str(tmp_path / "volume"), size_bytes=512)
    disk = DiskOrder(key="a", reader=QemuSpec(driver="qed", path=str(tmp_path / "image")), writer=writer)

    async def ended() -> Ended:
        async def heard(message: object) -> None: ...

        async with process.started() as worker:
            return await worker.carry_out(CopyOrder(disks=(disk,)), heard, lambda: False)

    with pytest.raises(Internal) as failed:
        asyncio.run(ended()).check()
    assert (type(failed.value), says in failed.value.detail) == (error, True), failed.value.detail
    assert hint in (failed.value.hint or "")


def test_a_worker_may_have_less_memory_than_ours_take() -> None:
    """A unit with LimitAS, or a user with `ulimit -v`: the limit cannot be raised again."""
    code = "from synvirt.jobs.worker import limit_memory; import resource as r; limit_memory(); print(r.getrlimit(r.RLIMIT_AS))"
    argv = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", code]
    limits = (4 << 30, 4 << 30)
    done = subprocess.run(
        argv, capture_output=True, text=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limits)
    )
    assert (done.stdout.strip(), done.stderr) == (str(limits), "")
