"""How the sshd of a test's own host is started: it knows one key, and reads no file of this machine's users."""

from pathlib import Path

_CONFIG = """\
Port {port}
ListenAddress {address}
HostKey {keys}/host
AuthorizedKeysFile {keys}/authorized
PidFile none
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
UsePAM no
LogLevel ERROR
# OpenSSH's own choice guards against quantum computers, for 90 ms of a core at each log-in.
KexAlgorithms curve25519-sha256
# SHLVL: so bash reads no ~/.bashrc, which on a developer's machine may start a hundred programs at each log-in.
SetEnv {environment}
"""


def sshd_config(*, port: int, keys: Path, address: str = "127.0.0.1", environment: str = "") -> str:
    """`keys`: a folder with `host` and `authorized`. `environment`: NAME=VALUE, for all commands; without spaces in values."""
    return _CONFIG.format(port=port, address=address, keys=keys, environment=f"{environment} SHLVL=1".strip())
