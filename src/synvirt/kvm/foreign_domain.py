"""A domain's XML from elsewhere, rebuilt from what is allowed: nothing in it names a program, a file or a device of this host.

libvirt's XML is a language for users who may be root: `<emulator>` is a program that libvirtd runs; `<kernel>`, `<source>`,
`<log>` and a dozen others are files that it opens. So a foreign definition is not searched for bad parts. Only elements and
attributes that the table below allows, with a value of its form, are copied; the rest is left out and listed. What stands word
for word in this host's own definition of the same guest stays, as it is trusted already.

The forms are libvirt's (libvirt.org/formatdomain.html). Pure.
"""

import re
from dataclasses import dataclass
from typing import Final
from xml.etree import ElementTree as ET  # only for writing: foreign XML is read by xml_document

from synvirt.kvm import numbered_ports
from synvirt.kvm.identity import JOB_NAMESPACE

# The forms of values. Words have no "/", so they cannot be the path of a file.
_WORD: Final = r"[\w.:,+~ -]*"
_ANY: Final = r"[^\x00]*"
_NUMBER: Final = r"\s*\d{1,20}\s*"

# Path: its attributes. A path that ends in /** stands for all elements in it, with values that are words. `#`: it has text.
_ALLOWED: Final = """
domain                              type
domain/name                         #
domain/uuid                         #
domain/genid                        #
domain/title                        #
domain/description                  #
domain/memory                       # unit
domain/currentMemory                # unit
domain/maxMemory                    # unit slots
domain/memoryBacking
domain/memoryBacking/hugepages/**
domain/memoryBacking/nosharepages
domain/memoryBacking/discard
domain/memoryBacking/access         mode
domain/memoryBacking/allocation     mode
domain/memoryBacking/source         type
domain/memtune/**
domain/vcpu                         # placement cpuset current
domain/vcpus/**
domain/iothreads                    #
domain/iothreadids/**
domain/cputune/**
domain/numatune/**
domain/blkiotune
domain/blkiotune/weight             #
domain/cpu/**
domain/clock/**
domain/features/**
domain/pm/**
domain/perf/**
domain/on_poweroff                  #
domain/on_reboot                    #
domain/on_crash                     #
domain/on_lockfailure               #
domain/sysinfo                      type
domain/sysinfo/bios
domain/sysinfo/bios/entry           # name
domain/sysinfo/system
domain/sysinfo/system/entry         # name
domain/sysinfo/baseBoard
domain/sysinfo/baseBoard/entry      # name
domain/sysinfo/chassis
domain/sysinfo/chassis/entry        # name
domain/sysinfo/oemStrings
domain/sysinfo/oemStrings/entry     #
domain/os                           firmware
domain/os/type                      # arch machine
domain/os/firmware/**
domain/os/loader                    readonly secure type stateless
domain/os/nvram
domain/os/boot                      dev
domain/os/bootmenu                  enable timeout
domain/os/smbios                    mode
domain/os/bios                      useserial rebootTimeout
domain/devices
domain/devices/disk                 type device model snapshot
domain/devices/disk/driver          name type cache io discard detect_zeroes error_policy rerror_policy queues iothread \
queue_size copy_on_read event_idx ioeventfd packed discard_no_unref
domain/devices/disk/target          dev bus rotation_rate removable tray
domain/devices/disk/serial          #
domain/devices/disk/wwn             #
domain/devices/disk/vendor          #
domain/devices/disk/product         #
domain/devices/disk/boot            order loadparm
domain/devices/disk/address/**
domain/devices/disk/alias           name
domain/devices/disk/readonly
domain/devices/disk/shareable
domain/devices/disk/blockio/**
domain/devices/disk/geometry/**
domain/devices/disk/iotune/**
domain/devices/controller           type index model ports vectors
domain/devices/controller/driver    queues cmd_per_lun max_sectors ioeventfd iothread
domain/devices/controller/model     name
domain/devices/controller/target/**
domain/devices/controller/master    startport
domain/devices/controller/address/**
domain/devices/controller/alias     name
domain/devices/controller/pcihole64 # unit
domain/devices/interface            type trustGuestRxFilters
domain/devices/interface/source     network bridge portgroup dev mode
domain/devices/interface/mac        address
domain/devices/interface/model      type
domain/devices/interface/driver     name queues txmode ioeventfd event_idx rx_queue_size tx_queue_size packed
domain/devices/interface/driver/host/**
domain/devices/interface/driver/guest/**
domain/devices/interface/link       state
domain/devices/interface/mtu        size
domain/devices/interface/vlan/**
domain/devices/interface/virtualport/**
domain/devices/interface/bandwidth/**
domain/devices/interface/filterref/**
domain/devices/interface/coalesce/**
domain/devices/interface/port       isolated
domain/devices/interface/rom        bar enabled
domain/devices/interface/boot       order loadparm
domain/devices/interface/address/**
domain/devices/interface/alias      name
domain/devices/serial               type
domain/devices/serial/target        type port
domain/devices/serial/target/model  name
domain/devices/serial/address/**
domain/devices/serial/alias         name
domain/devices/console              type
domain/devices/console/target       type port
domain/devices/console/address/**
domain/devices/console/alias        name
domain/devices/channel              type
domain/devices/channel/target       type name
domain/devices/channel/address/**
domain/devices/channel/alias        name
domain/devices/input                type bus model
domain/devices/input/address/**
domain/devices/input/alias          name
domain/devices/graphics             type port tlsPort autoport keymap sharePolicy passwd passwdValidTo connected \
defaultMode listen
domain/devices/graphics/listen      type address network
domain/devices/graphics/channel     name mode
domain/devices/graphics/image       compression
domain/devices/graphics/jpeg        compression
domain/devices/graphics/zlib        compression
domain/devices/graphics/playback    compression
domain/devices/graphics/streaming   mode
domain/devices/graphics/clipboard   copypaste
domain/devices/graphics/mouse       mode
domain/devices/graphics/filetransfer enable
domain/devices/sound                model
domain/devices/sound/codec          type
domain/devices/sound/audio          id
domain/devices/sound/address/**
domain/devices/sound/alias          name
domain/devices/audio                id type
domain/devices/video
domain/devices/video/model          type ram vram vram64 vgamem heads primary blob
domain/devices/video/model/resolution/**
domain/devices/video/address/**
domain/devices/video/alias          name
domain/devices/hub/**
domain/devices/redirdev             bus type
domain/devices/redirdev/address/**
domain/devices/redirdev/alias       name
domain/devices/redirdev/boot        order
domain/devices/watchdog             model action
domain/devices/watchdog/address/**
domain/devices/watchdog/alias       name
domain/devices/memballoon/**
domain/devices/rng                  model
domain/devices/rng/rate             bytes period
domain/devices/rng/backend          # model
domain/devices/rng/address/**
domain/devices/rng/alias            name
domain/devices/tpm                  model
domain/devices/tpm/backend          type version persistent_state
domain/devices/tpm/backend/active_pcr_banks/**
domain/devices/tpm/alias            name
domain/devices/tpm/address/**
domain/devices/memory               model access discard
domain/devices/memory/source/**
domain/devices/memory/target/**
domain/devices/memory/address/**
domain/devices/memory/alias         name
domain/devices/panic/**
domain/devices/iommu/**
"""

