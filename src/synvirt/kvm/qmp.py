"""QEMU's monitor, in QMP (QEMU's docs/interop/qmp-spec): one command after the other on a Unix socket. Blocking code.

A monitor serves one client at a time, and Proxmox VE or libvirt use it too: so a connection lasts only for a few commands.
"""

import json
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from synvirt.errors import Internal, SourceUnreachable
from synvirt.texts.json_bounded import TooManyValues, loads_bounded

# Another client of the monitor leaves within some seconds; our own commands on a busy disk take some too.
GREETING_TIMEOUT_S: Final = 30.0
ANSWER_TIMEOUT_S: Final = 120.0
# The nodes of a VM with thirty disks, each with its bitmaps, have some hundred KiB.
LINE_BYTES_MAX: Final = 16 << 20
_PIECE_BYTES: Final = 65536


class QmpError(Internal):
    """QEMU refuses a command."""


class NoQemu(SourceUnreachable):
    """Nothing listens at that socket: the VM does not run there, or no longer."""


class Qmp:
    """A connection, as a context. `what`: the VM's name in errors."""

    def __init__(self, path: Path, what: str) -> None:
        self._path, self.what = path, what
        self._socket: socket.socket | None = None
        self._rest = bytearray()

    def __enter__(self) -> Self:
        self._socket = made = socket.socket(socket.AF_UNIX)
        made.settimeout(GREETING_TIMEOUT_S)
        try:
            made.connect(str(self._path))
            self._line(GREETING_TIMEOUT_S)
            self.ask("qmp_capabilities")
        except BaseException as error:
            self.__exit__(None, None, None)
            if isinstance(error, OSError):
                raise NoQemu(f"{self.what}: its monitor cannot be reached: {error.strerror or 'no answer'}") from error
            raise
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._rest.clear()

    def ask(self, command: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """The command's result; events in between are skipped. QmpError, NoQemu, SourceUnreachable."""
        if self._socket is None:
            raise NoQemu(f"{self.what}: its monitor is not open")
        question = {"execute": command, **({"arguments": dict(arguments)} if arguments else {})}
        try:
            self._socket.sendall(json.dumps(question).encode() + b"\n")
        except OSError as error:
            raise NoQemu(f"{self.what}: its monitor was closed before {command}") from error
        while True:
            answer = self._line(ANSWER_TIMEOUT_S)
            if "return" in answer:
                return answer["return"]
            if isinstance(refusal := answer.get("error"), dict):
                raise QmpError(f"{self.what}: QEMU refuses {command}: {str(refusal.get('desc', ''))[:400]}")

    def _line(self, limit_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        while (end := self._rest.find(b"\n")) < 0:
            if len(self._rest) > LINE_BYTES_MAX:
                raise SourceUnreachable(f"{self.what}: its monitor sends more than {LINE_BYTES_MAX} bytes in one line")
            assert self._socket is not None
            self._socket.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                piece = self._socket.recv(_PIECE_BYTES)
            except TimeoutError as error:
                raise SourceUnreachable(
                    f"{self.what}: its monitor sends nothing for {limit_s:.0f} s",
                    hint="it serves one client at a time, and another one is connected; or its QEMU hangs",
                ) from error
            except OSError as error:
                raise NoQemu(f"{self.what}: its monitor was closed") from error
            if not piece:
                raise NoQemu(f"{self.what}: nothing listens at its monitor: the VM does not run there")
            self._rest += piece
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        try:
            found = loads_bounded(line)
        except TooManyValues as error:
            raise SourceUnreachable(f"{self.what}: its monitor sends {error} in one line") from error
        except (ValueError, RecursionError) as error:
            raise SourceUnreachable(f"{self.what}: its monitor does not use QMP") from error
        if not isinstance(found, dict):
            raise SourceUnreachable(f"{self.what}: its monitor does not use QMP")
        return found


def rows(value: Any) -> list[dict[str, Any]]:
    """Internal, where it is not a list."""
    if not isinstance(value, list):
        raise Internal("QEMU's monitor answers with something other than a list")
    return [one for one in value if isinstance(one, dict)]
