"""What libvirt asks each QEMU for a new folder of its own: eight processes and half a second of a core, with the same answers
each time. Folders of tests are given the answers that the first of them got.

libvirt itself judges whether they still hold: it asks again after a change of QEMU, of libvirt, of the kernel or of /dev/kvm.

And what it asks each guest that starts: see FEATURES_AT_ONCE.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from synvirt.hypervisor import accel
from synvirt.kvm import connection
from synvirt.kvm.library import module
from synvirt.kvm.qemu_user import QemuUser
from synvirt.sample.pieces import cache_dir

KEPT = "libvirt-capabilities"
# Under the folder of libvirt's cache.
ANSWERS = Path("qemu/capabilities")
# libvirt asks each of them.
EMULATORS = ("qemu-system-x86_64", "qemu-system-i386")

# Of qemu.conf. libvirt 9 asks a starting guest for each of its processor's 300 features by itself, which is two thirds of what
# QEMU does until that processor runs. If it takes QEMU for an older one, it asks for all of them at once (libvirt,
# src/qemu/qemu_process.c: qemuProcessFetchGuestCPU). Programs that `subprocess` starts have it as users do.
FEATURES_AT_ONCE = 'capability_filters = ["cpu-unavailable-features"]\n'


def kept_for(uid: int) -> Path:
    """Where the answers are kept for folders whose QEMU runs as this user: another may not open /dev/kvm."""
    _boot, *qemu = accel._host_state()
    # libvirt looks at the time of the inode, which a new hard link changes, too.
    changed = [Path(found).stat().st_ctime_ns for name in EMULATORS if (found := shutil.which(name))]
    state = (qemu, changed, module().getVersion(), os.uname().release, uid)
    return cache_dir() / KEPT / hashlib.sha256(repr(state).encode()).hexdigest()[:16]


def give(cache: Path, kept: Path) -> bool:
    """Whether the folder has answers now. Not, where nobody has kept any."""
    answers = cache / ANSWERS
    if not answers.exists() and kept.exists():
        answers.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(kept, answers)
    return answers.exists()


def keep(opened: Any, cache: Path, kept: Path) -> None:
    """Has libvirt ask, and keeps the answers: all of them or none."""
    opened.getCapabilities()
    # Another process was quicker, or the user has no cache: it only takes longer.
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
            shutil.copytree(cache / ANSWERS, Path(scratch, "made")).rename(kept)


@contextmanager
def capabilities_known() -> Iterator[None]:
    """For the embedded drivers that this process opens, and those that it forks."""
    prepare, embedded = connection._prepare, connection._embedded
    unknown: dict[Path, Path] = {}

    def given(root: Path, user: QemuUser | None) -> None:
        prepare(root, user)
        kept = kept_for(user.uid if user else os.geteuid())
        if not give(root / "cache", kept):
            unknown[root] = kept

    def kept(libvirt: Any, root: Path) -> Any:
        opened = embedded(libvirt, root)
        if root in unknown:
            keep(opened, root / "cache", unknown.pop(root))
        return opened

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(connection, "_prepare", given)
        patched.setattr(connection, "_embedded", kept)
        yield
