"""The two entrances to one app in one process: HTTPS for the network, a Unix socket for this host's own callers.

{data_dir}/synvirt.sock (0600, no password) ─▶ FromSocket ─┐
settings.listen (HTTPS, Basic)              ───────────────┴▶ app
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from synvirt.api import connections
from synvirt.api.callers.gate import FromSocket
from synvirt.api.connections import Held, allow_files
from synvirt.api.listening import Listening
from synvirt.api.tls import Replaced
from synvirt.errors import Conflict
from synvirt.jobs.shortage import HINT
from synvirt.settings import Settings

# Present answers may end; a stream whose client does not read is cut. A supervisor waits for us.
GRACE_S = 1
# Seconds between two looks whether the certificate was replaced.
CERTIFICATE_LOOK_S = 30.0
# How often the log says that callers wait: it may lie on the disk that has the volumes.
SAID_EVERY_S = 60.0
# With TLS 1.2, only ciphers with authentication (AEAD) and forward secrecy; TLS 1.3 has no others.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"

_log = structlog.get_logger("synvirt.api")


@contextmanager
def data_dir_locked(data_dir: Path) -> Iterator[None]:
    """Locks {data_dir} for this process: two services on one store would both run its jobs. Conflict, if another has the
    lock."""
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


class Server:
    """`run()` blocks until `stop()`, SIGTERM, SIGINT or SIGHUP, and takes two seconds at most to end after that.

    The constructor opens both sockets. `sockets`: bound earlier; without them, they are bound now, under `data_dir_locked`.
    BadRequest, Conflict.
    """

    def __init__(self, app: FastAPI, settings: Settings, sockets: Listening | None = None) -> None:
        self._app, self._stopping = app, False
        self._sockets = sockets or Listening(settings)
        try:
            self._servers = (
                (_Quiet(_config(app, self._sockets.tls)), self._sockets.tcp),
                (_Quiet(_config(FromSocket(app), None)), self._sockets.unix),
            )
            self._sockets.listen()
        except BaseException:
            self._sockets.close()
            raise
        self.address = self._sockets.address

    def run(self, *, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serves until a signal. `on_ready`: called once both sockets listen; its error ends the service, and is raised."""
        allow_files()
        try:
            with self._signals(), asyncio.Runner(loop_factory=_Loop) as runner:
                runner.run(self._run(on_ready))
        finally:
            self._sockets.close()

    def stop(self) -> None:
        """From any thread, or a signal. Idempotent."""
        self._stopping = True

    def connections(self) -> int:
        """The number of connections now, of both sockets."""
        return sum(len(server.server_state.connections) for server, _ in self._servers)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Does not use the loop's own handlers: at its end, the loop restores handlers that would raise KeyboardInterrupt
        anywhere."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # SIGHUP: the terminal was closed; nohup ignores it, and that stays.
        ends = [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL else [])]
        before = {number: signal.signal(number, lambda *_: self.stop()) for number in ends}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def _run(self, on_ready: Callable[[], None]) -> None:
        logging.getLogger("uvicorn.error").addFilter(_is_not_cut)
        tasks = [asyncio.create_task(server.serve(sockets=[sock])) for server, sock in self._servers]
        watcher = asyncio.create_task(self._watch(on_ready))
        certificates = asyncio.create_task(self._follow_certificate())
        try:
            await asyncio.gather(*tasks)
        finally:
            watcher.cancel()
            certificates.cancel()
            await self._cut()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher

    async def _follow_certificate(self) -> None:
        """Uses a new certificate as soon as its files are there, without a restart, and renews the service's own."""
        if self._sockets.tls is None:
            return
        replaced = Replaced(*self._sockets.tls)
        refused = ""
        while True:
            await asyncio.sleep(CERTIFICATE_LOOK_S)
            try:
                await asyncio.to_thread(self._sockets.renew_certificate)
            except (OSError, ValueError) as error:  # the old one stays, and this is tried again
                if str(error) != refused:
                    refused = str(error)
                    _log.warning("the certificate is not renewed", cause=refused)
            context = self._servers[0][0].config.ssl
            with contextlib.suppress(OSError):  # replaced again at this moment: seen at the next look
                if await asyncio.to_thread(replaced.look) and context is not None:
                    replaced.use(context, CIPHERS)

    async def _cut(self) -> None:
        """Cuts connections: closing TLS waits half a minute for the other side (asyncio's ssl_shutdown_timeout), and an idle
        browser does not answer: the event loop would end first, and leave the connection open."""
        for server, _ in self._servers:
            for connection in list(server.server_state.connections):
                connection.transport.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                while self.connections():
                    await asyncio.sleep(0)

    async def _watch(self, on_ready: Callable[[], None]) -> None:
        """Ends the servers on a stop, and on an error of its own: nothing else would hear a signal then."""
        try:
            while not all(server.started for server, _ in self._servers):
                await asyncio.sleep(0.02)
            _log.info("serving", address=self.address, socket=self._sockets.unix.getsockname())
            on_ready()
            # Polled: asyncio's events cannot be set from another thread, and no event can be set from two signals at once.
            while not self._stopping:
                await asyncio.sleep(0.1)
        finally:
            self._app.state.stopping.set()
            for server, _ in self._servers:
                server.should_exit = True


def serve(app: FastAPI, settings: Settings, *, on_ready: Callable[[], None] = lambda: None) -> None:
    """Serves the app until a signal. `on_ready`: called once both sockets listen."""
    Server(app, settings).run(on_ready=on_ready)


def _is_not_cut(record: logging.LogRecord) -> bool:
    """A request that the service's end has cut is no mistake. uvicorn says how many were."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


class _Loop(asyncio.SelectorEventLoop):
    """Waits less long for TLS than asyncio's minute, which uvicorn has no setting for. Its log says once a minute that callers
    wait for a descriptor: asyncio tries, and says so with a traceback, each second."""

    _said_at = 0.0

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in connections.NO_MORE and "socket" in context):
            super().call_exception_handler(context)
        elif not self._said_at or self.time() >= self._said_at + SAID_EVERY_S:
            self._said_at = self.time()
            _log.error("no caller comes in, and those who come wait", cause=error.strerror, hint=HINT)

    async def create_server(self, *arguments: Any, **options: Any) -> asyncio.Server:
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = connections.HANDSHAKE_WITHIN_S
        return await super().create_server(*arguments, **options)


class _Quiet(uvicorn.Server):
    """Uvicorn's server without its signal handlers: there are two of them, and `Server` handles signals for both."""

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
        # With X-Forwarded-For, any caller could choose the address by which failures are counted.
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE_S,
        ssl_certfile=identity[0] if identity else None,
        ssl_keyfile=identity[1] if identity else None,
        ssl_ciphers=CIPHERS,
    )
