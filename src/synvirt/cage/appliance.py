"""The cage of a converter: virt-v2v, or another tool that runs a guest's disks in an appliance of libguestfs.

Such a tool starts QEMU with an appliance that it builds of this host's own programs, and serves it the disks by qemu-nbd; so it
may start programs, speak by Unix sockets, use /dev/kvm, and read the packages' lists and the kernel. It is another user than
the service, one that libvirtd does not listen to; it writes its folders and reads its disks, and connects nowhere.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from synvirt.cage.confining import Cage, Network
from synvirt.cage.launch import argv_in
from synvirt.programs import find

# What an appliance is made of: a kernel and its modules (/usr and /lib are there anyway), what packages hold, and files of /etc
# that belong to them. Not the host's keys and password hashes, which supermin leaves out.
_MADE_OF = (
    "/boot",
    *("/var/lib/dpkg", "/etc/dpkg", "/etc/debian_version"),
    *("/var/lib/rpm", "/usr/lib/sysimage/rpm", "/etc/rpm"),
)
# Paths in libguestfs' and supermin's environment: an administrator's word.
_NAMED = ("SUPERMIN_KERNEL", "SUPERMIN_MODULES", "LIBGUESTFS_PATH", "VIRTIO_WIN", "VIRT_TOOLS_DATA_DIR")
# The package's unit hides the kernel's modules where they lie, as systemd does with ProtectKernelModules, and shows them here.
SHOWN_MODULES = Path("/run/synvirt-kernel-modules")
CACHE = "LIBGUESTFS_CACHEDIR"


def converter(
    argv: Sequence[str],
    *,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
    exact: Sequence[str] = (),
    environment: Mapping[str, str],
    network: Network = Network.LOCAL,
) -> list[str]:
    """What starts it, with that environment. `exact`: as of a Cage. `network`: ANY, where a disk lies elsewhere."""
    program = find(argv[0])
    own = [] if program is None else [program, str(Path(program).resolve().parent)]
    named = [path for name in _NAMED for path in environment.get(name, "").split(os.pathsep) if path.startswith("/")]
    cache = environment.get(CACHE) or tempfile.gettempdir()
    cage = Cage(
        reads=(*_MADE_OF, str(SHOWN_MODULES), *own, *named, *reads),
        writes=(cache, "/dev/kvm", *writes),
        exact=tuple(exact),
        network=network,
    )
    return argv_in(cage, argv)


def shown_kernel(modules: Path = SHOWN_MODULES, boot: Path = Path("/boot")) -> dict[str, str]:
    """The kernel that libguestfs' appliance boots, where its modules are shown elsewhere: the one that runs, else the last."""
    found = {folder.name: boot / f"vmlinuz-{folder.name}" for folder in sorted(modules.glob("*"))}
    whole = {
        version: kernel for version, kernel in found.items() if kernel.exists() and (modules / version / "modules.dep").exists()
    }
    if not whole:
        return {}
    version = os.uname().release if os.uname().release in whole else list(whole)[-1]
    return {"SUPERMIN_KERNEL": str(whole[version]), "SUPERMIN_MODULES": str(modules / version)}
