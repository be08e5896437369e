"""The menu of a guest's boot loader: what is started if nobody chooses. Pure, over Files.

Formats: menus of GRUB (grub.cfg, and the older grub.conf and menu.lst), of extlinux, and of the Boot Loader Specification; the
variables of GRUB (grubenv), which name the chosen entry. By UEFI, Red Hat's systems before 9 have menu and variables on the EFI
system partition, and in /boot a link to them, which leads nowhere there.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from synvirt.guests.inside.files import Files

# In a file system with /boot, or in one that is mounted there.
_FOLDERS: Final = ("/boot", "")
_MENUS: Final = ("grub/grub.cfg", "grub2/grub.cfg", "grub/grub.conf", "grub/menu.lst", "extlinux/extlinux.conf")
_ENTRIES, _VARIABLES = "loader/entries", ("grub2/grubenv", "grub/grubenv")
# Of a folder of entries, the chosen one and the newest ones are read.
_NEWEST: Final = 3
_VARIABLE: Final = re.compile(r"(?m)^(kernelopts|saved_entry)=(.*)$")
_DIGITS: Final = re.compile(r"([0-9]+)")
# The name that a menu of GRUB shows, quoted or not; the id of an entry.
_TITLE: Final = re.compile(r"'([^']*)'|\"([^\"]*)\"|(\S+)")
_ID: Final = re.compile(r"(?:\$menuentry_id_option|--id)[ =]+['\"]?([^'\" {]+)")
_DEVICE: Final = re.compile(r"^\([^)]*\)")
_KERNEL: Final = frozenset({"linux", "linux16", "linuxefi", "kernel"})
_INITRD: Final = frozenset({"initrd", "initrd16", "initrdefi"})
_OPTIONS: Final = frozenset({"append", "options"})
_REGULAR: Final = 0o100000


@dataclass(slots=True)
class Entry:
    """`menu`: its path in the guest; `folder`: of /boot in the file system that has the menu. `kernel` and `initrds`: files, as
    the menu names them. `options`: the kernel's command line. `names`: what it is chosen by, at each level of the menu."""

    menu: str
    folder: str
    names: tuple[frozenset[str], ...] = ()
    kernel: str = ""
    options: str = ""
    initrds: tuple[str, ...] = ()

    def file(self, files: Files, path: str) -> Any:
        """A file that the menu names, in the file system that has the menu: by its path, or in the folder, where the path is
        from another root (a subvolume's). None, where there is none."""
        for each in (path, f"{self.folder}/{path.rpartition('/')[2]}"):
            found = files.entry(each)
            if found is not None and found.file_mode & 0o170000 == _REGULAR:
                return found
        return None

    def shown(self, path: str) -> str:
        """The path of a file that the menu names, in the guest."""
        return f"/boot/{path.rpartition('/')[2]}"

    def configuration(self, files: Files) -> str | None:
        """That of the kernel, as distributions put it beside it; None, where there is none."""
        version = self.kernel.rpartition("/")[2].partition("-")[2]
        return files.read(f"{self.folder}/config-{version}") if version else None


def started(files: Files, by_efi: Mapping[str, str] = MappingProxyType({})) -> Entry | None:
    """The entry with a root file system that is the chosen one, else the newest in a folder of entries, else the menu's first.
    None, where the file system has no menu, nor a kernel that one on an EFI system partition starts. `by_efi`: the texts there,
    by their paths."""
    for folder in _FOLDERS:
        variables = _variables(files, folder, by_efi)
        menus = {_shown(path): files.read(path) or "" for path in (f"{folder}/{menu}" for menu in _MENUS)}
        for entry in (
            *_of_folder(files, folder, variables),
            *_of_menus(menus, folder, variables),
            *(entry for entry in _of_menus(by_efi, folder, variables) if entry.file(files, entry.kernel) is not None),
        ):
            entry.options = entry.options.replace("$kernelopts", variables.get("kernelopts", ""))
            if any(word.strip('"').startswith("root=") for word in entry.options.split()):
                return entry
    return None


