"""Unpacks the tar of a receipt into a folder: only plain files with names that a receipt has."""

import re
import shutil
import tarfile
from pathlib import Path
from typing import BinaryIO

from synvirt.errors import MalformedArchive

_NAME = re.compile(r"(data/)?[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def unpack(tar: BinaryIO, to: Path, root: str) -> Path:
    """Makes the folder `root` in `to` and returns it. MalformedArchive; FileExistsError and other OSErrors."""
    folder = to / root
    folder.mkdir(parents=True)
    try:
        (folder / "data").mkdir()
        with tarfile.open(fileobj=tar, mode="r:") as found:
            for member in found:
                name = _checked(member, root)
                content = found.extractfile(member)
                assert content is not None
                with (folder / name).open("xb") as file:
                    shutil.copyfileobj(content, file)
    except BaseException as error:  # a part of a receipt would be in the way of the next try
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, tarfile.TarError | ValueError | ArithmeticError):  # also of numbers in its headers
            raise MalformedArchive(f"the receipt is not a tar: {error}") from error
        raise
    return folder


def _checked(member: tarfile.TarInfo, root: str) -> str:
    # A sparse file is as large as its header says, however small the tar is.
    name = member.name.removeprefix(f"{root}/")
    if name == member.name or not member.isreg() or member.issparse() or not _NAME.fullmatch(name):
        raise MalformedArchive(f"the receipt's tar has {member.name!r}, which no receipt has")
    return name
