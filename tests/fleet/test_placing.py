"""Places chosen for the members of waves under way: by what hosts say of themselves, and again where that changes."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from synvirt.fleet.changing import change_members
from synvirt.fleet.model import Group, Member, MemberState, RollBackRequest, Wave, WaveRequest
from synvirt.fleet.placing import AGAIN_S, Placing
from synvirt.fleet.records import member_of
from synvirt.fleet.waves import Waves
from synvirt.live import VmRow
from synvirt.migrations.hosts.about import Host, HostDestination, HostRoom
from synvirt.model.plan import MigrationPlan, NetworkMap, Target
from synvirt.model.values import now
from synvirt.sizes import GIB
from synvirt.store import Store
from tests.fleet.made import SOURCE, member, plan, wave

S = MemberState


class Site:
    """Two hosts of 16 GiB; each VM takes 4 GiB of memory and 10 GiB of disk, unless its source does not report it."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(f"sqlite:///{folder}/site.db")
        self.waves = Waves(self.store.waves)
        self.at = 1000.0
        self.rooms: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
        self.states: dict[str, str] = {}
        self.silent = False
        self.placing = Placing(self.store.waves, self.hosts, self.vm_of, clock=lambda: self.at)

    def hosts(self) -> list[Host]:
        return [
            Host(
                id=name,
                name=name,
                state=self.states.get(name, "alive"),
                seen_at=now(),
                version="",
                jobs=0,
                destinations=(
                    HostDestination(name="fast", kind="zfs", free_bytes=room.get("free", 1000 * GIB)),
                    HostDestination(name="ceph", kind="rbd", free_bytes=1000 * GIB, shared_id="pool"),
                ),
                room=None
                if room.get("silent")
                else HostRoom(
                    free_memory_bytes=room.get("memory", 16) * GIB,
                    free_cpus=64,
                    networks=room.get("networks", ("network:default",)),
                    unreachable_sources=room.get("unreachable", ()),
                ),
            )
            for name, room in self.rooms.items()
        ]

    def vm_of(self, _source_id: UUID, vm_id: str) -> VmRow | None:
        return None if self.silent else VmRow(vm_id, vm_id, "on", memory_bytes=4 * GIB, cpu_count=2, capacity_bytes=10 * GIB)

    def begun(self, request: WaveRequest) -> UUID:
        made = self.waves.create(request)
        self.waves.go(made.id)
        return made.id

    def look(self, *waves: UUID) -> dict[str, str]:
        """Of the last of them."""
        why: dict[str, str] = {}
        for wave_id in waves:
            row, rows = self.waves.load(wave_id)
            whole = self.waves.whole(wave_id)
            assert row.id == wave_id
            why, _ = self.placing.look(whole, {one.member_id: one for one in rows}, {}, under_way=waves)
        left = {one.id for one in self.wave(waves[-1]).members if one.host is None}
        return {name: reported for name, reported in why.items() if name in left}

    def wave(self, wave_id: UUID) -> Wave:
        return self.waves.whole(wave_id)

    def hosts_of(self, wave_id: UUID) -> dict[str, str | None]:
        return {one.id: one.host for one in self.wave(wave_id).members}

    def begin(self, wave_id: UUID, name: str) -> None:
        """Noted, and not submitted."""
        (one,) = [one for one in self.wave(wave_id).members if one.id == name]
        fields = {"state": S.SYNCING, "job_id": uuid4()}
        change_members(self.store.waves, wave_id, [one], {S.WAITING}, fields, submitted=False)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.store.close()


def on(name: str, network: str) -> MigrationPlan:
    return plan(name).model_copy(update={"target": Target(network_map=(NetworkMap(source="lan", target=network),))})


def test_members_are_placed_evenly_and_the_rest_have_a_reason(site: Site) -> None:
    wave_id = site.begun(wave(*(member(f"m{n}") for n in range(9))))
    why = site.look(wave_id)
    placed = site.hosts_of(wave_id)
    assert [list(placed.values()).count(host) for host in ("a", "b", None)] == [4, 4, 1]
    (left,) = why
    assert why[left] == "No host takes it: each of 2 hosts has no 4 GiB of memory left."
    one = next(one for one in site.wave(wave_id).members if one.host == "a")
    assert one.placed is not None
    assert one.placed.startswith(f"a/{one.destination}: ")
    site.rooms["b"]["memory"] = 64
    assert site.look(wave_id) == {left: why[left]}, "hosts are not asked anew at each look"
    site.at += AGAIN_S
    assert site.look(wave_id) == {}
    assert site.hosts_of(wave_id)[left] == "b"


def test_two_waves_do_not_promise_one_room_twice(site: Site) -> None:
    first = site.begun(wave(*(member(f"m{n}") for n in range(6))))
    second = site.begun(wave(*(member(f"n{n}") for n in range(6))))
    # Neither is placed before it is known what both take.
    site.look(first, second)
    site.look(first, second)
    placed = [*site.hosts_of(first).values(), *site.hosts_of(second).values()]
    assert [placed.count(host) for host in ("a", "b", None)] == [4, 4, 4]


