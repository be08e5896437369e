"""The text that describes a VMDK: VMware «Virtual Disk Format 1.1», section «The Descriptor File».

    # Disk DescriptorFile
    version=1
    CID=fffffffe                 changes when the disk is written
    parentCID=ffffffff           the parent's CID when this snapshot was made; ffffffff: no parent
    createType="twoGbMaxExtentSparse"
    RW 4192256 SPARSE "disk-s001.vmdk"
    RW 2048 FLAT "disk-flat.vmdk" 0

A file of its own, or a few sectors in a sparse extent. It is foreign text: only valid lines are accepted.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from synvirt.disks.vmdk.sparse import SECTOR, SIZE_MAX
from synvirt.errors import MalformedArchive, UnsupportedFormat

NO_PARENT: Final = 0xFFFF_FFFF
# 2 TiB in pieces of 2 GiB are 1024. Each is an open file.
EXTENTS_MAX: Final = 4096
# Beside a line for each extent there are some thirty.
LINES_MAX: Final = 16384
# VMware has one file per extent; each is opened separately.
SAME_FILE_MAX: Final = 64

# The kind of an extent that is in no file.
ZERO: Final = "ZERO"

Access = Literal["RW", "RDONLY", "NOACCESS"]

# Possessive (`*+`): a line of a MiB is scanned once, whatever is in it.
_EXTENT = re.compile(
    r"(?P<access>RW|RDONLY|NOACCESS)[ \t]++(?P<sectors>[0-9]{1,20})[ \t]++(?P<kind>[A-Z0-9]{1,20})"
    r'(?:[ \t]++"(?P<file>[^"]*+)"(?:[ \t]++(?P<offset>[0-9]{1,20}))?)?(?:[ \t]|$)'
)
_SETTING = re.compile(r'(?P<key>[A-Za-z][\w.]{0,79})[ \t]*+=[ \t]*+(?:"(?P<quoted>[^"]*+)"[ \t]*+|(?P<plain>[^"]*+))$')
_ENCODING = re.compile(rb'^[ \t]*+encoding[ \t]*+=[ \t]*+"?([\w-]{1,40})', re.MULTILINE | re.IGNORECASE)
_CID = re.compile(r"[0-9A-Fa-f]{1,8}")
# Settings of disks that Workstation encrypted; vSphere names its filter instead. Read directly they would be noise.
_ENCRYPTED_BY: Final = frozenset({"keysafe", "encryption.keysafe", "encryptionkeys"})


class ExtentLine(NamedTuple):
    """`size` bytes of the disk in the file `file`; in a flat file from `offset` on."""

    access: Access
    size: int
    kind: str
    file: str = ""
    offset: int = 0


class Descriptor(NamedTuple):
    """`cid` and `parent_cid` None: the text does not have them. `parent_uuid`: VirtualBox' own name for a parent, which only
    its media registry can find; empty, where there is none."""

    create_type: str
    cid: int | None
    parent_cid: int | None
    parent_hint: str
    parent_uuid: str
    extents: tuple[ExtentLine, ...]

    @property
    def has_parent(self) -> bool:
        return self.parent_cid not in (None, NO_PARENT)


def parse_descriptor(content: bytes | bytearray, name: str) -> Descriptor:
    """The descriptor in the bytes, up to their first NUL. MalformedArchive."""
    text = _decoded(bytes(content).split(b"\0", 1)[0])
    settings: dict[str, str] = {}
    extents: list[ExtentLine] = []
    lines = text.splitlines()
    if len(lines) > LINES_MAX:
        raise MalformedArchive(f"{name}: its descriptor has {len(lines)} lines; VMware's longest has some thousand")
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        if (match := _EXTENT.match(line)) and (match["file"] or match["kind"] == ZERO):
            extents.append(_extent_line(match, number, name))
        elif match := _SETTING.match(line):
            settings.setdefault(
                match["key"].lower(), match["quoted"] if match["quoted"] is not None else match["plain"].strip()
            )
        elif line.split()[0] in ("RW", "RDONLY", "NOACCESS"):
            raise MalformedArchive(f"{name}: line {number} of its descriptor describes no extent: {line[:100]!r}")
    if "cid" not in settings and "createtype" not in settings:
        raise MalformedArchive(f"{name} is not a VMDK: it has neither a sparse extent's header nor a descriptor")
    if _ENCRYPTED_BY & settings.keys() or "vmwarevmcrypt" in settings.get("ddb.iofilters", ""):
        raise UnsupportedFormat(f"{name} is encrypted", hint="Decrypt the virtual machine in VMware, then export it again.")
    _check_extents(extents, name)
    return Descriptor(
        create_type=settings.get("createtype", ""),
        cid=_cid(settings, "cid", name),
        parent_cid=_cid(settings, "parentcid", name),
        parent_hint=settings.get("parentfilenamehint", ""),
        parent_uuid=_parent_uuid(settings.get("ddb.uuid.parent", "")),
        extents=tuple(extents),
    )


def _check_extents(extents: Sequence[ExtentLine], name: str) -> None:
    """Within the limits of VMware's largest disk. MalformedArchive."""
    if len(extents) > EXTENTS_MAX:
        raise MalformedArchive(f"{name}: {len(extents)} extents; VMware's largest split disk has 1024")
    for file, times in Counter(extent.file for extent in extents if extent.kind != ZERO).most_common(1):
        if times > SAME_FILE_MAX:
            raise MalformedArchive(f"{name}: {times} of its extents are in one file, {file[:100]!r}")
    if sum(extent.size for extent in extents) > SIZE_MAX:
        raise MalformedArchive(f"{name}: its extents are larger than VMware's largest disk")


def _parent_uuid(written: str) -> str:
    """`ddb.uuid.parent`; all zeros, as in most images, mean none."""
    found = written.strip("{} ").lower()
    return found if found.strip("0-") else ""


def _decoded(content: bytes) -> str:
    """File names in the descriptor's encoding; bytes that are invalid in it reach the file system unchanged."""
    try:
        return content.decode(_encoding(content))
    except (UnicodeDecodeError, LookupError):
        return content.decode("utf-8", "surrogateescape")


def _encoding(content: bytes) -> str:
    named = _ENCODING.search(content)
    if named is None or named[1].lower() == b"utf-8":
        return "utf-8"
    from synvirt.machines.texts import vmware_encoding  # most descriptors need no other

    return vmware_encoding(named[1].decode("latin-1"))


def _extent_line(match: re.Match[str], number: int, name: str) -> ExtentLine:
    access: Access = match["access"]  # type: ignore[assignment]  # the expression allows no other
    if access == "NOACCESS":
        raise UnsupportedFormat(f"{name}: line {number} of its descriptor says that its extent may not be read")
    return ExtentLine(
        access,
        size=int(match["sectors"]) * SECTOR,
        kind=match["kind"],
        file=match["file"] or "",
        offset=int(match["offset"] or 0) * SECTOR,
    )


def _cid(settings: dict[str, str], key: str, name: str) -> int | None:
    text = settings.get(key)
    if text is None:
        return None
    if not _CID.fullmatch(text):
        raise MalformedArchive(f"{name}: {key} is {text[:40]!r} in its descriptor, no 32-bit number")
    return int(text, 16)
