"""The ledger of hashes: what a pass read, extent by extent. With it anybody can prove later that a disk still has it.

    hashing = Hashing(reader)                   # a wrapper, transparent for copy()
    copy(hashing, writer)
    ledger = hashing.ledger("disk0")            # made in the same pass, of what was read
    verify(ledger, open_reader(target_spec))    # reads the target again: DiskWriteFailed names the first difference

A row is an extent: its start, its length, and its SHA-256, or that it is zeros. Rows ascend and never overlap. A byte that is
not part of the pass (of a delta) is in none. They are cut at multiples of 4 MiB (BLOCK_BYTES), and zeros are found by content,
so the ledger of a disk is the same whatever format it was read from, and whichever threads read it. (A pass with a rate limit
below 16 MiB/s reads less at a time, and its rows are shorter. It verifies as well, but is another ledger.)

Why SHA-256: the ledger is signed, so the hash must be unforgeable, and of such hashes it is the fastest here: 1460 MiB/s per
thread on a processor with SHA instructions, where BLAKE2b does 670, SHA-512 690 and SHA3-256 450. It scales with the threads,
since hashlib releases the interpreter's lock. XXH3-128 does 24000 and proves nothing to others: `disk convert --verify` uses it
where no ledger is kept (`digests.py`). A ledger with it has no written form.

As a file it is JSON lines (version 1). A ledger has exactly one written form, so that its bytes can be signed:

    {"ledger":"synvirt","version":1,"disk":"disk0","pass":1,"size_bytes":8388609,"block_bytes":4194304}
    {"start":0,"length":4194304,"algorithm":"sha256","digest":"9f86d0…"}
    {"start":4194304,"length":4194305,"algorithm":"zero","digest":""}
    {"rows":2}

Neighbouring zeros are one row. The last line shows that a ledger is complete. In memory a row takes about 200 bytes: 50 MiB for
1 TiB of data, nothing for zeros.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from synvirt.blocks import DiskReader, Extent, ExtentCursor, coalesced
from synvirt.copying import default_threads
from synvirt.disks.changed import Over
from synvirt.disks.checking.digests import SHA256, Digest
from synvirt.disks.checking.looking import PIECE_BYTES, Tally, first_found
from synvirt.disks.memory import is_zero
from synvirt.errors import DiskWriteFailed, MalformedArchive
from synvirt.sizes import MIB

BLOCK_BYTES: Final = 4 * MIB
VERSION: Final = 1
_ZERO: Final = "zero"
_DIGEST_BYTES: Final = len(SHA256.of(memoryview(b"")))
# A line of an honest ledger has some 120 bytes; the first one also a disk's name.
LINE_BYTES_MAX: Final = 64 << 10


class Row(NamedTuple):
    """`length` bytes from `start`; `digest` is their hash (the ledger says which), None where all are zero."""

    start: int
    length: int
    digest: bytes | None

    @property
    def end(self) -> int:
        return self.start + self.length


class Difference(NamedTuple):
    """The first row in which two ledgers differ: the same bytes in the one and in the other."""

    start: int
    length: int
    expected: str
    found: str


class Ledger:
    """The rows of one pass over one disk. `disk` is its name for people; `number` is the pass's; `digest` made its hashes."""

    def __init__(self, disk: str, size: int, rows: Iterable[Row], *, number: int = 1, digest: Digest = SHA256) -> None:
        """`rows` ascend and do not overlap."""
        self.disk, self.size, self.number, self.digest = disk, size, number, digest
        self.rows: tuple[Row, ...] = tuple(_zeros_joined(rows))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self.disk, self.number, self.size, self.digest, self.rows

    def described(self, row: Row) -> str:
        """The content of the row as text: `zeros`, or the hash with its name."""
        return "zeros" if row.digest is None else f"{self.digest.name.upper()} {row.digest.hex()}"

    def difference(self, other: "Ledger") -> Difference | None:
        """The first difference in the disk's content, whatever the names of the disks; None: there is none."""
        if self.size != other.size:
            end = min(self.size, other.size)
            return Difference(end, abs(self.size - other.size), f"{self.size} bytes", f"{other.size} bytes")
        mine, theirs = _Rows(self.rows), _Rows(other.rows)
        while (one := mine.now) is not None and (two := theirs.now) is not None:
            if one.start == two.start and one.digest is None and two.digest is None:
                length = min(one.length, two.length)
                mine.skip(length)
                theirs.skip(length)
            elif one == two:
                mine.skip(one.length)
                theirs.skip(two.length)
            else:
                return self._differing(one, two)
        left = mine.now or theirs.now
        if left is None:
            return None
        return Difference(
            left.start,
            left.length,
            *(("nothing", self.described(left)) if mine.now is None else (self.described(left), "nothing")),
        )

    def _differing(self, one: Row, two: Row) -> Difference:
        mine, theirs = self.described(one), self.described(two)
        if one.start == two.start:
            return Difference(one.start, min(one.length, two.length), mine, theirs)
        first, expected, found = (one, mine, "nothing") if one.start < two.start else (two, "nothing", theirs)
        return Difference(first.start, first.length, expected, found)

    def lines(self) -> Iterator[str]:
        """The lines of the file, without line ends. ValueError: its hashes are not SHA-256, and would prove nothing."""
        if self.digest is not SHA256:
            raise ValueError(f"a ledger of {self.digest.name} is not written")
        head = {"ledger": "synvirt", "version": VERSION, "disk": self.disk, "pass": self.number}
        yield _compact({**head, "size_bytes": self.size, "block_bytes": BLOCK_BYTES})
        for start, length, digest in self.rows:
            algorithm, hexadecimal = (_ZERO, "") if digest is None else (SHA256.name, digest.hex())
            yield _compact({"start": start, "length": length, "algorithm": algorithm, "digest": hexadecimal})
        yield _compact({"rows": len(self.rows)})

    @classmethod
    def from_lines(cls, lines: Iterable[str], name: str = "the ledger") -> "Ledger":
        """MalformedArchive says which line is wrong."""
        head: dict[str, Any] = {}
        rows: list[Row] = []
        for number, line in enumerate(lines, 1):
            value = _parsed(line, f"{name}, line {number}")
            if number == 1:
                head = _head(value, name)
            elif "rows" in value:
                if value["rows"] != len(rows):
                    raise MalformedArchive(f"{name} announces {value['rows']} rows, and has {len(rows)}")
                return cls(head["disk"], head["size_bytes"], rows, number=head["pass"])
            else:
                rows.append(_row(value, rows[-1].end if rows else 0, head["size_bytes"], f"{name}, line {number}"))
        raise MalformedArchive(f"{name} is cut off: it does not end with the number of its rows")


