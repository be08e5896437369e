"""Hyper-V exports through whole jobs, both ways: by our own readers, and by an outside tool with every sort of manners."""

import contextlib
import errno
import os
import signal
import subprocess
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from synvirt.errors import BadRequest, DiskWriteFailed
from synvirt.jobs.process import started
from synvirt.model.job import DiskProgress, Migration, Progress
from synvirt.model.kinds import State
from synvirt.offline.hyperv import tool as tool_module
from synvirt.offline.hyperv.tool import VmcxTool, vmcx_tool
from synvirt.settings import Settings, load
from synvirt.sizes import MIB
from tests.house import Crash, House, crash_at, offline_plan, states
from tests.offline import appliances
from tests.offline.hyperv import hyperv_exports
from tests.offline.hyperv.vmcx_service import Way, by_tool
from tests.running.processes import children, command_line, ready, until


def contents() -> dict[str, bytes]:
    return {"ide0:0": appliances.raw_disk(3 * MIB, seed=1), "scsi0:0": appliances.raw_disk(3 * MIB, seed=2)}


def exported(house: House, disks: dict[str, bytes] | None = None) -> Path:
    images = {
        key: appliances.image(house.folder, f"disk{number}.vhdx", "vhdx", raw)
        for number, (key, raw) in enumerate((contents() if disks is None else disks).items())
    }
    return hyperv_exports.export(house.imports / "an export", images)


def run(house: House, **fields: Any) -> Migration:
    job = house.intake.submit(offline_plan(exported(house), kind="vmcx_export", **fields))
    return house.run(job.id)


def check_volumes(house: House, job: Migration, disks: dict[str, bytes] | None = None) -> None:
    assert job.state == State.COMPLETED, job.last_error
    for key, raw in (contents() if disks is None else disks).items():
        assert house.volume(job, key).read_bytes() == raw
    check_tidy(house, job)


def check_tidy(house: House, job: Migration) -> None:
    """Nothing of the tool's is left: no file, no line in the ledger, no process."""
    assert list((house.folder / "passthrough").rglob("*/*")) == []
    assert [entry for entry in house.store.ledger(job.id) if entry.kind == "passthrough"] == []
    until(lambda: tools(house.folder) == [])


def tools(folder: Path) -> list[str]:
    """The processes of this machine that run the tool of that folder, or what it started."""
    commands = [command_line(int(path.name)) for path in Path("/proc").glob("[0-9]*")]
    return [command for command in commands if str(folder / "bin" / "tool") in command]


# ── both ways ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_our_own_way_from_the_plan_to_the_running_domain(tmp_path: Path) -> None:
    house = by_tool(tmp_path, "fail", "own", workers=started)
    job = run(house)
    assert states(job) == [State.QUEUED, State.COPYING_FULL, State.STARTING, State.COMPLETED]
    check_volumes(house, job)
    assert [one.kind for one in job.passes] == ["full"]
    house.close()


@pytest.mark.parametrize("manner", ["well", "backwards", "percent", "chatter"])
def test_the_tools_way_from_the_plan_to_the_running_domain(tmp_path: Path, manner: str) -> None:
    house = by_tool(tmp_path, manner, workers=started)
    job = run(house)
    assert states(job) == [State.QUEUED, State.COPYING_FULL, State.STARTING, State.COMPLETED]
    check_volumes(house, job)
    assert [(one.number, one.bytes > 0, one.finished_at is not None) for one in job.passes] == [
        (1, True, True),
        (2, True, True),
    ]
    assert job.progress.bytes_done == job.progress.bytes_total > 0
    assert all(disk.state == "copied" for disk in job.disks)
    house.close()


