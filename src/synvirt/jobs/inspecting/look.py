"""What the service (`looking.py`, `points.py`) and the process that inspects (`looker.py`) say to each other, and the limits
that both know.

Order and answer are one JSON object each, ended by the end of the stream.
"""

import json
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from synvirt.disks.roots import Root
from synvirt.errors import Internal
from synvirt.remote import Remote
from synvirt.sizes import GIB, MIB

# Limits of a child. The largest real appliance took a tenth of this; a file that needs more is hostile.
MEMORY_BYTES = 2 * GIB
CPU_S = 30
# The most bytes of an order. A path and a place are far smaller; a manifest that comes with the order has 64 MiB at most.
ORDER_BYTES_MAX = 65 * MIB
# A page of a folder with a thousand long names is 8 MiB.
ANSWER_BYTES_MAX = 32 * MIB
# What the service sends with the two sockets of a question.
PLAIN, WITH_PROGRAMS = b"-", b"p"
# What the looker answers of a question: the child's pidfd comes with it; or why there is no child, up to its end.
BEGUN, NOT_BEGUN = b"p", b"n"
# The child's exit code when it has used all the memory that it may.
OUT_OF_MEMORY = 3


class ReaderKilled(Internal):
    """The child was killed from outside, mostly as memory was short, or got no processor time. That says nothing of what it
    read."""


@dataclass(frozen=True, slots=True)
class Look:
    """One question. `what`: browse, inspect, detect, manifest, open_disk; or a kind of `points.py`, which has no `root` but
    reads `contents`; errors then show `path`. `kind`: the importer, where it is known; `vm`: which of several machines;
    `programs`: the reader needs a program (qemu-nbd, Samba's client)."""

    what: str
    root: Root | None
    path: str
    within_s: float
    vm: str | None = None
    kind: str | None = None
    key: str = ""
    limit: int = 0
    cursor: str | None = None
    programs: bool = False
    contents: tuple[bytes, ...] = field(default=(), repr=False)

    @property
    def answer_bytes_max(self) -> int:
        """The most bytes of an answer: an element of XML takes 6 times its length in JSON."""
        size = sum(map(len, self.contents))
        return min(MIB + 6 * size, ANSWER_BYTES_MAX + 2 * size) if self.root is None else ANSWER_BYTES_MAX

    def order(self) -> bytes:
        """The question as bytes. File names may not be UTF-8: JSON escapes carry them, which pydantic would refuse."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name not in ("root", "contents")}
        line = json.dumps({**fields, "root": _root_fields(self.root), "contents": [len(one) for one in self.contents]})
        return b"".join((line.encode(), b"\n", *self.contents))

    @classmethod
    def read(cls, order: bytes | bytearray) -> "Look":
        """The look that `order` asks for, as `order()` encoded it."""
        line, _, rest = order.partition(b"\n")
        fields = json.loads(line)
        ends = list(accumulate(fields.pop("contents")))
        contents = tuple(bytes(rest[start:end]) for start, end in zip([0, *ends], ends, strict=False))
        return cls(**{**fields, "root": _root(fields["root"]), "contents": contents})


def _root_fields(root: Root | None) -> dict[str, Any] | None:
    if root is None:
        return None
    return {"remote": asdict(root)} if isinstance(root, Remote) else {"path": str(root)}


def _root(fields: dict[str, Any] | None) -> Root | None:
    if fields is None:
        return None
    return _remote(fields["remote"]) if "remote" in fields else Path(fields["path"])


def _remote(fields: dict[str, Any]) -> Remote:
    credentials = tuple((name, value) for name, value in fields.pop("credentials"))
    return Remote(**{**fields, "credentials": credentials, "allowed_hosts": tuple(fields.pop("allowed_hosts"))})
