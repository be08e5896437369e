"""Answers of a pool that are too large, or have another form than XenAPI's: an error of ours names the call and the field."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from synvirt.live import odd
from synvirt.live.form import Place
from synvirt.live.odd import OddAnswer
from synvirt.live.xen import exports, machines, snapshots
from synvirt.live.xen import session as xen_session
from synvirt.live.xen.session import Login, XenSession
from synvirt.model.access import SourceOptions
from synvirt.texts import json_bounded
from synvirt.transport import Answer, AnswerTooLarge
from tests.fakes.xenserver.common_calls import carried_out
from tests.fakes.xenserver.model import Failure, message
from tests.live.odd import ODD, at_most_ours

VM, VDI = "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000002"
HOST = "OpaqueRef:host"


class Pool:
    """A pool's tables and the stand-in's common calls, without a server. `odd`: method → what is answered instead."""

    where = "pool port 443"

    def __init__(self, vms: int = 1) -> None:
        vm = {"VBDs": ["OpaqueRef:vbd"], "power_state": "Halted", "name_label": "web", "VIFs": [], "snapshots": []}
        self.tables: dict[str, dict[str, Any]] = {
            "VM": {f"OpaqueRef:vm{n}": vm | {"uuid": VM[:-4] + f"{n:04x}", "NVRAM": "x" * 1000} for n in range(1, vms + 1)},
            "VM_guest_metrics": {},
            "VBD": {"OpaqueRef:vbd": {"type": "Disk", "VDI": "OpaqueRef:vdi", "userdevice": "0"}},
            "VDI": {"OpaqueRef:vdi": {"uuid": VDI, "virtual_size": "1048576", "SR": "OpaqueRef:sr"}},
            "SR": {"OpaqueRef:sr": {"PBDs": ["OpaqueRef:pbd"], "type": "ext"}},
            "PBD": {"OpaqueRef:pbd": {"currently_attached": True, "host": HOST}},
            "host": {HOST: {"address": "pool", "name_label": "one"}},
            "pool": {"OpaqueRef:pool": {"restrictions": {}}},
        }
        self.odd: dict[str, Any] = {}
        self.called: list[str] = []

    def request(self, _method: str, _path: str, *, json: dict[str, Any], limit_bytes: int) -> Answer:
        method, (_, *parameters) = json["method"], json["params"]
        self.called.append(method)
        if method in self.odd:
            reply: Any = {"result": self.odd[method]}
        else:
            try:
                reply = {"result": carried_out(self.tables[method.partition(".")[0]], message(method), parameters)}
            except Failure as failure:
                reply = {"error": {"message": failure.description[0], "data": failure.description[1:]}}
        return _answer(reply, limit_bytes)

    def close(self) -> None:
        """Nothing is open."""


def _answer(reply: Any, limit_bytes: int) -> Answer:
    body = json.dumps(reply).encode()
    if len(body) > limit_bytes:
        raise AnswerTooLarge("more")
    return Answer(200, {}, body)


def session_with(pool: Any, folder: Path) -> XenSession:
    session = XenSession(Place("https", None, "pool", 443, "", ""), Login("root", "p"), SourceOptions(), folder)
    session._client, session._id = pool, "OpaqueRef:session"
    return session


@pytest.mark.parametrize(("limited", "limit"), [(xen_session, "ANSWER_BYTES_MAX"), (json_bounded, "VALUES_MAX")])
def test_a_pool_that_is_too_large_for_one_answer_is_listed_in_parts(
    limited: ModuleType, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(vms=20)
    at_once = machines.rows(session_with(pool, tmp_path))
    assert len(at_once) == 20
    assert "VM.get_record" not in pool.called
    monkeypatch.setattr(limited, limit, {"ANSWER_BYTES_MAX": 4000, "VALUES_MAX": 200}[limit])
    assert machines.rows(session_with(pool, tmp_path)) == at_once
    assert pool.called.count("VM.get_record") == 20


def test_a_vm_that_goes_while_the_list_is_made_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(vms=20)
    monkeypatch.setattr(xen_session, "ANSWER_BYTES_MAX", 4000)
    pool.odd["VM.get_all"] = [*pool.tables["VM"], "OpaqueRef:gone"]
    assert len(machines.rows(session_with(pool, tmp_path))) == 20


def test_a_class_with_too_many_objects_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(odd, "OBJECTS_MAX", 20)
    with pytest.raises(OddAnswer, match=r"VM\.get_all_records with 21 objects"):
        machines.rows(session_with(Pool(vms=21), tmp_path))


def _uses(session: XenSession) -> None:
    """All that reads answers."""
    machines.rows(session)
    vm = machines.machine(session, VM)
    ways = machines.ways(session, vm, "auto")
    machines.manifest(VM, vm, ways, machines.chain_lengths(session, vm))
    machines.guest_facts(session, VM)
    exports.by_export(session, "OpaqueRef:vdi", vm.records.at("VDI", "OpaqueRef:vdi"), raw=True)
    exports.changed(session, VDI, "OpaqueRef:vdi", vm.records.at("VDI", "OpaqueRef:vdi"), VDI)
    snapshots.cleanup(session, VM, "synvirt-1")


@pytest.mark.parametrize(
    "method",
    [
        *("VM.get_all_records", "VDI.get_all_records", "pool.get_all_records", "VM.get_by_uuid", "VM.get_record"),
        *("VBD.get_record", "VDI.get_record", "SR.get_record", "PBD.get_record", "host.get_record", "VM.get_by_name_label"),
        *("VDI.get_by_name_label", "VDI.get_nbd_info", "VDI.list_changed_blocks", "VM.get_current_operations"),
    ],
)
def test_an_answer_of_another_form_is_an_error_of_ours(method: str, tmp_path: Path) -> None:
    for thing in ODD:
        pool = Pool()
        pool.odd |= {"VDI.get_nbd_info": [], "VDI.list_changed_blocks": "AA==", "VM.get_current_operations": {}, method: thing}
        for record in pool.tables["VDI"].values():
            record["cbt_enabled"] = True
        at_most_ours(str(thing)[:20], lambda: _uses(session_with(pool, tmp_path)))  # noqa: B023


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        *(("VM", one) for one in ("VBDs", "VIFs", "snapshots", "platform", "other_config", "memory_static_max", "NVRAM")),
        *(("VDI", one) for one in ("virtual_size", "uuid", "sm_config", "SR", "name_label", "other_config")),
        *(("VBD", one) for one in ("type", "VDI", "userdevice", "bootable")),
        *(("SR", one) for one in ("PBDs", "type", "physical_size", "allowed_operations")),
        *(("host", one) for one in ("address", "name_label")),
    ],
)
def test_a_field_of_another_type_is_an_error_of_ours(kind: str, field: str, tmp_path: Path) -> None:
    for thing in ODD:
        pool = Pool()
        pool.odd |= {"VDI.get_nbd_info": [], "VDI.list_changed_blocks": "AA==", "VM.get_current_operations": {}}
        for record in pool.tables[kind].values():
            record[field] = thing
        at_most_ours(str(thing)[:20], lambda: _uses(session_with(pool, tmp_path)))  # noqa: B023


@pytest.mark.parametrize("size", [None, "all of it", "-1", 1.5, [], "9" * 5000])
def test_a_disk_of_unknown_size_is_no_empty_one(size: Any, tmp_path: Path) -> None:
    pool = Pool()
    pool.tables["VDI"]["OpaqueRef:vdi"]["virtual_size"] = size
    with pytest.raises(OddAnswer, match=r"pool answers VDI\.get_record with no number of bytes in virtual_size"):
        machines.machine(session_with(pool, tmp_path), VM)


def test_the_error_names_who_answered_what(tmp_path: Path) -> None:
    pool = Pool()
    pool.odd["VM.get_record"] = ["no", "record"]
    with pytest.raises(OddAnswer, match=r"pool port 443 answers VM\.get_record with a list that is not a record"):
        machines.machine(session_with(pool, tmp_path), VM)
