"""What a host says has changed, whatever its answers look like: no changed byte is left out."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.errors import CbtReset, CbtUnsupported, Internal, SourceUnreachable
from synvirt.live.vsphere import changes
from synvirt.live.vsphere.session import busy_faults, library
from tests.cases import cases

SIZE, KEY = 300, 2001
areas_ = st.lists(st.tuples(st.integers(0, SIZE + 40), st.integers(0, 60)), max_size=8)
# Of each answer: how far behind what was asked for it begins, and how much it describes.
answers = st.lists(st.tuples(st.sampled_from([0, 0, 0, 1, 30]), st.integers(0, 120)), max_size=12)


class Host:
    """A session with one that knows of these changed areas, and tells of them answer by answer."""

    host = "vc"

    def __init__(self, changed: list[tuple[int, int]], answers_: list[tuple[int, int]], since: str = "a/1") -> None:
        self.changed, self.answers, self.since = changed, iter(answers_), since
        self.told: set[int] = set()
        self.ends = False

    def machine(self, _vm_id: str) -> Any:
        return SimpleNamespace(QueryChangedDiskAreas=self.query)

    def snapshot(self, snapshot_id: str) -> str:
        return snapshot_id

    def call(self, _what: str, use: Callable[[Any], Any]) -> Any:
        return use(None)

    def query(self, *, snapshot: str, deviceKey: int, startOffset: int, changeId: str) -> Any:  # noqa: N803
        assert (snapshot, deviceKey, changeId) == ("snapshot-1", KEY, self.since)
        behind, length = next(self.answers, (0, SIZE))
        start = startOffset + behind
        self.ends |= start + length <= startOffset
        listed = [
            SimpleNamespace(start=max(at, start), length=min(at + size, start + length) - max(at, start))
            for at, size in self.changed
            if at + size >= start and at <= start + length and min(at + size, start + length) >= max(at, start)
        ]
        self.told |= set(range(start, start + length))
        return SimpleNamespace(startOffset=start, length=length, changedArea=listed)


@given(changed=areas_, told=answers)
@cases(300)
def test_each_changed_byte_and_each_that_nothing_was_said_of_is_read(
    changed: list[tuple[int, int]], told: list[tuple[int, int]]
) -> None:
    host: Any = Host(changed, told)
    disk = SimpleNamespace(key=KEY, capacityInBytes=SIZE)
    try:
        found = changes._areas(host, "vm-1", "snapshot-1", disk, "a/1")
    except CbtReset:
        assert host.ends, "it has told of all"
        return
    assert not host.ends, "a list that does not go on is not finished"
    read = {byte for at, length in found for byte in range(at, at + length)}
    known = {byte for at, length in changed for byte in range(at, at + length) if byte < SIZE}
    assert known | set(range(SIZE)) - host.told <= read <= set(range(SIZE))
    assert read <= known | set(range(SIZE)) - host.told, "and nothing besides, of a disk that is small"
    assert all(length > 0 for _, length in found)


def test_a_list_with_a_part_before_the_disks_begin_is_not_believed() -> None:
    """Neither as what changed, where the whole disk is compared then, nor as what was ever written."""
    area = SimpleNamespace(start=-10, length=20)
    answer = SimpleNamespace(startOffset=0, length=SIZE, changedArea=[area])
    machine = SimpleNamespace(QueryChangedDiskAreas=lambda **_: answer)
    session: Any = SimpleNamespace(host="vc", machine=lambda _: machine, snapshot=str, call=lambda _, use: use(None))
    disk = SimpleNamespace(key=KEY, capacityInBytes=SIZE, backing=SimpleNamespace(changeId="a/2"))
    with pytest.raises(CbtReset, match=r"disk 2001 of vm-1: vc lists a changed part at byte -10"):
        changes.changed(session, "vm-1", "snapshot-1", disk, "a/1")
    assert changes.allocated(session, "vm-1", "snapshot-1", disk) is None


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (lambda vmware: vmware.vim.fault.FileFault(), CbtReset),
        (lambda vmware: vmware.vmodl.fault.InvalidArgument(), CbtReset),
        (lambda vmware: vmware.vim.fault.NotFound(), CbtReset),
        (lambda vmware: vmware.vim.fault.FileLocked(), SourceUnreachable),
        (lambda vmware: vmware.vim.fault.TaskInProgress(), SourceUnreachable),
        (lambda vmware: vmware.vmodl.fault.NotSupported(), CbtUnsupported),
        (lambda vmware: vmware.vim.fault.GenericVmConfigFault(), CbtReset),
    ],
)
def test_a_refusal_says_whether_the_whole_disk_is_compared(fault: Callable[[Any], Exception], error: type[Exception]) -> None:
    """Only where the change id is of no use. A busy host is asked again."""
    vmware = library()
    refusal = fault(vmware)

    def call(_what: str, use: Callable[[Any], Any]) -> Any:
        try:
            return use(None)
        except busy_faults() as busy:
            raise SourceUnreachable("it is busy") from busy
        except vmware.vmodl.MethodFault as refused:
            raise Internal("it is refused") from refused

    def query(**_: object) -> None:
        raise refusal

    session: Any = SimpleNamespace(
        host="vc", machine=lambda _: SimpleNamespace(QueryChangedDiskAreas=query), snapshot=str, call=call
    )
    disk = SimpleNamespace(key=KEY, capacityInBytes=SIZE, backing=SimpleNamespace(changeId="a/2"))
    with pytest.raises(error):
        changes.changed(session, "vm-1", "snapshot-1", disk, "a/1")
    if error is not SourceUnreachable:  # what was ever written helps, and is not needed
        assert changes.allocated(session, "vm-1", "snapshot-1", disk) is None


@pytest.mark.parametrize(("present", "since", "is_known"), [("a/2", "a/1", True), ("b/2", "a/1", False), (None, "a/1", False)])
def test_a_tracking_that_began_again_is_not_asked(present: str | None, since: str, is_known: bool) -> None:
    host: Any = Host([(10, 5)], [])
    disk = SimpleNamespace(key=KEY, capacityInBytes=SIZE, backing=SimpleNamespace(changeId=present))
    if is_known:
        assert changes.changed(host, "vm-1", "snapshot-1", disk, since) == ((10, 5),)
        return
    with pytest.raises(CbtReset, match="restarted its change tracking"):
        changes.changed(host, "vm-1", "snapshot-1", disk, since)
    assert host.told == set()


@pytest.mark.parametrize(
    ("present", "since", "is_known"),
    [("a/10", "a/9", True), ("a/9", "a/9", False), ("a/9", "a/10", False), ("a/b", "a/1", False)],
)
def test_a_disk_that_has_gone_back_is_not_asked(present: str, since: str, is_known: bool) -> None:
    """A VM that was reverted to a snapshot: what it lost since is no write, and no host lists it as changed. If one pass came
    between that snapshot and the revert, the next pass has the same number."""
    host: Any = Host([(10, 5)], [], since)
    disk = SimpleNamespace(key=KEY, capacityInBytes=SIZE, backing=SimpleNamespace(changeId=present))
    if is_known:
        assert changes.changed(host, "vm-1", "snapshot-1", disk, since) == ((10, 5),)
        return
    with pytest.raises(CbtReset, match="has gone back from"):
        changes.changed(host, "vm-1", "snapshot-1", disk, since)
    assert host.told == set()
