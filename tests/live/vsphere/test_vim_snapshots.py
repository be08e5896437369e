"""Snapshots of a VM that other people take snapshots of, too: by a platform in memory, whose tasks do their work when they are
waited for. What VMware's own simulator does with them: api/test_snapshots.py."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.errors import AuthFailed, SnapshotFailed, SourceUnreachable, VmNotFound
from synvirt.live.vsphere import changes
from synvirt.live.vsphere.changes import STUN, remove, take

OURS, VM = "synvirt-a-1", "vm-1"


@dataclass
class Node:
    """A snapshot, with those that were taken after it."""

    id: str
    name: str
    children: list["Node"] = field(default_factory=list)

    def all(self) -> Iterator["Node"]:
        yield self
        for child in self.children:
            yield from child.all()


@dataclass
class Task:
    does: Callable[[], Any]
    kind: str = "VirtualMachine.createSnapshot"
    state: str = "running"


class Platform:
    """`fails`: what the next quiesced snapshot fails with, when it has been made by half."""

    host = "vc"

    def __init__(self, roots: Sequence[Node] = ()) -> None:
        self.roots, self.ids = list(roots), count(100)
        self.recent: list[Task] = []
        self.made: list[tuple[str, bool, bool]] = []
        self.fails: Exception | None = None
        self.is_on = self.has_tools = self.unconsolidated = False
        # What the VM is set to, and what its host does: it follows with the next stun.
        self.is_set = self.tracks = self.is_gone = False

    # ── as a session ─────────────────────────────────────────────────────────────────────────────────────────────────

    def machine(self, _vm_id: str) -> Any:
        return SimpleNamespace(
            CreateSnapshot_Task=self._create,
            ConsolidateVMDisks_Task=lambda: Task(self._consolidate),
            ReconfigVM_Task=lambda spec: Task(lambda: setattr(self, "is_set", spec.changeTrackingEnabled)),
        )

    def snapshot(self, snapshot_id: str) -> Any:
        def removed(*, removeChildren: bool, consolidate: bool) -> Task:  # noqa: N803 - vSphere's names
            self.unconsolidated |= not consolidate
            return Task(lambda: self._remove(snapshot_id, removeChildren))

        return SimpleNamespace(id=snapshot_id, RemoveSnapshot_Task=removed)

    def call(self, _what: str, use: Callable[[Any], Any]) -> Any:
        return use(None)

    def wait(self, task: Task, **_: object) -> Any:
        task.state = "success"
        return task.does()

    def properties(self, of: Any, paths: Sequence[str], **_: object) -> dict[str, Any]:
        if isinstance(of, Task):
            if of.state == "forgotten":
                raise VmNotFound("no such task")
            return {"info.descriptionId": of.kind, "info.state": of.state}
        if self.is_gone:
            raise VmNotFound("no such VM")
        return {
            "name": "web",
            "config.changeTrackingEnabled": self.is_set,
            "recentTask": self.recent,
            "snapshot.rootSnapshotList": [self._tree(root) for root in self.roots],
            "runtime.powerState": "poweredOn" if self.is_on else "poweredOff",
            "guest.toolsRunningStatus": "guestToolsRunning" if self.has_tools else "guestToolsNotRunning",
            "runtime.consolidationNeeded": self.unconsolidated,
            "config.hardware.device": [],
        }

    # ── what tasks do ────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, name: str) -> Any:
        node = Node(f"snapshot-{next(self.ids)}", name)
        under = self.roots
        while under:
            under = under[-1].children
        under.append(node)
        return SimpleNamespace(_moId=node.id)

    def _create(self, *, name: str, description: str, memory: bool, quiesce: bool) -> Task:
        def does() -> Any:
            self.made.append((name, memory, quiesce))
            self.tracks = self.is_set
            made = self.add(name)
            if quiesce and self.fails is not None:
                raise self.fails
            return made

        return Task(does)

    def _remove(self, snapshot_id: str, with_children: bool) -> None:
        def without(nodes: list[Node]) -> list[Node]:
            kept: list[Node] = []
            for node in nodes:
                node.children = without(node.children)
                kept += [node] if node.id != snapshot_id else [] if with_children else node.children
            return kept

        self.roots = without(self.roots)

    def _consolidate(self) -> None:
        self.unconsolidated = False

    def _tree(self, node: Node) -> Any:
        children = [self._tree(child) for child in node.children]
        return SimpleNamespace(name=node.name, snapshot=SimpleNamespace(_moId=node.id), childSnapshotList=children)

    @property
    def all(self) -> list[Node]:
        return [node for root in self.roots for node in root.all()]

    def named(self, name: str) -> int:
        return sum(node.name == name for node in self.all)


names = st.sampled_from([OURS, STUN, "before the update", "nightly"])
trees = st.recursive(
    st.builds(Node, st.uuids().map(str), names),
    lambda children: st.builds(Node, st.uuids().map(str), names, st.lists(children, max_size=2)),
    max_leaves=6,
)


@given(roots=st.lists(trees, max_size=2), unconsolidated=st.booleans())
def test_ours_are_removed_wherever_they_are_and_nobody_elses(roots: list[Node], unconsolidated: bool) -> None:
    """An operator's may have been taken after ours, and hang on it."""
    platform: Any = Platform(roots)
    platform.unconsolidated = unconsolidated
    others = {node.id for node in platform.all if node.name not in (OURS, STUN)}
    for _ in range(2):
        remove(platform, VM, (OURS, STUN))
        assert {node.id for node in platform.all} == others
        assert not platform.unconsolidated


