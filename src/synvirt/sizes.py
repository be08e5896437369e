"""Units of bytes, and times in words. A module of its own: the data path uses it and needs nothing of the model's."""

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

# A disk's sectors for its guest, unless the disk or its machine says otherwise.
SECTOR_BYTES = 512

# The bytes of one write(2) into a file. For longer writes, ext4 and XFS ask for memory in pieces of 2 MiB and more, and the
# kernel has to move other memory out of the way first: a copy then takes up to five times the processor time.
WRITE_BYTES = 512 * KIB


def exact_size(count: int) -> str:
    """A size in the form that `size_bytes` reads, exact to the byte."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count and count % factor == 0:
            return f"{count // factor} {unit}"
    return f"{count} B"


def sized(count: float) -> str:
    """A size with its unit: `1.5 GiB`, from 100 on without a fraction: `512 GiB`."""
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while count >= KIB and unit != "TiB":
        count, unit = count / KIB, next(units)
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"


def percent(done: int, total: int) -> int:
    """Rounded down: 100 only when all is done."""
    return min(100, done * 100 // total) if total else 0


def counted(count: int, noun: str) -> str:
    """`1 CPU`, `2 CPUs`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration(seconds: float | None) -> str:
    """The two units that matter: `1 h 20 min`, `3 min 5 s`, `0.4 s`."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s" if seconds % 1 else f"{seconds:.0f} s"
    whole = round(seconds)
    for large, small, length, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= length:
            rest = whole % length // part
            return f"{whole // length} {large}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"
