"""What root does before the service starts. On real zfs: tests/guest/zfs_destination.py."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from synvirt.destinations.zfs_allow import NEEDED
from synvirt.privileged.preparing import ZFS_RIGHTS, prepare
from synvirt.settings import load

DOCS = Path(__file__).parents[2] / "docs/zfs.md"
SETTINGS = '[zfs]\npool = "tank"\n[destinations.fast]\nkind = "zfs"\npool = "nvme"\nnamespace = "a/b"\n'
ALLOWED = f"allow -u synvirt {','.join(ZFS_RIGHTS)}"


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A zfs that has tank/synvirt, lacks nvme/a/b, and writes down what it is asked."""
    log, program = tmp_path / "called", tmp_path / "bin/zfs"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$*" >> {log}\ncase "$*" in\n'
        "*list*nvme*) echo \"cannot open 'nvme/a/b': dataset does not exist\" >&2; exit 1;;\n"
        "*broken*) echo 'internal error' >&2; exit 1;;\nesac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return log


def settings_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "synvirt.toml"
    path.write_text(text)
    path.chmod(0o640)
    return path


def test_the_user_gets_its_rights_on_each_dataset_of_the_settings_and_what_is_missing_is_made(
    called: Path, tmp_path: Path
) -> None:
    reported: list[str] = []
    prepare(load(config=settings_file(tmp_path, SETTINGS), environ={}), "synvirt", reported.append)
    assert reported == []
    assert called.read_text().splitlines() == [
        "list -H -o name tank/synvirt",
        f"{ALLOWED} tank/synvirt",
        "list -H -o name nvme/a/b",
        "create -p -o canmount=off nvme/a/b",
        f"{ALLOWED} nvme/a/b",
    ]


def test_what_zfs_refuses_is_reported_and_the_others_get_theirs(called: Path, tmp_path: Path) -> None:
    text = SETTINGS.replace('pool = "tank"\n', 'pool = "broken"\n')
    reported: list[str] = []
    prepare(load(config=settings_file(tmp_path, text), environ={}), "synvirt", reported.append)
    assert len(reported) == 1
    assert reported[0].startswith("synvirt has no rights on broken/synvirt: zfs ended with 1: internal error")
    assert f"{ALLOWED} nvme/a/b" in called.read_text()


def run(config: Path) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-P", "-m", "synvirt.privileged.preparing", "--config", str(config), "--user", "synvirt"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


def test_settings_that_another_may_write_give_nobody_a_right(called: Path, tmp_path: Path) -> None:
    config = settings_file(tmp_path, SETTINGS)
    config.chmod(0o660)
    done = run(config)
    assert (done.returncode, called.exists()) == (0, False)
    assert "not root's alone to write" in done.stderr


def test_the_environment_is_not_asked(called: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNVIRT_ZFS_POOL", "other")
    done = run(settings_file(tmp_path, ""))
    assert (done.returncode, done.stderr, called.exists()) == (0, "", False)


def test_the_rights_are_those_that_volumes_and_backups_ask_for() -> None:
    # Commands, not sentences: a sentence may be written anew.
    documented = re.findall(r"zfs allow -u synvirt (\S+) (\S+)", DOCS.read_text())
    assert [dataset for _, dataset in documented] == ["tank/synvirt", "tank/vms"], "volumes, and guests with backups"
    assert {name for rights, _ in documented for name in rights.split(",")} | NEEDED <= set(ZFS_RIGHTS)
