"""The serial console of a guest, which often is all that shows why a boot fails. Everything has limits, as guests are
hostile."""

import os
import re
from pathlib import Path
from typing import NamedTuple

# Enough for a kernel's last messages; not enough to fill a log or an answer.
TAIL_BYTES = 8192
TAIL_LINES, LINE_CHARS = 12, 160
# QEMU appends what the guest writes while it runs. A log that is longer than this is cut to its end.
LOG_LIMIT_BYTES = 1 << 20
# A PC's text screen (IBM VGA). The card has memory for eight screens, and the part that is shown moves: Linux scrolls in this
# way.
SCREEN_ADDRESS, SCREEN_COLUMNS, SCREEN_BYTES = 0xB8000, 80, 32 << 10
# The share of known characters on a screen with text; boot menus with frames have it too.
PLAIN_PART = 0.6

_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[()][A-Z0-9]|[A-Za-z=>])")
_CONTROLS = re.compile(r"[^\n\x20-\x7e\xa0-\uffff]")
# The login prompt of a Unix, or of Windows' Special Administration Console.
LOGIN_PROMPT = re.compile(r"(\blogin:|(^|\n)SAC>) ?$")


class Cause(NamedTuple):
    """Why a guest does not boot. `final`: a guest that shows this and then does nothing has failed. `other_bus`: another disk
    bus may help."""

    seen: re.Pattern[str]
    cause: str
    hint: str
    final: bool = True
    other_bus: bool = True


_NO_DRIVER = "the guest may lack a driver for this disk bus: put it in at the source, or name another in target.disk_bus"
_OTHER_NAMES = "the job's concerns (disk-names) tell where it names disks that have other names here: it should use UUID="
_NO_ROOT = f"{_NO_DRIVER}. Or {_OTHER_NAMES}"
_NO_LOADER = "is the boot disk among the imported disks, and is its firmware (bios or uefi) the one the source has?"
# What a console or a screen shows, what it means, and a hint. The first match counts, so the more exact patterns come first.
CAUSES = (
    Cause(
        re.compile(r"UEFI Interactive Shell|EFI Internal Shell|BdsDxe: No bootable option"),
        "the UEFI firmware found no boot loader on the disks",
        f"{_NO_LOADER} A loader that is not at /EFI/BOOT/BOOTX64.EFI needs a boot entry: copy it there, or add the entry",
        other_bus=False,
    ),
    Cause(
        re.compile(r"No bootable device|[Nn]ot a bootable disk|could not read the boot disk|Operating System not found", re.I),
        "the firmware found nothing to boot from",
        _NO_LOADER,
        other_bus=False,
    ),
    Cause(
        re.compile(r"STOP: 0x0*7b\b|0x0000007b\b|INACCESSIBLE[_ ]BOOT[_ ]DEVICE", re.I),
        "Windows has no driver for its boot disk (stop error 0x7B, INACCESSIBLE_BOOT_DEVICE)",
        "its virtio drivers must be put into it; until then it boots from sata or ide: target.disk_bus",
    ),
    Cause(
        re.compile(r"\*\*\* STOP: 0x|A problem has been detected and Windows has been shut down"),
        "Windows stopped with a blue screen",
        "the screenshot has the stop code",
    ),
    Cause(
        re.compile(r"0xc000000f|0xc0000225|0xc000000e|BOOTMGR is missing|NTLDR is missing|boot configuration data", re.I),
        "the Windows boot loader does not find its configuration or its disk",
        "was a disk that it boots from left out? Its boot files can be repaired from the Windows installation medium",
    ),
    Cause(
        re.compile(r"grub rescue>|error: .*(unknown filesystem|no such (device|partition|disk))|Missing operating system"),
        "the boot loader does not find its files (GRUB rescue)",
        "the guest's disks may have changed their order, or one that it boots from was left out",
    ),
    Cause(
        re.compile(r"^grub> ?$", re.MULTILINE),
        "the boot loader found no configuration and waits at its prompt",
        "was the disk with /boot left out?",
        other_bus=False,
    ),
    Cause(
        re.compile(r"\(initramfs\)|dracut:/#|Gave up waiting for (the )?root|\bALERT! .* does not exist"),
        "the guest's kernel does not find its root file system, and stopped in its initramfs",
        _NO_ROOT,
    ),
    Cause(
        re.compile(r"Unable to mount root fs|[Cc]ould not boot\.|No root device found"),
        "the guest's kernel does not find its root file system",
        _NO_ROOT,
    ),
    Cause(
        re.compile(r"Begin: Waiting for root file system|dracut-initqueue.*timeout"),
        "the guest's kernel waits for its root file system",
        _NO_ROOT,
        final=False,
    ),
    Cause(re.compile(r"Kernel panic"), "the guest's kernel panicked", _NO_DRIVER),
    Cause(
        # systemd's line, in the older of its forms and in the newer one, until a line of its own says how something ended. What
        # a guest writes is hostile, so no part of the line can be read in two ways.
        re.compile(
            r"(A start job is running for|Job) (/dev/|dev-)[^\n(]{1,200}\([^\n/()]{1,40} / [^\n/()]{1,40}\)[^\n]*"
            r"(\n(?!\[ *(OK|TIME|DEPEND|FAILED|SKIP|INFO|WARN) *\])[^\n]*)*\Z"
        ),
        "the guest waits for a disk",
        f"it does not find what it mounts: {_OTHER_NAMES}",
        final=False,
    ),
    Cause(
        re.compile(r"[Ee]mergency (mode|shell)|root password for maintenance"),
        "the guest stopped in its emergency mode",
        f"it did not find all that it mounts: {_OTHER_NAMES}",
    ),
)


