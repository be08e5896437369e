"""A firmware that halts the processor at once, for guests with nothing to boot: SeaBIOS looks for something, emulated, for a
tenth of a second of a core at each start of a guest. OVMF looks for 12 s of a core."""

from pathlib import Path

ROM_BYTES = 64 << 10
# Where a processor begins, 16 bytes before the end (Intel SDM volume 3, 10.1.4): cli; hlt; jmp, back to hlt.
RESET, HALTS = ROM_BYTES - 16, bytes.fromhex("fa f4 ebfd")
# Debian's SeaBIOS, which QEMU's own machines begin with.
SEABIOS = Path("/usr/share/seabios/bios-256k.bin")


# From its beginning, with the text behind it: si = text; dx = the first serial port; writes to it up to a zero; hlt; jmp, back
# to hlt. The code segment is the ROM, and is read by its prefix.
SAYS = bytes.fromhex("be1300 baf803 2eac 84c0 7403 ee ebf7 fa f4 ebfd")
TO_ITS_BEGINNING = bytes.fromhex("e9 0d00")  # jmp, from 3 bytes behind RESET


def halting_rom(path: Path, *, says: str = "") -> Path:
    """`says`: on the serial console, before it halts."""
    code = SAYS + says.encode("ascii") + b"\0" if says else b""
    path.write_bytes((code.ljust(RESET, b"\0") + (TO_ITS_BEGINNING if says else HALTS)).ljust(ROM_BYTES, b"\0"))
    return path
