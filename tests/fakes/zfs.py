"""A complete stand-in for zfs: the program `zfs` as the destination uses it, over files and loop devices.

    fake = FakeZfs(folder)      # writes an executable, {folder}/zfs, that keeps all it knows in {folder}/state.json
    ZfsDestination("tank", "synvirt", zfs=Zfs(fake.program), devices=fake.devices, name_of=fake.name_of)

Passes the contract suite of destinations, as real zfs does in the lab guest. Its words are those that zfs 2.1 was seen to say.
A volume is a sparse file with a loop device and a link to that at {folder}/dev/NAME, so the bytes go the way they go to a zvol.
"""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SUSPENDED = "suspended"  # a file in the folder, while it is there
BUSY_TURNS = "busy"  # a file in the folder: this many more calls of destroy are refused, as the dataset is busy


class FakeZfs:
    def __init__(self, folder: Path, *, pools: dict[str, int] | None = None) -> None:
        """`pools`: the bytes of each that are available."""
        self.folder = folder
        self.devices = folder / "dev"
        self.devices.mkdir(parents=True, exist_ok=True)
        self.program = str(folder / "zfs")
        if not (folder / "state.json").exists():
            datasets = {name: {"kind": "filesystem"} for name in pools or {"tank": 1 << 30}}
            (folder / "state.json").write_text(json.dumps({"pools": pools or {"tank": 1 << 30}, "datasets": datasets}))
            Path(self.program).write_text(f'#!/bin/sh\nexec {sys.executable} -IS {__file__} {folder} "$@"\n')
            Path(self.program).chmod(0o755)

    def name_of(self, descriptor: int) -> str:
        """What BLKZNAME answers for a real volume: here, whose link leads to the loop device."""
        device = os.fstat(descriptor).st_rdev
        return next(name for name in self.volumes() if (self.devices / name).stat().st_rdev == device)

    def datasets(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = json.loads((self.folder / "state.json").read_text())["datasets"]
        return found

    def volumes(self) -> list[str]:
        return [name for name, dataset in self.datasets().items() if dataset["kind"] == "volume"]

    def busy(self, turns: int) -> None:
        (self.folder / BUSY_TURNS).write_text(str(turns))

    def export(self) -> None:
        """`zpool export` of all pools: zfs calls their datasets missing until `bring_back`."""
        (self.folder / "state.json").rename(self.folder / "exported.json")
        (self.folder / "state.json").write_text(json.dumps({"pools": {}, "datasets": {}}))

    def bring_back(self) -> None:
        (self.folder / "exported.json").rename(self.folder / "state.json")

    def suspend(self) -> None:
        """The pools have lost their disks: each command is refused until `clear`."""
        (self.folder / SUSPENDED).touch()

    def clear(self) -> None:
        """`zpool clear` of all pools."""
        (self.folder / SUSPENDED).unlink()

    def close(self) -> None:
        """Let the loop devices of all volumes go."""
        for name in self.volumes():
            let_go(self.folder / "bytes" / name)


def let_go(backing: Path) -> None:
    """Of the device over this file. By the file, for a device that was let go before is another test's by now."""
    listed = ["losetup", "--associated", str(backing), "--noheadings", "--output", "NAME"]
    for device in subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split():
        subprocess.run(["losetup", "--detach", device], check=True)


class Refused(Exception):
    pass


def refuse_missing(state: dict[str, Any], name: str) -> None:
    if name not in state["datasets"]:
        raise Refused(f"cannot open '{name}': dataset does not exist")


def create(folder: Path, state: dict[str, Any], arguments: list[str]) -> None:
    name, options, size = arguments[-1], {}, None
    rest = iter(arguments[:-1])
    for word in rest:
        match word:
            case "-s":
                pass
            case "-V":
                size = int(next(rest))
            case "-o":
                key, _, value = next(rest).partition("=")
                options[key] = value
            case _:
                raise Refused(f"invalid option '{word}'")
    parent = name.rpartition("/")[0]
    if name.split("/")[0] not in state["pools"]:
        raise Refused(f"cannot open '{name.split('/')[0]}': no such pool")
    if name in state["datasets"]:
        raise Refused(f"cannot create '{name}': dataset already exists")
    if parent not in state["datasets"]:
        raise Refused(f"cannot create '{name}': parent does not exist")
    if size is not None:
        if size % int(options["volblocksize"]):
            raise Refused(f"cannot create '{name}': volume size must be a multiple of volume block size")
        backing, link = folder / "bytes" / name, folder / "dev" / name
        for path in (backing, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        with backing.open("wb") as file:
            file.truncate(size)
        made = subprocess.run(["losetup", "--find", "--show", backing], check=True, capture_output=True, text=True)
        link.symlink_to(made.stdout.strip())
    state["datasets"][name] = {"kind": "filesystem" if size is None else "volume", "options": options}


def snapshot(folder: Path, state: dict[str, Any], arguments: list[str]) -> None:
    (name,) = arguments
    volume = name.partition("@")[0]
    refuse_missing(state, volume)
    if name in state["datasets"]:
        raise Refused(f"cannot create snapshot '{name}': dataset already exists")
    # What was written by the device is in its cache until then.
    subprocess.run(["blockdev", "--flushbufs", folder / "dev" / volume], check=True)
    subprocess.run(["cp", "--sparse=always", folder / "bytes" / volume, folder / "bytes" / name], check=True)
    state["datasets"][name] = {"kind": "snapshot"}


def clone(folder: Path, state: dict[str, Any], arguments: list[str]) -> None:
    *options, origin, name = arguments
    refuse_missing(state, origin)
    volume = state["datasets"][origin.partition("@")[0]]["options"]
    size = (folder / "bytes" / origin).stat().st_size
    words = ["-o", f"volblocksize={volume['volblocksize']}", *options]
    create(folder, state, ["-V", str(size), *words, name])
    subprocess.run(["dd", f"if={folder / 'bytes' / origin}", f"of={folder / 'dev' / name}", "bs=1M", "conv=fsync"], check=True)
    state["datasets"][name]["origin"] = origin


def destroy(folder: Path, state: dict[str, Any], arguments: list[str]) -> None:
    (name,) = arguments
    if "@" in name and name.partition("@")[0] in state["datasets"] and name not in state["datasets"]:
        raise Refused("could not find any snapshots to destroy; check snapshot names.")
    refuse_missing(state, name)
    if "@" in name:
        if any(other.get("origin") == name for other in state["datasets"].values()):
            raise Refused(f"cannot destroy '{name}': snapshot has dependent clones\nuse '-R' to destroy")
        (folder / "bytes" / name).unlink()
        del state["datasets"][name]
        return
    busy = folder / BUSY_TURNS
    if busy.exists() and (turns := int(busy.read_text())):
        busy.write_text(str(turns - 1))
        raise Refused(f"cannot destroy '{name}': dataset is busy")
    if any(other.startswith((f"{name}/", f"{name}@")) for other in state["datasets"]):
        raise Refused(f"cannot destroy '{name}': {state['datasets'][name]['kind']} has children\nuse '-r' to destroy")
    if state["datasets"][name]["kind"] == "volume":
        link = folder / "dev" / name
        # As zfs does, it asks whether somebody has it open, and destroys nothing then.
        try:
            os.close(os.open(link, os.O_RDONLY | os.O_EXCL))
        except OSError:
            raise Refused(f"cannot destroy '{name}': dataset is busy") from None
        let_go(folder / "bytes" / name)
        link.unlink()
        (folder / "bytes" / name).unlink()
    del state["datasets"][name]


def get(folder: Path, state: dict[str, Any], arguments: list[str]) -> str:
    _, _, columns, names, dataset = arguments
    refuse_missing(state, dataset)
    rows = []
    for name in names.split(","):
        value, source = found(state, dataset, name)
        row = {"property": name, "value": value, "source": source}
        rows.append("\t".join(row[column] for column in columns.split(",")))
    return "\n".join(rows)


def found(state: dict[str, Any], dataset: str, name: str) -> tuple[str, str]:
    if name == "available":
        return str(state["pools"][dataset.partition("/")[0]]), "-"
    at = dataset
    while at:
        if name in state["datasets"][at].get("options", {}):
            return state["datasets"][at]["options"][name], "local" if at == dataset else f"inherited from {at}"
        at = at.rpartition("/")[0]
    return "-", "-"


def show(folder: Path, state: dict[str, Any], arguments: list[str]) -> str:
    refuse_missing(state, arguments[-1])
    return arguments[-1]


COMMANDS: dict[str, Callable[[Path, dict[str, Any], list[str]], str | None]] = {
    "clone": clone,
    "create": create,
    "destroy": destroy,
    "get": get,
    "list": show,
    "snapshot": snapshot,
}


@contextmanager
def locked_state(folder: Path) -> Iterator[dict[str, Any]]:
    """What the fake knows, written back whole where nothing was refused."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = json.loads((folder / "state.json").read_text())
        yield state
        written = folder / "state.new"
        written.write_text(json.dumps(state))
        written.replace(folder / "state.json")


def answered(folder: Path, command: str, arguments: list[str]) -> str:
    """What it prints. Refused."""
    if (folder / SUSPENDED).exists():
        raise Refused(f"cannot open '{arguments[-1]}': pool I/O is currently suspended")
    with locked_state(folder) as state:
        output = COMMANDS[command](folder, state, arguments)
    return "" if output is None else f"{output}\n"


def main() -> int:
    try:
        sys.stdout.write(answered(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
    except Refused as refused:
        print(refused, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
