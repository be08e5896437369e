"""A firmware that halts the processor at once, for guests with nothing to boot: SeaBIOS looks for something, emulated, for a
tenth of a second of a core at each start of a guest."""

from pathlib import Path

ROM_BYTES = 64 << 10
# Where a processor begins, 16 bytes before the end (Intel SDM volume 3, 10.1.4): cli; hlt; jmp, back to hlt.
RESET, HALTS = ROM_BYTES - 16, bytes.fromhex("fa f4 ebfd")
# Debian's SeaBIOS, which QEMU's own machines begin with.
SEABIOS = Path("/usr/share/seabios/bios-256k.bin")


def halting_rom(path: Path) -> Path:
    path.write_bytes((bytes(RESET) + HALTS).ljust(ROM_BYTES, b"\0"))
    return path
