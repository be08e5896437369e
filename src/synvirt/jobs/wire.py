"""What a service and its worker process say to each other: one JSON object a line.

    service ─▶ worker   the order, with its `kind`; later, where that kind asks for them, more lines (`wire.next_line`)
    worker ─▶ service   Moved, Flushed, Result …, and Broken as the last one where the order failed

The service keeps the worker's standard input open, and sends an empty line each KEEPALIVE_S. Its end means that the service
is gone; silence for SILENCE_S, that it is frozen, and its host may be fenced soon (lease.py): either way the worker ends.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar, Literal, Protocol, Self, cast

from synvirt.jobs import dataclass_json
from synvirt.outgoing import permitted

# Before the lease of the service's host is over: the host that takes the job over must be its only writer.
KEEPALIVE_S, SILENCE_S = 10.0, 40.0


class WireModel:
    """Frozen data classes. What is wrong with a line is said without its content, which may hold credentials."""

    __slots__ = ()
    # For those that a stored document has as a field.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "hide_input_in_errors": True}

    def to_line(self) -> bytes:
        return dataclass_json.dump(self) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """ValueError."""
        return cast("Self", dataclass_json.load(cls, line))

    @classmethod
    def of(cls, content: Any) -> Self:
        """Of JSON that is read already: a Result's content. ValueError."""
        return cast("Self", dataclass_json.read(cls, content))


class Watched(Enum):
    """When a worker that brings nothing is stalled (stalling.py): ALWAYS but while it waits for the service's line;
    WHILE_READING: not after the last byte of a disk either. NEVER: it serves others, and waits for them."""

    ALWAYS = auto()
    WHILE_READING = auto()
    NEVER = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Order(WireModel):
    """What the service asks of a worker. `outgoing`: where the sources may be that it connects to, as in the process that gives
    the order: a field of all of them, which no kind of order can leave out."""

    watched: ClassVar[Watched] = Watched.ALWAYS
    outgoing: tuple[str, ...] = field(default_factory=permitted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved(WireModel):
    """Progress of a disk; not durable yet."""

    message: Literal["moved"] = "moved"
    key: str
    bytes_total: int
    bytes_done: int
    bytes_zero: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed(WireModel):
    """Every byte before `offset_bytes` is durable on the destination; `finished`: all of the pass is, and of what should not
    have changed `bytes_checked` were compared."""

    message: Literal["flushed"] = "flushed"
    key: str
    offset_bytes: int
    bytes_total: int
    bytes_done: int
    bytes_zero: int
    finished: bool = False
    bytes_checked: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken(WireModel):
    """`kind`: the error's class. Several have one code, and callers answer some of them in ways of their own."""

    message: Literal["broken"] = "broken"
    kind: str
    code: str
    detail: str
    hint: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(WireModel):
    """What only that kind of order has to say. `content` is a WireModel of the kind's, by its `name`. `waits`: the worker does
    nothing before the service's next line."""

    message: Literal["result"] = "result"
    name: str
    content: dict[str, Any]
    waits: bool = False


Message = Moved | Flushed | Broken | Result


def message_of(line: bytes) -> Message:
    """ValueError: a worker reads what is hostile, and may itself be, too."""
    return cast("Message", dataclass_json.load(Message, line))


class Wire(Protocol):
    """The worker's end. `say` is safe from any thread; `stop` is True once the service has asked for the end; `next_line` waits
    for the service's next line."""

    def say(self, message: Message) -> None: ...
    def stop(self) -> bool: ...
    def next_line(self) -> bytes: ...
