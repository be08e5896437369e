"""What goes over the wire is what pydantic would make of it: every spec and order, and what is wrong."""

import json
from typing import Any
from uuid import UUID

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from synvirt.backups.orders import ChangesSpec, Commit, ServeOrder, TakeOrder, VerifyPointOrder
from synvirt.disks import specs
from synvirt.disks.specs import ImageSpec, RawSpec, ReaderSpec, WriterSpec
from synvirt.jobs import dataclass_json
from synvirt.jobs.orders import CopyOrder, DiskOrder, DiskSpans, HashesOrder, OpenedBeneath, RepairOrder
from synvirt.jobs.wire import Broken, CarriedOut, Flushed, Moved, message_of
from synvirt.repository.specs import RepositorySpec

KINDS: tuple[Any, ...] = (
    CopyOrder,
    RepairOrder,
    DiskSpans,
    OpenedBeneath,
    TakeOrder,
    ServeOrder,
    VerifyPointOrder,
    Commit,
    Moved,
    Flushed,
    Broken,
    CarriedOut,
    ReaderSpec,
    WriterSpec,
    ChangesSpec,
    RepositorySpec,
)


# Pydantic tries each member of a union at each level: a spec within many specs takes it minutes.
DEPTH_MAX = 5


def _depth(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inside), default=-1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: getattr(kind, "__name__", str(kind))[:30])
def test_it_is_read_as_pydantic_reads_it(kind: Any) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(kind)

    # Not shrunk, and not read by pydantic where it is too deep.
    @settings(max_examples=30, deadline=None, phases=(Phase.explicit, Phase.generate))
    @given(st.from_type(kind))
    def holds(value: Any) -> None:
        assume("nan" not in repr(value))  # it equals nothing, itself neither
        line = dataclass_json.dump(value)
        assert b"\n" not in line
        assert dataclass_json.load(kind, line) == value
        if _depth(json.loads(line)) > DEPTH_MAX:
            return
        try:
            theirs = adapter.validate_json(line)
        except ValidationError:
            return  # a lone surrogate
        assert theirs == value

    holds()


def test_a_name_that_is_not_utf_8() -> None:
    spec = RawSpec(path="/imports/\udcff.vmdk")
    assert dataclass_json.load(ReaderSpec, dataclass_json.dump(spec)) == spec


ORDER = json.loads(
    CopyOrder(
        disks=(
            DiskOrder(
                key="a",
                reader=ImageSpec(format="vmdk", over=RawSpec(path="/hush")),
                writer=specs.FileWriterSpec(path="/v", size_bytes=1),
                hashes=HashesOrder(path="/h", token=UUID(int=1), last=True),
            ),
        )
    ).to_line()
)


def _but(path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """The order with that at `path`; None: without it."""
    made: Any = json.loads(json.dumps(ORDER))
    place = made
    for step in path[:-1]:
        place = place[step]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return made  # type: ignore[no-any-return]


DISK = ("disks", 0)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("disks",), None, "it: lacks disks"),
        (("disks",), "hush", "disks: is not a list"),
        (("more",), "hush", "it: has a field that is not known"),
        (("kind",), "take", "kind: is none of copy"),
        ((*DISK, "key"), 7, "disks.[].key: is not of type str"),
        ((*DISK, "since_bytes"), True, "disks.[].since_bytes: is not of type int"),
        ((*DISK, "since_bytes"), 1.5, "disks.[].since_bytes: is not of type int"),
        ((*DISK, "fresh"), 1, "disks.[].fresh: is not of type bool"),
        ((*DISK, "reader", "format"), "hush", "disks.[].reader"),
        ((*DISK, "reader", "over", "path"), None, "disks.[].reader.over: lacks path"),
        ((*DISK, "reader", "over"), [], "disks.[].reader.over: is nothing that is known here"),
        ((*DISK, "hashes", "token"), "hush", "disks.[].hashes.token: is not a UUID"),
        (("threads",), "hush", "threads: is nothing that is known here"),
    ],
)
def test_what_is_wrong_is_named_without_its_content(path: tuple[str | int, ...], value: object, words: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        CopyOrder.from_line(json.dumps(_but(path, value)).encode())
    assert str(caught.value).startswith(words)
    assert "hush" not in str(caught.value)
    with pytest.raises(ValidationError):
        TypeAdapter(CopyOrder).validate_json(json.dumps(_but(path, value)), strict=True)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hush",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"message": "hush"}',
        b'{"message": ["moved"]}',
        b'{"message": "result", "name": "ready"}',
        b"\xff",
        b'{"message": "result", "name": "x", "content": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    ],
    ids=lambda line: str(line[:30]),
)
def test_no_line_of_a_worker_breaks_the_service(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        message_of(line)
    assert "hush" not in str(caught.value)


def test_a_spec_that_lies_in_itself_too_often() -> None:
    deep = json.dumps({"format": "raw", "path": "x"})
    for _ in range(400):
        deep = '{"format": "gzip", "size_max_bytes": 1, "over": ' + deep + "}"
    with pytest.raises(ValueError, match=r"too deep|not JSON"):
        dataclass_json.load(ReaderSpec, deep)


@pytest.mark.parametrize("number", [7, -1, 1 << 70])
def test_a_dict_by_numbers(number: int) -> None:
    assert dataclass_json.read(dict[int, str], {str(number): "x"}) == {number: "x"}
    with pytest.raises(ValueError, match="a key that is not a number"):
        dataclass_json.read(dict[int, str], {"seven": "x"})
