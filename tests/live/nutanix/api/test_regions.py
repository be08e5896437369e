"""A list of what changed that stops in the middle is not one of a disk that did not change further on."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from synvirt.disks.changed import AllocatedReader, ChangedReader
from synvirt.disks.specs import AllocatedSpec, BlankSpec, ChangedSpec
from synvirt.live.nutanix.central import Central, DiskPoint
from synvirt.live.nutanix.element import Element
from synvirt.live.nutanix.prism import Refused
from synvirt.live.nutanix.regions import Region, laid_over
from synvirt.sizes import KIB
from tests.fakes.disks import MemoryReader

SIZE = 1 << 30
HALF = SIZE // 2


class Asked:
    """A Prism that gives these answers, in order."""

    host = "prism"

    def __init__(self, *answers: Any) -> None:
        self._answers = iter(answers)

    def ask(self, *_: object, **__: object) -> Any:
        found = next(self._answers)
        return SimpleNamespace(json=lambda: found)

    def close(self) -> None: ...


def of_element(*answers: Any) -> list[tuple[int, int, bool]]:
    return list(Element(Asked(*answers)).regions("/c/.snapshot/f", "/c/.snapshot/e"))  # type: ignore[arg-type]


def of_central(*answers: Any) -> list[tuple[int, int, bool]]:
    cluster = {"data": {"clusterIp": {"ipv4": {"value": "10.0.0.1"}}, "jwtToken": "t"}}
    central = Central(Asked(cluster), lambda _address: Asked(*answers))  # type: ignore[arg-type,return-value]
    central._versions["dataprotection"] = "v4.0"
    point = DiskPoint("a", "b", "c")
    return list(central.regions(point, point, SIZE))


def extra(following: Any) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [{"name": "fileSize", "value": SIZE}]
    return {"extraInfo": rows if following is None else [*rows, {"name": "nextOffset", "value": following}]}


V3 = {"file_size": SIZE, "region_list": [{"offset": 0, "length": 65536, "type": "REGULAR"}]}
V4 = {"data": [{"offset": 0, "length": 65536, "regionType": "REGULAR"}]}
FOUND = [(0, 65536, False)]


def test_a_list_ends_where_no_further_offset_is_given() -> None:
    assert of_element({**V3, "next_offset": HALF}, {**V3, "region_list": []}) == FOUND
    assert of_element({**V3, "next_offset": 0}) == FOUND
    assert of_central({**V4, "metadata": extra(HALF)}, {"metadata": extra(0)}) == FOUND
    assert of_central({**V4, "metadata": extra(None)}) == FOUND


@pytest.mark.parametrize(
    "second", [{}, [], None, {**V3, "next_offset": HALF}, {**V3, "next_offset": 1}, {**V3, "region_list": {"error": "busy"}}]
)
def test_a_cluster_that_stops_in_the_middle_is_not_believed(second: Any) -> None:
    with pytest.raises(Refused, match=f"from {HALF} on"):
        of_element({**V3, "next_offset": HALF}, second)


@pytest.mark.parametrize(
    "second",
    [
        {},
        [],
        None,
        {**V4, "metadata": extra(HALF)},
        {**V4, "metadata": extra(1)},
        {"data": {"error": []}, "metadata": extra(0)},
    ],
)
def test_a_prism_central_that_stops_in_the_middle_is_not_believed(second: Any) -> None:
    with pytest.raises(Refused, match=f"from {HALF} on"):
        of_central({**V4, "metadata": extra(HALF)}, second)


@pytest.mark.parametrize(
    "row",
    [
        None,
        "65536",
        {"offset": HALF},
        {"length": 65536},
        {"offset": HALF, "length": None},
        {"offset": HALF, "length": "64 KiB"},
        {"offset": -1, "length": 65536},
        {"offset": HALF, "length": -1},
    ],
)
def test_a_region_that_is_none_does_not_count_as_unchanged(row: Any) -> None:
    with pytest.raises(Refused, match="from 0 on"):
        of_element({**V3, "region_list": [*V3["region_list"], row]})  # type: ignore[misc]
    with pytest.raises(Refused, match="from 0 on"):
        of_central({"data": [*V4["data"], row], "metadata": extra(None)})


@pytest.mark.parametrize("following", ["soon", [HALF], {"offset": HALF}, 0.5])
def test_a_further_offset_that_is_no_number_is_no_end(following: Any) -> None:
    with pytest.raises(Refused, match="from 0 on"):
        of_element({**V3, "next_offset": following})
    with pytest.raises(Refused, match="from 0 on"):
        of_central({**V4, "metadata": extra(following)})


@given(
    regions=st.lists(st.builds(Region, st.integers(0, 50), st.integers(0, 15), st.booleans()), max_size=8),
    delta=st.booleans(),
)
def test_what_is_reported_as_data_is_read_whatever_else_is_reported_of_it(regions: list[Region], delta: bool) -> None:
    """Regions may overlap, come in any order, and go beyond the disk's end."""
    size = 40
    wanted = bytearray(b"." if delta else b"0") * size
    for start, length, zero in sorted(regions, key=lambda one: not one.zero):  # data last
        end = min(start + length, size)
        wanted[start:end] = (b"0" if zero else b"d") * max(end - start, 0)
    spec = laid_over(BlankSpec(size_bytes=size), size, regions, delta=delta)
    over = spec.over if isinstance(spec, ChangedSpec) else spec
    assert isinstance(over, AllocatedSpec)
    reader: AllocatedReader | ChangedReader = AllocatedReader(MemoryReader("A" * size, block_bytes=1), over.areas)
    if isinstance(spec, ChangedSpec):
        reader = ChangedReader(reader, spec.areas)
    found = bytearray(b".") * size
    for extent in reader.extents():
        found[extent.start : extent.end] = (b"0" if extent.zero else b"d") * extent.length
    assert found == wanted


@given(
    reported=st.lists(st.tuples(st.integers(0, 24), st.integers(1, 4), st.booleans()), max_size=8),
    delta=st.booleans(),
)
@example(reported=[(0, 1, True), (5, 1, False), (8, 1, False)], delta=True)
def test_what_is_joined_for_want_of_room_is_read_and_never_taken_for_zeros(
    reported: list[tuple[int, int, bool]], delta: bool
) -> None:
    """Between two areas that are kept as one lies what did not change, or was never reported: it has the guest's bytes."""
    block, count = 64 * KIB, 24
    regions = [Region(start * block, length * block, zero) for start, length, zero in reported]
    wanted = bytearray(b"." if delta else b"0") * count
    for start, length, zero in sorted(reported, key=lambda one: not one[2]):
        end = min(start + length, count)
        wanted[start:end] = (b"0" if zero else b"d") * max(end - start, 0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("synvirt.live.nutanix.regions.AREAS_MAX", 2)
        spec = laid_over(BlankSpec(size_bytes=count * block), count * block, regions, delta=delta)
    over = spec.over if isinstance(spec, ChangedSpec) else spec
    assert isinstance(over, AllocatedSpec)
    reader: AllocatedReader | ChangedReader = AllocatedReader(MemoryReader("A" * count, block_bytes=block), over.areas)
    if isinstance(spec, ChangedSpec):
        reader = ChangedReader(reader, spec.areas)
    found = bytearray(b".") * count
    for extent in reader.extents():
        found[extent.start // block : extent.end // block] = (b"0" if extent.zero else b"d") * (extent.length // block)
    allowed = {ord("d"): b"d", ord("0"): b"0d", ord("."): b".d"}
    assert all(one in allowed[want] for one, want in zip(found, wanted, strict=True)), (found, wanted)