@given(roots=st.lists(trees, max_size=2), is_on=st.booleans(), has_tools=st.booleans())
def test_one_of_a_name_is_taken_once_and_quiet_where_the_guest_can_be(roots: list[Node], is_on: bool, has_tools: bool) -> None:
    platform: Any = Platform(roots)
    platform.is_on, platform.has_tools = is_on, has_tools
    before = {node.id for node in platform.all}
    is_there = platform.named(OURS) > 0
    found = {take(platform, VM, OURS).id for _ in range(2)}
    assert len(found) == 1
    assert found <= {node.id for node in platform.all if node.name == OURS}
    assert platform.made == ([] if is_there else [(OURS, False, is_on and has_tools)])
    assert before | found == {node.id for node in platform.all}


@given(roots=st.lists(trees, max_size=2), is_set=st.booleans(), tracks=st.booleans())
def test_a_tracking_that_is_switched_off_has_ended_at_its_host_and_left_nothing(
    roots: list[Node], is_set: bool, tracks: bool
) -> None:
    """Also where a crash came between the setting and the stun that makes the host follow it."""
    platform: Any = Platform(roots)
    platform.is_set, platform.tracks = is_set, tracks
    others = {node.id for node in platform.all if node.name != STUN}
    changes.disable(platform, VM)
    assert (platform.is_set, platform.tracks) == (False, False)
    assert {node.id for node in platform.all} == others


def test_of_a_vm_that_is_gone_there_is_nothing_to_switch_off() -> None:
    platform: Any = Platform()
    platform.is_gone = True
    changes.disable(platform, VM)


@pytest.mark.parametrize("state", ["queued", "running"])
@pytest.mark.parametrize("use", [take, lambda session, vm_id, name: remove(session, vm_id, (name,))])
def test_what_an_abandoned_call_still_makes_is_waited_for(state: str, use: Callable[[Any, str, str], object]) -> None:
    platform: Any = Platform()
    platform.recent = [
        Task(lambda: pytest.fail("it is gone"), state="forgotten"),
        Task(lambda: pytest.fail("it is no snapshot's"), kind="VirtualMachine.reconfigure"),
        Task(lambda: pytest.fail("it has ended"), state="success"),
        Task(lambda: platform.add(OURS), state=state),
    ]
    use(platform, VM, OURS)
    if platform.recent[-1].state == state:
        platform.wait(platform.recent[-1])  # it ends by itself, later
    assert (platform.named(OURS), platform.made) == (1 if use is take else 0, [])


@pytest.mark.parametrize(("error", "is_raised"), [(SnapshotFailed("it failed"), False), (AuthFailed("no"), True)])
def test_a_task_of_before_that_fails_is_none_of_ours(error: Exception, is_raised: bool) -> None:
    def fails() -> None:
        raise error

    platform: Any = Platform()
    platform.recent = [Task(fails)]
    if is_raised:
        with pytest.raises(type(error)):
            take(platform, VM, OURS)
    else:
        assert take(platform, VM, OURS).id
    assert platform.named(OURS) == (0 if is_raised else 1)


def test_a_quiesced_one_that_fails_by_half_is_not_taken_for_whole() -> None:
    platform: Any = Platform([Node("theirs", "nightly")])
    platform.is_on = platform.has_tools = True
    platform.fails = SnapshotFailed("the guest could not be quiesced")
    found = take(platform, VM, OURS)
    assert platform.made == [(OURS, False, True), (OURS, False, False)]
    assert [node.id for node in platform.all] == ["theirs", found.id]


def test_a_platform_that_is_busy_is_asked_for_a_quiet_one_later(monkeypatch: pytest.MonkeyPatch) -> None:
    platform: Any = Platform()
    platform.is_on = platform.has_tools = True
    platform.fails = SourceUnreachable("it is busy")
    with pytest.raises(SourceUnreachable):
        take(platform, VM, OURS)
    assert platform.made == [(OURS, False, True)]


def test_a_vm_that_goes_while_its_snapshots_are_removed_needs_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    platform: Any = Platform([Node("1", OURS)])
    waits = platform.wait

    def gone(task: Task, **named: Any) -> Any:
        raise VmNotFound("no such VM")

    platform.wait = gone
    with pytest.raises(VmNotFound):  # the snapshot is there, whatever was meant by that
        remove(platform, VM, (OURS,))

    def removed_by_others(task: Task, **named: Any) -> Any:
        waits(task, **named)
        raise VmNotFound("no such snapshot")

    platform.wait = removed_by_others
    remove(platform, VM, (OURS,))
    assert changes._named_or_gone(platform, VM, (OURS,)) == []