def test_disks_of_one_size_are_distinguished_by_what_they_hold(tmp_path: Path) -> None:
    """A blank one, two that begin alike and differ far behind, one with a partition table; the tool lists them backwards."""
    size = 8 * MIB
    table = (bytes(510) + b"\x55\xaa").ljust(size, b"\0")
    late, later = (bytes(at) + b"data" * 1024 + bytes(size - at - 4096) for at in (5 * MIB, 6 * MIB))
    disks = {"ide0:0": bytes(size), "ide0:1": late, "scsi0:0": table, "scsi0:1": later}
    house = by_tool(tmp_path, "backwards")
    job = house.run(house.intake.submit(offline_plan(exported(house, disks), kind="vmcx_export")).id)
    check_volumes(house, job, disks)
    house.close()


def test_a_skipped_disk_of_the_tools_goes_nowhere(tmp_path: Path) -> None:
    house = by_tool(tmp_path, "well")
    job = run(house, skip_disks=["ide0:0"])
    check_volumes(house, job, {"scsi0:0": contents()["scsi0:0"]})
    assert len(list((tmp_path / "volumes").rglob("*.raw"))) == 1
    house.close()


@pytest.mark.parametrize("manner", ["well", "percent"])
def test_progress_of_the_tool_is_shown_and_never_goes_back(tmp_path: Path, manner: str) -> None:
    """virt-v2v counts to a hundred for each disk, others for the whole."""
    house = by_tool(tmp_path, manner)
    seen: list[Progress] = []
    pin = house.board.pin

    def watched(job_id: Any, state: State, progress: Progress, disks: tuple[DiskProgress, ...] = ()) -> None:
        seen.append(progress)
        pin(job_id, state, progress, disks)

    house.board.pin = watched  # type: ignore[method-assign]
    job = run(house)
    check_volumes(house, job)
    whole = sum(map(len, contents().values()))
    assert [one.bytes_done for one in seen] == sorted(one.bytes_done for one in seen)
    by_the_tool = [one.bytes_done for one in seen if one.bytes_total == 2 * whole]
    assert by_the_tool[:5] == [0, whole // 4, whole // 2, whole * 3 // 4, whole]
    house.close()


# ── which way ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("way", "driver", "passes"), [("auto", "hyperv", 2), ("auto", "vmwarevdp", 1), ("tool", "hyperv", 2), ("own", "hyperv", 1)]
)
def test_the_way_that_the_settings_choose(tmp_path: Path, way: Way, driver: str, passes: int) -> None:
    house = by_tool(tmp_path, "well", way, driver=driver)
    job = run(house)
    check_volumes(house, job)
    assert len(job.passes) == passes
    house.close()


def test_auto_without_the_tool_is_our_own_way(tmp_path: Path) -> None:
    house = by_tool(tmp_path, "well", "auto")
    (tmp_path / "bin" / "tool").unlink()
    job = run(house)
    check_volumes(house, job)
    assert len(job.passes) == 1
    house.close()


def test_a_tool_that_must_be_and_is_not_there_is_found_before_anything_is_made(tmp_path: Path) -> None:
    house = by_tool(tmp_path, "well", "tool")
    (tmp_path / "bin" / "tool").unlink()
    job = run(house)
    assert states(job) == [State.QUEUED, State.FAILED]
    assert job.last_error is not None
    assert (job.last_error.code, "tool is not installed" in job.last_error.message) == ("E_MIG_INVALID_PLAN", True)
    assert house.leftovers() == []
    house.close()


def test_the_way_is_chosen_once(tmp_path: Path) -> None:
    """A tool that is installed while a job is under way does not take it over."""
    house = by_tool(tmp_path, "well", "own")
    job = house.intake.submit(offline_plan(exported(house), kind="vmcx_export"))
    house.store.on_commit = crash_at(6)
    with contextlib.suppress(Crash):
        house.run(job.id)
    house.close()
    again = by_tool(tmp_path, "well", "tool", hypervisor=house.hypervisor)
    ended = again.run(job.id)
    assert len(ended.passes) == 1
    check_volumes(again, ended)
    again.close()


@pytest.mark.parametrize("arguments", ["-i {driver} {source}", "-os {folder}", "'{source} {folder}"])
def test_arguments_that_cannot_be_right_are_reported_at_the_start(arguments: str) -> None:
    with pytest.raises(BadRequest, match="setting vmcx_tool_arguments "):
        vmcx_tool(load(environ={"SYNVIRT_VMCX_TOOL_ARGUMENTS": arguments}))
    vmcx_tool(Settings())