def test_a_wave_that_is_rolled_back_or_cannot_be_read_stops_no_other(site: Site) -> None:
    """A new leader has placed neither, and the source of one may not answer for days. What that one takes still counts."""
    back = site.begun(wave(*(member(f"m{n}") for n in range(6))))
    site.look(back)
    for name in site.hosts_of(back):
        site.begin(back, name)
    site.waves.roll_back(back, RollBackRequest())
    site.placing = Placing(site.store.waves, site.hosts, site.vm_of, clock=lambda: site.at)
    other = site.begun(wave(*(member(f"n{n}") for n in range(6))))
    damaged = uuid4()
    whole, rows = site.wave(other), {one.member_id: one for one in site.waves.load(other)[1]}
    assert not site.placing.look(whole, rows, {}, under_way=(back, damaged, other))[1], "it is not known yet what they take"
    site.placing.count(site.wave(back), {})
    site.placing.look(whole, rows, {}, under_way=(back, damaged, other), stuck={damaged})
    assert [list(site.hosts_of(other).values()).count(host) for host in ("a", "b", None)] == [1, 1, 4]


def test_a_network_and_a_source_that_a_host_lacks(site: Site) -> None:
    site.rooms["b"]["networks"] = ("bridge:dmz",)
    wave_id = site.begun(wave(member("m", plan=on("m", "default")), member("n", plan=on("n", "bridge:dmz"))))
    site.look(wave_id)
    assert site.hosts_of(wave_id) == {"m": "a", "n": "b"}
    # Noted as begun, and its host does not reach the source: another takes it, where one can.
    for name in ("m", "n"):
        site.begin(wave_id, name)
    site.rooms["a"] = {"networks": ("network:default", "bridge:dmz")}
    site.rooms["b"]["unreachable"] = (SOURCE,)
    site.at += AGAIN_S
    site.look(wave_id)
    assert site.hosts_of(wave_id) == {"m": "a", "n": "a"}
    site.rooms["a"]["unreachable"] = (SOURCE,)
    site.at += AGAIN_S
    site.look(wave_id)
    assert site.hosts_of(wave_id) == {"m": "a", "n": "a"}, "where no other host takes it, it is tried there again"


def test_a_host_that_is_lost_or_fills_up_gives_its_members_to_others(site: Site) -> None:
    site.rooms["b"]["memory"] = 64
    wave_id = site.begun(wave(*(member(f"m{n}") for n in range(6))))
    site.look(wave_id)
    before = site.hosts_of(wave_id)
    assert set(before.values()) == {"a", "b"}
    site.rooms["a"]["memory"] = 4
    site.at += AGAIN_S
    site.look(wave_id)
    after = site.hosts_of(wave_id)
    assert list(after.values()).count("a") <= 1
    assert None not in after.values()
    site.states["b"] = "away"
    site.at += AGAIN_S
    why = site.look(wave_id)
    assert list(site.hosts_of(wave_id).values()).count("a") == 1
    assert len(why) == 5


def test_a_host_whose_hypervisor_is_away_takes_nothing(site: Site) -> None:
    """What is not known counted as endless, so such a host took the whole wave."""
    site.rooms["b"]["silent"] = True
    wave_id = site.begun(wave(*(member(f"m{n}") for n in range(5))))
    why = site.look(wave_id)
    assert Counter(site.hosts_of(wave_id).values()) == {"a": 4, None: 1}
    (reason,) = why.values()
    assert reason == "No host takes it: b gets no answer from its hypervisor; a has no 4 GiB of memory left."
    # It is back: nobody waits for the next time that hosts are asked anew.
    site.rooms["b"]["silent"] = False
    assert site.look(wave_id) == {}
    assert Counter(site.hosts_of(wave_id).values()) == {"a": 4, "b": 1}


def test_a_destination_that_does_not_answer_takes_nothing(site: Site) -> None:
    site.rooms["a"]["free"] = site.rooms["b"]["free"] = None
    target = Target(destination="fast")
    of_fast = plan("m").model_copy(update={"target": target})
    wave_id = site.begun(wave(member("m", plan=of_fast), member("n")))
    why = site.look(wave_id)
    assert why == {"m": "No host takes it: each of 2 hosts gets no answer from destination fast."}
    assert [one.destination for one in site.wave(wave_id).members] == [None, "ceph"]
    site.rooms["b"]["free"] = 100 * GIB
    assert site.look(wave_id) == {}
    assert site.hosts_of(wave_id)["m"] == "b"


