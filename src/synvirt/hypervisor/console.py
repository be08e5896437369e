"""What a guest says on its serial console: the only witness of a boot that fails. All of it is bounded: guests are hostile."""

import os
import re
from pathlib import Path
from typing import NamedTuple

# Enough to hold a kernel's last words; not enough to fill a log or an answer.
TAIL_BYTES = 8192
TAIL_LINES, LINE_CHARS = 12, 160
# QEMU appends what the guest writes for as long as the guest lives: past this much, all but the tail is dropped.
LOG_LIMIT_BYTES = 1 << 20

_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[()][A-Z0-9]|[A-Za-z=>])")
_CONTROLS = re.compile(r"[^\n\x20-\x7e\xa0-\uffff]")
LOGIN_PROMPT = re.compile(r"\blogin: ?$")


class Cause(NamedTuple):
    seen: re.Pattern[str]
    cause: str
    hint: str


_OTHER_BUS = "the guest may lack a driver for this disk bus: import it again with target.disk_bus sata"
# What a console shows, what it means, what to do. First match wins, so the narrow come before the wide.
CAUSES = (
    Cause(
        re.compile(r"No bootable device|[Nn]ot a bootable disk|could not read the boot disk|BdsDxe: No bootable option"),
        "the firmware found nothing to boot from",
        "is the boot disk among the imported disks, and is its firmware (bios or uefi) the one the source has?",
    ),
    Cause(
        re.compile(r"grub rescue>|error: .*(unknown filesystem|no such (device|partition|disk))|Missing operating system"),
        "the boot loader does not find its files",
        "the guest's disks may have changed their order, or one that it boots from was left out",
    ),
    Cause(
        re.compile(
            r"Unable to mount root fs|Gave up waiting for (the )?root|[Cc]ould not boot\.|\bALERT! .* does not exist"
            r"|dracut-initqueue.*timeout|Begin: Waiting for root file system"
        ),
        "the guest's kernel does not find its root file system",
        _OTHER_BUS,
    ),
    Cause(re.compile(r"Kernel panic"), "the guest's kernel panicked", _OTHER_BUS),
    Cause(
        re.compile(r"[Ee]mergency (mode|shell)|root password for maintenance"),
        "the guest stopped in its emergency mode",
        "its /etc/fstab may name disks that have other names here: it should use UUID=",
    ),
)


def tail(path: Path) -> str:
    """The console's last lines, as plain text; empty where there are none, or where the log is not ours to read."""
    try:
        with path.open("rb") as log:
            log.seek(max(os.fstat(log.fileno()).st_size - TAIL_BYTES, 0))
            text = log.read(TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    text = _CONTROLS.sub("", _ESCAPES.sub("", text).replace("\r", "\n"))
    lines = [line.rstrip()[:LINE_CHARS] for line in text.split("\n")]
    return "\n".join([line for line in lines if line][-TAIL_LINES:])


def cause(shown: str) -> Cause | None:
    return next((known for known in CAUSES if known.seen.search(shown)), None)


def trim(folder: Path) -> None:
    """Cut each console log in the folder that has outgrown its limit. QEMU appends, so it goes on at the new end."""
    for log in folder.glob("*.log"):
        try:
            if log.stat().st_size > LOG_LIMIT_BYTES:
                with log.open("r+b") as file:
                    file.seek(-TAIL_BYTES, os.SEEK_END)
                    kept = file.read(TAIL_BYTES)
                    file.truncate(0)
                with log.open("ab") as file:
                    file.write(kept)
        except OSError:
            continue  # its domain was undefined meanwhile
