"""A disk that virt-v2v takes for a Windows Server 2022: NTFS, two registry hives and a program's header. Nothing in it can run,
but a boot record that says what Windows' emergency console does, where it is asked for.

The tools that write it are those of Debian: mkntfs, ntfs-3g, sfdisk, hivexregedit. Real virtio drivers may not be had here, so
the driver image holds phony ones by the same names; what a conversion does with them (files, registry, boot-start service) is
real.
"""

import contextlib
import errno
import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from synvirt.programs import run

MIB = 1 << 20
# The conversion asks for 100 MB free in the guest.
NTFS_BYTES = 180 * MIB
DISK_BYTES = NTFS_BYTES + 2 * MIB
START_SECTOR = 2048
DISK_ID = b"1234"
_ZEROS = bytes(MIB)

_SOFTWARE = r"""
[HKLM\SOFTWARE\Microsoft]

[HKLM\SOFTWARE\Microsoft\Windows]

[HKLM\SOFTWARE\Microsoft\Windows\CurrentVersion]
"DevicePath"=str(2):"%SystemRoot%\\inf"

[HKLM\SOFTWARE\Microsoft\Windows NT]

[HKLM\SOFTWARE\Microsoft\Windows NT\CurrentVersion]
"CurrentBuild"=str(1):"20348"
"CurrentBuildNumber"=str(1):"20348"
"CurrentMajorVersionNumber"=dword:0000000a
"CurrentMinorVersionNumber"=dword:00000000
"CurrentVersion"=str(1):"6.3"
"EditionID"=str(1):"ServerStandard"
"InstallationType"=str(1):"Server"
"ProductName"=str(1):"Windows Server 2022 Standard"
"SystemRoot"=str(1):"C:\\Windows"
"""

# The mounted device is the disk's id and the partition's offset, as Windows writes it: C: is our one partition.
_SYSTEM = r"""
[HKLM\SYSTEM\Select]
"Current"=dword:00000001
"Default"=dword:00000001
"Failed"=dword:00000000
"LastKnownGood"=dword:00000002

[HKLM\SYSTEM\MountedDevices]
"\\DosDevices\\C:"=hex(3):31,32,33,34,00,00,10,00,00,00,00,00

[HKLM\SYSTEM\ControlSet001]

[HKLM\SYSTEM\ControlSet001\Control]

[HKLM\SYSTEM\ControlSet001\Control\CriticalDeviceDatabase]

[HKLM\SYSTEM\ControlSet001\Control\Session Manager]

[HKLM\SYSTEM\ControlSet001\Control\Class]

[HKLM\SYSTEM\ControlSet001\Control\Class\{4D36E97D-E325-11CE-BFC1-08002BE10318}]

[HKLM\SYSTEM\ControlSet001\Services]

[HKLM\SYSTEM\ControlSet001\Services\Tcpip]

[HKLM\SYSTEM\ControlSet001\Services\Tcpip\Parameters]
"Hostname"=str(1):"phony"
"""

_DRIVERS = {"viostor": "viostor", "vioscsi": "vioscsi", "NetKVM": "netkvm", "Balloon": "balloon", "vioserial": "vioser"}


# 16 bits: each character of what follows goes to the first serial port, once that takes one; then the processor halts.
_SAYS = bytes.fromhex("31c0 8ed8 fa be217c ac 84c0 7411 88c4 bafd03 ec a820 74fb b2f8 88e0 ee ebea f4 ebfd")
_PROMPT = b"\r\nComputer is booting, SAC started and initialized.\r\n\r\nSAC>\0"