def test_what_is_on_a_host_whose_hypervisor_or_destination_goes_away_moves_to_others(site: Site) -> None:
    site.rooms["a"]["memory"] = site.rooms["b"]["memory"] = 64
    wave_id = site.begun(wave(*(member(f"m{n}") for n in range(4))))
    site.look(wave_id)
    for one in site.wave(wave_id).members:
        fields = {"destination": "fast"}
        change_members(site.store.waves, wave_id, [one], {S.WAITING}, fields)
    site.rooms["a"]["silent"] = True
    site.at += AGAIN_S
    assert site.look(wave_id) == {}
    assert set(site.hosts_of(wave_id).values()) == {"b"}
    site.rooms["a"]["silent"], site.rooms["b"]["free"] = False, None
    site.at += AGAIN_S
    assert site.look(wave_id) == {}
    places = {(one.host, one.destination) for one in site.wave(wave_id).members}
    assert ("b", "fast") not in places


def test_a_member_that_is_tried_again_stays_with_its_volumes_unless_its_host_is_gone(site: Site) -> None:
    wave_id = site.begun(wave(member("m")))
    (one,) = site.wave(wave_id).members
    fields = {"host": "a", "destination": "fast", "placed": "it was so", "retry_of": uuid4()}
    change_members(site.store.waves, wave_id, [one], {S.WAITING}, fields, submitted=False)
    site.rooms["a"]["free"] = 0
    site.look(wave_id)
    (stays,) = site.wave(wave_id).members
    assert fields.items() <= stays.model_dump().items(), "its volumes need no room that they have not"
    site.states["a"] = "fenced"
    site.at += AGAIN_S
    site.look(wave_id)
    (moved,) = site.wave(wave_id).members
    assert (moved.host, moved.retry_of) == ("b", None)


def test_what_was_submitted_stays(site: Site) -> None:
    wave_id = site.begun(wave(member("m")))
    site.look(wave_id)
    site.begin(wave_id, "m")
    (one,) = site.wave(wave_id).members
    change_members(site.store.waves, wave_id, [one], {S.SYNCING}, {}, submitted=True)
    site.states[one.host or ""] = "fenced"
    site.at += AGAIN_S
    site.look(wave_id)
    assert site.hosts_of(wave_id) == {"m": one.host}, "its job goes on there, or is taken over"


def test_groups(site: Site) -> None:
    site.rooms["a"]["memory"] = site.rooms["b"]["memory"] = 64
    groups = (Group(name="pair", rule="apart"), Group(name="many", rule="apart"), Group(name="near", rule="together"))
    members = [
        *(member(f"pair-{n}", group="pair") for n in range(2)),
        *(member(f"many-{n}", group="many") for n in range(4)),
        *(member(f"near-{n}", group="near") for n in range(3)),
    ]
    wave_id = site.begun(wave(*members, groups=groups))
    assert site.look(wave_id) == {}
    placed = site.hosts_of(wave_id)
    assert {placed["pair-0"], placed["pair-1"]} == {"a", "b"}
    # More than there are hosts: spread, or they would wait forever.
    assert sorted(str(placed[f"many-{n}"]) for n in range(4)) == ["a", "a", "b", "b"]
    assert len({placed[f"near-{n}"] for n in range(3)}) == 1


def test_a_source_that_has_not_said_and_files(site: Site) -> None:
    site.silent = True
    offline = MigrationPlan.model_validate(
        {"source": {"Offline": "ova_archive"}, "source_ref": {"kind": "offline_host_path", "path": "/a.ova"}, "mode": "Cold"}
    )
    wave_id = site.begun(wave(member("m"), member("file", plan=offline)))
    assert site.look(wave_id) == {"m": "Its source has not reported yet how large it is."}
    site.silent = False
    site.at += AGAIN_S
    assert site.look(wave_id) == {}
    assert site.hosts_of(wave_id) == {"m": "a", "file": None}, "a file lies where it lies"


def test_a_source_that_does_not_list_its_vms_is_named_with_its_cause(site: Site) -> None:
    """An unknown source: a member of it waited for a report that never comes."""
    site.silent = True
    site.placing = Placing(site.store.waves, site.hosts, site.vm_of, {SOURCE: "there is no source"}.get, clock=lambda: site.at)
    wave_id = site.begun(wave(member("m")))
    assert site.look(wave_id) == {"m": "Its source does not list its VMs: there is no source."}


def test_what_is_rolled_back_and_was_never_submitted_is_the_leaders_once_its_host_is_fenced(site: Site) -> None:
    wave_id = site.begun(wave(member("m")))
    site.look(wave_id)
    site.begin(wave_id, "m")
    (one,) = site.wave(wave_id).members
    change_members(site.store.waves, wave_id, [one], {S.SYNCING}, {}, rolling_back=True)

    def release() -> bool:
        rows = {row.member_id: row for row in site.waves.load(wave_id)[1]}
        return site.placing.release(site.wave(wave_id), rows, {})

    site.states[one.host or ""] = "away"
    assert release() is False, "it may still submit"
    site.states[one.host or ""] = "fenced"
    assert release() is True
    assert release() is False
    (row,) = site.waves.load(wave_id)[1]
    left: Member = member_of(row)
    assert (left.host, row.rolling_back) == (None, True)
