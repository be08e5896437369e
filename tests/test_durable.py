"""Files that are put in place whole, and folders that others get through."""

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from synvirt.durable import make_open_folder, put_private_file, put_text, sweep
from tests.needs import need_root


def test_what_root_puts_into_another_s_folder_is_that_user_s(tmp_path: Path) -> None:
    """`synvirt password`, called by root, writes for a service that is not."""
    need_root("another user's folder")
    keyring = tmp_path / "keyring"
    keyring.mkdir(mode=0o700)
    os.chown(keyring, 12345, 12346)
    for content in (b"one", b"two"):
        put_private_file(keyring / "users", content)
        found = (keyring / "users").stat()
        assert ((keyring / "users").read_bytes(), found.st_uid, found.st_gid, found.st_mode & 0o777) == (
            content,
            12345,
            12346,
            0o600,
        )


def test_a_folder_is_open_with_all_that_was_missing_above_it_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o700)
    before = os.umask(0o077)
    try:
        make_open_folder(tmp_path / "there/a/b")
    finally:
        os.umask(before)
    modes = [(tmp_path / "there" / name).stat().st_mode & 0o777 for name in (".", "a", "a/b")]
    assert modes == [0o700, 0o711, 0o711]


def test_two_open_folders_are_made_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both see that the folder above is missing."""
    both, mkdir = threading.Barrier(2, timeout=60), Path.mkdir

    def together(path: Path, **options: bool) -> None:
        if path.name == "above":
            both.wait()
        mkdir(path, **options)

    monkeypatch.setattr(Path, "mkdir", together)
    with ThreadPoolExecutor(2) as threads:
        for made in [threads.submit(make_open_folder, tmp_path / "above" / name) for name in "ab"]:
            made.result()
    with pytest.raises(FileExistsError):
        make_open_folder(tmp_path / "above/a")


# It puts a file, and is killed at the moment of its argument: `call` is the name of a function of os.
KILLED = """
import os, signal, sys
from pathlib import Path
from synvirt.durable import put_private_file
path, call, replace = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "replace"
os_call = getattr(os, call)
def killed(*arguments, **options):
    if call == "open" and not arguments[1] & os.O_CREAT:
        return os_call(*arguments, **options)
    try:
        if sys.argv[4] == "after":
            os_call(*arguments, **options)
    finally:
        os.kill(os.getpid(), signal.SIGKILL)
setattr(os, call, killed)
put_private_file(path, b"new" * 5000, replace=replace)
"""


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("replace", ["replace", "add"])
@pytest.mark.parametrize("call", ["open", "fsync", "replace", "link", "unlink"])
def test_a_kill_at_any_moment_leaves_the_old_file_or_the_new_one_and_the_next_sweep_nothing_else(
    tmp_path: Path, call: str, replace: str, moment: str
) -> None:
    path = tmp_path / "tls.key"
    if replace == "replace":
        path.write_bytes(b"old")
    argv = [sys.executable, "-c", KILLED, str(path), call, replace, moment]
    ended = subprocess.run(argv, timeout=60, check=False).returncode
    assert ended == (0 if call == {"replace": "link", "add": "replace"}[replace] else -signal.SIGKILL)
    assert not path.exists() or path.read_bytes() in (b"old", b"new" * 5000)
    sweep(tmp_path)
    assert [one.name for one in tmp_path.iterdir() if one != path] == []
    put_private_file(path, b"newer")
    assert path.read_bytes() == b"newer"


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "users"
    put_private_file(path, b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        if call == "write":
            patched.setattr("synvirt.durable._write", full)
        else:
            patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            put_private_file(path, b"new")
    assert (list(tmp_path.iterdir()), path.read_bytes()) == ([path], b"old")


def test_it_is_durable_before_it_has_its_name_and_nobody_sweeps_it_away_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes | list[str]] = []

    def noted(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append(path.read_bytes() if path.is_file() else [one.name for one in path.iterdir()])
        sweep(tmp_path)

    monkeypatch.setattr(os, "fsync", noted)
    put_private_file(tmp_path / "key", b"secret")
    assert synced == [b"secret", ["key"]]
    assert (tmp_path / "key").read_bytes() == b"secret"


def test_an_existing_file_is_replaced_only_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "users"
    put_private_file(path, b"old", replace=False)
    with suppress(FileExistsError):
        put_private_file(path, b"new", replace=False)
    assert (list(tmp_path.iterdir()), path.read_bytes()) == ([path], b"old")


def test_files_that_an_earlier_version_left_are_swept_once_their_process_has_gone(tmp_path: Path) -> None:
    """It named them by its process: `.tls.crt.4711`. A number that no process has by now: above the kernel's largest."""
    gone, lives = 4194305, os.getpid()
    for name in ("tls.crt", "tls.key", "users", "sessions", "notes"):
        (tmp_path / f".{name}.{gone}").write_bytes(b"half")
    (tmp_path / f".users.{lives}").write_bytes(b"being written")
    sweep(tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([f".notes.{gone}", f".users.{lives}"])


def test_a_persons_file_that_finds_no_room_leaves_the_one_before(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, hard))
    try:
        with pytest.raises(OSError, match="File too large") as failed:
            put_text(kept, ["some ", "more"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert failed.value.filename == str(kept)
    assert (kept.read_text(), list(tmp_path.iterdir())) == ("before", [kept])
    put_text(kept, ["some ", "more"])
    assert (kept.read_text(), list(tmp_path.iterdir())) == ("some more", [kept])
