"""Temporary folders: a killed process's are removed by the next sweep, and nothing else is."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from synvirt.cage.confining import cage_user
from synvirt.cage.scratch import scratch_folder, sweep
from tests.needs import need_root

# It makes a folder with something in it, says where, and waits to be killed.
HOLDER = """
import sys
from pathlib import Path
from synvirt.cage.scratch import scratch_folder
with scratch_folder("v2v", Path(sys.argv[1])) as folder:
    (folder / "in").mkdir()
    (folder / "in" / "guest.xml").write_text("<domain/>")
    print(folder, flush=True)
    sys.stdin.read()
"""
DAYS = 86400
OLD = [f"synvirt-{kind}-ab12_d9z" for kind in ("look", "v2v", "qcow2", "qemu-nbd", "vmcx", "stamp", "mount", "live", "vddk")]
FOREIGN = [
    "synvirt-v2v",
    "synvirt-v2v-",
    "synvirt-v2v-ab12",
    "synvirt-v2v-ab12_d9z.bak",
    "synvirt-notes-ab12_d9z",
    "v2v-ab12_d9z",
]


def aged(path: Path, days: float) -> Path:
    path.mkdir()
    (path / "file").write_bytes(b"content")
    then = path.stat().st_mtime - days * DAYS
    os.utime(path, (then, then))
    return path


def test_a_folder_is_swept_once_its_process_was_killed_and_not_before(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        folder = Path(holder.stdout.readline().strip())
        sweep(tmp_path)
        assert (folder / "in/guest.xml").exists()
        holder.kill()
    assert folder.exists()
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_ends_with_its_block_and_only_its_user_may_enter_it(tmp_path: Path) -> None:
    with scratch_folder("look", tmp_path) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert folder.name.startswith("synvirt-look-")
    assert list(tmp_path.iterdir()) == []


def test_the_system_s_place_is_taken_where_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder("look") as folder:
        assert folder.parent == tmp_path
        sweep()
        assert folder.exists()
    aged(tmp_path / f"{folder.name[:-13]}_abc1234.held", 0)
    sweep()
    assert list(tmp_path.iterdir()) == []


def test_what_versions_without_locks_left_goes_after_a_day(tmp_path: Path) -> None:
    for name in OLD:
        aged(tmp_path / name, 1.1)
    kept = aged(tmp_path / "synvirt-v2v-fresh_01", 0.9)
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [kept]


def test_nothing_else_is_swept(tmp_path: Path) -> None:
    """An operator's own folders, a file, and a link to a folder elsewhere."""
    elsewhere = aged(tmp_path / "elsewhere", 9)
    there = aged(tmp_path / "tmp", 0)
    (there / "synvirt-v2v-lin_k001").symlink_to(elsewhere)
    (there / "synvirt-v2v-lin_k001.held").symlink_to(elsewhere)
    (there / "synvirt-v2v-fil_e001.held").write_bytes(b"notes")
    for name in FOREIGN:
        aged(there / name, 9)
    before = sorted(path.name for path in there.iterdir())
    sweep(there)
    assert sorted(path.name for path in there.iterdir()) == before
    assert (elsewhere / "file").exists()


def test_folders_of_other_users_stay_except_those_of_our_cages(tmp_path: Path) -> None:
    need_root("another user's folder")
    for name, user in (("synvirt-v2v-oth_er01.held", 54321), ("synvirt-v2v-cag_ed01.held", cage_user()[0])):
        os.chown(aged(tmp_path / name, 9), user, user)
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["synvirt-v2v-oth_er01.held"]