def disk(path: Path, work: Path, *, hibernated: bool = False, encrypted: bool = False, boots: bool = False) -> Path:
    """Makes the raw disk at `path`. `hibernated`: Windows was put to sleep, as Fast Startup does; `encrypted`: by BitLocker;
    `boots`: a BIOS finds what says the prompt of Windows' emergency console at the serial port."""
    ntfs = work / "ntfs.img"
    with ntfs.open("wb") as file:
        file.truncate(NTFS_BYTES)
    geometry = ["-p", str(START_SECTOR), "-H", "255", "-S", "63", "-s", "512"]
    run(["mkntfs", "-q", "-F", "-f", *geometry, "-L", "System", str(ntfs)], timeout_s=60)
    with mounted(ntfs, work / "mnt") as root:
        _fill(root, work)
        if hibernated:
            (root / "hiberfil.sys").write_bytes(b"HIBR".ljust(8192, b"\0"))
    with path.open("wb") as file:
        file.truncate(DISK_BYTES)
    table = work / "table"
    table.write_text("label: dos\n2048,,7,*\n")
    run(["sh", "-c", f"sfdisk -q {path} < {table}"], timeout_s=60)
    with path.open("r+b") as file, ntfs.open("rb") as part:
        if boots:
            assert len(_SAYS) == 0x21
            file.write(_SAYS + _PROMPT)
        file.seek(440)
        file.write(DISK_ID)
        for at, block in blocks(part):
            file.seek(START_SECTOR * 512 + at)
            file.write(block)
        if encrypted:
            file.seek(START_SECTOR * 512 + 3)
            file.write(b"-FVE-FS-")
    ntfs.unlink()
    return path