# The allowed values, where not all are. A device with another type of its own is left out as a whole.
_VALUES: Final = {
    "domain@type": "kvm|qemu",
    "domain/name": r"[^/\x00\n]{1,255}",
    "domain/title": _ANY,
    "domain/description": _ANY,
    "domain/memory": _NUMBER,
    "domain/os/type": "hvm",
    "domain/clock@timezone": r"[\w+-]{1,40}(/[\w+-]{1,40}){0,2}",  # a name, never a file: QEMU gets it as TZ
    "domain/on_poweroff": "destroy|restart|preserve|rename-restart",
    "domain/on_reboot": "destroy|restart|preserve|rename-restart",
    "domain/on_crash": "destroy|restart|preserve|rename-restart",  # others write the guest's memory to this host's disk
    "domain/sysinfo@type": "smbios",
    "domain/sysinfo/bios/entry": _ANY,
    "domain/sysinfo/system/entry": _ANY,
    "domain/sysinfo/baseBoard/entry": _ANY,
    "domain/sysinfo/chassis/entry": _ANY,
    "domain/sysinfo/oemStrings/entry": _ANY,
    "domain/memoryBacking/source@type": "anonymous|memfd",
    "domain/devices/disk@device": "disk|cdrom|floppy",
    "domain/devices/disk/serial": _ANY,
    "domain/devices/disk/driver@name": "qemu",
    "domain/devices/interface@type": "network|bridge|direct|user",
    "domain/devices/interface/source@mode": "bridge|vepa|private",
    "domain/devices/serial@type": "pty",
    "domain/devices/console@type": "pty",
    "domain/devices/channel@type": "unix|spicevmc",
    "domain/devices/channel/target@type": "virtio",
    "domain/devices/input@type": "mouse|keyboard|tablet",
    "domain/devices/graphics@type": "vnc|spice",
    "domain/devices/graphics@passwd": _ANY,
    "domain/devices/graphics/listen@type": "none|address|network|socket",
    "domain/devices/audio@type": "none|spice",
    "domain/devices/redirdev@type": "spicevmc",
    "domain/devices/watchdog@action": "reset|shutdown|poweroff|pause|none",  # others dump the guest, or reach the host
    "domain/devices/rng/backend@model": "random|builtin",
    "domain/devices/rng/backend": r"/dev/u?random|",
    "domain/devices/tpm/backend@type": "emulator",
    "domain/devices/memory@model": "dimm",
}

