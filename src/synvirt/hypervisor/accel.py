"""Whether KVM works here. It is found out by running a guest, not by the existence of the device.

/dev/kvm can open, and libvirt can advertise kvm, where guests stand still: inside some virtual machines KVM emulates each
instruction of a guest in long mode. So the probe is a guest that enters long mode, counts to a hundred million and ends QEMU:
0.1 s where KVM works, 0.3 s under QEMU's own translator (TCG), minutes where KVM only pretends.
"""

import json
import os
import threading
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from synvirt.durable import user_name
from synvirt.errors import SynvirtError
from synvirt.programs import ProgramFailed, find, run
from synvirt.repeating import tried_again

EMULATOR = "qemu-system-x86_64"
KVM_DEVICE = Path("/dev/kvm")
# Twenty times what the probe takes under plain translation. A KVM that is slower than that is worse than none.
PROBE_LIMIT_S = 5.0
# A probe that something else ended is run again, this often at most.
TRIES = 3
# QEMU's message for a signal that asks it to end; it then ends with 0 (system/runstate.c).
TERMINATED = "terminating on signal"
# isa-debug-exit ends QEMU with (value << 1) | 1; the probe writes 0x10.
PROBE_PORT, PROBE_EXIT = 0xF4, 0x21

# The boot sector, loaded at 0x7c00 in real mode (Intel SDM volume 3, 9.8.5 "Initializing IA-32e Mode").
_PROBE_CODE = bytes.fromhex(
    "fa"  # cli
    "31c0 8ed8 8ec0"  # ds = es = 0
    "66c7060010 03200000"  # PML4 at 0x1000: one entry, to 0x2000
    "66c7060020 03300000"  # PDPT at 0x2000: one entry, to 0x3000
    "66c7060030 83000000"  # page directory at 0x3000: the first 2 MiB, onto themselves
    "66b8a0000000 0f22e0"  # cr4 = PAE, PGE
    "66b800100000 0f22d8"  # cr3 = 0x1000
    "66b9800000c0 0f32 80cc01 0f30"  # EFER.LME
    "0f20c0 660d01000080 0f22c0"  # cr0 |= PE, PG: long mode from here on
    "660f0116667c"  # lgdt [0x7c66]
    "ea587c0800"  # jmp 8:0x7c58
    "b900e1f505"  # 0x7c58: ecx = 100,000,000
    "e2fe"  # loop, to itself
    "b010 e6f4"  # out 0xf4, 0x10
    "f4 ebfd"  # hlt, forever
    "0f00 6c7c0000"  # 0x7c66: GDT limit and address
    "0000000000000000 ffff0000009baf00"  # 0x7c6c: null; 64-bit code
)
PROBE_SECTOR = _PROBE_CODE.ljust(510, b"\0") + b"\x55\xaa"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """`reason`: why, for people."""

    kind: Literal["kvm", "tcg"]
    reason: str


class ProbeEnded(Exception):
    """Something else on this host ended the probe, for example as memory was short: nothing is known by it."""


def boots_under(kind: Literal["kvm", "tcg"]) -> str | None:
    """None, where the probe guest ran to its end in time; else what went wrong. ProbeEnded."""
    # In memory: a service that is killed meanwhile leaves no file.
    with os.fdopen(os.memfd_create("synvirt-probe"), "wb", buffering=0) as image:
        image.write(PROBE_SECTOR)
        devices = [
            *("-machine", "pc", "-accel", kind, "-m", "32", "-display", "none", "-no-reboot"),
            *("-nodefaults", "-no-user-config"),
            *("-device", f"isa-debug-exit,iobase={PROBE_PORT:#x},iosize=4"),
            *("-drive", f"file=/proc/{os.getpid()}/fd/{image.fileno()},format=raw,if=ide"),
        ]
        # A service that is killed meanwhile cannot end its probe, which would use a core forever where KVM does not work.
        bounded = ["timeout", "--signal=KILL", f"{PROBE_LIMIT_S + 1:g}"]
        try:
            said = run([*bounded, EMULATOR, *devices], timeout_s=PROBE_LIMIT_S).stderr
        except ProgramFailed as failed:
            if failed.returncode == PROBE_EXIT:
                return None
            if failed.from_outside:
                raise ProbeEnded(f"{EMULATOR} {failed.cut_off}") from failed
            if failed.returncode is None:
                return f"a tiny guest did not end in {PROBE_LIMIT_S:g} s"
            return failed.stderr or f"{EMULATOR} ended with {failed.returncode}"
        except SynvirtError as error:
            return error.detail
    if TERMINATED in said:
        raise ProbeEnded(said.strip())
    return f"{EMULATOR} ended before its guest did"


