"""Logical volumes, as they are put together of what physical volumes say."""

import io
import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.errors import DiskReadFailed, SynvirtError
from synvirt.guests.inside import lvm
from synvirt.guests.inside.seekable import Bytes, Seekable
from tests.cases import cases
from tests.guests.lvm_disks import DATA, group, physical, segment

EXTENT = 4096
NAMES = {"pv0": "A" * 32, "pv1": "B" * 32, "pv2": "C" * 32}


class Memory(Seekable):
    def __init__(self, content: bytes) -> None:
        super().__init__(len(content))
        self._content = content

    def _bytes(self, offset: int, length: int) -> bytes:
        return self._content[offset : offset + length]


def put_together(disks: Mapping[str, bytes]) -> tuple[dict[str, Bytes], dict[str, str]]:
    """Volumes, and what was not read."""
    unread: dict[str, str] = {}
    held = [found for content in disks.values() if (found := lvm.physical(Memory(content))) is not None]
    return dict(lvm.logical_volumes(held, unread)), unread


def content_of(volume: Bytes) -> bytes:
    volume.seek(0)
    return volume.read()


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[int, int, list[tuple[str, int]]]]:
    """Segments of a volume: how many extents, how many sectors a stripe, and where the stripes begin."""
    found = []
    for _ in range(draw(st.integers(1, 5))):
        stripes = draw(st.lists(st.tuples(st.sampled_from(list(NAMES)), st.integers(0, 20)), min_size=1, max_size=3))
        found.append((draw(st.integers(1, 4)) * len(stripes), draw(st.sampled_from([1, 2, 4, 8])), stripes))
    return found


