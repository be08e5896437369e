"""Inspecting untrusted files: the service asks, a caged child of the looker (`looker.py`) reads the file, and its answer is
checked before it is used.

    inspect(…) ─▶ a caged child ─▶ an answer ─▶ checked: its form, its size, and that all its files are under the root

Blocking code, from any thread. If a child breaks, or takes too long or too much memory, that is an error of the file; not if
it is killed, or cannot be begun.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import structlog
from pydantic import BaseModel, ValidationError

from synvirt import errors
from synvirt.disks.roots import Root
from synvirt.disks.specs import (
    BlankSpec,
    ChecksumSpec,
    GzipSpec,
    ImageSpec,
    JoinedSpec,
    QemuSpec,
    RawSpec,
    XvaSpec,
)
from synvirt.errors import DiskReadFailed, Internal, MalformedArchive, SourceUnreachable, SynvirtError, cause_of, from_code
from synvirt.jobs.inspecting.look import (
    CPU_S,
    MEMORY_BYTES,
    NOT_BEGUN,
    OUT_OF_MEMORY,
    PLAIN,
    WITH_PROGRAMS,
    Look,
    ReaderKilled,
)
from synvirt.jobs.orders import OpenedBeneath
from synvirt.jobs.process import ENVIRONMENT
from synvirt.jobs.shortage import HINT
from synvirt.model.files import HostFolder, Inspection
from synvirt.model.kinds import OfflineKind
from synvirt.model.machine import VmManifest
from synvirt.offline import OfflineImporter, OpenedDisk
from synvirt.offline.browsing import ELSEWHERE_WITHIN_S, with_free_bytes
from synvirt.offline.registry import BY_KIND
from synvirt.offline.several import choosing
from synvirt.programs import ENDED_HINT, inherited, is_from_outside
from synvirt.remote import Remote
from synvirt.repeating import tried_again
from synvirt.sizes import MIB

# To inspect a file of this host takes milliseconds, on a slow share a second. A share that hangs is reported.
HERE_WITHIN_S = 60.0
# Longer than the limit that the child itself has for remote files.
GRACE_S = 5.0
# How many at once. Each takes a core at most, or waits minutes for a server.
AT_ONCE = 16
# Seconds for the looker's start: it imports all that inspections need, on a busy machine.
START_WITHIN_S = 120.0
CAUSE_BYTES_MAX = 500
ENDS_WITHIN_S = 10.0
# How often a question is asked whose looker or child something else on this host has ended.
TRIES = 3
# The specs that an importer may answer: kinds that read files under the root.
_BENEATH = (RawSpec, ImageSpec, QemuSpec, GzipSpec, JoinedSpec, BlankSpec, XvaSpec, ChecksumSpec)

_log = structlog.get_logger("synvirt.looking")

LOOKER = ("-P", "-m", "synvirt.jobs.inspecting.looker")


class Looking(Protocol):
    """Questions about files before a job reads them. `synvirt.offline.browsing` answers them without a cage."""

    def browse(self, root: Path, path: str = "", *, limit: int, cursor: str | None = None) -> HostFolder: ...
    def inspect(
        self, root: Root, path: str, *, vm: str | None = None, free_bytes: Callable[[], int] | None = None
    ) -> Inspection: ...


class CagedLooking:
    """Asks a looker. `close()` ends it, and every inspection under way."""

    def __init__(self, looker: tuple[str, ...] = LOOKER) -> None:
        self._looker = looker
        self._turns = threading.BoundedSemaphore(AT_ONCE)
        self._lock = threading.Lock()
        self._started: _Looker | None = None
        self._closed = False
        self.importers: Mapping[OfflineKind, OfflineImporter] = MappingProxyType({kind: _Caged(self, kind) for kind in BY_KIND})

    def begin(self) -> None:
        """Starts the looker, so that it is ready before the first question. Returns at once."""
        threading.Thread(target=self._warm, name="looker", daemon=True).start()

    def close(self) -> None:
        """Ends the looker; an inspection after that fails."""
        with self._lock:
            self._closed = True
            if self._started is not None:
                self._started.close()
                self._started = None

    def browse(self, root: Path, path: str = "", *, limit: int, cursor: str | None = None) -> HostFolder:
        look = Look("browse", root, path, HERE_WITHIN_S, limit=limit, cursor=cursor)
        return _valid(HostFolder, self.ask(look))

    def inspect(
        self, root: Root, path: str, *, vm: str | None = None, free_bytes: Callable[[], int] | None = None
    ) -> Inspection:
        found = _valid(Inspection, self.ask(Look("inspect", root, path, _within_s(root), vm=vm)))
        return with_free_bytes(found, free_bytes)

    def detect(self, path: Path | str, root: Root) -> OfflineImporter:
        """Which importer `path` is for, asked of a caged child. HostPathRejected, NotFound, UnsupportedFormat."""
        found = self.ask(Look("detect", root, str(path), _within_s(root)))
        try:
            return self.importers[OfflineKind(found)]
        except (ValueError, KeyError) as error:
            raise _nonsense() from error

    def ask(self, look: Look) -> Any:
        """The child's answer, as parsed JSON. Raises the child's error; MalformedArchive, where the child broke."""
        if isinstance(look.root, Remote) and look.root.url.startswith("smb"):
            look = replace(look, programs=True)  # Samba's client is one
        with self._turns:
            answer = self._answer(look)
            if "needs_programs" in answer and not look.programs:
                answer = self._answer(replace(look, programs=True))
        if "error" in answer:
            raise _error(answer["error"])
        if "ok" not in answer:
            raise _nonsense()
        return answer["ok"]

    def _answer(self, look: Look) -> dict[str, Any]:
        try:
            return tried_again(
                partial(self._answer_now, look), tries=TRIES, after=lambda error: isinstance(error, (_LookerGone, ReaderKilled))
            )
        except _LookerGone as error:
            raise Internal("the inspection of files does not run", hint="see the service's log") from error

    def _answer_now(self, look: Look) -> dict[str, Any]:
        try:
            looker = self._looker_now()
            try:
                return looker.answer(look)
            except _LookerGone:
                looker.close()  # else it may be asked again: its sockets are gone before its process is
                raise
        except OSError as error:  # of a process or a socket of ours
            raise _not_begun(look, cause_of(error)) from error

    def _looker_now(self) -> "_Looker":
        with self._lock:
            if self._closed:
                raise Internal("the service is ending")
            if self._started is None or self._started.is_gone():
                if self._started is not None:
                    self._started.close()
                    _log.warning("the process that inspects files had ended, and is started again")
                self._started = _Looker(self._looker)
            return self._started

    def _warm(self) -> None:
        with suppress(SynvirtError, _LookerGone, OSError):
            self._looker_now()


@dataclass(frozen=True, slots=True)
class _Caged:
    """An importer that works in a cage. Its `probe` is not used: `detect` is."""

    looking: CagedLooking
    kind: OfflineKind
    vm: str | None = None

    def of(self, vm: str) -> OfflineImporter:
        """The importer for one of several machines. BadRequest, where the kind holds only one."""
        choosing(BY_KIND[self.kind], vm)
        return replace(self, vm=vm)

    def probe(self, path: Path, head: bytes, root: Root = Path("/")) -> bool:
        raise NotImplementedError("a caged importer is found by CagedLooking.detect")

    def inspect(self, path: Path, root: Root) -> VmManifest:
        look = Look("manifest", root, str(path), _within_s(root), kind=self.kind, vm=self.vm)
        return _valid(VmManifest, self.looking.ask(look))

    def open_disk(self, path: Path, root: Root, disk_key: str) -> OpenedDisk:
        look = Look("open_disk", root, str(path), _within_s(root), kind=self.kind, vm=self.vm, key=disk_key)
        answer = self.looking.ask(look)
        try:
            found = OpenedBeneath.of(answer)
        except ValueError as error:
            raise _nonsense() from error
        vouch((found.reader, *found.checksums), root)
        return OpenedDisk(found.reader, found.checksums)


# ── the answer is not trusted ──────────────────────────────────────────────────────────────────────────────────


def vouch(specs: object, root: Root) -> None:
    """Internal, where specs name a file outside the root. A reader that a hostile file took over may name any file."""
    for spec in _all_of(specs):
        if isinstance(spec, Remote):
            if spec != root:
                raise _nonsense()
            continue
        if not isinstance(spec, _BENEATH):
            raise _nonsense()
        for field in fields(spec):
            value = getattr(spec, field.name)
            is_file = field.name == "path" or (field.name in ("root", "key_file", "beneath") and isinstance(value, str))
            if is_file and not _is_beneath(str(value), root, getattr(spec, "remote", None)):
                raise _nonsense()


def _is_beneath(name: str, root: Root, remote: Remote | None) -> bool:
    path = Path(name)
    if ".." in path.parts or path.is_absolute() == isinstance(root, Remote):
        return False
    if isinstance(root, Remote):
        return remote == root
    return path.is_relative_to(root.absolute()) or path.is_relative_to(root.resolve())


def _all_of(found: object) -> Iterator[Any]:
    if is_dataclass(found) and not isinstance(found, type):
        yield found
        if not isinstance(found, Remote):
            for field in fields(found):
                yield from _all_of(getattr(found, field.name))
    elif isinstance(found, tuple):
        for one in found:
            yield from _all_of(one)


Answer = TypeVar("Answer", bound=BaseModel)


def _valid(model: type[Answer], content: Any) -> Answer:
    try:
        return model.model_validate_json(json.dumps(content))
    except (ValidationError, ValueError) as error:
        raise _nonsense() from error


def _error(fields: Any) -> SynvirtError:
    """The child's error, if it is one of ours."""
    try:
        kind, code, detail, hint = (str(fields[name]) for name in ("kind", "code", "detail", "hint"))
        holds = tuple(str(one) for one in fields["holds"])
        no_hint = fields["hint"] is None
    except (TypeError, LookupError):
        return _nonsense()
    found = vars(errors).get(kind)
    if kind == "UnsupportedFormat":
        return errors.UnsupportedFormat(detail, hint=None if no_hint else hint, holds=holds)
    if isinstance(found, type) and issubclass(found, SynvirtError):
        return found(detail, hint=None if no_hint else hint)
    return from_code(code, detail, None if no_hint else hint)