def _variables(files: Files, folder: str, by_efi: Mapping[str, str]) -> dict[str, str]:
    of_efi = (text for path, text in by_efi.items() if path.endswith("/grubenv"))
    texts = (*(files.read(f"{folder}/{path}") for path in _VARIABLES), *of_efi)
    return dict(_VARIABLE.findall(next(filter(None, texts), "")))


def _of_folder(files: Files, folder: str, variables: dict[str, str]) -> Iterator[Entry]:
    names = [name for name in files.names(f"{folder}/{_ENTRIES}") if name.endswith(".conf")]
    newest = sorted(names, key=_version, reverse=True)[:_NEWEST]
    chosen = [name for name in names if name == f"{variables.get('saved_entry')}.conf"]
    for name in dict.fromkeys((*chosen, *newest)):
        path = f"{folder}/{_ENTRIES}/{name}"
        yield from _parsed(files.read(path) or "", _shown(path), folder, is_entry=True)[1]


def _of_menus(menus: Mapping[str, str], folder: str, variables: dict[str, str]) -> Iterator[Entry]:
    for path, text in menus.items():
        default, entries = _parsed(text, path, folder)
        if default in ("saved", "${saved_entry}"):
            default = variables.get("saved_entry", "")
        way = default.split(">")
        yield from (entry for entry in entries if len(entry.names) == len(way) and _leads(way, entry))
        yield from entries


def _leads(way: list[str], entry: Entry) -> bool:
    return all(word in names for word, names in zip(way, entry.names, strict=True))


def _shown(path: str) -> str:
    return path if path.startswith("/boot/") else f"/boot{path}"


def _version(name: str) -> list[int | str]:
    """For sorting: 5.14.0-427 is newer than 5.14.0-70."""
    return [int(part) if place % 2 else part for place, part in enumerate(_DIGITS.split(name))]


def _parsed(text: str, menu: str, folder: str, *, is_entry: bool = False) -> tuple[str, list[Entry]]:
    """The default, and the entries. `is_entry`: the whole file is one."""
    default, entries = "", [Entry(menu, folder)]
    # Open blocks, each with the names of a menu's part, if it is one; the entries so far at each level.
    opened, counts = list[frozenset[str]](), [0]
    for line in text.splitlines():
        word, rest = (*line.split(None, 1), "", "")[:2]
        word, rest = word.lower(), rest.strip()
        if word in ("menuentry", "submenu"):
            opened.append(_names(rest, counts[-1]))
            counts[-1] += 1
            if word == "menuentry":
                entries.append(Entry(menu, folder, tuple(filter(None, opened))))
            counts.append(0)
        elif word == "function":
            opened.append(frozenset())
            counts.append(0)
        elif word == "}" and opened:
            opened.pop()
            counts.pop()
        elif word in ("title", "label") and not is_entry:
            entries.append(Entry(menu, folder, (frozenset({str(len(entries) - 1), rest}),)))
        elif word == "default" or word.startswith("default="):
            default = word.partition("=")[2] or rest.lstrip("= ")
        elif word == "set" and rest.startswith("default=") and "next_entry" not in rest:
            default = rest.partition("=")[2].strip("\"'")
        else:
            _note(entries[-1], word, rest)
    return default, [entry for entry in entries if entry.kernel]


def _names(rest: str, number: int) -> frozenset[str]:
    title, id_ = _TITLE.match(rest), _ID.search(rest)
    return frozenset({str(number), *filter(None, title.groups() if title else ()), *([id_[1]] if id_ else [])})


def _note(entry: Entry, word: str, rest: str) -> None:
    if word in _KERNEL:
        entry.kernel, _, options = rest.partition(" ")
        entry.options = f"{entry.options} {options}"
    elif word in _OPTIONS:
        entry.options = f"{entry.options} {rest}"
    elif word in _INITRD:
        entry.initrds = tuple(_DEVICE.sub("", one) for one in rest.split() if not one.startswith("$"))
    if not entry.initrds and "initrd=" in entry.options:
        of_options = (one.removeprefix("initrd=") for one in entry.options.split() if one.startswith("initrd="))
        entry.initrds = tuple(path for each in of_options for path in each.split(","))
