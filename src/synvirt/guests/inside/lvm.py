"""Logical volumes of LVM2, put together from the metadata on their physical volumes. Pure, over seekable bytes.

    label ─▶ header ─▶ metadata areas ─▶ a group as a text ─▶ its volumes ─▶ segments, which lie on physical volumes

Format: lvm2, lib/label/label.h and lib/format_text/layout.h; the text: lvm.conf(5), and what `vgcfgbackup` writes. Linear and
striped volumes are read, and of mirrors the first image that is present. Thin and cached volumes, and those with parity, are
not.
"""

import re
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from synvirt.errors import DiskReadFailed, UnsupportedFormat
from synvirt.guests.inside.seekable import Bytes, Seekable, read_at
from synvirt.model.facts import short

VOLUMES_MAX = 64
# An area has 1 MiB, unless an administrator wants more.
_TEXT_BYTES_MAX, _DEPTH_MAX = 4 << 20, 8
# Mirrors' images are volumes, and these may be mirrors.
_NESTED_MAX = 4
# The most for all volumes of a group together. Segments of a volume under others count each time they are asked for.
_SEGMENTS_MAX = 100_000
_SECTOR = 512
_LABELS, _LABEL = 4, struct.Struct("<8sQII8s")
_AREA, _LOCATION = struct.Struct("<QQ"), struct.Struct("<QQII")
_AREAS_MAX = 16
_MAGIC, _HEADER = b"\x20LVM2\x20x[5A%r0N*>", struct.Struct("<I16sIQQ")
_IGNORED = 1
NOT_READ = "LVM is not read as it is there"
_WORD: Final = re.compile(r'\s+|#[^\n]*|"((?:[^"\\]|\\.)*)"|(-?[0-9]+)(?![\w.+-])|([\w.+-]+)|([{}\[\]=,])', re.ASCII)

Value = str | int | list["Value"] | dict[str, "Value"]
Section = dict[str, Value]


class Physical(NamedTuple):
    """A physical volume: its name, and its text about its group; None, where another one has the text."""

    name: str
    volume: Bytes
    text: str | None