def blocks(file: BinaryIO, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """From there on, each MiB that is not all zeros, with its place. Holes are not read: they are most of such a disk."""
    at = start
    while (found := _data_from(file, at)) is not None:
        at = found - (found - start) % MIB
        block = os.pread(file.fileno(), MIB, at)
        if block != _ZEROS[: len(block)]:
            yield at, block
        at += MIB


def _data_from(file: BinaryIO, at: int) -> int | None:
    """lseek(2), SEEK_DATA. None: there are none any more."""
    try:
        return os.lseek(file.fileno(), at, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return None


def digest(raw: Path) -> str:
    """Of its content: a hole is as good as zeros."""
    found = hashlib.sha256(str(raw.stat().st_size).encode())
    with raw.open("rb") as file:
        for at, block in blocks(file):
            found.update(at.to_bytes(8, "big") + block)
    return found.hexdigest()


@contextlib.contextmanager
def volume_of(raw: Path, work: Path) -> Iterator[Path]:
    """The files of the one partition of a raw disk, read-only."""
    part = work / "part.img"
    start = START_SECTOR * 512
    with raw.open("rb") as file, part.open("wb") as out:
        for at, block in blocks(file, start):
            out.seek(at - start)
            out.write(block)
        out.truncate(raw.stat().st_size - start)
    with mounted(part, work / "look", "ro") as root:
        yield root


def assert_converted(raw: Path, work: Path) -> None:
    """The registry of the result, read by another tool: viostor is a service that starts at boot, and its file is there."""
    with volume_of(raw, work) as root:
        assert (root / "Windows/System32/drivers/viostor.sys").read_text() == "phony viostor.sys"
        hive = root / "Windows/System32/config/SYSTEM"
        key = r"ControlSet001\Services\viostor"
        exported = run(["hivexregedit", "--export", "--unsafe-printable-strings", str(hive), key], timeout_s=60).stdout
    assert '"Start"=dword:00000000' in exported
    assert r'"ImagePath"=str(2):"system32\drivers\viostor.sys"' in exported


@contextlib.contextmanager
def mounted(image: Path, folder: Path, options: str = "rw") -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    run(["ntfs-3g", "-o", options, str(image), str(folder)], timeout_s=60)
    try:
        yield folder
    finally:
        run(["umount", str(folder)], timeout_s=60)


def _fill(root: Path, work: Path) -> None:
    system = root / "Windows" / "System32"
    for folder in (system / "config", system / "drivers", root / "Windows" / "inf", root / "Windows" / "Temp"):
        folder.mkdir(parents=True)
    (root / "Program Files").mkdir()
    (root / "Users").mkdir()
    (system / "cmd.exe").write_bytes(_program())
    for name, keys in (("SOFTWARE", _SOFTWARE), ("SYSTEM", _SYSTEM)):
        hive, text = work / name, work / f"{name}.reg"
        hive.write_bytes(_hive())
        text.write_text(keys)
        run(["hivexregedit", "--merge", "--prefix", f"HKLM\\{name}", str(hive), str(text)], timeout_s=60)
        (system / "config" / name).write_bytes(hive.read_bytes())


def _program() -> bytes:
    """The header of a 64-bit program (PE32+): by it the tool knows the architecture."""
    program = bytearray(1024)
    program[:2] = b"MZ"
    struct.pack_into("<I", program, 0x3C, 0x80)
    program[0x80:0x84] = b"PE\0\0"
    struct.pack_into("<HHIIIHH", program, 0x84, 0x8664, 1, 0, 0, 0, 0xF0, 0x22)
    struct.pack_into("<H", program, 0x98, 0x20B)
    return bytes(program)


def _hive() -> bytes:
    """An empty registry hive (regf 1.3): a root key and its security cell in one bin."""
    name = b"$$$PROTO.HIV"
    key_at = 0x20
    key_bytes = _aligned(4 + 0x4C + len(name))
    security_at = key_at + key_bytes
    none = 0xFFFFFFFF
    root_fields = (0, none, 0, 0, none, none, 0, none, security_at, none, 0, 0, 0, 0, 0)
    key = struct.pack("<2sHQ15IHH", b"nk", 0x2C, 0x01D0000000000000, *root_fields, len(name), 0)
    rights = bytes.fromhex("010004800000000000000000000000001400000002001c000100000000001400ff000f00010100000000000512000000")
    security = struct.pack("<2sHIIII", b"sk", 0, security_at, security_at, 1, len(rights)) + rights
    cells = bytearray(4096)
    struct.pack_into("<4sII8xQI", cells, 0, b"hbin", 0, 4096, 0, 0)
    free_at = security_at + _aligned(4 + len(security))
    for at, length, content in (
        (key_at, key_bytes, key + name),
        (security_at, free_at - security_at, security),
    ):
        struct.pack_into("<i", cells, at, -length)
        cells[at + 4 : at + 4 + len(content)] = content
    struct.pack_into("<i", cells, free_at, 4096 - free_at)
    header = bytearray(4096)
    struct.pack_into("<4sIIQIIIIIII", header, 0, b"regf", 1, 1, 0x01D0000000000000, 1, 3, 0, 1, key_at, 4096, 1)
    checksum = 0
    for (word,) in struct.iter_unpack("<I", header[:508]):
        checksum ^= word
    struct.pack_into("<I", header, 508, checksum)
    return bytes(header + cells)


def _aligned(length: int) -> int:
    return (length + 7) & ~7


def drivers(tree: Path, *, windows: str = "2k22", agent: bool = False) -> Path:
    """A folder laid out like virtio-win.iso, with drivers for one Windows, and perhaps the agent's installer."""
    for folder, name in _DRIVERS.items():
        target = tree / folder / windows / "amd64"
        target.mkdir(parents=True)
        for ending in ("inf", "sys", "cat"):
            (target / f"{name}.{ending}").write_text(f"phony {name}.{ending}")
    if agent:
        (tree / "guest-agent").mkdir()
        (tree / "guest-agent" / "qemu-ga-x86_64.msi").write_bytes(bytes(1000))
    return tree


def driver_image(path: Path, work: Path, agent: bool = False) -> Path:
    """The same as an ISO."""
    tree = drivers(work / f"iso-{path.stem}", agent=agent)
    run(["genisoimage", "-quiet", "-J", "-r", "-o", str(path), str(tree)], timeout_s=60)
    return path