# ── tools that go wrong ──────────────────────────────────────────────────────────────────────────────────────────────

WRONG = {
    "fail": "tool ended with 3: ",
    "fail late": "tool ended with 1: tool: error: /web-sda: no space left",
    "fail in JSON": "tool ended with 1: the disk /web-sda has 50% of its blocks",
    "nothing": "made no raw disk of 3145728 bytes with the content of disk ide0:0; it made nothing",
    "one too few": "made no raw disk of 3145728 bytes with the content of disk ide0:0; it made web-sda",
    "short": "it made web-sda of 3145216 bytes, web-sdb of 3145216 bytes",
    "qcow2": "made no raw disk of 3145728 bytes with the content of disk ide0:0",
    "zeros": "made no raw disk of 3145728 bytes with the content of disk ide0:0",
    "link": "made no raw disk of 3145728 bytes with the content of disk ide0:0; it made nothing",
}


@pytest.mark.parametrize("manner", WRONG)
def test_a_tool_that_fails_or_lies_fails_the_job_and_leaves_nothing(tmp_path: Path, manner: str) -> None:
    house = by_tool(tmp_path, manner)
    job = run(house)
    assert job.state == State.FAILED
    assert job.last_error is not None
    assert job.last_error.code == "E_MIG_DISK_READ_FAILED"
    assert WRONG[manner] in job.last_error.message
    assert "vmcx_way" in (job.last_error.hint or "")
    assert str(tmp_path) not in job.last_error.message
    assert len(job.last_error.message) < 3000
    assert house.leftovers() == []
    assert house.store.ledger(job.id) == []
    check_tidy(house, job)
    house.close()


def test_the_end_of_what_a_failing_tool_said_is_reported(tmp_path: Path) -> None:
    house = by_tool(tmp_path, "fail")
    job = run(house)
    assert job.last_error is not None
    assert job.last_error.message.endswith("tool: error: an export: the export is sealed")
    house.close()


def test_a_tool_that_hangs_is_ended(tmp_path: Path) -> None:
    house = by_tool(tmp_path, "hang", timeout_s=2)
    job = run(house)
    assert job.last_error is not None
    assert (job.last_error.code, job.last_error.hint) == ("E_MIG_DISK_READ_FAILED", "raise vmcx_tool_timeout_s")
    assert "tool took over 2 s" in job.last_error.message
    assert house.leftovers() == []
    check_tidy(house, job)
    house.close()


def test_a_tool_that_something_else_ended_is_not_to_blame(tmp_path: Path) -> None:
    house = by_tool(tmp_path, "killed")
    job = run(house)
    assert job.last_error is not None
    assert "the conversion tool tool was ended by SIGKILL: " in job.last_error.message
    assert "journalctl" in (job.last_error.hint or "")
    assert house.leftovers() == []
    check_tidy(house, job)
    house.close()


def test_what_a_failed_tool_left_running_is_ended(tmp_path: Path) -> None:
    house = by_tool(tmp_path, "daemon")
    job = run(house)
    assert job.state == State.FAILED
    assert users(tmp_path / "passthrough") == []
    assert house.leftovers() == []
    check_tidy(house, job)
    house.close()


