"""Small guests that do on purpose what real ones do by accident: boot sectors, and a Debian without virtio drivers."""

import random
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest

from synvirt.sample import Sample, build, disk, pieces
from synvirt.sizes import MIB
from tests.needs import lacking, need

SECTOR_BYTES = 512
# jmp f000:fff0: where the processor begins; what a triple fault comes down to.
RESETS = bytes.fromhex("eaf0ff00f0")
# es = 0; then forever: BIOS int 13h, AH=03h, writes sector 2 of the first disk; halts nine times, until the next tick of the
# BIOS's clock, 18.2 a second: half a second. (Its int 15h, AH=86h, waits by a clock of 1024 ticks a second, each emulated.)
WRITES = bytes.fromhex("31c08ec0b80103bb007cb90200ba8000cd13fbb90900f4e2fdebe9")


# es = ds = 0; then forever: a counter in its own first sector is counted up; that sector is written to 2 + counter % 32, by
# int 13h, AH=03h; a sector at the beginning of another cylinder is read; halts until the next tick: at most 55 ms. From 256 on,
# some 15 s later, it halts for four: QEMU takes 5 ms of a processor for each number, and some tests wait for a minute.
COUNTS = bytes.fromhex(
    "31c08ec08ed8ff06f07db80103bb007c8a0ef07d80e11f80c102b500ba8000cd13b80102bb00808a2ef07db101ba8000cd13"
    "fbf4803ef17d007403f4f4f4ebc6"
)
COUNTERS, COUNTER_AT = range(2, 34), 0x1F0


# ds = es = 0; then forever: writes its first sector to a place 64 KiB behind the one before, by int 13h, AH=43h, with the
# packet at 0180h; halts until the next tick. So each write needs room for a cluster of an overlay.
_FILLS = bytes.fromhex("31c08ed88ec0ff06f07d8106887d800083168a7d00be807db80043ba8000cd13fbf4ebe2")
FILLS = _FILLS.ljust(0x180, b"\0") + bytes.fromhex("10000100007c0000").ljust(16, b"\0")


def counters(image: Path) -> list[int]:
    """What such a guest wrote last, ascending. Of one that nothing was lost of they are one after the other."""
    with image.open("rb") as file:
        content = file.read(SECTOR_BYTES * COUNTERS.stop)
    places = [SECTOR_BYTES * (number - 1) + COUNTER_AT for number in COUNTERS]
    return sorted(int.from_bytes(content[place : place + 2], "little") for place in places)


def prints(text: str) -> bytes:
    """Prints by BIOS int 10h, AH=0Eh, and halts."""
    return bytes.fromhex("31c08ed8be197cfcac84c07409b40ebb0700cd10ebf2f4ebfd") + text.replace("\n", "\r\n").encode() + b"\0"


def boot_sector(image: Path, code: bytes, *, size: int = MIB) -> Path:
    """A disk that a BIOS boots: its first sector is the code (Intel: real mode, at 0000:7C00)."""
    assert len(code) <= SECTOR_BYTES - 2
    with image.open("wb") as file:
        file.truncate(size)
        file.write(code.ljust(SECTOR_BYTES - 2, b"\0") + b"\x55\xaa")
    return image


def halting_linux(image: Path) -> Path:
    """A disk that is taken for one of Linux: a boot record that shows a login prompt and halts, an empty file system, data and
    holes. Its boot takes a third of a second of a processor, that of an emulated Linux takes four."""
    boot_sector(image, prints("halting login: "), size=33 * MIB)
    mke2fs = [need("mke2fs", "e2fsprogs"), "-q", "-t", "ext4", "-E", f"offset={MIB}", str(image), "3M"]
    subprocess.run(mke2fs, check=True, capture_output=True, timeout=60)
    noise = random.Random(9)
    with image.open("r+b") as file:
        file.seek(446)
        file.write(struct.pack("<B3sB3sII", 0x80, b"\xfe\xff\xff", 0x83, b"\xfe\xff\xff", MIB // 512, 3 * MIB // 512))
        for at in (1024, 5 * MIB + 512, 20 * MIB, 33 * MIB - 65536):
            file.seek(at)
            file.write(noise.randbytes(noise.randrange(1, 60) * 512))
    return image


# ── a Debian that knows SATA and IDE, and no virtio ──────────────────────────────────────────────────────────────────

# The cloud kernel of the sample has no AHCI. Of the whole kernel's 400 MiB these are taken.
PACKAGE = "linux-image-amd64"
MODULES = ("ahci", "ata_piix", "sd_mod", "ext4", "crc32c_generic", "crc32c_intel", "e1000e")
# And what those depend on.
WANTED = ("libahci", "libata", "scsi_mod", "scsi_common", "t10*", "mbcache", "jbd2", "crc*", "libcrc32c", "ptp", "pps_core")
PATTERNS = [f"*/{name}.ko*" for name in (*MODULES, *WANTED)]


def debian_without_virtio(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Sample:
    """Its initramfs gives up after some seconds with Debian's own words and prompt; its init shows a login prompt, no agent."""
    found = kernel(pieces.cache_dir())
    monkeypatch.setattr(pieces, "MODULES", (MODULES,))
    monkeypatch.setattr(pieces, "_kernel", lambda _: found)
    gives_up = 'echo "ALERT! LABEL=root does not exist.  Dropping to a shell!"; echo; echo "(initramfs) "; exec sh'
    patient = disk.INITRAMFS_INIT
    monkeypatch.setattr(disk, "INITRAMFS_INIT", patient.replace("-lt 300", "-lt 30").replace(_first_end(patient), gives_up))
    monkeypatch.setattr(disk, "ROOT_INIT", disk.ROOT_INIT.split("while :; do")[0] + LOGIN)
    return build(folder, payload_mib=0, name="no-virtio")


LOGIN = 'echo; printf "Debian GNU/Linux 12 no-virtio ttyS0\\n\\nno-virtio login: "; while :; do sleep 3600; done\n'


def _first_end(init: str) -> str:
    (line,) = [line for line in init.splitlines() if "no root disk" in line]
    return line[line.index('echo "SYNVIRT') : line.rindex(";")]


def kernel(cache: Path) -> tuple[Path, Path]:
    """As a package of a few modules: whole, or not there."""
    kept = cache / f"{PACKAGE}-parts"
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            depends = subprocess.run(
                ["apt-cache", "depends", "--no-recommends", PACKAGE], capture_output=True, text=True, check=True
            ).stdout
            name = next(word for word in depends.split() if word.startswith("linux-image-6"))
            fetched = subprocess.run(["apt-get", "download", "-q=2", name], cwd=scratch, check=False, capture_output=True)
            if fetched.returncode:
                lacking(f"needs the Debian package {PACKAGE} from its archive: apt-get update")
            (package,) = Path(scratch).glob("*.deb")
            parts = Path(scratch, "parts")
            parts.mkdir()
            with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as unpacked:
                command = ["tar", "-x", "-C", str(parts), "--wildcards", "./boot/vmlinuz-*", *PATTERNS]
                # tar complains of patterns that match nothing: what is built in differs from kernel to kernel.
                subprocess.run(command, stdin=unpacked.stdout, check=False, capture_output=True)
            try:
                parts.rename(kept)
            except OSError:  # another test run was quicker
                assert kept.exists()
    (image,) = (kept / "boot").glob("vmlinuz-*")
    return image, kept / "lib/modules" / image.name.removeprefix("vmlinuz-")