def _compact(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True)


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line) if len(line) <= LINE_BYTES_MAX else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise MalformedArchive(f"{where} is not a line of a ledger")
    return value


def _head(value: dict[str, Any], name: str) -> dict[str, Any]:
    if value.get("ledger") != "synvirt" or value.get("version") != VERSION:
        raise MalformedArchive(f"{name} is not a ledger of version {VERSION}")
    wanted = {"disk": str, "pass": int, "size_bytes": int}
    if any(type(value.get(key)) is not kind for key, kind in wanted.items()) or value["size_bytes"] < 0:
        raise MalformedArchive(f"{name}, line 1: a ledger's disk, pass and size_bytes are missing or wrong")
    return value


def _row(value: dict[str, Any], at_least: int, size: int, where: str) -> Row:
    start, length = value.get("start"), value.get("length")
    if type(start) is not int or type(length) is not int or start < at_least or length <= 0 or start + length > size:
        raise MalformedArchive(f"{where}: {length!r} bytes at {start!r} are out of order, or outside the disk's {size}")
    match value.get("algorithm"), value.get("digest"):
        case "zero", "":
            return Row(start, length, None)
        case "sha256", str(text) if len(text) == 2 * _DIGEST_BYTES and length <= PIECE_BYTES:
            try:
                return Row(start, length, bytes.fromhex(text))
            except ValueError:
                pass
    raise MalformedArchive(f"{where}: neither zeros nor the SHA-256 of at most {PIECE_BYTES} bytes")


def _zeros_joined(rows: Iterable[Row]) -> Iterator[Row]:
    held: Row | None = None
    for row in rows:
        if held is not None and row.digest is None and held.end == row.start:
            held = Row(held.start, held.length + row.length, None)
            continue
        if held is not None:
            yield held
            held = None
        if row.digest is None:
            held = row
        else:
            yield row
    if held is not None:
        yield held


class _Rows:
    """A walk over rows, which may pass zeros in parts."""

    def __init__(self, rows: tuple[Row, ...]) -> None:
        self._rows = iter(rows)
        self.now = next(self._rows, None)

    def skip(self, length: int) -> None:
        assert self.now is not None
        left = self.now.length - length
        self.now = Row(self.now.start + length, left, None) if left else next(self._rows, None)