def physical(volume: Bytes) -> Physical | None:
    """None, where it is not a physical volume. DiskReadFailed."""
    beginning = read_at(volume, 0, _LABELS * _SECTOR)
    for sector in range(len(beginning) // _SECTOR):
        magic, _, _, offset, _ = _LABEL.unpack_from(beginning, sector * _SECTOR)
        if magic == b"LABELONE":
            return _physical(volume, sector * _SECTOR + offset)
    return None


def _physical(volume: Bytes, at: int) -> Physical:
    header = read_at(volume, at, _SECTOR)
    name = header[:32].decode("ascii", "replace")
    data_areas = _areas(header, 40)
    areas = _areas(header, 40 + (len(data_areas) + 1) * _AREA.size)
    return Physical(name, volume, next(filter(None, (_text(volume, start) for start, _ in areas)), None))


def _areas(header: bytes, at: int) -> list[tuple[int, int]]:
    """The areas in the list, which ends with an entry of zeros."""
    found: list[tuple[int, int]] = []
    while len(found) < _AREAS_MAX and at + _AREA.size <= len(header):
        start, size = _AREA.unpack_from(header, at)
        if not start:
            return found
        found.append((start, size))
        at += _AREA.size
    raise DiskReadFailed("its header has no end")


def _text(volume: Bytes, start: int) -> str | None:
    """The text lies in a ring behind the area's header."""
    header = read_at(volume, start, _SECTOR)
    if len(header) < _SECTOR:
        raise DiskReadFailed("its metadata lies beyond its end")
    _, magic, _, _, size = _HEADER.unpack_from(header)
    offset, length, _, flags = _LOCATION.unpack_from(header, _HEADER.size)
    if magic != _MAGIC or not offset or flags & _IGNORED:
        return None
    if length > _TEXT_BYTES_MAX or offset >= size:
        raise DiskReadFailed(f"its metadata of {length} bytes is none of LVM")
    first = read_at(volume, start + offset, min(length, size - offset))
    content = first + read_at(volume, start + _SECTOR, length - len(first))
    return content.rstrip(b"\0").decode(errors="replace")


def parsed(text: str) -> Section:
    """Sections and values, by their names. DiskReadFailed."""
    words = _words(text)
    found = _section(words, 0)
    if next(words, None) is not None:
        raise DiskReadFailed("its metadata has more ends than sections")
    return found


def _words(text: str) -> Iterator[tuple[str, str | int]]:
    """Names, values and marks, each with its kind."""
    at = 0
    while at < len(text):
        match = _WORD.match(text, at)
        if match is None:
            raise DiskReadFailed("its metadata is not text of LVM")
        at = match.end()
        string, number, name, mark = match.groups()
        if string is not None:
            yield "value", re.sub(r"\\(.)", r"\1", string)
        elif number is not None:
            # No number of LVM has more digits, and Python refuses numbers with thousands of them.
            yield "value", int(number[:20])
        elif name is not None:
            yield "name", name
        elif mark is not None:
            yield mark, mark


def _section(words: Iterator[tuple[str, str | int]], depth: int) -> Section:
    found: Section = {}
    for kind, word in words:
        if kind == "}" and depth:
            return found
        if kind not in ("name", "value") or depth >= _DEPTH_MAX:
            raise DiskReadFailed("its metadata is not text of LVM")
        mark = next(words, ("", ""))[0]
        if mark == "=":
            found[str(word)] = _value(words)
        elif mark == "{":
            found[str(word)] = _section(words, depth + 1)
        else:
            raise DiskReadFailed("its metadata is not text of LVM")
    if depth:
        raise DiskReadFailed("its metadata ends within a section")
    return found


def _value(words: Iterator[tuple[str, str | int]]) -> Value:
    kind, word = next(words, ("", ""))
    if kind == "value":
        return word
    if kind != "[":
        raise DiskReadFailed("its metadata has a name without a value")
    found: list[Value] = []
    for kind, word in words:
        if kind == "]":
            return found
        if kind == "value":
            found.append(word)
        elif kind != ",":
            break
    raise DiskReadFailed("its metadata has a list without an end")


def _sections(section: Section, name: str) -> Mapping[str, Section]:
    inner = section.get(name, {})
    return {key: value for key, value in inner.items() if isinstance(value, dict)} if isinstance(inner, dict) else {}


def _number(section: Section, name: str) -> int:
    value = section.get(name)
    if not isinstance(value, int) or value < 0:
        raise DiskReadFailed(f"its metadata does not say {name}")
    return value


class Stripe(NamedTuple):
    """The start on a volume; None, where that volume is missing."""

    volume: Bytes | None
    offset: int


class Segment(NamedTuple):
    """A run of a volume's bytes; linear, if it has one stripe."""

    start: int
    length: int
    stripe_bytes: int
    stripes: Sequence[Stripe]


class Logical(Seekable):
    """A logical volume, made of its segments."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        super().__init__(sum(segment.length for segment in segments))
        self.segments = segments

    def _bytes(self, offset: int, length: int) -> bytes:
        content = bytearray()
        while len(content) < length:
            piece = self._piece(offset + len(content), length - len(content))
            if not piece:
                break
            content += piece
        return bytes(content)

    def _piece(self, offset: int, most: int) -> bytes:
        segment = self.segments[bisect_right(self.segments, offset, key=lambda each: each.start) - 1]
        within, count = offset - segment.start, len(segment.stripes)
        column, at, together = 0, within, segment.length - within
        if count > 1:
            number, rest = divmod(within, segment.stripe_bytes)
            row, column = divmod(number, count)
            at, together = row * segment.stripe_bytes + rest, segment.stripe_bytes - rest
        stripe = segment.stripes[column]
        if stripe.volume is None:
            raise DiskReadFailed("a physical volume of it is missing")
        return read_at(stripe.volume, stripe.offset + at, min(together, most))


class Group:
    """A volume group. `text`: from a physical volume; `held`: all physical volumes, by their names."""

    def __init__(self, text: str, held: Mapping[str, Bytes]) -> None:
        found = [(name, value) for name, value in parsed(text).items() if isinstance(value, dict)]
        if len(found) != 1:
            raise DiskReadFailed("its metadata describes no group, or several")
        [(self.name, section)] = found
        self.id, self.seqno = str(section.get("id")), _number(section, "seqno")
        self._extent_bytes = _number(section, "extent_size") * _SECTOR
        self._segments_left = _SEGMENTS_MAX
        self._volumes = _sections(section, "logical_volumes")
        self._physical = {
            name: Stripe(held.get(str(one.get("id")).replace("-", "")), _number(one, "pe_start") * _SECTOR)
            for name, one in _sections(section, "physical_volumes").items()
        }

    def names(self) -> list[str]:
        """The names of volumes for users, without LVM's own."""
        shown = [name for name, one in self._volumes.items() if "VISIBLE" in str(one.get("status"))]
        return shown[:VOLUMES_MAX]

    def volume(self, name: str, nested: int = 0) -> Logical:
        """UnsupportedFormat, where its kind is not read. DiskReadFailed."""
        sections = [
            one for key, one in self._volumes.get(name, {}).items() if key.startswith("segment") and isinstance(one, dict)
        ]
        segments = sorted((self._segment(one, nested) for one in sections), key=lambda segment: segment.start)
        at = 0
        for segment in segments:
            if segment.start != at or not segment.length:
                raise DiskReadFailed("its segments leave a hole, or overlap")
            at += segment.length
        return Logical(segments)

    def _segment(self, section: Section, nested: int) -> Segment:
        self._segments_left -= 1
        if self._segments_left < 0:
            raise UnsupportedFormat("it has more segments than are read")
        kind, start, length = section.get("type"), _number(section, "start_extent"), _number(section, "extent_count")
        if kind == "striped":
            stripes = self._placed(section.get("stripes"), nested)
            stripe_bytes = _number(section, "stripe_size") * _SECTOR if len(stripes) > 1 else 1
        elif kind == "mirror":
            stripes, stripe_bytes = _one_of(self._placed(section.get("mirrors"), nested)), 1
        elif kind == "raid1":
            # Each image has two volumes: its metadata and its data.
            images = section.get("raids")
            names = images[1::2] if isinstance(images, list) else []
            stripes, stripe_bytes = _one_of([self._stripe(name, start, nested) for name in names]), 1
        else:
            raise UnsupportedFormat(f"volumes of the type {short(kind)} are not read")
        if not stripes or not stripe_bytes:
            raise DiskReadFailed("it has a segment that lies nowhere")
        return Segment(start * self._extent_bytes, length * self._extent_bytes, stripe_bytes, stripes)

    def _placed(self, value: Value | None, nested: int) -> list[Stripe]:
        """Pairs of a name and an extent."""
        words = value if isinstance(value, list) else []
        return [self._stripe(name, extent, nested) for name, extent in zip(words[::2], words[1::2], strict=False)]

    def _stripe(self, name: Value, extent: Value, nested: int) -> Stripe:
        """A stripe on a physical volume, or on another volume of the group."""
        if not isinstance(name, str) or not isinstance(extent, int):
            raise DiskReadFailed("it has a segment that lies nowhere")
        offset = extent * self._extent_bytes
        if name in self._physical:
            volume, begin = self._physical[name]
            return Stripe(volume, begin + offset)
        if nested >= _NESTED_MAX:
            raise DiskReadFailed("its volumes lie on each other")
        return Stripe(self.volume(name, nested + 1), offset)


def _one_of(images: Sequence[Stripe]) -> list[Stripe]:
    """Of a mirror's images the first that is present; the first, where none is."""
    return [next((image for image in images if _is_present(image.volume)), images[0])] if images else []


def _is_present(volume: Bytes | None) -> bool:
    if isinstance(volume, Logical):
        return all(_is_present(stripe.volume) for segment in volume.segments for stripe in segment.stripes)
    return volume is not None


def logical_volumes(held: Sequence[Physical], unread: dict[str, str]) -> Iterator[tuple[str, Bytes]]:
    """The volumes of all groups, each with its name. Adds to `unread` what cannot be put together."""
    volumes = {one.name: one.volume for one in reversed(held)}
    groups: dict[str, Group] = {}
    if held and not any(one.text for one in held):
        unread["logical volumes"] = f"{NOT_READ}: no physical volume that is there describes its group"
    for text in filter(None, (one.text for one in held)):
        try:
            group = Group(text, volumes)
        except DiskReadFailed as error:
            unread["logical volumes"] = f"{NOT_READ}: {error.detail}"
            continue
        if group.id not in groups or group.seqno > groups[group.id].seqno:
            groups[group.id] = group
    for group in groups.values():
        for name in group.names():
            where = f"logical volume {short(group.name)}/{short(name)}"
            try:
                yield where, group.volume(name)
            except (DiskReadFailed, UnsupportedFormat) as error:
                unread[where] = error.detail