@cases(60)
@given(layout=layouts(), reads=st.lists(st.tuples(st.integers(0, 1 << 18), st.integers(0, 20_000)), max_size=5))
def test_every_byte_of_a_volume_is_where_its_segments_say(
    layout: list[tuple[int, int, list[tuple[str, int]]]], reads: list[tuple[int, int]]
) -> None:
    """Held against a map of sectors, one by one."""
    size = DATA + 40 * EXTENT
    expected, segments, start = bytearray(), "", 0
    data = {key: random.Random(key).randbytes(size - DATA) for key in NAMES}
    for number, (extents, sectors, stripes) in enumerate(layout, 1):
        words = ", ".join(f'"{key}", {at}' for key, at in stripes)
        sized = f"stripe_size = {sectors}\n" if len(stripes) > 1 else ""
        segments += segment(number, start, extents, "striped", f"stripe_count = {len(stripes)}\n{sized}stripes = [\n{words}\n]")
        for sector in range(extents * 8):
            row, within = divmod(sector, sectors)
            key, at = stripes[row % len(stripes)]
            place = at * EXTENT + (row // len(stripes) * sectors + within) * 512
            expected += data[key][place : place + 512]
        start += extents
    text = group("vg", NAMES, {"root": segments})
    disks = {key: physical(name, text if key == "pv1" else "", size)[:DATA] + data[key] for key, name in NAMES.items()}
    found, unread = put_together(disks)
    assert not unread
    [(where, volume)] = found.items()
    assert where == "logical volume vg/root"
    assert content_of(volume) == expected
    for at, length in reads:
        assert volume.seek(at, io.SEEK_SET) == at
        assert volume.read(length) == expected[at : at + length]


def linear(key: str, at: int, kind: str = "striped") -> str:
    return segment(1, 0, 2, kind, f'stripe_count = 1\nstripes = ["{key}", {at}]')


def test_volumes_of_several_groups_are_read_and_others_say_why_not() -> None:
    """Of each group the newest text counts, wherever it lies in its ring."""
    size = DATA + 8 * EXTENT
    old = group("vg", {"pv0": NAMES["pv0"], "pv1": NAMES["pv1"]}, {"gone": linear("pv0", 0)}, seqno=3)
    mirror = {"m_rimage_0": linear("pv1", 2), "m": segment(1, 0, 2, "raid1", 'raids = ["m_rmeta_0", "m_rimage_0"]')}
    volumes = {
        "root": linear("pv0", 4),
        "thin": linear("pv0", 0, "thin"),
        **mirror,
        "old": segment(1, 0, 2, "mirror", 'mirrors = ["m_rimage_0", 0]'),
    }
    new = group("vg", {"pv0": NAMES["pv0"], "pv1": NAMES["pv1"]}, volumes, seqno=4)
    other = group("data-vg.1", {"pv0": NAMES["pv2"], "pv9": "Z" * 32}, {"srv": linear("pv0", 1), "lost": linear("pv9", 0)})
    data = {key: random.Random(key).randbytes(8 * EXTENT) for key in NAMES}
    heads = {"pv0": physical(NAMES["pv0"], old, size), "pv1": physical(NAMES["pv1"], new, size, offset=DATA - 4096 - 100)}
    heads["pv2"] = physical(NAMES["pv2"], other, size)
    found, unread = put_together({key: head[:DATA] + data[key] for key, head in heads.items()})
    assert unread == {"logical volume vg/thin": "volumes of the type thin are not read"}
    lost = found.pop("logical volume data-vg.1/lost")
    assert {where: content_of(volume) for where, volume in found.items()} == {
        "logical volume vg/root": data["pv0"][4 * EXTENT : 6 * EXTENT],
        "logical volume vg/m": data["pv1"][2 * EXTENT : 4 * EXTENT],
        "logical volume vg/old": data["pv1"][2 * EXTENT : 4 * EXTENT],
        "logical volume data-vg.1/srv": data["pv2"][EXTENT : 3 * EXTENT],
    }
    with pytest.raises(DiskReadFailed, match="is missing"):
        content_of(lost)


LOOP = {"a": segment(1, 0, 2, "striped", 'stripes = ["b", 0]'), "b": segment(1, 0, 2, "striped", 'stripes = ["a", 0]')}
HOSTILE = [
    *(
        "vg {",
        "vg { a = ",
        "vg { a = [1, 2",
        "vg = 1",
        "a { } b { }",
        "}",
        "vg { a { { ",
        "vg { seqno = -1 }",
        'vg { a = "',
        "\x00",
    ),
    "a { " * 10_000,
    f"vg {{ seqno = {'9' * 10_000} }}",
    group("vg", NAMES, LOOP),
    group("vg", NAMES, {"root": segment(1, 3, 2, "striped", 'stripes = ["pv0", 0]')}),
    group("vg", NAMES, {"root": segment(1, 0, 0, "striped", 'stripes = ["pv0", 0]')}),
    group("vg", NAMES, {"root": segment(1, 0, 2, "striped", 'stripe_size = 0\nstripes = ["pv0", 0, "pv1", 0]')}),
    group("vg", NAMES, {"root": segment(1, 0, 2, "raid1", 'raids = ["x"]')}),
    group("vg", NAMES, {"root": segment(1, 0, 2, "raid1", "raids = [1, 2]")}),
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_refused_by_our_errors(text: str) -> None:
    found, unread = put_together({"pv0": physical(NAMES["pv0"], text, DATA + EXTENT)})
    assert not found
    assert unread


def test_damaged_volumes_raise_nothing_foreign() -> None:
    good = physical(NAMES["pv0"], group("vg", NAMES, {"root": linear("pv0", 0)}), DATA + 8 * EXTENT)
    used = [at for at in range(len(good)) if good[at]]
    for seed in range(300):
        chance, damaged = random.Random(seed), bytearray(good)
        for _ in range(chance.randrange(1, 5)):
            damaged[chance.choice(used)] = chance.randrange(256)
        try:
            for volume in put_together({"pv0": bytes(damaged)})[0].values():
                volume.read(4096)
        except SynvirtError:
            continue


@pytest.mark.parametrize("gone", ["pv0", "pv1"])
def test_a_mirror_is_read_of_the_image_that_is_there(gone: str) -> None:
    volumes = {
        "m_rimage_0": linear("pv0", 2),
        "m_rimage_1": linear("pv1", 2),
        "m": segment(1, 0, 2, "raid1", 'raids = ["m_rmeta_0", "m_rimage_0", "m_rmeta_1", "m_rimage_1"]'),
        "old": segment(1, 0, 2, "mirror", 'mirrors = ["m_rimage_0", 0, "m_rimage_1", 0]'),
    }
    named = {key: NAMES[key] for key in ("pv0", "pv1")}
    data = random.Random(1).randbytes(8 * EXTENT)
    head = physical(NAMES["pv1" if gone == "pv0" else "pv0"], group("vg", named, volumes), DATA + 8 * EXTENT)
    found, unread = put_together({"there": head[:DATA] + data})
    assert unread == {}
    for name in ("m", "old"):
        assert content_of(found[f"logical volume vg/{name}"]) == data[2 * EXTENT : 4 * EXTENT]
