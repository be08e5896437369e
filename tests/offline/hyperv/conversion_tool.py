"""A conversion tool for the tests, with the manners of virt-v2v: a program of its own, and qemu-img does the work.

    tool --machine-readable                             its input drivers, a line each
    tool [--as MANNER] -i hyperv SOURCE -os FOLDER      each disk of the export as a raw file FOLDER/web-sda …

A MANNER is one of the ways in which tools differ, or go wrong.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path


def install(folder: Path) -> str:
    """The program `tool` in `folder`, for a test's settings."""
    folder.mkdir(exist_ok=True)
    path = folder / "tool"
    path.write_text(f"#!{sys.executable} -IS\n" + Path(__file__).read_text())
    path.chmod(0o755)
    return str(path)


# Beside it are the disks as they were before they became images.
COPIES = """#!/bin/sh -eu
for folder; do :; done
echo '{"type": "message", "message": "Copying disk 1/1"}'
echo '{"type": "progress", "message": "50/100"}'
cp "${0%/*}"/*.raw "$folder"
echo '{"type": "progress", "message": "100/100"}'
"""


def install_copying(folder: Path, disks: Mapping[str, Path]) -> None:
    """In its place one with the same manners that has nothing to convert: the raw files `disks`, by the names that it gives
    them. For loops of jobs: to convert two small images, and to load Python for it, was half of what such a job took."""
    (folder / "tool").write_text(COPIES)
    for name, disk in disks.items():
        (folder / f"{name}.raw").unlink(missing_ok=True)
        (folder / f"{name}.raw").hardlink_to(disk)


def arguments(manner: str) -> str:
    return f"--as '{manner}' -i {{driver}} {{source}} -os {{folder}}"


def convert(image: Path, target: Path, output_format: str = "raw") -> None:
    source_format = "vpc" if image.suffix == ".vhd" else "vhdx"
    argv = ["qemu-img", "convert", "-f", source_format, "-O", output_format, str(image), str(target)]
    subprocess.run(argv, check=True, timeout=60)


def short(image: Path, target: Path) -> None:
    convert(image, target)
    os.truncate(target, target.stat().st_size - 512)


def zeros(image: Path, target: Path) -> None:
    convert(image, target)
    size = target.stat().st_size
    os.truncate(target, 0)
    os.truncate(target, size)


def link(image: Path, target: Path) -> None:
    convert(image, target.with_suffix(".txt"))
    target.symlink_to(target.with_suffix(".txt"))


def hang(image: Path, target: Path) -> None:
    target.write_bytes(b"half of it")
    subprocess.run(["sleep", "3600"], check=False)


MAKE: dict[str, Callable[[Path, Path], None]] = {
    "short": short,
    "zeros": zeros,
    "link": link,
    "hang": hang,
    "qcow2": lambda image, target: convert(image, target, "qcow2"),
    "nothing": lambda image, target: None,
    "one too few": lambda image, target: convert(image, target.with_name("web-sda")),
}


def say(**record: str) -> None:
    print(json.dumps(record), flush=True)


def fail(source: Path, _folder: Path) -> int:
    print("tool: opening the source\n" + "x" * 5000 + f"\ntool: error: {source}: the export is sealed", file=sys.stderr)
    return 3


def fail_late(_source: Path, folder: Path) -> int:
    print(f"tool: error: {folder}/web-sda: no space left", file=sys.stderr)
    return 1


def fail_in_json(_source: Path, folder: Path) -> int:
    say(type="error", message=f"the disk {folder}/web-sda has 50% of its blocks")
    return 1


def killed(_source: Path, _folder: Path) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def chatter(_source: Path, _folder: Path) -> int:
    """Ten times what a pipe takes, on each of both."""
    for number in range(30_000):
        print(f"{number} of nothing in particular, 7/0, 300% sure", file=sys.stderr if number % 2 else sys.stdout)
    return 0


def leave_daemon(_source: Path, folder: Path) -> int:
    """One that serves disks and goes on when the tool has failed, as virt-v2v's qemu-nbd does."""
    subprocess.Popen(["sh", "-c", f"exec 3>'{folder}/served'; exec sleep 3600"], start_new_session=True)
    while not (folder / "served").exists():
        pass
    return 1


BEFORE: dict[str, Callable[[Path, Path], int]] = {"fail": fail}
AFTER: dict[str, Callable[[Path, Path], int]] = {
    "fail late": fail_late,
    "fail in JSON": fail_in_json,
    "killed": killed,
    "daemon": leave_daemon,
    "chatter": chatter,
}


def main() -> int:
    if "--machine-readable" in sys.argv:
        print("virt-v2v\ninput:disk\ninput:hyperv\noutput:local")
        return 0
    words = sys.argv[1:]
    manner = words[words.index("--as") + 1] if "--as" in words else "well"
    at = words.index("-i")
    driver, source, folder = words[at + 1], Path(words[at + 2]), Path(words[words.index("-os") + 1])
    if driver != "hyperv":
        print(f"tool: error: no input driver {driver}", file=sys.stderr)
        return 2
    if manner in BEFORE:
        return BEFORE[manner](source, folder)
    (folder / "web.xml").write_text("<domain/>")
    found = sorted(path for path in source.rglob("*") if path.suffix in (".vhdx", ".vhd"))
    for number, image in enumerate(found):
        place = len(found) - 1 - number if manner == "backwards" else number
        if manner != "percent":
            say(type="message", message=f"Copying disk {number + 1}/{len(found)}")
        for part in (50, 100):
            if manner == "percent":
                print(f"[{'*' * part}] {100 * number / len(found) + part / len(found):.1f}%", end="\r", flush=True)
            else:
                say(type="progress", message=f"{part}/100")
        MAKE.get(manner, convert)(image, folder / f"web-sd{'abcdefgh'[place]}")
    return AFTER[manner](source, folder) if manner in AFTER else 0


if __name__ == "__main__":
    sys.exit(main())
