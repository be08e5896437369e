"""Files that are put in place whole, and folders that others get through."""

import os
from pathlib import Path

from synvirt.durable import make_open_folder, put_private_file
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