# Where one of these does not fit, it is a different device and is left out as a whole.
_DECISIVE: Final = frozenset(
    f"domain/devices/{path}"
    for path in (
        *("disk@device", "channel@type", "channel/target@type", "input@type", "graphics@type", "audio@type", "redirdev@type"),
        *("rng/backend@model", "rng/backend", "tpm/backend@type", "memory@model"),
    )
)
# Values that replace all others.
_INSTEAD: Final = {"domain@type": "kvm", "domain/devices/serial@type": "pty", "domain/devices/console@type": "pty"}

# Each definition has these, and libvirt makes them again. So it is not reported that they are left out.
_OWN: Final = re.compile(
    "|".join(
        (
            r"domain@id",
            r"domain/(resource|seclabel|idmap)",
            r"domain/os/(loader|nvram(@template|@format)?)",  # the caller says which firmware it is
            r"domain/devices/(serial|console)/source",
            r"domain/devices/console@tty",
            r"domain/devices/channel/(source|target@state)",
            r"domain/devices/interface/target",
            r"domain/devices/graphics(/listen)?@socket",
            r"domain/devices/graphics@(websocket|websocketGenerated)",
            r"domain/devices/graphics/listen@fromConfig",
            r"domain/devices/disk/(source|backingStore)",  # the destination's volumes replace it, and discs are kept apart
        )
    )
)
# This host has its own emulator and uses that.
_STANDARD_EMULATORS: Final = frozenset(
    {"/usr/bin/qemu-system-x86_64", "/usr/bin/kvm", "/usr/bin/qemu-kvm", "/usr/libexec/qemu-kvm"}
)
_CARD_KINDS: Final = frozenset({"network", "bridge", "direct", "user"})


def _table() -> dict[str, frozenset[str]]:
    rows = (line.split() for line in _ALLOWED.strip().splitlines())
    return {row[0]: frozenset(row[1:]) for row in rows}


_TABLE: Final = _table()


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """`left_out`: what was not copied, a phrase each, without duplicates."""

    root: ET.Element
    left_out: tuple[str, ...]
    firmware: str | None  # the path of its loader
    console_log: bool  # whether its console was written to a file


def rebuilt(foreign: ET.Element, own: ET.Element | None = None) -> Rebuilt:
    """`foreign`, a <domain>, reduced to what is allowed. `own`: this host's definition of the same guest."""
    numbers = numbered_ports.numbers_in(foreign)
    copying = _Copying(own, frozenset(f"domain/{tag}" for tag in numbered_ports.PARTS) if numbers else frozenset())
    root = copying.element(foreign, "domain")
    numbered_ports.add(root, numbers)
    for disk in root.iterfind("devices/disk"):
        if disk.get("device", "disk") != "disk" and disk.find("source") is None:
            disk.set("type", "file")  # an empty drive; another type would need a source
    log = foreign.find("devices/serial/log")
    return Rebuilt(root, tuple(dict.fromkeys(copying.left_out)), foreign.findtext("os/loader"), log is not None)


class _Refused(Exception):
    """The device is not an allowed one."""


