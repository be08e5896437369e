"""The worker: each pass of a job has its own process. A bad image kills a worker, never the service.

    stdin   one line: the order as JSON, with its kind; then it stays open, and its end means that the service is gone
    stdout  one line for each message (wire.py)
    SIGTERM stop at the next request

`synvirt.worker` puts the table of kinds together and is what runs. Threads, no event loop.
"""

import contextlib
import json
import os
import queue
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from synvirt.cage import Cage, enter
from synvirt.cage.scratch import housed
from synvirt.errors import Internal, SynvirtError
from synvirt.jobs.wire import SHORT, SILENCE_S, Broken, CarriedOut, Message, Order, Wire
from synvirt.outgoing import permit
from synvirt.sizes import GIB

# The limit of a worker's address space. An image that needs more is hostile: a 1 TiB disk needs less than 256 MiB. Threads and
# mapped libraries count too.
ADDRESS_SPACE_BYTES = 8 * GIB

_BEGIN_HINT = "look at the free space where temporary files are (TMPDIR, /tmp), and whether it is writable"

OrderT = TypeVar("OrderT", bound=Order)


@dataclass(frozen=True)
class Task(Generic[OrderT]):
    """How orders of one kind are read and carried out: to the end, or SynvirtError. `cage`: what an order needs in its cage.
    `begin`: what an order must start before it enters the cage."""

    order: type[OrderT]
    carry_out: Callable[[OrderT, Wire], None]
    cage: Callable[[OrderT], Cage | None] = lambda order: None
    begin: Callable[[OrderT], None] = lambda order: None


# The tasks by kind. Each is loaded when an order of its kind comes: a copy does not load what backups import.
Tasks = Mapping[str, Callable[[], Task[Any]]]


def carry_out(task: Task[OrderT], order: OrderT, wire: Wire) -> None:
    """Carries an order out, and reports its end. SynvirtError as soon as something fails; the service then gets Broken."""
    try:
        task.carry_out(order, wire)
    except Exception as error:
        wire.say(broken_by(error))
        raise
    wire.say(CarriedOut())


def broken_by(error: Exception, *, hint: str | None = None) -> Broken:
    """The message of an order that failed so. `hint`: for errors that have none."""
    if not isinstance(error, SynvirtError):
        detail = f"the worker failed: {type(error).__name__}: {error}"
        ours: SynvirtError = Internal(detail, hint=hint)
        ours.__cause__ = error
        error = ours
    if type(error) is Internal:
        from synvirt.jobs.shortage import HINT, shortage_of  # a worker without errors does not need it

        if (lacks := shortage_of(error)) is not None:
            detail = error.detail if lacks in error.detail else f"{error.detail}: {lacks}"
            return Broken(kind=SHORT, code=error.code, detail=detail, hint=HINT)
    return Broken(kind=type(error).__name__, code=error.code, detail=error.detail, hint=error.hint)


def read_order(line: bytes, tasks: Tasks) -> tuple[Task[Any], Order]:
    """The order in a line, and its task. ValueError, without a part of the line: an order may hold a password, and the error is
    logged."""
    try:
        kind = json.loads(line)["kind"]
        load = tasks[kind]
    except (ValueError, TypeError, LookupError):
        raise ValueError(f"its kind is none of {', '.join(tasks)}") from None
    task = load()
    try:
        return task, task.order.from_line(line)
    except ValueError as error:
        raise ValueError(str(error)) from None


class _Pipes:
    """The wire of a process: its standard input and output."""

    def __init__(self) -> None:
        # The output of libraries must not look like a message.
        self._messages = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        self._speaking, self._stopping = threading.Lock(), threading.Event()
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._rest = b""
        signal.signal(signal.SIGTERM, lambda *_: self._stopping.set())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service handles Ctrl-C

    def say(self, message: Message) -> None:
        with self._speaking:
            # Through the buffer: a write that a signal interrupts may take a part of a long line, which the buffer completes.
            self._messages.write(message.to_line())
            self._messages.flush()

    def stop(self) -> bool:
        return self._stopping.is_set()

    def next_line(self) -> bytes:
        return self._lines.get()

    def first_line(self) -> bytes:
        """The first line, read in the caller's thread; incomplete, where the standard input has ended."""
        return self._read_line() or self._rest

    def listen(self, silence_s: float) -> None:
        """From now on lines go to `next_line`. At the end of the input the process ends: the service is gone."""
        threading.Thread(target=self._listen, args=(silence_s,), daemon=True).start()

    def _listen(self, silence_s: float) -> None:
        with contextlib.suppress(OSError):
            while (line := self._read_line(silence_s)) is not None:
                if line:
                    self._lines.put(line)
        os._exit(1)

    def _read_line(self, within_s: float | None = None) -> bytes | None:
        """The next line. None, at the end of the input or after `within_s` without a line."""
        while b"\n" not in self._rest:
            if within_s is not None and not select.select([0], [], [], within_s)[0]:
                return None
            part = os.read(0, 1 << 16)
            if not part:
                return None
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def limit_memory() -> None:
    """Limits this process's address space, to less where it may not have as much."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = ADDRESS_SPACE_BYTES if hard == resource.RLIM_INFINITY else min(ADDRESS_SPACE_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main(tasks: Tasks, *, silence_s: float | None = None) -> int:
    """Reads an order and carries it out. The exit code: 0; 1 for an order that failed; 2 for one that is not understood.
    `silence_s`: see wire.py."""
    limit_memory()
    pipes = _Pipes()
    try:
        task, order = read_order(pipes.first_line(), tasks)
    except ValueError as error:
        print(f"not an order: {error}", file=sys.stderr)  # noqa: T201 - the service keeps our stderr
        return 2
    permit(order.outgoing)
    try:
        task.begin(order)
        if (cage := task.cage(order)) is not None:
            enter(housed(cage))  # before there are threads, and before a byte of what is copied is read
        pipes.listen(silence_s or SILENCE_S)
    except Exception as error:
        pipes.say(broken_by(error, hint=_BEGIN_HINT))
        raise
    try:
        carry_out(task, order, pipes)
    except SynvirtError:
        return 1
    return 0
