"""The lab guest of `make lab`: a small Debian with zfs, booted under QEMU for one command.

    /host    this checkout, read-only, its virtual environment with it
    /result  a folder of the test's: what the command leaves there is there when the guest is off

The guest has a pool `tank` on a disk of its own, empty at each start; what it writes to its root disk is thrown away. It has no
network. It is emulated, and Python in it is some 30 times slower than here: a test asks little of it.
"""

import hashlib
import lzma
import os
import shutil
import struct
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.needs import lacking, need

CHECKOUT = Path(__file__).resolve().parent.parent
RECIPE = ("build", "initramfs-init", "guest-init")
POOL_BYTES = 2 << 30
MEMORY_MIB = 1024
# What guards a real machine, and here is only emulated work. Workers' cages take Landlock. Above all, programs are where they
# were before: QEMU translates code once for each place in memory, and takes that for the most of a short program's time.
CHEAP = (
    "mitigations=off init_on_alloc=0 hardened_usercopy=off randomize_kstack_offset=off audit=0 lsm=landlock "
    "transparent_hugepage=never clearcpuid=rep_good cgroup_disable=memory norandmaps cryptomgr.notests noreplace-smp"
)


@dataclass(frozen=True, slots=True)
class Output:
    """`code`: the command's own, or None where the guest never came so far; `output`: its output; `console`: the guest."""

    code: int | None
    output: str
    console: str


def folder() -> Path:
    """Where `make lab` keeps the guest of this recipe. Skips, or fails on CI, where there is none."""
    cache = os.environ.get("SYNVIRT_LAB") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "synvirt-lab"
    recipe = hashlib.sha256(b"".join((CHECKOUT / "lab" / name).read_bytes() for name in RECIPE)).hexdigest()[:12]
    made = sorted(Path(cache).glob(f"zfs-{recipe}-*"))
    if not made:
        lacking(f"needs the lab guest, a Debian with zfs: run `make lab` (it takes some minutes, once); looked in {cache}")
    return made[-1]


def python() -> str:
    """How the guest calls Python with this environment's packages: both are Debian 12's Python, and the environment lies in the
    checkout."""
    packages = Path(sysconfig.get_path("purelib"))
    if not packages.is_relative_to(CHECKOUT):
        lacking(f"needs the virtual environment to lie in the checkout, where `make test` makes it: it is {packages}")
    inside = Path("/host") / packages.relative_to(CHECKOUT)
    return f"PYTHONPATH={inside}:/host/src:/host PYTHONDONTWRITEBYTECODE=1 python3"


def unpack(kernel: Path, to: Path) -> None:
    """The kernel in a bzImage, by the fields of Linux' Documentation/x86/boot.rst. Debian's is packed by xz, which is 4 seconds
    of emulated work; QEMU boots it unpacked, as it has an entry for PVH. It is 63 MiB then, and never whole in memory."""
    with kernel.open("rb") as packed, to.open("wb") as unpacked:
        head = packed.read(0x24C)
        setup_sectors = head[0x1F1] + 1
        (payload,) = struct.unpack_from("<I", head, 0x248)
        packed.seek(setup_sectors * 512 + payload)
        with lzma.open(packed) as xz:  # ends where the payload's stream does
            shutil.copyfileobj(xz, unpacked)


def run(command: str, result: Path, *, timeout_s: float) -> Output:
    """Boot the guest, run the command in bash, and wait until it is off. `result` is /result in the guest."""
    guest = folder()
    emulator = need("qemu-system-x86_64", "qemu-system-x86")
    pool, console, kernel = result / "pool.img", result / "console", result / "vmlinux"
    unpack(guest / "vmlinuz", kernel)
    with pool.open("wb") as file:
        file.truncate(POOL_BYTES)
    (result / "command").write_text(command)
    shares = [
        part
        for tag, path, mode in (("host", CHECKOUT, "on"), ("result", result, "off"))
        for part in (
            "-fsdev", f"local,id={tag},path={path},security_model=none,readonly={mode},multidevs=remap",
            "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}",
        )
    ]  # fmt: skip
    argv = [
        # A guest never outlives the test that booted it, however that ended.
        "setpriv", "--pdeathsig", "KILL",
        emulator, "-nodefaults", "-no-user-config", "-nographic", "-no-reboot",
        # QEMU 7.2 emulates AVX wrongly: numpy's sort, for one, gives another order. A fifth level of page tables is only work,
        # and so is a guard of user memory; where the processor says that it copies strings fast, each byte is a step here.
        "-machine", "q35", "-accel", "tcg,tb-size=512", "-cpu", "max,avx=off,avx2=off,la57=off,smap=off,erms=off",
        "-smp", "1", "-m", str(MEMORY_MIB),
        "-kernel", str(kernel), "-initrd", str(guest / "initrd"),
        # A machine that is overloaded brings the timer's interrupts too late for the kernel's check of them, which ends it.
        "-append", f"console=ttyS0 quiet panic=-1 nokaslr no_timer_check {CHEAP}",
        "-serial", f"file:{console}",
        # snapshot=on: the guest's root disk is never changed, so guests may run side by side.
        "-drive", f"file={guest / 'root.img'},if=none,id=root,format=raw,snapshot=on,cache=unsafe",
        "-device", "virtio-blk-pci,drive=root",
        "-drive", f"file={pool},if=none,id=pool,format=raw,discard=unmap,cache=unsafe",
        "-device", "virtio-blk-pci,drive=pool",
        "-device", "virtio-rng-pci",
        *shares,
    ]  # fmt: skip
    try:
        subprocess.run(argv, timeout=timeout_s, stdin=subprocess.DEVNULL, check=True, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the guest was not done in {timeout_s} s:\n{_tail(console)}\n{_tail(result / 'output')}", pytrace=False)
    except subprocess.CalledProcessError as error:
        pytest.fail(f"QEMU ended with {error.returncode}: {error.stderr[-2000:]}", pytrace=False)
    finally:
        pool.unlink()
        kernel.unlink()
    code = (result / "code").read_text().strip() if (result / "code").exists() else ""
    return Output(int(code) if code else None, _tail(result / "output", 200_000), _tail(console))


def _tail(path: Path, chars: int = 5000) -> str:
    return path.read_text(errors="replace")[-chars:] if path.exists() else ""
