"""The cage of a converter: virt-v2v, or another tool that runs a guest's disks in an appliance of libguestfs.

Such a tool builds an appliance from this host's own programs, starts QEMU with it, and serves it the disks by qemu-nbd. So it
may start programs, use Unix sockets and /dev/kvm, and read the packages' lists and the kernel. It runs as another user than the
service, one that libvirtd refuses. It may write its own folders and read its disks, and connects nowhere.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from synvirt.cage.confining import Cage, Network
from synvirt.cage.launch import argv_in
from synvirt.programs import find

# The parts of an appliance: a kernel and its modules (/usr and /lib are allowed anyway), the packages' files, and files of /etc
# that belong to them. Not the host's keys and password hashes, which supermin leaves out.
_MADE_OF = (
    "/boot",
    *("/var/lib/dpkg", "/etc/dpkg", "/etc/debian_version"),
    *("/var/lib/rpm", "/usr/lib/sysimage/rpm", "/etc/rpm"),
)
# Libosinfo, which virt-v2v asks what a Linux guest's devices are, ends where it may not read a part of its database: the host's
# own additions, and the lists of devices that Debian links from /usr/share/misc.
_OSINFO = ("/etc/osinfo", "/var/lib/usbutils", "/var/lib/pciutils")
# Paths in the environment of libguestfs and supermin, set by an administrator.
_NAMED = ("SUPERMIN_KERNEL", "SUPERMIN_MODULES", "LIBGUESTFS_PATH", "VIRTIO_WIN", "VIRT_TOOLS_DATA_DIR")
# The package's unit hides the kernel's modules at their usual place (systemd's ProtectKernelModules), and shows them here.
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
    """The command that starts the converter with that environment. `exact`: as in Cage. `network`: ANY, where a disk is on
    another host."""
    program = find(argv[0])
    own = [] if program is None else [program, str(Path(program).resolve().parent)]
    named = [path for name in _NAMED for path in environment.get(name, "").split(os.pathsep) if path.startswith("/")]
    cache = environment.get(CACHE) or tempfile.gettempdir()
    cage = Cage(
        reads=(*_MADE_OF, *_OSINFO, str(SHOWN_MODULES), *own, *named, *reads),
        writes=(cache, "/dev/kvm", *writes),
        exact=tuple(exact),
        network=network,
    )
    return argv_in(cage, argv)


def shown_kernel(modules: Path = SHOWN_MODULES, boot: Path = Path("/boot")) -> dict[str, str]:
    """The kernel for libguestfs' appliance, where its modules are shown at another place: the running one, else the last."""
    found = {folder.name: boot / f"vmlinuz-{folder.name}" for folder in sorted(modules.glob("*"))}
    whole = {
        version: kernel for version, kernel in found.items() if kernel.exists() and (modules / version / "modules.dep").exists()
    }
    if not whole:
        return {}
    version = os.uname().release if os.uname().release in whole else list(whole)[-1]
    return {"SUPERMIN_KERNEL": str(whole[version]), "SUPERMIN_MODULES": str(modules / version)}
