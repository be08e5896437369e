"""What somebody who may write in the import root puts in a file's place. It loads nothing: each worker of the tests has it."""

from pathlib import Path


def file(imports: Path) -> None:
    (imports / "vm" / "disk").unlink()
    (imports / "vm" / "disk").symlink_to("../../shadow")


def folder(imports: Path) -> None:
    (imports / "vm").rename(imports / "old")
    (imports.parent / "outside").mkdir()
    (imports.parent / "outside" / "disk").write_bytes(b"secret" + bytes(506))
    (imports / "vm").symlink_to("../outside")


def another(imports: Path) -> None:
    (imports / "vm" / "disk").unlink()
    (imports / "vm" / "disk").write_bytes(b"other.".ljust(512))
