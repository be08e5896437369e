"""What of the import root is listed, where a part of it fails."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from synvirt.offline.browsing import browse


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.ESTALE, errno.ENOENT])
def test_a_folder_whose_file_system_is_gone_hides_nothing_but_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """One stale mount in the import root made the list of all of it an internal error."""
    (tmp_path / "share").mkdir()
    (tmp_path / "web.ova").write_bytes(b"x")
    really = os.stat

    def stale(name: Any, *given: Any, **named: Any) -> os.stat_result:
        if name == "share":
            raise OSError(number, os.strerror(number))
        return really(name, *given, **named)

    monkeypatch.setattr(os, "stat", stale)
    assert [entry.name for entry in browse(tmp_path, limit=10).entries] == ["web.ova"]


def test_an_error_of_this_host_itself_is_no_gap_in_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "share").mkdir()
    really = os.stat

    def full(name: Any, *given: Any, **named: Any) -> os.stat_result:
        if name == "share":
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return really(name, *given, **named)

    monkeypatch.setattr(os, "stat", full)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        browse(tmp_path, limit=10)
