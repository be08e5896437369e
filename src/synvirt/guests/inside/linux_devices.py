"""The devices by which a Linux guest finds its disks, besides what it mounts: facts «finds FILE WHAT». Pure, over Files.

Formats: fstab(5), crypttab(5), lvm.conf(5), lvmdevices(8); and the kernel's command line, as a menu has it (menus.py). With a
devices file, LVM uses the disks in it alone, each found by an id: RHEL 9 has one from its installation on.
"""

import re
from collections.abc import Collection, Iterator

from synvirt.guests.inside.files import Files
from synvirt.guests.inside.menus import Entry
from synvirt.model.facts import short

FSTAB, CRYPTTAB, LVM_CONF, LVM_FOLDER = "/etc/fstab", "/etc/crypttab", "/etc/lvm/lvm.conf", "/etc/lvm/devices"
_LVM_CONFS = (LVM_CONF, "/etc/lvm/lvmlocal.conf")
_SETTING = r'(?m)^[ \t]*(?:devices/)?{}\s*=\s*"?([\w.-]+)'
_USES, _NAME = (re.compile(_SETTING.format(setting)) for setting in ("use_devicesfile", "devicesfile"))
_FILTER = re.compile(r"(?m)^[ \t]*(?:devices/)?(?:global_)?filter\s*=\s*\[([^\]]*)")
_PATTERN = re.compile(r'"([ar])(.)((?:[^"\\]|\\.)*)."')
# A pattern's beginning that is a name; and one that matches each device.
_BEGINNING, _ANY = re.compile(r"\^?(/dev/[\w/:-]+(?:\.(?![*+?])[\w/:-]+)*)(\$?)"), re.compile(r"\^?(/dev/)?(\.\*/?)?\$?")

# What a kernel or its initramfs waits for.
_WAITED_FOR = ("root", "resume")


def devices_of(files: Files, physical: Collection[str]) -> Iterator[tuple[str, str]]:
    """The facts. `physical`: the names of the physical volumes of LVM that are there; what a file says of others counts for
    nothing."""
    swaps = [words[0] for words in _lines(files.read(FSTAB)) if len(words) >= 3 and words[2] == "swap"]
    for number, device in enumerate(swaps, 1):
        yield f"finds {FSTAB} swap {number}", short(device)
    for words in _lines(files.read(CRYPTTAB)):
        if len(words) >= 2:
            yield f"finds {CRYPTTAB} {short(words[0])}", short(words[1])
    if physical:
        confs = [files.read(path) or "" for path in _LVM_CONFS]
        if (path := _list(files, "\n".join(confs))) is not None:
            yield from _listed(path, files.read(path), physical)
            return  # filters do not count beside it
        for path, conf in zip(_LVM_CONFS, confs, strict=True):
            for number, device in enumerate(_accepted(conf), 1):
                yield f"finds {path} filter {number}", short(device)


def _lines(text: str | None) -> Iterator[list[str]]:
    return (words for line in (text or "").splitlines() if (words := line.split()) and not words[0].startswith("#"))


def _list(files: Files, conf: str) -> str | None:
    """The devices file, where there is one that LVM uses."""
    uses, name = (_last(setting, conf) for setting in (_USES, _NAME))
    path = f"{LVM_FOLDER}/{name or 'system.devices'}"
    return path if uses != "0" and files.read(path) is not None else None


def _listed(path: str, content: str | None, physical: Collection[str]) -> Iterator[tuple[str, str]]:
    """The physical volumes in the devices file, each with the kind of its id and the id."""
    for words in _lines(content):
        entry = dict(word.split("=", 1) for word in words if "=" in word)
        if entry.get("PVID", "").replace("-", "") in physical and "IDTYPE" in entry and "IDNAME" in entry:
            yield f"finds {path} {short(entry['PVID'])}", short(f"{entry['IDTYPE']} {entry['IDNAME']}")


def _last(setting: re.Pattern[str], conf: str) -> str | None:
    found = setting.findall(conf)
    return found[-1] if found else None


def _accepted(conf: str) -> Iterator[str]:
    """The devices that a filter lets through, where it lets no others through; a name's beginning ends in an asterisk."""
    for found in _FILTER.finditer(conf):
        names: list[str] = []
        for verb, _, pattern in _PATTERN.findall(found[1]):
            if _ANY.fullmatch(pattern):
                yield from names if verb == "r" else ()
                break
            if verb == "a" and (name := _BEGINNING.match(pattern)) is not None:
                names.append(name[1] if name[2] or name.end() == len(pattern) else f"{name[1]}*")


def command_line(entry: Entry) -> dict[str, str]:
    """The facts of the kernel's command line."""
    words = (word.strip('"').split("=", 1) for word in entry.options.split() if "=" in word)
    return {f"finds {short(entry.menu)} {name}": short(value) for name, value in words if name in _WAITED_FOR}
