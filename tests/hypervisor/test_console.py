"""A guest's console is quoted where its boot fails: its last lines, bounded whatever the guest writes."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synvirt.hypervisor import console


@pytest.mark.parametrize(
    ("shown", "cause"),
    [
        ("Booting from Hard Disk...\nBoot failed: could not read the boot disk\n\nNo bootable device.", "nothing to boot from"),
        ("Boot failed: not a bootable disk\n\nNo bootable device.", "nothing to boot from"),
        ("BdsDxe: No bootable option or device was found.", "no boot loader"),
        ("UEFI Interactive Shell v2.2\nEDK II\nMapping table\n     BLK0: Alias(s):\nShell>", "no boot loader"),
        ("grub>", "waits at its prompt"),
        ("*** STOP: 0x0000007B (0xFFFFF880009A97E8,0xFFFFFFFFC0000034)", "0x7B"),
        ("STOP: 0x7B", "0x7B"),
        ("Stop code: INACCESSIBLE BOOT DEVICE", "0x7B"),
        ("*** STOP: 0x0000007E (0xFFFFFFFFC0000005)", "blue screen"),
        ("BOOTMGR is missing\nPress Ctrl+Alt+Del to restart", "Windows boot loader"),
        ("(initramfs)", "initramfs"),
        ("Begin: Waiting for root file system ...", "waits for its root"),
        ("error: no such device: 5b1f.\nEntering rescue mode...\ngrub rescue>", "boot loader"),
        ("Kernel panic - not syncing: VFS: Unable to mount root fs on unknown-block(0,0)", "root file system"),
        ("Gave up waiting for root file system device.", "root file system"),
        ("ALERT! UUID=0a3f does not exist.  Dropping to a shell!", "root file system"),
        ("dracut-initqueue[319]: Warning: dracut-initqueue timeout - starting timeout scripts", "root file system"),
        ("Kernel panic - not syncing: Attempted to kill init!", "panicked"),
        ("You are in emergency mode. After logging in, type", "emergency"),
        ("[  OK  ] Started\n[ ***  ] A start job is running for /dev/disk/by-uuid/0b1c (12s / 1min 30s)", "waits for a disk"),
        ("[**    ] A start job is running for dev-sdb1.device (12s / 1min 30s)", "waits for a disk"),
        ("[   ***] (1 of 2) Job dev-disk-by…c-part1.device/start running (1min / 1min 30s)", "waits for a disk"),
        ("[   ***] Job dev-sdb1.device/start running (9s / no limit)", "waits for a disk"),
    ],
)
def test_known_ends_have_a_cause_and_a_hint(shown: str, cause: str) -> None:
    known = console.cause_of(shown)
    assert known is not None
    assert cause in known.cause
    assert known.hint


def test_an_ordinary_boot_has_no_cause() -> None:
    assert console.cause_of("pci 0000:00:1f.2: reg 0x7b: [io 0x0000-0x007b]") is None
    assert console.cause_of("[    1.0] Linux version 6.1\nDebian GNU/Linux 12 web ttyS0\n\nweb login:") is None


def test_a_guest_waits_for_a_disk_until_systemd_says_how_that_ended() -> None:
    """As a Debian 12 writes it, cut at each byte: a look may come while a line is drawn again, or the kernel speaks."""
    stars = b"\x1b[0;31m*\x1b[0;1;31m*\x1b[0m\x1b[0;31m*"
    drawn = b"\x1bM\r\x1b[K[  " + stars + b" \x1b[0m] Job dev-vg-srv.device/start running (35s / 1min 30s)\r\r\n"
    kernel = b"[   80.428557] fbcon: bochs-drmdrmfb (fb0) is primary device\r\n" * 4
    shown = b"[\x1b[0;32m  OK  \x1b[0m] Started udev.\r\n" + drawn + kernel + drawn
    for end in range(shown.index(b"30s)") + 4, len(shown) + 1):
        found = console.cause_of(console.last_lines(console._plain(shown[:end].decode())))
        assert found is not None
        assert "waits for a disk" in found.cause
    ended = b"[\x1b[0;1;31m TIME \x1b[0m] Timed out waiting for device dev-vg-srv.device - /dev/vg/srv.\r\n"
    assert console.cause_of(console._plain((shown + ended).decode())) is None
    assert console.cause_of("[   ***] Job networking.service/start running (1min / 5min)") is None


def test_a_login_prompt_is_the_last_thing_shown() -> None:
    assert console.LOGIN_PROMPT.search("Debian GNU/Linux 12 web ttyS0\nweb login:")
    assert console.LOGIN_PROMPT.search("Computer is booting, SAC started and initialized.\nSAC>")
    assert not console.LOGIN_PROMPT.search("Last login: Mon Nov 3\n$")


@given(st.binary(max_size=3 * console.TAIL_BYTES))
@settings(max_examples=50)
def test_a_tail_is_short_plain_text(tmp_path: Path, written: bytes) -> None:
    log = tmp_path / "console.log"
    log.write_bytes(written)
    shown = console.tail(log)
    assert len(shown.split("\n")) <= console.TAIL_LINES
    assert all(len(line) <= console.LINE_CHARS for line in shown.split("\n"))
    assert not set(shown) & set(map(chr, [*range(10), *range(11, 32), 127]))


def test_the_tail_ends_where_the_console_ends_without_its_colours(tmp_path: Path) -> None:
    log = tmp_path / "console.log"
    log.write_bytes(b"x" * 100_000 + b"\r\n\x1b[0;1;31mfailed\x1b[0m to start\r\n\r\nend\r\n")
    assert console.tail(log).endswith("failed to start\nend")


def test_the_line_that_says_the_cause_is_quoted_wherever_it_stands() -> None:
    panic = "Kernel panic - not syncing: VFS: Unable to mount root fs on unknown-block(0,0)"
    trace = [f"[    3.0357{number:02}] call {number}" for number in range(20)]
    shown = "\n".join(["Booting", panic, *trace])
    cause = console.cause_of(shown)
    assert console.quoted(shown, cause) == "\n".join([panic, "…", *trace[-12:]])
    assert console.quoted(shown, None) == "\n".join(trace[-12:])
    near = "\n".join([*trace, panic])
    assert console.quoted(near, cause) == "\n".join([*trace[-11:], panic])


def test_no_console_is_an_empty_tail(tmp_path: Path) -> None:
    assert console.tail(tmp_path / "nothing.log") == ""


def test_a_log_that_outgrows_its_limit_is_cut_to_its_tail_and_goes_on(tmp_path: Path) -> None:
    log, small = tmp_path / "a.log", tmp_path / "b.log"
    small.write_bytes(b"short")
    with log.open("ab") as qemu:  # holds it open for appending, as QEMU does
        qemu.write(b"old" * console.LOG_LIMIT_BYTES + b"the tail")
        qemu.flush()
        console.trim(tmp_path)
        assert log.stat().st_size <= console.TAIL_BYTES
        qemu.write(b" and more")
        qemu.flush()
    assert log.read_bytes().endswith(b"the tail and more")
    assert small.read_bytes() == b"short"


def test_a_screen_in_text_mode_is_read() -> None:
    cells = b"".join(bytes((character, 0x1F)) for character in b"*** STOP: 0x0000007B".ljust(80) + bytes(80) + b"end".ljust(80))
    assert console.screen(cells) == "*** STOP: 0x0000007B\nend"
    assert console.screen(bytes(console.SCREEN_BYTES)) == ""


def test_what_an_earlier_boot_said_is_no_cause() -> None:
    shown = "Kernel panic - not syncing\n" + "a line\n" * console.TAIL_LINES
    assert console.cause_of(console.last_lines(shown.rstrip())) is None


@given(st.binary(max_size=console.SCREEN_BYTES))
def test_whatever_is_on_the_screen_is_plain_text(cells: bytes) -> None:
    assert not set(console.screen(cells)) & set(map(chr, [*range(10), *range(11, 32), 127]))


def test_a_picture_is_no_text() -> None:
    assert console.screen(b"\xff" * console.SCREEN_BYTES) == ""
    assert console.screen(bytes(range(256)) * (console.SCREEN_BYTES // 256)) == ""


def test_logs_that_cannot_be_listed_now_are_cut_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in libvirt's event loop, which prints what is raised there as a traceback."""

    def full(_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "scandir", full)
    console.trim(tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "piece", ["Job /dev/( / ) ", "Job /dev/x(1 / ", "Job /dev/x(1 / 2)\n", "dracut-initqueue", "( / )", "\n["]
)
def test_a_guest_that_writes_what_is_hard_to_match_holds_nobody_up(piece: str) -> None:
    """One of 8 KiB took nine minutes, and no other thread of the service ran meanwhile."""
    shown = piece * (console.TAIL_BYTES // len(piece))
    assert console.cause_of(shown + "\n[  OK  ] x") is None
    console.cause_of(shown)