class Hashing(Over):
    """A reader that keeps the hash of all that is read through it. A copy reads it instead of `over`, which it owns.

    Its extents are those of `over`. But where data and zeros share a block of 4 MiB, the zeros are read and hashed with it: so
    each request of the copy is a row. The thread that read it hashes it while the bytes are still in its cache.
    """

    def __init__(self, over: DiskReader, digest: Digest = SHA256) -> None:
        super().__init__(over)
        self._digest = digest
        # By start. Each thread only adds rows of its own.
        self._read: dict[int, Row] = {}

    def extents(self) -> Iterator[Extent]:
        return coalesced(_by_blocks(coalesced(self._over.extents())))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        super().read_into(offset, buffer)
        start, end = offset, offset + len(buffer)
        while start < end:
            stop = min(end, start - start % BLOCK_BYTES + BLOCK_BYTES)
            part = buffer[start - offset : stop - offset]
            digest = None if is_zero(part) else self._digest.of(part)
            self._read[start] = Row(start, stop - start, digest)
            start = stop

    def ledger(self, disk: str) -> Ledger:
        """The ledger of what was read, and of the zeros that needed no reading."""
        # A copy may read short zeros with their neighbours, and then all of them.
        zeros = (extent for extent in self.extents() if extent.zero and extent.start not in self._read)
        rows = [*self._read.values(), *(Row(extent.start, extent.length, None) for extent in zeros)]
        return Ledger(disk, self.size, sorted(rows, key=lambda row: row.start), digest=self._digest)


def _by_blocks(extents: Iterator[Extent]) -> Iterator[Extent]:
    """Gives the data in a block also the zeros of that block. `extents` are coalesced, so data and zeros alternate."""
    before: Extent | None = None
    extent = next(extents, None)
    while extent is not None:
        after = next(extents, None)
        if not extent.zero:
            yield extent
        else:
            start, end = extent.start, extent.end
            if before is not None and before.end == start:
                start = min(-(-start // BLOCK_BYTES) * BLOCK_BYTES, end)
            if after is not None and after.start == end:
                end = max(end // BLOCK_BYTES * BLOCK_BYTES, start)
            for first, last, zero in ((extent.start, start, False), (start, end, True), (end, extent.end, False)):
                if first < last:
                    yield Extent(first, last - first, zero)
        before, extent = extent, after


def verify(
    ledger: Ledger,
    target: DiskReader,
    *,
    threads: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[int], None] = lambda bytes_read: None,
) -> int:
    """Reads the target again, and compares it with the ledger; gives how many bytes were read (zeros that are holes need no
    reading).

    DiskWriteFailed names the first bytes that are not what was written; DiskReadFailed, Cancelled.
    """
    if target.size < ledger.size:
        raise DiskWriteFailed(f"{ledger.disk}: the target has {target.size} bytes, the disk {ledger.size}")
    read = Tally()

    def look(row: Row, buffer: memoryview, _: memoryview) -> Difference | None:
        view = buffer[: row.length]
        target.read_into(row.start, view)
        read.add(row.length)
        found = Row(row.start, row.length, None if is_zero(view) else ledger.digest.of(view))
        return None if found == row else Difference(row.start, row.length, ledger.described(row), ledger.described(found))

    threads = 1 if target.max_readers <= 1 else min(threads or default_threads(), target.max_readers)
    difference = first_found(
        to_look_at(ledger, target),
        look,
        threads=threads,
        stop=stop,
        on_progress=lambda: on_progress(read.total),
    )
    if difference is not None:
        raise DiskWriteFailed(
            f"{ledger.disk}: the {difference.length} bytes at offset {difference.start} were read back from the target as"
            f" {difference.found}; expected is {difference.expected}",
            hint="the target's storage does not keep what is written to it: look at the kernel's log, and at its health",
        )
    return read.total


def to_look_at(ledger: Ledger, target: DiskReader) -> Iterator[Row]:
    """The rows, in pieces; of zero rows only what the target does not report as zeros."""
    extents = ExtentCursor(target.extents())
    for row in ledger.rows:
        if row.digest is not None:
            yield row
            continue
        for extent in extents.between(row.start, row.end):
            if not extent.zero:
                for start in range(extent.start, extent.end, PIECE_BYTES):
                    yield Row(start, min(PIECE_BYTES, extent.end - start), None)
