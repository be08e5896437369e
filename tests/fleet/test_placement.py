"""Placement: what fits where, and why, for each VM; laws on drawn fleets."""

from collections import Counter, defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from synvirt.fleet.model import Group
from synvirt.fleet.placement import Host, Need, Store, place
from synvirt.sizes import GIB


def host(name: str, memory: int = 64, cpus: float = 32, space: int = 1000, **fields: object) -> Host:
    stores = fields.pop("stores", (Store("fast", space * GIB),))
    return Host(name, memory * GIB, cpus, stores, **fields)  # type: ignore[arg-type]


def need(name: str, size: int = 100, memory: int = 8, cpus: int = 2, **fields: object) -> Need:
    return Need(name, size * GIB, memory * GIB, cpus, **fields)  # type: ignore[arg-type]


def test_hosts_fill_evenly_and_each_vm_is_explained() -> None:
    found = place([need(f"m{n}") for n in range(8)], [host("kvm1"), host("kvm2")])
    assert Counter(one.host for one in found.values()) == {"kvm1": 4, "kvm2": 4}
    assert found["m0"].reason == "kvm1/fast: 900 GiB of space, 56 GiB of memory and 30 CPUs stay free; 2 could take it."
    assert list(found) == [f"m{n}" for n in range(8)]


def test_large_vms_are_placed_first() -> None:
    small = [need(f"s{n}", size=10, memory=4) for n in range(14)]
    found = place([*small, need("large", memory=60)], [host("kvm1"), host("kvm2")])
    assert all(one.host is not None for one in found.values())


def test_why_nobody_takes_it_is_reported_by_cause() -> None:
    hosts = [
        *(host(f"kvm{n}", memory=4, networks=frozenset({"lan"})) for n in (1, 2)),
        host("kvm3", networks=frozenset({"lan"}), space=10),
        host("kvm4", out_of_reach=frozenset({"vc1"})),
        host("kvm5", cpus=1, networks=frozenset({"lan"})),
    ]
    found = place([need("m", source="vc1", networks=frozenset({"lan"}))], hosts)["m"]
    assert (found.host, found.destination) == (None, None)
    assert found.reason == (
        "No host takes it: each of 2 hosts has no 8 GiB of memory left; kvm4 does not reach source vc1; "
        "kvm3 has no 100 GiB of space left; kvm5 has no 2 CPUs left."
    )
    assert place([need("m", networks=frozenset({"dmz"}))], hosts[2:3])["m"].reason.endswith("kvm3 has no network dmz.")
    assert place([need("m", destination="slow")], [host("kvm1")])["m"].reason.endswith("kvm1 has no destination slow.")
    assert place([need("m")], [])["m"].reason == "There is no host."


def test_a_plans_destination_is_kept_and_shared_space_counts_once() -> None:
    shared = (Store("ceph", 150 * GIB, "pool-1"), Store("fast", 1000 * GIB))
    hosts = [host("kvm1", stores=shared), host("kvm2", stores=shared)]
    found = place([need("a", destination="ceph"), need("b", destination="ceph")], hosts)
    assert [one.destination for one in found.values()] == ["ceph", None]


def test_apart_means_another_host_and_together_the_same_where_it_fits() -> None:
    hosts = [host("kvm1"), host("kvm2")]
    apart = place([need(f"dc{n}", group="dc") for n in range(3)], hosts, [Group(name="dc", rule="apart")])
    assert [one.host for one in apart.values()] == ["kvm1", "kvm2", None]
    assert "each of 2 hosts has another of group dc" in apart["dc2"].reason
    wanted = [need(f"m{n}", memory=30, group="g") for n in range(3)]
    together = place(wanted, hosts, [Group(name="g")])
    assert [one.host for one in together.values()] == ["kvm1", "kvm1", "kvm2"]
    assert together["m1"].reason.endswith("The others of group g are there.")
    assert together["m2"].reason.endswith("elsewhere: there it has no room.")


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 128), st.integers(1, 32), st.integers(1, 900)), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 8), st.integers(1, 400), st.integers(0, 3)), max_size=30),
)
def test_no_host_ever_takes_more_than_it_has(hosts: list[tuple[int, int, int]], needs: list[tuple[int, int, int, int]]) -> None:
    ours = [host(f"h{n}", memory, cpus, space) for n, (memory, cpus, space) in enumerate(hosts)]
    wanted = [
        need(f"m{n}", space, memory, cpus, group=f"g{group}" if group else None)
        for n, (memory, cpus, space, group) in enumerate(needs)
    ]
    found = place(wanted, ours, [Group(name="g1", rule="apart"), Group(name="g2")])
    assert found == place(wanted, ours, [Group(name="g1", rule="apart"), Group(name="g2")])
    taken: dict[str, list[Need]] = defaultdict(list)
    for one in wanted:
        if (name := found[one.member].host) is not None:
            taken[name].append(one)
    for one_host in ours:
        here = taken[one_host.name]
        assert sum(one.memory_bytes for one in here) <= one_host.free_memory_bytes
        assert sum(one.cpu_count for one in here) <= one_host.free_cpus
        assert sum(one.size_bytes for one in here) <= (one_host.stores[0].free_bytes or 0)
        assert sum(one.group == "g1" for one in here) <= 1
    for one in wanted:  # nobody is refused who would fit an empty fleet's largest host alone
        if len(wanted) == 1 and any(
            h.free_memory_bytes >= one.memory_bytes
            and h.free_cpus >= one.cpu_count
            and (h.stores[0].free_bytes or 0) >= one.size_bytes
            for h in ours
        ):
            assert found[one.member].host is not None