def _nonsense() -> Internal:
    return Internal(
        "the process that inspected the file gave an answer that no reader gives", hint="the file may be an attack: report it"
    )


def _within_s(root: Root) -> float:
    return ELSEWHERE_WITHIN_S if isinstance(root, Remote) else HERE_WITHIN_S


# ── the looker's process ─────────────────────────────────────────────────────────────────────────────────────────────


class _LookerGone(Exception):
    pass


class _Looker:
    def __init__(self, looker: tuple[str, ...]) -> None:
        """Returns when it is ready. _LookerGone."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as failing, theirs:
            failing.enter_context(ours)
            self._child = subprocess.Popen(
                [sys.executable, *looker, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # The service's environment may hold secrets.
                env=inherited(ENVIRONMENT),
                start_new_session=True,
            )
            failing.pop_all()
        self._control = ours
        self._sending = threading.Lock()
        ours.settimeout(START_WITHIN_S)
        try:
            ready = ours.recv(16)
        except OSError as error:
            self.close()
            raise _LookerGone from error
        if not ready:
            self.close()
            raise _LookerGone

    def is_gone(self) -> bool:
        return self._child.poll() is not None

    def close(self) -> None:
        self._control.close()
        try:
            self._child.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def answer(self, look: Look) -> dict[str, Any]:
        with ExitStack() as stack:
            channel, theirs = (stack.enter_context(end) for end in socket.socketpair())
            status, their_status = (stack.enter_context(end) for end in socket.socketpair())
            try:
                with self._sending:
                    descriptors = [theirs.fileno(), their_status.fileno()]
                    socket.send_fds(self._control, [WITH_PROGRAMS if look.programs else PLAIN], descriptors)
            except OSError as error:
                raise _LookerGone from error
            theirs.close()
            their_status.close()
            deadline = time.monotonic() + look.within_s + GRACE_S
            try:
                pidfd, why_none = _pidfd(status)
            except OSError as error:
                raise _LookerGone from error
            if pidfd is None:
                raise _not_begun(look, why_none)
            stack.callback(os.close, pidfd)
            stack.callback(_end, pidfd)
            content = _converse(channel, look.order(), deadline, look.answer_bytes_max)
            if content is None:
                raise _late(look)
            if not content:
                raise _broken(look, status)
            return _parsed(content)


def _pidfd(status: socket.socket) -> tuple[int | None, str]:
    """Of the child; or None, and why there is no child."""
    status.settimeout(START_WITHIN_S)
    message, descriptors, _, _ = socket.recv_fds(status, 1, 1)
    if message == NOT_BEGUN:
        return None, status.recv(CAUSE_BYTES_MAX).decode(errors="replace")
    if not message or not descriptors:
        raise OSError("the looker has ended")
    return descriptors[0], ""


def _not_begun(look: Look, why: str) -> Internal:
    hint = f"{HINT}; or the folder of temporary files takes nothing: look at its free space"
    return Internal(f"{Path(look.path).name} cannot be inspected now: {why}", hint=hint)


def _converse(channel: socket.socket, order: bytes, deadline: float, most: int) -> bytes | None:
    """The child's whole answer, `most` bytes at most. None, if it has not ended in time."""
    answer = bytearray()
    try:
        channel.settimeout(max(0.001, deadline - time.monotonic()))
        with suppress(BrokenPipeError, ConnectionResetError):
            channel.sendall(order)
            channel.shutdown(socket.SHUT_WR)
        while len(answer) <= most:
            channel.settimeout(max(0.001, deadline - time.monotonic()))
            part = channel.recv(1 << 20)
            if not part:
                return bytes(answer)
            answer += part
    except TimeoutError:
        return None
    except ConnectionResetError:
        return b""
    raise _nonsense()


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _nonsense() from error
    if not isinstance(found, dict):
        raise _nonsense()
    return found


