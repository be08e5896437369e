"""Facts from the root file system of a Linux guest, by the names of `model/facts.py`. Pure, over Files."""

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Final

from synvirt.guests.inside import linux_cards
from synvirt.guests.inside.files import Files
from synvirt.kvm.agent_facts import passwd
from synvirt.model.facts import several, short

# Files and whole folders of netplan(5), interfaces(5), systemd.network(5), nm-settings-keyfile(5), ifcfg(5), ifcfg of SUSE.
NETWORK = (
    "/etc/netplan/",
    "/etc/network/interfaces",
    "/etc/network/interfaces.d/",
    "/etc/systemd/network/",
    "/etc/NetworkManager/system-connections/",
    "/etc/sysconfig/network-scripts/",
    "/etc/sysconfig/network/",
)
_UNITS = "/etc/systemd/system"
_IPV4 = r"(?<![\w.:])(?:\d{1,3}\.){3}\d{1,3}(?:/\d{1,2})?(?![\w.])"
_IPV6 = r"(?<![\w.:])[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{0,4}){2,7}(?:/\d{1,3})?(?![\w:])"
_ADDRESS = re.compile(f"{_IPV4}|{_IPV6}")
_MASKS = re.compile(r"255(?:\.\d{1,3}){3}")


def facts_of(files: Files) -> dict[str, str]:
    """The facts; empty, where there is no system."""
    release = _settings(files.read("/etc/os-release") or files.read("/usr/lib/os-release") or "")
    users = passwd(files.read("/etc/passwd") or "")
    if not release and not users:
        return {}
    found: dict[str, str] = {}
    if name := (files.read("/etc/hostname") or "").split("#")[0].strip().split("\n")[0]:
        found["host name"] = short(name)
    if pretty := release.get("PRETTY_NAME"):
        found["system"] = short(pretty)
    if zone := _time_zone(files):
        found["time zone"] = short(zone)
    network = dict(_network_files(files))
    found |= dict(_mounts(files.read("/etc/fstab") or "")) | users | dict(_enabled(files)) | dict(_network(network))
    return found | dict(linux_cards.cards_of(files, network))


def _settings(text: str) -> dict[str, str]:
    """The settings of os-release(5): a shell's assignments, read without a shell."""
    found = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and name.isidentifier():
            try:
                found[name] = " ".join(shlex.split(value))
            except ValueError:
                continue
    return found


def _time_zone(files: Files) -> str:
    _, found, zone = (files.target("/etc/localtime") or "").partition("zoneinfo/")
    return zone if found else (files.read("/etc/timezone") or "").strip()


# Options of a mount that nothing waits for, or only once the network is there (systemd.mount(5)).
_NOT_WAITED_FOR: Final = frozenset({"nofail", "noauto", "_netdev", "x-systemd.automount"})


def _mounts(text: str) -> Iterator[tuple[str, str]]:
    """fstab(5); with «optional», where the system starts without."""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 3 and not words[0].startswith("#") and words[1].startswith("/"):
            optional = " optional" if _NOT_WAITED_FOR & {*"".join(words[3:4]).split(",")} else ""
            yield f"mount {short(words[1])}", f"{short(words[0])} {short(words[2])}{optional}"


def _enabled(files: Files) -> Iterator[tuple[str, str]]:
    """Units that start by themselves: links in folders with the name of the unit that wants them (systemctl(1), «enable»)."""
    wanted: dict[str, set[str]] = {}
    for folder in files.names(_UNITS):
        if folder.endswith((".wants", ".requires")):
            for unit in files.names(f"{_UNITS}/{folder}"):
                wanted.setdefault(short(unit), set()).add(short(folder.rpartition(".")[0]))
    for unit, by in wanted.items():
        yield f"enabled {unit}", f"by {several(by)}"


def _network_files(files: Files) -> Iterator[tuple[str, str]]:
    """The files that set up the network, by their paths."""
    for place in NETWORK:
        paths = [place + name for name in sorted(files.names(place))] if place.endswith("/") else [place]
        for path in paths:
            text = files.read(path)
            if text:
                yield path, text


def _network(network: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The network's configuration: addresses, and a checksum that shows any other change. Wireless keys are not reported."""
    for path, text in network.items():
        addresses = several(_MASKS.sub("", one) for one in _ADDRESS.findall(text)).removeprefix(", ")
        yield f"network file {short(path)}", short(f"{addresses}; {hashlib.sha256(text.encode()).hexdigest()[:12]}")
