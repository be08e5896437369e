"""The process that holds a guest still, without a guest: what it is given to find its host by."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.live import SourceAccess, holding
from synvirt.live.libvirt.freeze import _thaw, frozen
from tests.needs import need_libvirt
from tests.servers.libvirt_lab import until

_SAYS_FROZEN = """\
[ "$XDG_RUNTIME_DIR" = /run/user/1000 ] && [ "$SSH_AUTH_SOCK" = /run/agent ] && [ -z "$A_SECRET" ] && echo frozen || env
cat > /dev/null
"""


def test_it_finds_a_users_own_libvirt_and_keys_and_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(tmp_path, _SAYS_FROZEN, monkeypatch)
    for name, value in (("XDG_RUNTIME_DIR", "/run/user/1000"), ("SSH_AUTH_SOCK", "/run/agent"), ("A_SECRET", "hidden")):
        monkeypatch.setenv(name, value)
    with frozen(SourceAccess("qemu:///session"), "web") as hold:
        assert hold.quiet
        assert hold.lasted()


def _program(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\nread -r order\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


@pytest.mark.parametrize(
    ("script", "quiet", "lasted", "killed"),
    [
        ("echo frozen; cat > /dev/null", True, True, False),
        (r"printf 'frozen\nit was thawed\n'; cat > /dev/null", True, False, False),
        ("echo its agent does not answer", False, False, False),
        ("echo frozen; kill -9 $$", True, False, True),
    ],
)
def test_what_becomes_of_a_hold_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, quiet: bool, lasted: bool, killed: bool
) -> None:
    _program(tmp_path, script, monkeypatch)
    with frozen(SourceAccess("qemu:///session"), "web") as hold:
        until(lambda: hold.lasted() <= lasted)  # the second line, or the end, is on its way
        assert (hold.quiet, hold.lasted()) == (quiet, lasted)
    assert hold.killed == killed


def test_a_guest_that_does_not_thaw_is_not_waited_for_and_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process goes on when the service does."""
    thawed = tmp_path / "thawed"
    _program(
        tmp_path, f"echo frozen; cat > /dev/null; while [ ! -e {tmp_path}/go ]; do sleep 0.1; done; touch {thawed}", monkeypatch
    )
    monkeypatch.setattr(holding, "THAW_TIMEOUT_S", 0.0)
    with frozen(SourceAccess("qemu:///session"), "web"):
        pass
    assert not thawed.exists()
    (tmp_path / "go").touch()
    until(thawed.exists)


@pytest.mark.parametrize(
    ("failures", "active", "limit_s", "tries"),
    [(0, True, 0.0, 1), (3, True, 600.0, 4), (3, True, 0.0, 1), (3, False, 600.0, 1)],
)
def test_a_guest_is_thawed_until_it_is_so(
    monkeypatch: pytest.MonkeyPatch, failures: int, active: bool, limit_s: float, tries: int
) -> None:
    """Its agent is still freezing, and the connection is lost meanwhile; by a new one it thaws."""
    libvirt = need_libvirt()
    left = iter([False] * failures + [True] * 9)
    seen: list[str] = []

    def look_up(_uuid: str) -> Any:
        seen.append("asked")
        if len(seen) > 2 and "closed" not in seen:
            raise libvirt.libvirtError("client socket is closed")
        return SimpleNamespace(
            name=lambda: "web", isActive=lambda: active, agentSetResponseTimeout=lambda *_: None, fsThaw=thaw
        )

    def thaw() -> None:
        if not next(left):
            raise libvirt.libvirtError("guest agent command timed out")

    host = SimpleNamespace(
        open=lambda: None, close=lambda: seen.append("closed"), connection=SimpleNamespace(lookupByUUIDString=look_up)
    )
    monkeypatch.setattr(holding, "THAW_PAUSES_S", (0.0,))
    _thaw(host, "uuid", limit_s)  # type: ignore[arg-type]
    assert seen.count("asked") - seen.count("closed") == tries


def test_a_guest_is_thawed_also_after_an_error_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder for the new connection's secrets could not be made."""
    errors = iter([OSError("No space left on device"), MemoryError(), RuntimeError("can't start new thread")])
    opened: list[bool] = []

    def open_() -> None:
        if (error := next(errors, None)) is not None:
            raise error
        opened.append(True)

    domain = SimpleNamespace(isActive=lambda: False)
    host = SimpleNamespace(open=open_, close=lambda: None, connection=SimpleNamespace(lookupByUUIDString=lambda _uuid: domain))
    monkeypatch.setattr(holding, "THAW_PAUSES_S", (0.0,))
    _thaw(host, "uuid", 600.0)  # type: ignore[arg-type]
    assert opened == [True]
