"""The protocol between a service and its worker process: one JSON object for each line.

    service ─▶ worker   the order, with its `kind`; later, where that kind asks for them, more lines (`wire.next_line`)
    worker ─▶ service   Moved, Flushed, Result …, and one as the last: CarriedOut, or Broken where the order failed

The service keeps the worker's standard input open, and sends an empty line every KEEPALIVE_S. The end of the input means that
the service is gone; no line for SILENCE_S, that it is frozen and its host may be fenced soon (lease.py). The worker ends in
both cases.
"""

from enum import Enum, auto
from typing import Any, ClassVar, Literal, Protocol, Self, cast

from synvirt.jobs import dataclass_json
from synvirt.outgoing import permitted
from synvirt.records import Record, field

# Shorter than the lease of the service's host: the host that takes the job over must be its only writer.
KEEPALIVE_S, SILENCE_S = 10.0, 40.0


# The kind of a Broken whose worker was refused a thread, a process or a descriptor: its order may be given again.
SHORT = "Short"


class WireModel(Record):
    """Frozen data classes. Errors about a line do not show its content, which may hold credentials."""

    __slots__ = ()
    # For models that are a field of a stored document.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "hide_input_in_errors": True}

    def to_line(self) -> bytes:
        return dataclass_json.dump(self) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """ValueError."""
        return cast("Self", dataclass_json.load(cls, line))

    @classmethod
    def of(cls, content: Any) -> Self:
        """The model of parsed JSON, which is a Result's content. ValueError."""
        return cast("Self", dataclass_json.read(cls, content))


class Watched(Enum):
    """When a worker without progress counts as stalled (stalling.py). ALWAYS: except while it waits for the service's line.
    WHILE_READING: also not after the last byte of a disk. NEVER: it serves others, and waits for them."""

    ALWAYS = auto()
    WHILE_READING = auto()
    NEVER = auto()


class Order(WireModel):
    """What a worker is to do. `outgoing`: which hosts it may connect to; the same as in the process that gives the order. Every
    kind of order has it."""

    watched: ClassVar[Watched] = Watched.ALWAYS
    outgoing: tuple[str, ...] = field(default_factory=permitted)


class Moved(WireModel):
    """Progress of a disk; not durable yet."""

    message: Literal["moved"] = "moved"
    key: str
    bytes_total: int
    bytes_done: int
    bytes_zero: int


class Flushed(WireModel):
    """Every byte before `offset_bytes` is durable on the destination. `finished`: the whole pass is. `bytes_checked`: how many
    bytes that should be unchanged were compared."""

    message: Literal["flushed"] = "flushed"
    key: str
    offset_bytes: int
    bytes_total: int
    bytes_done: int
    bytes_zero: int
    finished: bool = False
    bytes_checked: int = 0


class Broken(WireModel):
    """The order failed. `kind`: the error's class, as several share a code and callers treat some of them differently."""

    message: Literal["broken"] = "broken"
    kind: str
    code: str
    detail: str
    hint: str | None


class CarriedOut(WireModel):
    """The order was carried out to its end. Without this message it was not, whatever the exit code of the worker is."""

    message: Literal["carried_out"] = "carried_out"


class Result(WireModel):
    """A message of one kind of order. `content` is a WireModel of that kind, by its `name`. `waits`: the worker does nothing
    before the service's next line."""

    message: Literal["result"] = "result"
    name: str
    content: dict[str, Any]
    waits: bool = False


Message = Moved | Flushed | Broken | CarriedOut | Result


def message_of(line: bytes) -> Message:
    """The message in a line. ValueError: a worker reads hostile data, so its lines may be hostile too."""
    return cast("Message", dataclass_json.load(Message, line))


class Wire(Protocol):
    """The worker's end. `say` is safe from any thread; `stop` is True once the service has asked for the end; `next_line` waits
    for the service's next line."""

    def say(self, message: Message) -> None: ...
    def stop(self) -> bool: ...
    def next_line(self) -> bytes: ...
