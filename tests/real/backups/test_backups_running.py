"""A guest that runs and writes is backed up: every point is what its disks were at its moment, and a kill leaves nothing."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from synvirt.sample import build
from tests.needs import need
from tests.real.test_service import _guests, service
from tests.running import forked
from tests.running.processes import until

WRITES = "dd if=/dev/urandom of=/written bs=64k count=20 seek={} conv=notrunc 2>/dev/null; sync; echo done"
# Of the second disk, which has no file system: nothing of it is frozen, so nothing may write to it at the moment itself.
WRITES_RAW = "dd if=/dev/urandom of=/dev/vdb bs=64k count=3 seek=5 conv=notrunc 2>/dev/null; sync; echo done"
LISTS_FILES = "cd / && sha256sum alive written kept/*"
CHANGES_FILES = f"mkdir /kept; dd if=/dev/urandom of=/kept/a bs=64k count=40 2>/dev/null; echo b > /kept/b; sync; {LISTS_FILES}"
# What a run ends with whose guest somebody else has thawed.
TOO_SLOW = ("E_BAK_QUIESCE_FAILED", "E_BAK_GUEST_STILL_FROZEN", "E_BAK_SNAPSHOT_FAILED")


class Ruler:
    """The child process."""

    def __init__(self, data_dir: Path, log: Path) -> None:
        with log.open("ab") as stderr:
            argv = [sys.executable, "-m", "tests.real.backups.backup_child", str(data_dir)]
            self.process = forked.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True)
        self._log = log

    def ask(self, *action: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(action) + "\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            if line[0] in '{"[':  # the others are for people
                return json.loads(line)
        raise AssertionError(self._log.read_text()[-3000:])

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@contextmanager
def ruler(data_dir: Path) -> Iterator[Ruler]:
    made = Ruler(data_dir, data_dir / "child.log")
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    need("qemu-system-x86_64", "qemu-system-x86")
    need("syslinux", "syslinux")
    sample = build(tmp_path, payload_mib=2, keep_raw=True)
    assert sample.raw is not None
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    argv = [need("qemu-img", "qemu-utils"), "convert", "-f", "raw", "-O", "qcow2"]
    subprocess.run([*argv, str(sample.raw), str(data_dir / "system.qcow2")], check=True)
    sample.raw.unlink()
    (data_dir / "data.img").write_bytes(bytes(8 << 20))
    yield data_dir
    for pid in _guests(data_dir):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_point_is_what_the_disks_were_at_its_moment(
    data_dir: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    reference = str(tmp_path / "reference")
    with ruler(data_dir) as child:
        child.ask("boot")
        first = child.ask("run", "require", "", reference, WRITES.format(0) + "; " + WRITES_RAW)
        check_quiesced(first)
        assert [disk["changes_only"] for disk in first["run"]["guests"][0]["disks"]] == [False, False]
        record_property("freeze_ms", first["run"]["guests"][0]["freeze_ms"])

        # What it wrote while its disks were read is in the next.
        second = child.ask("run", "require", "", reference, WRITES.format(400))
        check_quiesced(second)
        system, data = second["run"]["guests"][0]["disks"]
        assert (system["changes_only"], data["changes_only"]) == (True, False)
        assert 0 < system["read_bytes"] < system["size_bytes"] // 4
        assert second["run"]["warnings"] == []
        left = child.ask("left")
        assert (left["states"], left["job"], left["scratch"]) == (["lasting"], None, [])
        assert len(left["checkpoints"]) == 1

        # A service that lives, and is too slow: somebody else thaws the guest, and nobody says that it was quiesced. The two
        # share the agent's one connection: the one may take an answer to the other for its own, which is an error as well.
        slow = child.ask("run", "require", "slow")
        assert (slow["run"]["status"], slow["points"]) == ("failed", [])
        assert slow["run"]["error"]["code"] in TOO_SLOW
        until(lambda: child.ask("status") == "thawed")
        assert child.ask("left") == left

        assert child.ask("run", "require", "frozen") == "frozen"
        child.kill()
    check_a_run_that_froze_goes_on(data_dir)
    check_a_run_that_read_goes_on(data_dir)
    check_a_run_that_began_goes_on(data_dir)
    with ruler(data_dir) as child:
        assert child.ask("execute", WRITES.format(800)) == "done"
        third = child.ask("run", "require", "", reference)
        check_quiesced(third)
        assert third["run"]["guests"][0]["disks"][0]["changes_only"]

        child.ask("forget_checkpoint")
        fourth = child.ask("run", "require", "", reference)
        check_quiesced(fourth)
        assert [warning["code"] for warning in fourth["run"]["warnings"]] == ["E_BAK_DELTA_FALLBACK"]
        assert not fourth["run"]["guests"][0]["disks"][0]["changes_only"]
        kept = child.ask("execute", CHANGES_FILES)
    check_the_guest_comes_back(data_dir, check_the_service(data_dir), kept)


def check_quiesced(report: dict[str, Any]) -> None:
    run, (point,) = report["run"], report["points"]
    assert (run["status"], run["error"]) == ("completed", None)
    assert report["same"] == [True]
    assert (point["quiesced"], point["consistency"]) == (True, "filesystem")
    assert 0 < point["freeze_ms"] < 10_000
    assert run["guests"][0]["way"] == "bitmap"


def check_it_goes_on(child: Ruler) -> None:
    """The next service ends the run, and nothing is left but what the run after it goes by."""
    assert child.ask("start") == {"status": "completed", "error": None}
    left = child.ask("left")
    assert (left["states"], left["job"], left["scratch"]) == (["lasting"], None, [])
    assert len(left["checkpoints"]) == 1


def check_a_run_that_froze_goes_on(data_dir: Path) -> None:
    """kill -9 in the one moment in which its file systems stand still: a process that outlives the service thaws them."""
    with ruler(data_dir) as child:
        until(lambda: child.ask("status") == "thawed")
        assert child.ask("execute", "echo alive > /alive && cat /alive") == "alive"
        assert child.ask("left")["states"] == ["lasting", "working"]
        check_it_goes_on(child)
        assert child.ask("run", "require", "reading") == "reading"
        child.kill()


def check_a_run_that_read_goes_on(data_dir: Path) -> None:
    """kill -9 while QEMU serves its disks."""
    with ruler(data_dir) as child:
        left = child.ask("left")
        assert left["states"] == ["lasting", "working"]
        assert left["job"] is not None
        assert len(left["checkpoints"]) == 2
        assert left["scratch"] != []
        check_it_goes_on(child)


def check_a_run_that_began_goes_on(data_dir: Path) -> None:
    """kill -9 while libvirt begins the backup: 9.0 then says for ever that one begins."""
    with ruler(data_dir) as child, pytest.raises(AssertionError):
        child.ask("run", "require", "beginning")
    with ruler(data_dir) as child:
        assert child.ask("left")["states"] == ["lasting", "working"]
        check_it_goes_on(child)


def check_the_service(data_dir: Path) -> str:
    """As a user meets it; its restore point."""
    with service(data_dir) as (_, client):
        (job,) = json.loads(client.ask("GET", "/backup/jobs"))["items"]
        run = json.loads(client.ask("POST", f"/backup/jobs/{job['id']}/run"))
        until(lambda: json.loads(client.ask("GET", f"/backup/runs/{run['id']}"))["finished_at"] is not None)
        run = json.loads(client.ask("GET", f"/backup/runs/{run['id']}"))
        assert (run["status"], run["warnings"]) == ("completed", [])
        (point,) = run["restore_point_ids"]
        assert json.loads(client.ask("GET", f"/backup/restore-points/{point}"))["quiesced"]
        return str(point)


def check_the_guest_comes_back(data_dir: Path, point: str, kept: str) -> None:
    """Its process and its disks are lost. It is restored beside what is left of it, boots, and has the files that it had."""
    for pid in _guests(data_dir):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not _guests(data_dir))
    for name in ("system.qcow2", "data.img"):
        (data_dir / name).unlink()
    with service(data_dir) as (_, client):
        request = {"target": "new_domain", "name": "came-back", "start": True}
        run = json.loads(client.ask("POST", f"/backup/restore-points/{point}/restore", json=request))
        until(lambda: json.loads(client.ask("GET", f"/backup/runs/{run['id']}"))["finished_at"] is not None)
        run = json.loads(client.ask("GET", f"/backup/runs/{run['id']}"))
        assert (run["status"], run["error"], run["warnings"]) == ("completed", None, [])
        assert run["domain"] == {"name": "came-back", "uuid": run["id"]}
    with ruler(data_dir) as child:
        assert child.ask("rule", "came-back") == run["id"]
        assert child.ask("execute", LISTS_FILES) == kept