def users(folder: Path) -> list[str]:
    """The processes that have a file in the folder open, deleted or not."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    if link.readlink().is_relative_to(folder):
                        found.append(command_line(int(process.name)))
    return found


def test_no_room_for_what_the_tool_writes_is_found_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = by_tool(tmp_path, "well")
    usage = os.statvfs(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000, "total": usage.f_blocks}))
    monkeypatch.setattr(type(house.destination), "free_bytes", lambda _: 1 << 40)
    job = run(house)
    assert job.last_error is not None
    assert job.last_error.code == "E_MIG_DISK_WRITE_FAILED"
    assert "and 1000 are free" in job.last_error.message
    assert house.leftovers() == []
    check_tidy(house, job)
    house.close()


# ── cancel, crashes, kill -9 ─────────────────────────────────────────────────────────────────────────────────────────


def test_cancelled_while_the_tool_runs(tmp_path: Path) -> None:
    house = by_tool(tmp_path, "hang")
    job = house.intake.submit(offline_plan(exported(house), kind="vmcx_export"))

    def cancel_once_it_runs() -> None:
        until(lambda: any((tmp_path / "passthrough").rglob("web-sda")))
        house.intake.cancel(job.id)

    watcher = threading.Thread(target=cancel_once_it_runs)
    watcher.start()
    ended = house.run(job.id)
    watcher.join()
    assert ended.state == State.CANCELLED
    assert house.leftovers() == []
    assert house.store.ledger(job.id) == []
    check_tidy(house, ended)
    house.close()


def service(folder: Path, manner: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """The engine's process."""
    url = f"sqlite:///{folder / 'store.db'}"
    return ready("tests.offline.hyperv.vmcx_service", str(folder), url, manner, log=folder / "service.log")


@pytest.mark.timeout(180)
def test_a_service_that_is_killed_takes_its_tool_along_and_starts_over(tmp_path: Path) -> None:
    house = by_tool(tmp_path, "well")
    job = house.intake.submit(offline_plan(exported(house), kind="vmcx_export"))
    with service(tmp_path, "hang") as process:
        until(lambda: any((tmp_path / "passthrough").rglob("web-sda")))
        until(lambda: any("sleep" in command for command in children(process.pid).values()))
        family = children(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        until(lambda: not any(Path(f"/proc/{pid}").exists() and command_line(pid) == family[pid] for pid in family))
    assert house.store.ledger(job.id)
    with service(tmp_path, "well"):
        until(lambda: house.store.get(job.id).ended)
    check_volumes(house, house.store.get(job.id))
    house.close()


@pytest.mark.timeout(180)
def test_cancelled_after_a_kill_nothing_of_the_tool_is_left(tmp_path: Path) -> None:
    house = by_tool(tmp_path, "well")
    job = house.intake.submit(offline_plan(exported(house), kind="vmcx_export"))
    with service(tmp_path, "hang") as process:
        until(lambda: any((tmp_path / "passthrough").rglob("web-sda")))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    house.intake.cancel(job.id)
    with service(tmp_path, "hang"):
        until(lambda: house.store.get(job.id).ended)
    ended = house.store.get(job.id)
    assert ended.state == State.CANCELLED
    assert house.leftovers() == []
    assert house.store.ledger(job.id) == []
    check_tidy(house, ended)
    house.close()


def test_what_the_tool_wrote_is_there_after_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is noted in the store, which is durable, and the tool does not run again: a hole would be copied as zeros."""
    tool = VmcxTool(tmp_path / "data/passthrough", way="tool")
    made = tool.folder / "a job"
    synced: list[Path] = []

    def run(*_: object, cwd: Path, **__: object) -> None:
        for name in ("web-sda", "web-sdb", "web.xml"):
            (cwd / name).write_bytes(b"disk")

    monkeypatch.setattr(tool_module, "run", run)
    monkeypatch.setattr(VmcxTool, "_caged", lambda *_: [])
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    tool.import_into("a job", tmp_path / "an export", 0, lambda _: None, lambda: False)
    assert synced == [made / "web-sda", made / "web-sdb", made, made.parent, made.parent.parent]


def test_what_the_tool_wrote_and_no_disk_took_is_no_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full or failing disk may say so only when it is asked to keep what it has."""
    tool = VmcxTool(tmp_path / "data/passthrough", way="tool")

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(tool_module, "run", lambda *_, **__: None)
    monkeypatch.setattr(VmcxTool, "_caged", lambda *_: [])
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DiskWriteFailed, match="cannot be kept: Input/output error"):
        tool.import_into("a job", tmp_path / "an export", 0, lambda _: None, lambda: False)
