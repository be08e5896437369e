"""The files of a Linux guest that say what it is, and what they say."""

from pathlib import Path
from types import MappingProxyType

LINUX = MappingProxyType(
    {
        "host name": "web01",
        "system": "Debian GNU/Linux 12 (bookworm)",
        "time zone": "Europe/Berlin",
        "user root": "number 0, shell /bin/bash",
        "user web": "number 1000, shell /bin/sh",
        "mount /": "UUID=1234 ext4",
        "mount /srv": "/dev/sdb1 xfs",
        "mount /media": "UUID=5678 ext4 optional",
        "enabled nginx.service": "by multi-user.target",
        "enabled open-vm-tools.service": "by multi-user.target, vmware.target",
    }
)
FILES = MappingProxyType(
    {
        "etc/hostname": "web01\n",
        "usr/lib/os-release": 'NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nBAD="\n',
        "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nweb:x:1000:1000::/home/web:/bin/sh\n",
        "etc/fstab": "# a comment\nUUID=1234 / ext4 defaults 0 1\n/dev/sdb1 /srv xfs defaults 0 2\n"
        "UUID=5678 /media ext4 ro,nofail 0 2\nproc none proc\n",
        "etc/netplan/50.yaml": "network:\n  ethernets:\n    ens192:\n      addresses: [10.77.0.5/24, 'fd00::5/64']\n",
        "etc/network/interfaces": "iface ens3 inet static\n  address 10.0.0.9\n  netmask 255.255.255.0\n",
    }
)
LINKS = MappingProxyType(
    {
        "etc/os-release": "../usr/lib/os-release",
        "etc/localtime": "/usr/share/zoneinfo/Europe/Berlin",
        "etc/systemd/system/multi-user.target.wants/nginx.service": "/lib/systemd/system/nginx.service",
        "etc/systemd/system/multi-user.target.wants/open-vm-tools.service": "/lib/systemd/system/open-vm-tools.service",
        "etc/systemd/system/vmware.target.requires/open-vm-tools.service": "/lib/systemd/system/open-vm-tools.service",
        # Ways that lead nowhere, and round in a circle.
        "etc/netplan/out.yaml": "../../../../../../../../etc/shadow",
        "etc/netplan/circle.yaml": "circle.yaml",
    }
)


def planted(root: Path) -> Path:
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for name, target in LINKS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target)
    return root
