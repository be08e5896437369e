"""Answers of a script with another form than the script gives: an error of ours names the host, the script and the field."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.live.hyperv import answers, journal, machines, tracking
from synvirt.live.hyperv.adapter import WmiApi
from synvirt.live.hyperv.journal import Entry
from synvirt.live.odd import OddAnswer
from synvirt.machines import concerns
from tests.live.odd import at_most_ours, variants

VM, SINCE, HOST = "9b2c0d9c-0000-0000-0000-000000000001", "synvirt-job-1", "hv1, port 5986"
FILE = {
    "path": "D:\\a.vhdx",
    "format": 3,
    "type": 3,
    "size": 1 << 20,
    "file_size": 4096,
    "parent": "",
    "id": "{AA}",
    "sector": 512,
}
DRIVE = {"bus": 1, "controller": 0, "location": 0, "path": "D:\\a.vhdx", "physical": False, "shared": False, "chain": [FILE]}
RIGHT: dict[str, Any] = {
    "about": {
        "name": "HV1", "product": "Windows Server", "version": "10.0", "vm_versions": ["8.0"], "domain": "d",
        "in_domain": False, "user": "HV1\\u", "nodes": [{"name": "n", "up": True}],
        "administrator": True, "hyperv_administrator": False,
    },
    "list": {"vms": [{"id": VM, "name": "web", "state": 3, "cpus": 2, "memory": 512 << 20}]},
    "inspect": {
        "id": VM, "name": "web", "host": "HV1", "state": 3, "generation": 2, "version": "9.0", "checkpoint_type": 3,
        "replication": 0, "cpus": 2, "cpus_per_socket": 2, "memory": 512 << 20, "memory_dynamic": True,
        "memory_least": 512 << 20, "memory_most": 1 << 40,
        "firmware": {"secure_boot": True, "template": "", "boot": [{"bus": 1, "controller": 0, "location": 0}]},
        "security": {"tpm": False, "shielded": False},
        "nics": [{
            "id": "Microsoft:a\\b", "mac": "00155D0A0B0C", "legacy": False, "connected": True, "switch": "LAN",
            "addresses": ["192.0.2.7"], "vlan_mode": 1, "vlan": 7,
        }],
        "services": [{"id": "Microsoft:a\\b", "name": "VSS", "enabled": True, "status": 2}],
        "checkpoints": [{"id": "c", "name": "before", "created": "2026-01-02T03:04:05Z"}],
        "kvp": [None], "dvds": ["D:\\x.iso"], "floppies": ["D:\\x.vfd"], "pci": 1, "gpus": 1,
        "fibre_channel": 0, "ports": ["COM1"], "drives": [DRIVE],
    },
    "state": {
        "state": 3, "status": "None", "version": "9.0", "changed": "2026-01-02T03:04:05Z", "checkpoint_type": 3,
        "notes": journal.written("", {SINCE: Entry(s="s", p="point", sure=True)}), "drives": [DRIVE],
        "snapshots": [{"id": "s", "notes": "", "drives": [DRIVE]}],
        "points": [{"id": "point", "type": 1, "level": 1, "disks": ["{AA}"], "trackings": ["rct:1"]}],
    },
    "changes": {"processed": 1 << 20, "offsets": [0], "lengths": [4096]},
}  # fmt: skip


def _use(script: str, found: Any) -> None:
    """What is done with the answer."""
    if script == "about":
        first = SimpleNamespace(run=lambda _: found)
        adapter: Any = SimpleNamespace(_hosts=SimpleNamespace(first=first), _options=SimpleNamespace(shares=""))
        WmiApi._about(adapter)
        WmiApi._supports_warm(adapter)
    elif script == "list":
        for one in found["vms"] or []:
            machines.row(one, "")
    elif script == "inspect":
        machines.manifest(VM, found, concerns.no_disks())
        machines.facts_of_guest(found)
    else:
        state = found if script == "state" else RIGHT["state"]
        changes = found if script == "changes" else RIGHT["changes"]
        host: Any = SimpleNamespace(run=lambda *_, **__: changes)
        for drive in filter(lambda one: one["chain"], state["drives"]):
            tracking.areas(host, VM, state, drive, SINCE)


@pytest.mark.parametrize("script", RIGHT)
def test_an_answer_of_another_form_is_an_error_of_ours(script: str) -> None:
    _use(script, answers.checked(script, RIGHT[script], HOST))
    for which, found in variants(RIGHT[script]):
        at_most_ours(which, lambda: _use(script, answers.checked(script, found, HOST)))  # noqa: B023


def test_the_error_names_the_field() -> None:
    found = json.loads(json.dumps(RIGHT["inspect"]))
    found["drives"][0]["chain"][0]["size"] = ["large"]
    with pytest.raises(OddAnswer, match=r"hv1, port 5986 answers inspect\.ps1 with .* drives\.0\.chain\.0\.size: .* integer"):
        answers.checked("inspect", found, HOST)
