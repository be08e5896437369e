"""The network cards that a Linux guest's own files configure by their names: facts «configures NAME». Pure, over Files.

Formats: netplan(5), interfaces(5), systemd.network(5), nm-settings-keyfile(5), ifcfg of Red Hat and of SUSE; and what gives a
card a name by its MAC address: udev(7), systemd.link(5). Such names count for nothing, as MAC addresses are kept.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from typing import Final

from synvirt.guests.inside.files import Files
from synvirt.model.facts import several, short

# Names that a kernel or systemd gives (systemd.net-naming-scheme(7)); a VLAN's begins with its card's.
_NAME: Final = re.compile(r"(?<![\w.:/-])(?:eth\d{1,3}|en(?:o|s|X)\d{1,9}(?:f\d+)?|enp\d{1,3}s\d{1,3}(?:f\d+)?)(?![\w-])")
_MAC_ADDRESS: Final = re.compile(r"(?mi)^[ \t]*(?:Permanent)?MACAddress\s*=")
_LINK_NAME: Final = re.compile(r"(?m)^[ \t]*Name\s*=\s*(\S+)")
_RULE_NAME: Final = re.compile(r'(?m)^(?=[^#\n]*ATTRS?\{address\}\s*==)[^#\n]*\bNAME\s*:?=\s*"([^"]+)"')
_OF_SUSE: Final = "/etc/sysconfig/network/ifcfg-"
_RULES: Final = "/etc/udev/rules.d/"
# Where systemd's names come from, and what turns them off.
_DEFAULT_LINKS: Final = ("/usr/lib/systemd/network/99-default.link", "/lib/systemd/network/99-default.link")
_MASKS: Final = ("/etc/systemd/network/99-default.link", "/etc/udev/rules.d/80-net-setup-link.rules")
_COMMAND_LINES: Final = ("/etc/default/grub", "/etc/kernel/cmdline", "/boot/grub/grub.cfg", "/boot/grub2/grub.cfg")
_KERNELS_OWN: Final = re.compile(r"(?m)^[^#\n]*\bnet\.ifnames=0\b")


def cards_of(files: Files, network: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The facts: each name with the files that have it. None, where the kernel's own names are used, as it counts the cards.
    `network`: the files that set up the network, by their paths."""
    if not any(files.read(path) is not None for path in _DEFAULT_LINKS) or _are_kernels_own(files):
        return
    by_mac = set(_named_by_mac(files, network))
    found: dict[str, set[str]] = {}
    for path, names in _configured(network):
        for name in names:
            if name not in by_mac:
                found.setdefault(name, set()).add(short(path))
    for name, paths in found.items():
        yield f"configures {name}", several(paths)


def _are_kernels_own(files: Files) -> bool:
    if any(files.target(path) == "/dev/null" for path in _MASKS):
        return True
    return any(_KERNELS_OWN.search(files.read(path) or "") for path in _COMMAND_LINES)


def _named_by_mac(files: Files, network: Mapping[str, str]) -> Iterator[str]:
    for name in files.names(_RULES):
        if name.endswith(".rules"):
            yield from _RULE_NAME.findall(files.read(_RULES + name) or "")
    for path, text in network.items():
        if path.endswith(".link") and _MAC_ADDRESS.search(text):
            yield from _LINK_NAME.findall(text)


def _lines(pattern: str) -> Callable[[str], list[str]]:
    """The names in what that pattern captures of each line that is no comment."""
    wanted = re.compile(rf"(?m)^[ \t]*{pattern}")
    return lambda text: [name for found in wanted.findall(text) for name in _NAME.findall(found)]


def _netplan(text: str) -> list[str]:
    """Keys of mappings whose block says no MAC address."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    keys = ((number, line.strip().partition(":")[0].strip("\"'")) for number, line in enumerate(lines) if ":" in line)
    named = [(number, name) for number, name in keys if _NAME.fullmatch(name)]
    return [name for number, name in named if not any("macaddress:" in line for line in _block(lines, number))]


def _block(lines: list[str], number: int) -> Iterator[str]:
    """The line of that number, and those that are in it."""
    yield lines[number]
    yield from takewhile(lambda line: _indent(line) > _indent(lines[number]), lines[number + 1 :])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _ifcfg(text: str) -> list[str]:
    return [] if re.search(r"(?m)^[ \t]*HWADDR\s*=", text) else _DEVICE(text)


_DEVICE: Final = _lines(r"DEVICE\s*=\s*[\"']?(\S+?)[\"']?\s*$")
_INTERFACES: Final = _lines(r"(?:auto|allow-[\w-]+|iface)\s+([^#\n]+)")
# What the paths of files begin and end with, and what finds names in one.
_FORMATS: Final[tuple[tuple[str, str, Callable[[str], list[str]]], ...]] = (
    ("/etc/netplan/", ".yaml", _netplan),
    ("/etc/network/interfaces", "", _INTERFACES),
    ("/etc/systemd/network/", ".network", _lines(r"(?:Original)?Name\s*=\s*([^#\n]+)")),
    ("/etc/NetworkManager/system-connections/", "", _lines(r"interface-name\s*=\s*([^#\n]+)")),
    ("/etc/sysconfig/network-scripts/", "", _ifcfg),
)


def _configured(network: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    for path, text in network.items():
        for beginning, ending, names in _FORMATS:
            if path.startswith(beginning) and path.endswith(ending):
                yield path, names(text)
        if path.startswith(_OF_SUSE):  # where the file's name has the card's
            yield path, _NAME.findall(path.removeprefix(_OF_SUSE))
