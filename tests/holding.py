"""Which files hold a text, found a MiB at a time: volumes of jobs are among them."""

from pathlib import Path

from synvirt.sizes import MIB


def files_that_hold(folder: Path, text: str) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and holds(path, text.encode())]


def holds(path: Path, wanted: bytes) -> bool:
    end = b""
    with path.open("rb") as file:
        while piece := file.read(MIB):
            if wanted in end + piece:
                return True
            end = piece[-len(wanted) :]
    return False