def _end(pidfd: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _late(look: Look) -> SynvirtError:
    if look.root is None:  # all that it reads came with the question, and the processor time for that has a limit of its own
        return ReaderKilled(
            f"{look.path} was not read within {look.within_s:.0f} s", hint="this host was too busy, or stood still: try again"
        )
    if isinstance(look.root, Remote):
        return SourceUnreachable(f"{look.root.url} did not send what was needed within {look.within_s:.0f} s")
    return DiskReadFailed(
        f"{Path(look.path).name} could not be inspected within {look.within_s:.0f} s",
        hint="does the disk or the share that it lies on answer?",
    )


def _broken(look: Look, status: socket.socket) -> SynvirtError:
    """The error of the file, for a child that ended without an answer. ReaderKilled; _LookerGone, if it ended as well."""
    status.settimeout(ENDS_WITHIN_S)
    try:
        told = status.recv(16)
        code = int(told or b"1")
    except (OSError, ValueError):
        told, code = b"1", 1
    if not told:
        raise _LookerGone
    name = Path(look.path).name
    if code == -signal.SIGALRM:  # as this process stood still too, it has not seen that it is late
        return _late(look)
    if is_from_outside(code):
        raise ReaderKilled(
            f"{name} was not inspected: what reads it was ended by {signal.Signals(-code).name}",
            hint=f"{ENDED_HINT}; or the service's unit allows too little (MemoryMax)",
        )
    if code == -signal.SIGXCPU:
        how = f"inspecting it took over {CPU_S} s of processor time"
    elif code == OUT_OF_MEMORY:
        how = f"inspecting it took over {MEMORY_BYTES // MIB} MiB of memory"
    elif code < 0:
        how = f"it broke its reader (signal {-code})"
    else:
        how = "it broke its reader"
    _log.warning("a reader was ended", file=name, exit_code=code)
    return MalformedArchive(f"{name}: {how}", hint="no VM that was exported does that: keep the file, and report it")
