"""Errors of a qcow2 image for parts of its disk that cannot be read: always with the guest's offset."""

from collections.abc import Callable

from synvirt.errors import DiskReadFailed


def unreadable(name: str, guest: int, cause: str, hint: str | None = None) -> DiskReadFailed:
    return DiskReadFailed(f"{name} cannot be read at guest offset {guest}: {cause}", hint=hint)


def outside_the_file(name: str, guest: int, host: int, file_size: int) -> DiskReadFailed:
    """The error for a cluster behind the end of the file. Offsets in bytes."""
    return unreadable(
        name,
        guest,
        f"its cluster lies at {host}, outside the file of {file_size} bytes",
        "The file seems to be cut off: copy it again from where it came.",
    )


def read_for_guest(read_into: Callable[[int, memoryview], None], host: int, into: memoryview, *, name: str, guest: int) -> None:
    """Reads the image's file for a guest offset, which is named if it fails."""
    try:
        read_into(host, into)
    except DiskReadFailed as error:
        raise unreadable(name, guest, error.detail, error.hint) from error
