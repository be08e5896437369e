"""A guest's family, from the many names that exporters use.

The family decides one thing: Windows guests get virtio drivers before their first start. So names count more than numbers
(exporters write an old number for a system that is newer than they are), and Windows is looked for first.
"""

import re

from synvirt.model.machine import Family, GuestOs

# VMware's guest ids (`windows2019srv_64Guest`, `winNetEnterpriseGuest`), VirtualBox's (`Windows11_64`), libosinfo's
# (`win2k22`), oVirt's (`windows_2022x64`), XenServer's («Windows Server 2022 (64-bit)») and CIM's own («Microsoft Windows …»).
_WINDOWS = re.compile(
    r"windows|microsoft|\bwin(dows)?[ _-]?(\d|xp|vista|nt|net|me\b|k)|^win[a-z0-9]*guest|longhorn", re.IGNORECASE
)
_LINUX = re.compile(
    r"linux|ubuntu|debian|red ?hat|rhel|centos|fedora|suse|sles|gentoo|\barch|alpine|photon|coreos|rocky|alma|oracle|amazon"
    r"|asianux|mandr|turbolinux|kernel \d|flatcar|\bol\d|xcp-ng|xenserver|proxmox|mint|kali|scientific|nixos",
    re.IGNORECASE,
)
_OTHER = re.compile(
    r"bsd|solaris|darwin|mac ?os|os/2|os2|netware|haiku|\bdos\b|sco|unixware|vmkernel|esxi?\b|qnx", re.IGNORECASE
)

# CIM_OperatingSystem.OSType (DMTF CIM schema): numbers of the two families that matter; the rest is other.
_CIM_WINDOWS = frozenset({15, 16, 17, 18, 19, 58, 63, 67, *range(69, 78), 103, 105, *range(111, 122)})
_CIM_LINUX = frozenset({36, 64, 79, 80, *range(82, 102), *range(106, 110)})


# Names of the same numbers, where a virtual machine may have such a system. From 112 on, versions of the schema differ.
_CIM_NAMES = {
    "29": "Solaris",
    "36": "Linux",
    "42": "FreeBSD",
    "58": "Windows 2000",
    "65": "OpenBSD",
    "67": "Windows XP",
    "69": "Microsoft Windows Server 2003",
    "70": "Microsoft Windows Server 2003 64-Bit",
    "71": "Windows XP 64-Bit",
    "73": "Windows Vista",
    "74": "Windows Vista 64-Bit",
    "76": "Microsoft Windows Server 2008",
    "77": "Microsoft Windows Server 2008 64-Bit",
    "78": "FreeBSD 64-Bit",
    "79": "Red Hat Enterprise Linux",
    "80": "Red Hat Enterprise Linux 64-Bit",
    "81": "Solaris 64-Bit",
    "82": "SUSE",
    "83": "SUSE 64-Bit",
    "84": "SLES",
    "85": "SLES 64-Bit",
    "93": "Ubuntu",
    "94": "Ubuntu 64-Bit",
    "95": "Debian",
    "96": "Debian 64-Bit",
    "97": "Linux 2.4.x",
    "98": "Linux 2.4.x 64-Bit",
    "99": "Linux 2.6.x",
    "100": "Linux 2.6.x 64-Bit",
    "101": "Linux 64-Bit",
    "103": "Microsoft Windows Server 2008 R2",
    "104": "VMware ESXi",
    "105": "Microsoft Windows 7",
    "106": "CentOS 32-bit",
    "107": "CentOS 64-bit",
    "108": "Oracle Linux 32-bit",
    "109": "Oracle Linux 64-bit",
}


def guest_os(*, cim_id: str = "", vendor_id: str = "", description: str = "") -> GuestOs:
    """The guest by `vendor_id` (VMware's, VirtualBox's, …), `description` and the CIM number; any may be empty."""
    name = description or vendor_id or _CIM_NAMES.get(cim_id, "")
    return GuestOs(family=family(cim_id, vendor_id, description), id=vendor_id or cim_id, name=name)


def family(cim_id: str, *names: str) -> Family:
    """Windows, Linux or other: by names first, in their order, then by the CIM number of the system."""
    for name in filter(None, names):
        found = _family_of_name(name)
        if found is not None:
            return found
    number = int(cim_id) if cim_id.isascii() and cim_id.isdigit() and len(cim_id) < 6 else -1
    if number in _CIM_WINDOWS:
        return "windows"
    return "linux" if number in _CIM_LINUX else "other"


def names_another(guest: GuestOs) -> bool:
    """Whether the guest's name is that of another system, neither Windows nor Linux, and not just unknown."""
    return bool(_OTHER.search(guest.name) or _OTHER.search(guest.id))


def _family_of_name(name: str) -> Family | None:
    if _WINDOWS.search(name):
        return "windows"
    if _OTHER.search(name):
        return "other"
    return "linux" if _LINUX.search(name) else None
