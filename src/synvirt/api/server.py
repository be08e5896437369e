"""The two ways in, of one app in one process: HTTPS for the network, a Unix socket for this host's own callers.

{data_dir}/synvirt.sock (0600, no password) ─▶ FromSocket ─┐
settings.listen (HTTPS, Basic)              ───────────────┴▶ app
"""

import asyncio
import contextlib
import errno
import fcntl
import ipaddress
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from synvirt.api.callers.gate import FromSocket
from synvirt.api.connections import Held, allow_files
from synvirt.api.tls import certificate, fingerprint
from synvirt.errors import BadRequest, Conflict
from synvirt.settings import Settings, listen_address

# Answers under way may end; a stream whose client does not read is cut. A supervisor waits for us.
GRACE_S = 1
# With TLS 1.2, ciphers that hold what they encrypt to its sum (AEAD), and keys that are forgotten; TLS 1.3 has no others.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
# sun_path of unix(7), with its ending zero.
SOCKET_PATH_BYTES = 107

_log = structlog.get_logger("synvirt.api")


@contextmanager
def data_dir_locked(data_dir: Path) -> Iterator[None]:
    """Hold {data_dir} for this process: two services on one store would both run its jobs. Conflict when another has it."""
    with (data_dir / "synvirt.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(20).strip() or "unknown"
            raise Conflict(
                f"another service (process {holder}) runs on {data_dir}", hint="stop that one, or name another --data-dir"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


# `synvirt serve` and `synvirt demo` take the option alike.
ELSEWHERE = "choose another: --listen 127.0.0.1:8442, the setting listen, or SYNVIRT_LISTEN"


class Server:
    """`run()` blocks until `stop()`, SIGTERM or SIGINT, and takes two seconds at most to end after that.

    Making it binds both sockets, so that who cannot listen learns it before a job is begun. Make it under
    `data_dir_locked`: it takes a socket that nobody answers for its own.
    """

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        self._app, self._settings = app, settings
        self._stopping = False
        with contextlib.ExitStack() as undo:
            self._tcp = undo.enter_context(_tcp_socket(settings))
            self._unix = undo.enter_context(_unix_socket(settings.socket_path))
            undo.callback(settings.socket_path.unlink)
            identity = certificate(settings) if settings.tls else None
            if identity is not None:
                _log.info("certificate", path=str(identity[0]), sha256=fingerprint(identity[0]))
            self._servers = (
                (_Quiet(_config(app, identity)), self._tcp),
                (_Quiet(_config(FromSocket(app), None)), self._unix),
            )
            undo.pop_all()
        host, port = self._tcp.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        self.address = f"{'https' if settings.tls else 'http'}://{host}:{port}"

    def run(self, *, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serves until a signal. `on_ready`: called once both sockets listen."""
        allow_files()
        try:
            with self._signals():
                asyncio.run(self._run(on_ready))
        finally:
            self._tcp.close()
            self._unix.close()
            self._settings.socket_path.unlink(missing_ok=True)

    def stop(self) -> None:
        """From any thread, or a signal. Idempotent."""
        self._stopping = True

    def connections(self) -> int:
        """How many there are now, of both sides."""
        return sum(len(server.server_state.connections) for server, _ in self._servers)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Not the loop's own handlers: what it puts in their place at its end would raise KeyboardInterrupt wherever we are."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, lambda *_: self.stop()) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def _run(self, on_ready: Callable[[], None]) -> None:
        tasks = [asyncio.create_task(server.serve(sockets=[sock])) for server, sock in self._servers]
        watcher = asyncio.create_task(self._watch(on_ready))
        try:
            await asyncio.gather(*tasks)
        finally:
            watcher.cancel()
            await self._cut()

    async def _cut(self) -> None:
        """Closing TLS waits half a minute for the other side's goodbye (asyncio's ssl_shutdown_timeout), and an idle browser
        says none: the event loop would end before, and leave the connection open."""
        for server, _ in self._servers:
            for connection in list(server.server_state.connections):
                connection.transport.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                while self.connections():
                    await asyncio.sleep(0)

    async def _watch(self, on_ready: Callable[[], None]) -> None:
        while not all(server.started for server, _ in self._servers):
            await asyncio.sleep(0.02)
        _log.info("serving", address=self.address, socket=str(self._settings.socket_path))
        on_ready()
        # Polled: an event of asyncio's could not be set from another thread, nor any event from two signals at once.
        while not self._stopping:
            await asyncio.sleep(0.1)
        self._app.state.stopping.set()
        for server, _ in self._servers:
            server.should_exit = True


def serve(app: FastAPI, settings: Settings, *, on_ready: Callable[[], None] = lambda: None) -> None:
    """Serves the app until a signal. `on_ready`: called once both sockets listen."""
    Server(app, settings).run(on_ready=on_ready)


class _Quiet(uvicorn.Server):
    """Uvicorn's server without its signal handlers: there are two of them, and `Server` listens for both."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _config(app: ASGIApp, identity: tuple[Path, Path] | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Held,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # X-Forwarded-For would let any caller choose the address that failures are counted by.
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE_S,
        ssl_certfile=identity[0] if identity else None,
        ssl_keyfile=identity[1] if identity else None,
        ssl_ciphers=CIPHERS,
    )


def _tcp_socket(settings: Settings) -> socket.socket:
    host, port = listen_address(settings.listen)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise BadRequest(f"setting listen: {host} is no address of this host: {error.strerror}") from error
    if not settings.tls and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise BadRequest(
            f"setting tls is off, and {host} is not a loopback address: passwords would cross the network in clear",
            hint="listen on 127.0.0.1 behind a proxy of yours, or leave tls on",
        )
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen()
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise Conflict(f"{settings.listen} is in use by another program", hint=ELSEWHERE) from error
        raise BadRequest(f"cannot listen on {settings.listen}: {error.strerror}", hint=ELSEWHERE) from error
    sock.setblocking(False)
    return sock


def _unix_socket(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        raise BadRequest(f"{path} is longer than a socket's path may be ({SOCKET_PATH_BYTES} bytes)", hint="shorten --data-dir")
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
        path.chmod(0o600)  # before listen(): until then nobody can connect
        sock.listen()
    except OSError as error:
        sock.close()
        raise BadRequest(f"cannot listen on {path}: {error.strerror}") from error
    sock.setblocking(False)
    return sock


def _remove_stale(path: Path) -> None:
    """A service that was killed leaves its socket behind. One that answers is not stale."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise Conflict(f"{path} is in the way: it is no socket", hint="move it elsewhere")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise Conflict(f"another service answers at {path}", hint="stop that one, or name another --data-dir")
