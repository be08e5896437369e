"""What a killed service leaves running is known by its arguments, and nothing else is touched."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from synvirt.kvm import orphans
from tests.running.processes import command_line

GUEST = "6f1c3c0a-3c5f-4b52-9f57-7d8f4d3f6a01"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[object]:
    """Starts a program of that name that does nothing but have arguments."""
    alive: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> subprocess.Popen[bytes]:
        program = tmp_path / name
        if not program.exists():
            shutil.copy(Path(sys.executable).resolve(), program)
        alive.append(
            subprocess.Popen([program, "-c", "import time; print('up', flush=True); time.sleep(60)", *arguments], stdout=-1)
        )
        stdout = alive[-1].stdout
        assert stdout is not None
        assert stdout.readline() == b"up\n"
        return alive[-1]

    yield start
    for process in alive:
        process.kill()
        process.communicate()


def test_probes_and_tpms_of_this_folder_are_suspects_and_nothing_else(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    root = tmp_path / "root (1)"
    probe = run("qemu-system-x86_64", "-machine", "none,accel=kvm:tcg", "-qmp", f"unix:{root}/lib/qemu/qmp-X/qmp.monitor")
    tpm = run("swtpm", "socket", "--tpmstate", f"dir={root}/lib/swtpm/{GUEST}/tpm2,mode=0600")
    run("qemu-system-x86_64", "-machine", "q35,accel=tcg", "-drive", f"file={root}/lib/qemu/qmp-disk.raw")
    run("qemu-system-x86_64", "-machine", "none,accel=kvm:tcg", "-qmp", f"unix:{root}2/lib/qemu/qmp-X/qmp.monitor")
    setup = run("swtpm_setup", "--tpm2", "--tpm-state", f"{root}/lib/swtpm/{GUEST}/tpm2")
    run("swtpm", "socket", "--tpmstate", f"dir={root}2/lib/swtpm/{GUEST}/tpm2,mode=0600")
    run("editor", f"{root}/lib/swtpm/{GUEST}/tpm2", "none,accel=", f"{root}/lib/qemu/qmp-X")
    found = {(one.pid, one.guest) for one in orphans.suspects(root)}
    assert found == {(probe.pid, None), (tpm.pid, GUEST), (setup.pid, GUEST)}


def test_the_tpm_of_a_guest_that_runs_stays(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    tpm = run("swtpm", "socket", "--tpmstate", f"dir={tmp_path}/lib/swtpm/{GUEST}/tpm2")
    found = orphans.suspects(tmp_path)
    orphans.end(found, tmp_path, lambda uuid: uuid == GUEST)
    assert command_line(tpm.pid)
    orphans.end(found, tmp_path, lambda uuid: False)
    assert tpm.wait(30) == -9


def test_a_number_that_went_to_another_process_is_let_alone(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    other = run("editor", "a letter")
    orphans.end([orphans.Orphan(other.pid, None)], tmp_path, lambda uuid: False)
    assert other.poll() is None


def test_folders_of_a_start_that_came_to_nothing_are_removed(tmp_path: Path) -> None:
    """The service was killed between libvirt's making them and the guest's process, whose record is forgotten."""
    places = (tmp_path / "lib/qemu", tmp_path / "lib/qemu/channel/target")
    for place in places:
        for name in ("domain-1-killed", "domain-12-runs", "domain-x", "nvram"):
            (place / name).mkdir(parents=True)
    (places[0] / "domain-1-killed/monitor.sock").touch()
    left = orphans.traces(tmp_path)
    for place in places:
        (place / "domain-2-begun-since").mkdir()
    orphans.remove(left, [12])
    for place in places:
        assert sorted(path.name for path in place.glob("*")) == sorted(
            ["domain-12-runs", "domain-2-begun-since", "domain-x", "nvram", *(["channel"] if place == places[0] else [])]
        )


def test_variables_that_were_not_whole_yet_are_removed(tmp_path: Path) -> None:
    """The service was killed while libvirt copied them."""
    place = tmp_path / "lib/qemu/nvram"
    place.mkdir(parents=True)
    for name in ("killed_VARS.fd.new", "guest_VARS.fd", "mine.new"):
        (place / name).touch()
    orphans.remove(orphans.traces(tmp_path), [])
    assert sorted(path.name for path in place.iterdir()) == ["guest_VARS.fd", "mine.new"]


def test_what_a_killed_swtpm_left_is_removed(tmp_path: Path) -> None:
    """It removes its socket and the file of its number only where it is asked to end."""
    place = tmp_path / "run/swtpm"
    place.mkdir(parents=True)
    killed = ["1-a-1-guest-swtpm.pid", "1-a-1-guest-swtpm.sock"]
    stay = ["12-runs-swtpm.pid", "12-runs-swtpm.sock", "driver.pid", "x-1-swtpm.pid"]
    for name in (*killed, *stay):
        (place / name).touch()
    left = orphans.traces(tmp_path)
    (place / "2-begun-since-swtpm.sock").touch()
    orphans.remove(left, [12])
    assert sorted(path.name for path in place.iterdir()) == sorted([*stay, "2-begun-since-swtpm.sock"])


def test_the_pid_file_of_a_guest_that_has_ended_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "run/qemu"
    folder.mkdir(parents=True)
    ended = subprocess.Popen(["true"])
    ended.wait()
    # The first by its name might be of a swtpm, of the start with that number.
    for name, text in {
        "1-a-swtpm": str(ended.pid),
        "runs": str(os.getpid()),
        "cut off": "",
        "written": "",
        "garbage": "x",
        "driver": str(ended.pid),
        "begun since": str(ended.pid),
    }.items():
        (folder / f"{name}.pid").write_text(text)
    left = orphans.traces(tmp_path)
    for name in ("begun since", "written"):
        (folder / f"{name}.pid").write_text(str(os.getpid()))
    orphans.remove(left, [1])
    assert sorted(path.stem for path in folder.iterdir()) == ["begun since", "driver", "garbage", "runs", "written"]


def test_what_cannot_be_removed_keeps_nobody_from_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [tmp_path / f"{number}-web-swtpm.pid" for number in range(2)]
    for path in left:
        path.touch()
    really = os.unlink

    def busy(path: Path, **others: Any) -> None:
        if path == left[0]:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        really(path, **others)

    monkeypatch.setattr(os, "unlink", busy)
    orphans.remove(left, ())
    assert [path.exists() for path in left] == [True, False]


def test_a_tpm_goes_with_the_process_that_still_makes_it(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    made = tmp_path / f"lib/swtpm/{GUEST}/tpm2"
    made.mkdir(parents=True)
    (made / "tpm2-00.permall").touch()
    (other := tmp_path / "lib/swtpm/another/tpm2").mkdir(parents=True)
    setup = run("swtpm_setup", "--tpm2", "--tpm-state", str(made))
    editor = run("editor", str(made))
    orphans.forget_tpm(tmp_path, GUEST)
    orphans.forget_tpm(tmp_path, GUEST)
    assert not made.parent.exists()
    assert other.exists()
    assert setup.wait(30) == -9
    assert editor.poll() is None
