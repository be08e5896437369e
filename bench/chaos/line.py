"""A service's connection to PostgreSQL by a socket of its own, which can be cut or fall silent."""

import asyncio
import contextlib
import threading
from pathlib import Path

SOCKET = ".s.PGSQL.5432"
CHUNK_BYTES = 64 * 1024


class Line:
    """`folder`: what a database's URL names as its host. `cut`: all that is connected is dropped, and who knocks is refused;
    `silent`: nothing passes any more, and nobody is told; `mend`: as before either. From any thread."""

    def __init__(self, folder: Path, database: Path) -> None:
        self.folder, self.database = folder, database
        folder.mkdir()
        self._loop = asyncio.new_event_loop()
        self._passing = asyncio.Event()
        self._passing.set()
        self._is_cut = False
        self._open: set[asyncio.StreamWriter] = set()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait()

    def cut(self) -> None:
        self._loop.call_soon_threadsafe(self._cut)

    def silence(self) -> None:
        self._loop.call_soon_threadsafe(self._passing.clear)

    def mend(self) -> None:
        self._loop.call_soon_threadsafe(self._mend)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _serve(self, ready: threading.Event) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._listen(ready))

    async def _listen(self, ready: threading.Event) -> None:
        self._over = asyncio.Event()
        async with await asyncio.start_unix_server(self._joined, self.folder / SOCKET):
            ready.set()
            await self._over.wait()
            self._cut()

    def _cut(self) -> None:
        self._is_cut = True
        for writer in self._open:
            writer.transport.abort()

    def _mend(self) -> None:
        self._is_cut = False
        self._passing.set()

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            if self._is_cut:
                return
            await self._passing.wait()
            there, back = await asyncio.open_unix_connection(self.database / SOCKET)
            self._open.add(back)
            try:
                ways = [asyncio.ensure_future(self._pass(reader, back)), asyncio.ensure_future(self._pass(there, writer))]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()
            finally:
                self._open.discard(back)
                back.transport.abort()
        except OSError:
            pass  # the database is away: who knocks sees its end
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while content := await reader.read(CHUNK_BYTES):
                await self._passing.wait()
                writer.write(content)
                await writer.drain()
