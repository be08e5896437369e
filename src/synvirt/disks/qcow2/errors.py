"""How a qcow2 image says that a part of its disk cannot be read: always by the guest's offset."""

from collections.abc import Callable

from synvirt.errors import DiskReadFailed


def unreadable(name: str, guest: int, cause: str, hint: str | None = None) -> DiskReadFailed:
    return DiskReadFailed(f"{name} cannot be read at guest offset {guest}: {cause}", hint=hint)


def outside_the_file(name: str, guest: int, host: int, file_size: int) -> DiskReadFailed:
    """The error of a cluster that lies behind the end of the file. Offsets in bytes."""
    return unreadable(
        name,
        guest,
        f"its cluster lies at {host}, outside the file of {file_size} bytes",
        "The file seems to be cut off: copy it again from where it came.",
    )


def read_for_guest(read_into: Callable[[int, memoryview], None], host: int, into: memoryview, *, name: str, guest: int) -> None:
    """A read of the image's file on behalf of a guest offset, which a failure then names."""
    try:
        read_into(host, into)
    except DiskReadFailed as error:
        raise unreadable(name, guest, error.detail, error.hint) from error