_lock = threading.Lock()
_known: Accelerator | None = None


def accelerator(remember_in: Path | None = None) -> Accelerator:
    """KVM where it works, else TCG. Takes up to PROBE_LIMIT_S once a boot of the host; safe from several threads.

    `remember_in`: a folder that keeps the answer for the next process, until the host or QEMU changes; without one it is the
    user's cache. What is in the user's cache is good for a service that has not asked yet.
    """
    global _known  # noqa: PLW0603 - one host, one answer a process
    with _lock:
        if _known is None:
            _known = _remembered(remember_in) or _remembered(None)
        if _known is None:
            found, certain = _probed(remember_in)
            _known = found if certain else None
            return found
        return _known


def _probed(remember_in: Path | None) -> tuple[Accelerator, bool]:
    """Also whether it is certain. If the probe fails without KVM too, the host is busy, or QEMU is broken: this says nothing
    about KVM, and is not remembered. Nor is it, where something else ends the probe each time."""
    if not KVM_DEVICE.exists():
        return Accelerator("tcg", f"there is no {KVM_DEVICE}"), True
    if not _may_open():
        return Accelerator("tcg", f"this user may not open {KVM_DEVICE}: usermod -aG kvm {user_name(os.geteuid())}"), True
    try:
        trouble = _boots_under("kvm")
        found = Accelerator("tcg", f"KVM does not work: {trouble}") if trouble else Accelerator("kvm", "a guest ran under KVM")
        if trouble and _boots_under("tcg"):
            return found, False
    except ProbeEnded as ended:
        return Accelerator("tcg", f"it is not known whether KVM works: {ended}"), False
    try:
        kept = _file(remember_in)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({"host": _host_state(), **asdict(found)}))
    except (OSError, RuntimeError):
        pass  # only the next process is slower for it
    return found, True


def _boots_under(kind: Literal["kvm", "tcg"]) -> str | None:
    return tried_again(partial(boots_under, kind), tries=TRIES, after=lambda error: isinstance(error, ProbeEnded))


def _may_open() -> bool:
    return os.access(KVM_DEVICE, os.R_OK | os.W_OK, effective_ids=True)


def _remembered(folder: Path | None) -> Accelerator | None:
    try:
        kept = json.loads(_file(folder).read_bytes())
        if kept["host"] == _host_state() and kept["kind"] in ("kvm", "tcg"):
            return Accelerator(kept["kind"], str(kept["reason"]))
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        pass  # an unreadable file counts as none
    return None


def _file(folder: Path | None) -> Path:
    """RuntimeError, where the user has no home."""
    cache = folder or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "synvirt"
    return cache / "accelerator.json"


def _host_state() -> list[str]:
    """What the answer depends on: this boot of the host (modules, permissions, nesting), this QEMU, and whether this user may
    open the device, which changes when it joins a group."""
    program = find(EMULATOR)
    stat = Path(program).stat() if program else None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    access = str(KVM_DEVICE.exists() and (KVM_DEVICE.stat().st_mode, _may_open()))
    return [boot, access, str(program), str(stat and (stat.st_size, stat.st_mtime_ns))]