def text(path: Path) -> str:
    """The end of the console, as plain lines. Empty, where there is none, or where we may not read the log."""
    try:
        with path.open("rb") as log:
            log.seek(max(os.fstat(log.fileno()).st_size - TAIL_BYTES, 0))
            content = log.read(TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    return _plain(content)


def _plain(content: str) -> str:
    lines = _CONTROLS.sub("", _ESCAPES.sub("", content).replace("\r", "\n")).split("\n")
    return "\n".join(line.rstrip()[:LINE_CHARS] for line in lines if line.strip())


def tail(path: Path) -> str:
    """The console's last lines, few enough for an error message."""
    return last_lines(text(path))


def last_lines(shown: str) -> str:
    return "\n".join(shown.split("\n")[-TAIL_LINES:])


def quoted(shown: str, cause: Cause | None) -> str:
    """The last lines; before them the line with the cause, if that comes earlier."""
    lines = shown.split("\n")
    rest, last = lines[:-TAIL_LINES], lines[-TAIL_LINES:]
    if cause is None or cause.seen.search("\n".join(last)):
        return "\n".join(last)
    says = next((line for line in reversed(rest) if cause.seen.search(line)), None)
    return "\n".join(last if says is None else [says, "…", *last])


def screen(cells: bytes) -> str:
    """The text on a screen in text mode: pairs of a character of code page 437 and its colours, 80 in a line. Empty for another
    mode, whose memory has no text."""
    if sum(byte == 0 or 0x20 <= byte < 0x7F for byte in cells[::2]) < PLAIN_PART * len(cells) / 2:
        return ""
    characters = cells[::2].decode("cp437")
    rows = (characters[at : at + SCREEN_COLUMNS] for at in range(0, len(characters), SCREEN_COLUMNS))
    return _plain("\n".join(row.replace("\0", " ") for row in rows))


def cause_of(shown: str) -> Cause | None:
    """The cause that a text shows. Of a console, pass only the last lines, as earlier ones may be of an earlier boot."""
    return next((known for known in CAUSES if known.seen.search(shown)), None)


def trim(folder: Path) -> None:
    """Cuts each console log in the folder that is over its limit. QEMU appends, so it goes on at the new end."""
    try:
        logs = list(folder.glob("*.log"))
    except OSError:
        return  # there is no descriptor for the folder: the next look finds them
    for log in logs:
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
