"""The fake zfs without its processes: each takes 60 ms of a core to start, for an answer of two."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from synvirt.destinations import zfs_command
from synvirt.programs import Output, ProgramFailed
from tests.fakes.zfs import Refused, answered


@contextmanager
def answered_here() -> Iterator[None]:
    """Commands to any fake zfs are answered in this process; tests/destinations/test_zfs.py starts the program, too."""

    def run(argv: Sequence[str], **_: object) -> Output:
        try:
            return Output(answered(Path(argv[0]).parent, argv[1], list(argv[2:])), "")
        except Refused as refused:
            raise ProgramFailed("zfs", 1, str(refused)) from None

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(zfs_command, "run", run)
        yield
