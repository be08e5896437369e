"""Which VMs a query selects, and the error where it selects none."""

from typing import Any

import pytest

from synvirt.errors import BadRequest
from synvirt.fleet.model import MEMBERS_MAX
from synvirt.fleet.querying import VmQuery, wave_of_query
from synvirt.fleet.sheets.rows import KnownVm
from synvirt.live import VmRow
from tests.fleet.made import SOURCE, plan

ROWS = [
    VmRow("vm-4", "web-02", "off", folder="DC0/Finance", guest_os="Debian GNU/Linux 12", host="esx1"),
    VmRow("vm-1", "web-01", "on", folder="DC0/Finance/Web", guest_os="Debian GNU/Linux 12", host="esx1"),
    VmRow("vm-2", "Web-01", "on", folder="DC0/Finance/Test", guest_os="Microsoft Windows Server 2022", host="esx2"),
    VmRow("vm-3", "db\n01", "on", folder="DC0/Financials", guest_os="", host="esx2"),
    VmRow("vm-5", "", "suspended"),
]


def asked(**words: Any) -> list[tuple[str, str]]:
    """The members' ids, and the VMs that their plans name."""
    known = [KnownVm(str(SOURCE), "lab", "", row.vm_id, row.name, plan(row.vm_id)) for row in ROWS]
    wave = wave_of_query(VmQuery(source_id=SOURCE, name="november", **words), known, ROWS)
    found = []
    for one in wave.members:
        assert one.plan.source_ref.kind == "live_vm"
        found.append((one.id, one.plan.source_ref.vm_id))
    return found


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ({}, ["vm-5", "vm-3", "vm-1", "vm-2", "vm-4"]),
        ({"folder": "dc0/finance"}, ["vm-1", "vm-2", "vm-4"]),
        ({"folder": "/DC0/Finance/", "power_state": "on"}, ["vm-1", "vm-2"]),
        ({"host": "ESX1"}, ["vm-1", "vm-4"]),
        ({"vm": "web-*", "power_state": "off"}, ["vm-4"]),
        ({"guest_os": "windows"}, ["vm-2"]),
        ({"power_state": "suspended"}, ["vm-5"]),
    ],
)
def test_who_is_meant(words: dict[str, Any], meant: list[str]) -> None:
    assert [vm_id for _, vm_id in asked(**words)] == meant


def test_names_that_are_alike_empty_or_hostile_become_ids() -> None:
    assert [id_ for id_, _ in asked()] == ["vm", "db-01", "web-01", "Web-01", "web-02"]


@pytest.mark.parametrize(
    ("words", "detail", "hint"),
    [
        ({"folder": "DC0/Finanse"}, "folder: no VM", "DC0/Finance"),
        ({"folder": "DC0/Finance", "host": "esx3"}, "host: no VM that matches so far has 'esx3'", "there is esx2, esx1"),
        ({"vm": "web"}, "vm: no VM", "web-01"),
        ({"power_state": "suspended", "guest_os": "linux"}, "guest_os: no VM", "reports no value of it for any of them"),
    ],
)
def test_a_word_that_fits_none_is_an_error_with_the_nearest(words: dict[str, Any], detail: str, hint: str) -> None:
    with pytest.raises(BadRequest) as refused:
        asked(**words)
    assert detail in refused.value.detail
    assert hint in str(refused.value.hint)


def test_more_than_a_wave_holds_is_refused() -> None:
    rows = [VmRow(f"vm-{n}", f"vm-{n}", "on") for n in range(MEMBERS_MAX + 1)]
    with pytest.raises(BadRequest, match=f"{MEMBERS_MAX + 1} VMs are meant"):
        wave_of_query(VmQuery(source_id=SOURCE, name="all"), [], rows)
    with pytest.raises(BadRequest, match="the source has no VMs"):
        wave_of_query(VmQuery(source_id=SOURCE, name="all"), [], [])
