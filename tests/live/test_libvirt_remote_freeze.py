"""The process that holds a guest still, without a guest: what it is given to find its host by."""

import sys
from pathlib import Path

import pytest

from synvirt.live import SourceAccess
from synvirt.live.libvirt_remote_freeze import frozen

_SAYS_FROZEN = """\
#!/bin/sh
read -r order
[ "$XDG_RUNTIME_DIR" = /run/user/1000 ] && [ "$SSH_AUTH_SOCK" = /run/agent ] && [ -z "$A_SECRET" ] && echo frozen || env
cat > /dev/null
"""


def test_it_finds_a_users_own_libvirt_and_keys_and_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text(_SAYS_FROZEN)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    for name, value in (("XDG_RUNTIME_DIR", "/run/user/1000"), ("SSH_AUTH_SOCK", "/run/agent"), ("A_SECRET", "hidden")):
        monkeypatch.setenv(name, value)
    with frozen(SourceAccess("qemu:///session"), "web") as quiet:
        assert quiet
