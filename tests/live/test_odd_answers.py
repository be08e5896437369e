"""A VM as a platform describes it, with one thing after another replaced: it is read, or refused by an error of ours."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.sax.saxutils import escape

import pytest

from synvirt.live import odd as odd_answers
from synvirt.live.libvirt.adapter import LibvirtRemote
from synvirt.live.nutanix import machines as nutanix
from synvirt.live.nutanix.adapter import PrismApi
from synvirt.live.nutanix.central import Central
from synvirt.live.nutanix.element import Element
from synvirt.live.nutanix.ways import Way
from synvirt.live.odd import OddAnswer
from synvirt.live.proxmox.adapter import PveApi
from synvirt.live.proxmox.seen import Seen, Volume
from synvirt.live.vsphere.form import VimOptions
from synvirt.live.vsphere.inventory import Inventory
from synvirt.live.vsphere.session import Row
from synvirt.sizes import GIB, MIB
from tests.live.libvirt.test_libvirt_remote_manifest import DOMAIN
from tests.live.odd import at_most_ours, variants
from tests.live.proxmox.test_pve_manifest import FULL

PRISM = json.loads((Path(__file__).parent / "recorded" / "prism.json").read_text())
PVE: dict[str, Any] = {
    "row": {"node": "pve1", "vmid": 100, "name": "web"},
    "config": FULL,
    "status": {"status": "running", "qmpstatus": "running", "running-qemu": "9.2.0", "ha": {"managed": 1, "state": "started"}},
    "snapshots": [{"name": "before", "snaptime": 1750000000, "description": "x"}, {"name": "current"}],
    "os_info": {"id": "debian", "pretty-name": "Debian 12", "version-id": "12"},
    "interfaces": [
        {
            "name": "eth0",
            "hardware-address": "bc:24:11:00:00:01",
            "ip-addresses": [{"ip-address": "192.0.2.7", "ip-address-type": "ipv4", "prefix": 24}],
        }
    ],
}

LIBVIRT: dict[str, Any] = {
    "stats": {"state.state": 1, "state.reason": 1, "balloon.maximum": 1 << 20, "vcpu.current": 2},
    "block": [GIB, MIB, MIB],
    "guest": {"os.id": "debian", "os.pretty-name": "Debian 12"},
    "addresses": {"eth0": {"hwaddr": "52:54:00:AA:bb:cc", "addrs": [{"addr": "192.0.2.7"}]}},
    "made": "1750000000",
}


def _by_prism(found: Callable[[], nutanix.FoundVm]) -> None:
    control = SimpleNamespace(vm=lambda _: found(), vms=lambda: [found()])
    adapter: Any = SimpleNamespace(_control=lambda: control, _way=lambda _: Way("nfs"), _origin="https://prism:9440")
    PrismApi._inspect(adapter, "vm")
    PrismApi._list_vms(adapter)


def _of_central(vm: Any) -> None:
    _by_prism(lambda: nutanix.of_central(vm, {}, {}))


def _of_element(vm: Any) -> None:
    _by_prism(lambda: nutanix.of_element(vm))


def _of_proxmox(found: Any) -> None:
    volumes = {"local-lvm:vm-100-disk-2": Volume(1 << 30, 1 << 20, "raw")}
    cluster = SimpleNamespace(api=SimpleNamespace(host="pve"))
    adapter: Any = SimpleNamespace(_cluster=cluster, _seen=lambda _: Seen("100", volumes=volumes, **found))
    PveApi._inspect(adapter, "100")


def _of_libvirt(found: Any) -> None:
    snapshot = f"<domainsnapshot><creationTime>{escape(str(found['made']))}</creationTime></domainsnapshot>"
    answers: dict[str, Any] = {
        "XMLDesc": DOMAIN,
        "state": [1, 1],
        "isPersistent": 1,
        "hasManagedSaveImage": 0,
        "metadata": "<state/>",
        "blockInfo": found["block"],
        "guestInfo": found["guest"],
        "interfaceAddresses": found["addresses"],
        "listAllSnapshots": [SimpleNamespace(getXMLDesc=lambda _: snapshot, getName=lambda: "before")],
        "UUIDString": "6d6f7665-6d65-4d6f-8f76-656d656d6f76",
        "name": "web",
        "agentSetResponseTimeout": 0,
    }
    domain: Any = SimpleNamespace(**{name: partial(lambda answer, *_: answer, answer) for name, answer in answers.items()})
    connection = SimpleNamespace(getAllDomainStats=lambda *_: [(domain, found["stats"])])
    adapter: Any = SimpleNamespace(
        _host=SimpleNamespace(name="kvm1", connection=connection), _too_old=lambda: None, _unreadable=lambda: None
    )
    LibvirtRemote._inspect(adapter, domain)
    LibvirtRemote._list_vms(adapter)


VSPHERE: dict[str, Any] = {
    "vm": {
        "name": "web",
        "parent": SimpleNamespace(_moId="group-v4"),
        "runtime.powerState": "poweredOn",
        "runtime.host": SimpleNamespace(_moId="host-9"),
        "summary.config.template": False,
        "summary.config.numCpu": 2,
        "summary.config.memorySizeMB": 2048,
        "summary.config.guestFullName": "Debian GNU/Linux 12",
        "summary.storage.committed": GIB,
        "summary.storage.uncommitted": MIB,
    },
    "folder": {"name": "vms", "parent": SimpleNamespace(_moId="group-d1")},
    "host": {"name": "esxi1"},
}


def _listed_by_vsphere(found: Any) -> None:
    def all_of(types: list[Any], _paths: Any, *, what: str) -> list[Row]:
        assert what
        kind = {"VirtualMachine": "vm", "Folder": "folder", "HostSystem": "host"}[types[0].__name__.rpartition(".")[2]]
        return [Row({"vm": "vm-7", "folder": "group-v4", "host": "host-9"}[kind], found[kind])]

    content = SimpleNamespace(rootFolder=SimpleNamespace(_moId="group-d1"))
    session: Any = SimpleNamespace(host="vc1", all_of=all_of, content=content)
    Inventory(session, VimOptions()).vms()


def _parts(right: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """As the client takes them: each part is a mapping, or a list of them."""
    for name, part in right.items():
        for which, odd in variants(part):
            kept = odd if isinstance(odd, list) else [odd]
            if type(odd) is type(part) and all(isinstance(one, dict) for one in kept):
                yield f"{name}{which}", {**right, name: odd}


def _each(right: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """One answer after another, of several calls."""
    for name, part in right.items():
        for which, odd in variants(part):
            yield f"{name}{which}", {**right, name: odd}


@pytest.mark.parametrize(
    ("right", "odd", "use"),
    [
        pytest.param(PRISM["vm"], variants, _of_central, id="prism v4"),
        pytest.param(PRISM["v3 vm"], variants, _of_element, id="prism v3"),
        pytest.param(PVE, _parts, _of_proxmox, id="proxmox"),
        pytest.param(LIBVIRT, _each, _of_libvirt, id="libvirt"),
        pytest.param(VSPHERE, _parts, _listed_by_vsphere, id="vsphere's list"),
    ],
)
def test_a_vm_of_another_form_is_read_or_refused(right: Any, odd: Any, use: Any) -> None:
    use(right)
    for which, found in odd(right):
        if isinstance(found, dict):
            at_most_ours(which, lambda: use(found))  # noqa: B023


def test_the_error_names_who_answered_what() -> None:
    with pytest.raises(
        OddAnswer, match=r"https://prism:9440 answers for VM vm with .* memory_bytes: .* greater than or equal to 0"
    ):
        _of_central(PRISM["vm"] | {"memorySizeBytes": -1})


@pytest.mark.parametrize(
    "listed",
    [
        pytest.param(lambda prism: Central(prism, lambda _: prism).all("vmm", "ahv/config/vms", "list"), id="v4"),
        pytest.param(lambda prism: Element(prism).vms(), id="v3"),
        pytest.param(lambda prism: Element(prism).snapshots(), id="snapshots"),
        pytest.param(lambda prism: Element(prism).images("synvirt"), id="images"),
    ],
)
def test_a_list_without_an_end_is_given_up(listed: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages are full, and say that there are more."""
    monkeypatch.setattr(odd_answers, "OBJECTS_MAX", 2000)
    asked, total = list[str](), 1 << 40

    def ask(_method: str, path: str, **_: Any) -> Any:
        asked.append(path)
        assert len(asked) < 100
        entities: list[dict[str, str]] = [{}] * 500
        metadata = {"totalAvailableResults": total, "total_matches": total}
        body = {"data": entities * 5, "entities": entities, "metadata": metadata}
        return SimpleNamespace(json=lambda: body)

    prism: Any = SimpleNamespace(host="prism", ask=ask)
    with pytest.raises(OddAnswer, match="more than 2000"):
        listed(prism)