class _Copying:
    def __init__(self, own: ET.Element | None, made_anew: frozenset[str]) -> None:
        self._own = own
        self._made_anew = made_anew
        self.left_out: list[str] = []

    def element(self, found: ET.Element, path: str) -> ET.Element:
        """The copy of an element in the table, with its allowed parts only."""
        copy = ET.Element(found.tag)
        for name, value in found.attrib.items():
            if self._may(f"{path}@{name}", value, _is_below(path) or name in _TABLE[path]):
                copy.set(name, value)
            elif (instead := _INSTEAD.get(f"{path}@{name}")) is not None:
                copy.set(name, instead)
        text = (found.text or "").strip()
        if text and self._may(path, text, _is_below(path) or "#" in _TABLE[path]):
            copy.text = text
        for child in found:
            if isinstance(child.tag, str):
                copy.extend(self._child(child, f"{path}/{child.tag}"))
        return copy

    def _child(self, found: ET.Element, path: str) -> list[ET.Element]:
        """The element's copy, or none."""
        if path == "domain/metadata":
            return [_metadata(found)]
        if self._is_own(found, path):
            return [found]
        if path not in _TABLE and not _is_below(path):
            self._note_removal(found, path)
            return []
        return self._device(found, path) if path.count("/") == 2 else [self.element(found, path)]

    def _device(self, found: ET.Element, path: str) -> list[ET.Element]:
        if path == "domain/devices/interface" and not _is_known_card(found):
            return [self._unplugged(found, path)]
        if path == "domain/devices/disk":
            self._note_disc(found)
        try:
            return [self.element(found, path)]
        except _Refused:
            return []

    def _may(self, path: str, value: str, known: bool) -> bool:
        if known and _fits(path, value):
            return True
        if not _OWN.fullmatch(path):
            shown = _without_namespace(path.removeprefix("domain/"))
            self.left_out.append(f"{shown}={_short(value)} is left out: it may reach into this host")
        if path in _DECISIVE:
            raise _Refused
        return False

    def _unplugged(self, found: ET.Element, path: str) -> ET.Element:
        """The card as the guest knows it, without its network: a foreign definition may not name one."""
        self.left_out.append(f"a network card is not plugged in: it was of type {_short(found.get('type', 'unknown'))}")
        copy = ET.Element("interface", type="user")
        for name in ("mac", "model", "boot", "address"):
            copy.extend(self.element(child, f"{path}/{name}") for child in found.findall(name))
        ET.SubElement(copy, "link", state="down")
        return copy

    def _is_own(self, found: ET.Element, path: str) -> bool:
        if self._own is None:
            return False
        text = _canonical(found)
        return any(_canonical(own) == text for own in self._own.iterfind(path.removeprefix("domain/")))

    def _note_removal(self, found: ET.Element, path: str) -> None:
        if path == "domain/devices/emulator":
            if (text := (found.text or "").strip()) not in _STANDARD_EMULATORS:
                self.left_out.append(f"it runs by this host's own QEMU, not by {_short(text)}")
        elif not path.endswith("/log") and not _OWN.fullmatch(path) and path not in self._made_anew:
            kind = f" of type {_short(found.attrib['type'])}" if "type" in found.attrib else ""
            shown = _without_namespace(path.removeprefix("domain/"))
            self.left_out.append(f"{shown}{kind} is left out: it may reach into this host")

    def _note_disc(self, disk: ET.Element) -> None:
        source, target = disk.find("source"), disk.find("target")
        if disk.get("device", "disk") in ("cdrom", "floppy") and source is not None and target is not None:
            path = source.get("file") or source.get("dev") or source.get("name") or "a disc"
            self.left_out.append(f"what was in its drive {_short(target.get('dev', ''))} is left out: {_short(path)}")


def _is_known_card(found: ET.Element) -> bool:
    source = found.find("source")
    return found.get("type") in _CARD_KINDS and (
        source is None or source.get("mode", "bridge") in ("bridge", "vepa", "private")
    )


def _is_below(path: str) -> bool:
    """Whether the path is in the table as `…/**`, or lies in such a path."""
    parts = path.split("/")
    return path not in _TABLE and any("/".join(parts[:count]) + "/**" in _TABLE for count in range(2, len(parts) + 1))


def _fits(path: str, value: str) -> bool:
    return re.fullmatch(_VALUES.get(path, _WORD), value.strip()) is not None


def _metadata(found: ET.Element) -> ET.Element:
    """Notes of other tools, which libvirt does not read. Our own mark, which says whose a domain is, is never copied."""
    copy = ET.Element("metadata")
    copy.extend(child for child in found if isinstance(child.tag, str) and not child.tag.startswith(f"{{{JOB_NAMESPACE}}}"))
    return copy


def _canonical(element: ET.Element) -> object:
    text = (element.text or "").strip()
    return element.tag, sorted(element.attrib.items()), text, [_canonical(child) for child in element]


def _without_namespace(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "", path)


def _short(text: str) -> str:
    printable = "".join(letter if letter.isprintable() else "?" for letter in text)
    return printable if len(printable) <= 60 else f"{printable[:60]}…"
