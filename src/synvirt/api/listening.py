"""The service's two sockets. They are bound before anything else begins: a service that cannot listen has changed nothing.

Listening()  the address and {data_dir}/synvirt.sock are ours; connections are refused, as if no service runs
listen()     connections are served: `Server`
"""

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

import structlog

from synvirt.api.connections import Door
from synvirt.api.tls import certificate, fingerprint, renew
from synvirt.errors import BadRequest, Conflict
from synvirt.settings import Settings
from synvirt.settings.starting import found_address

# sun_path of unix(7), with its final zero.
SOCKET_PATH_BYTES = 107
# `synvirt serve` and `synvirt demo` both have the option.
ELSEWHERE = "choose another: --listen 127.0.0.1:8442, the setting listen, or SYNVIRT_LISTEN"

_log = structlog.get_logger("synvirt.api")


class Listening:
    """The sockets of one service. `tls`: its certificate and key; None for HTTP."""

    def __init__(self, settings: Settings) -> None:
        """Call it under `data_dir_locked`, as it replaces a socket on which no service answers. BadRequest, Conflict."""
        self._settings = settings
        with contextlib.ExitStack() as undo:
            self.tcp = undo.enter_context(_tcp_socket(settings))
            self.unix = undo.enter_context(_unix_socket(settings.socket_path))
            undo.callback(settings.socket_path.unlink)
            self.tls = certificate(settings) if settings.tls else None
            if self.tls is not None:
                _log.info("certificate", path=str(self.tls[0]), sha256=fingerprint(self.tls[0]))
            undo.pop_all()
        host, port = self.tcp.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        self.address = f"{'https' if settings.tls else 'http'}://{host}:{port}"

    def listen(self) -> None:
        """Conflict, if another program has bound the same port meanwhile."""
        try:
            self.tcp.listen()
            self.unix.listen()
        except OSError as error:
            raise _refused(self._settings.listen, error) from error

    def renew_certificate(self) -> None:
        """Makes the service's own certificate again, before it expires. OSError; ValueError: it is not whole now."""
        renew(self._settings)

    def close(self) -> None:
        """Idempotent."""
        self.tcp.close()
        self.unix.close()
        self._settings.socket_path.unlink(missing_ok=True)


def _tcp_socket(settings: Settings) -> socket.socket:
    family, kind, protocol, address = found_address(settings)
    sock = Door(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _refused(settings.listen, error) from error
    sock.setblocking(False)
    return sock


def _refused(listen: str, error: OSError) -> Conflict | BadRequest:
    if error.errno == errno.EADDRINUSE:
        return Conflict(f"{listen} is in use by another program", hint=ELSEWHERE)
    return BadRequest(f"cannot listen on {listen}: {error.strerror}", hint=ELSEWHERE)


def _unix_socket(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        raise BadRequest(f"{path} is longer than a socket's path may be ({SOCKET_PATH_BYTES} bytes)", hint="shorten --data-dir")
    _remove_stale(path)
    sock = Door(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
        path.chmod(0o600)  # before listen(): until then no connection is possible
    except OSError as error:
        sock.close()
        raise BadRequest(f"cannot listen on {path}: {error.strerror}") from error
    sock.setblocking(False)
    return sock


def _remove_stale(path: Path) -> None:
    """Removes the socket of a killed service. One that answers is in use."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise Conflict(f"{path} already exists, and is not a socket", hint="move it elsewhere")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise Conflict(f"another service answers at {path}", hint="stop that one, or name another --data-dir")
