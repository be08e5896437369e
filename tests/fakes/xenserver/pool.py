"""A pool's state: VMs with real disks, snapshots, changed block tracking, tasks, sessions with roles; and the calls on it.

What a call may be, and what it answers, is the data model's to say (model.py).
"""

import base64
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from tests.fakes.contents import Content, fill, size_of
from tests.fakes.xenserver import common_calls, model
from tests.fakes.xenserver.common_calls import Record
from tests.fakes.xenserver.model import Failure

TRACKED_BYTES = 65536
USER, PASSWORD = "mover", "s3cret"


def reference() -> str:
    return f"OpaqueRef:{uuid4()}"


class Pool:
    """`fault` asks for failures; `calls` counts what was asked."""

    def __init__(self, folder: Path, addresses: Iterable[str]) -> None:
        self.disks, self.exports = folder / "disks", folder / "exports"
        for one in (self.disks, self.exports):
            one.mkdir(parents=True)
        self.lock = threading.RLock()
        self.tables: dict[str, dict[str, Record]] = {kind: {} for kind in model.classes()}
        self.sessions: dict[str, str] = {}
        self.users: dict[str, tuple[str, str | None]] = {"root": (PASSWORD, None), USER: (PASSWORD, "vm-power-admin")}
        self.certificates: dict[str, str] = {}
        self.calls: Counter[str] = Counter()
        self.faults: list[tuple[str, Failure, int]] = []
        # Of the HTTP handler: «body500», «cut», «500», «leftover».
        self.export_faults: list[str] = []
        self.nbd_servers: list[Record] = []
        self.deaf: set[str] = set()
        self.takes_its_time: set[str] = set()
        # Cleared: what is done in the background waits.
        self.at_work = threading.Event()
        self.at_work.set()
        self._journal: dict[str, list[tuple[int, int, int]]] = {}
        self._moments: dict[str, tuple[str, int]] = {}
        self._tracking: dict[str, str] = {}
        self._sequence = 0
        self._clock = datetime(2026, 11, 22, 8)  # noqa: DTZ001 - XenAPI's times have no zone
        self.hosts = {address: self._host(address) for address in addresses}
        self.master = next(iter(self.hosts))
        self.pool = self.add("pool", name_label="lab", master=self.hosts[self.master], restrictions={"restrict_cbt": "false"})
        self.network = self.add("network", name_label="Pool-wide network associated with eth0", purpose=["nbd"])

    # ── what is there ────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, kind: str, **given: Any) -> str:
        made, reported = reference(), model.fields(kind)
        with self.lock:
            given.setdefault("uuid", str(uuid4()))
            self.tables[kind][made] = model.record(kind, **{key: value for key, value in given.items() if key in reported})
        return made

    def at(self, kind: str, ref: str) -> Record:
        return common_calls.at(self.tables[kind], kind, ref)

    def _host(self, address: str) -> str:
        version = {"product_brand": "XCP-ng", "product_version": "8.3.0", "build_number": "cloud"}
        host = self.add("host", name_label=f"host {address}", address=address, enabled=True, software_version=version)
        domain = self.add("VM", name_label=f"Control domain on host: {address}", is_control_domain=True, power_state="Running")
        self.tables["host"][host]["control_domain"] = domain
        return host

    def add_store(self, kind: str = "ext", *, hosts: Iterable[str] | None = None, size: int = 1 << 40, cbt: bool = True) -> str:
        allowed = ["vdi_create", "vdi_destroy", "vdi_snapshot"] + ["vdi_enable_cbt", "vdi_disable_cbt"] * cbt
        store = self.add("SR", name_label=f"Local {kind}", type=kind, physical_size=size, allowed_operations=allowed)
        for address in hosts or self.hosts:
            pbd = self.add("PBD", host=self.hosts[address], SR=store, currently_attached=True)
            self.tables["SR"][store]["PBDs"].append(pbd)
        return store

    def add_vm(self, name: str, contents: Iterable[Content], store: str, **fields: Any) -> str:
        """A VM that runs; its UUID."""
        metrics = self.add("VM_metrics", start_time=self._now())
        guest = self.add(
            "VM_guest_metrics",
            os_version={"name": "Debian GNU/Linux 12 (bookworm)", "distro": "debian"},
            networks={"0/ip": "192.0.2.7", "0/ipv6/0": "2001:db8::7"},
        )
        given: Record = {
            "power_state": "Running",
            "domain_type": "hvm",
            "HVM_boot_policy": "BIOS order",
            "HVM_boot_params": {"firmware": "bios", "order": "cdn"},
            "platform": {"cores-per-socket": "2", "viridian": "false"},
            "memory_static_max": 1 << 30,
            "VCPUs_max": 4,
            "VCPUs_at_startup": 4,
            "metrics": metrics,
            "guest_metrics": guest,
            "resident_on": self.hosts[self.master],
            "other_config": {"base_template_name": "Debian Bookworm 12"},
        }
        vm = self.add("VM", name_label=name, **given | fields)
        for number, content in enumerate(contents):
            self.add_disk(vm, content, store, number)
        vif = self.add("VIF", VM=vm, device="0", MAC="26:5a:1c:0f:33:91", network=self.network)
        self.tables["VM"][vm]["VIFs"].append(vif)
        return str(self.tables["VM"][vm]["uuid"])

    def add_disk(self, vm: str, content: Content, store: str, number: int) -> str:
        vdi = self._add_vdi(store, size_of(content), name_label=f"disk {number}", type="user", managed=True)
        fill(self._file(vdi), content)
        self._add_vbd(vm, vdi, str(number), attached=self.tables["VM"][vm]["power_state"] == "Running")
        return vdi

    def _add_vdi(self, store: str, size: int, **fields: Any) -> str:
        vdi = self.add("VDI", SR=store, virtual_size=size, physical_utilisation=size, **fields)
        self.tables["SR"][store]["VDIs"].append(vdi)
        return vdi

    def _add_vbd(self, vm: str, vdi: str, device: str, *, attached: bool) -> str:
        vbd = self.add("VBD", VM=vm, VDI=vdi, userdevice=device, type="Disk", mode="RW", bootable=device == "0")
        self.tables["VBD"][vbd]["currently_attached"] = attached
        self.tables["VM"][vm]["VBDs"].append(vbd)
        self.tables["VDI"][vdi]["VBDs"].append(vbd)
        return vbd

    def _now(self) -> datetime:
        """A start takes a second at the least."""
        self._clock += timedelta(seconds=1)
        return self._clock

    def vm(self, uuid: str) -> str:
        return next(ref for ref, vm in self.tables["VM"].items() if vm["uuid"] == uuid)

    def vdis(self, uuid: str) -> list[str]:
        vbds = [self.tables["VBD"][one] for one in self.tables["VM"][self.vm(uuid)]["VBDs"]]
        return [str(vbd["VDI"]) for vbd in vbds if vbd["type"] == "Disk"]

    def _file(self, vdi: str) -> Path:
        return self.disks / f"{self.tables['VDI'][vdi]['uuid']}.raw"

    def disk(self, uuid: str, number: int = 0) -> Path:
        return self._file(self.vdis(uuid)[number])

    def snapshots(self) -> list[str]:
        """All that is left, by name: snapshots, and disks of those that are no more."""
        alone = [vdi for vdi in self.tables["VDI"].values() if not vdi["VBDs"]]
        return [str(one["name_label"]) for one in [*self.tables["VM"].values(), *alone] if one["is_a_snapshot"]]

    # ── guests ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def guest_writes(self, uuid: str, offset: int, data: bytes, number: int = 0) -> bool:
        """False when it is off: a guest that does not run writes nothing."""
        with self.lock:
            if self.tables["VM"][self.vm(uuid)]["power_state"] != "Running":
                return False
            vdi = self.vdis(uuid)[number]
            descriptor = os.open(self._file(vdi), os.O_WRONLY)
            try:
                os.pwrite(descriptor, data, offset)
            finally:
                os.close(descriptor)
            self._sequence += 1
            first, last = offset // TRACKED_BYTES, (offset + len(data) - 1) // TRACKED_BYTES
            self._journal.setdefault(vdi, []).append((self._sequence, first, last))
            return True

    def lose_tracking(self, uuid: str) -> None:
        """Somebody switched it off, and on again."""
        with self.lock:
            for vdi in self.vdis(uuid):
                if self.tables["VDI"][vdi]["cbt_enabled"]:
                    self.vdi_disable_cbt(vdi)
                    self.vdi_enable_cbt(vdi)

    def power(self, uuid: str, state: str) -> None:
        with self.lock:
            vm = self.tables["VM"][self.vm(uuid)]
            if state == "Running" and vm["power_state"] == "Halted":
                self.tables["VM_metrics"][vm["metrics"]]["start_time"] = self._now()
            vm["power_state"] = state
            for one in vm["VBDs"]:
                self.tables["VBD"][one]["currently_attached"] = state == "Running"

    # ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def fault(self, method: str, code: str, *parameters: str, times: int = 1) -> None:
        with self.lock:
            self.faults.append((method, Failure(code, *parameters), times))

    def dispatch(self, address: str, method: str, given: list[Any]) -> Any:
        """What a host at `address` answers. Failure."""
        background = method.startswith("Async.")
        reported = model.message(method.removeprefix("Async."))
        with self.lock:
            self.calls[reported.name] += 1
            if not reported.session:
                return self._log_in(address, reported, given)
            if address != self.master:
                raise Failure("HOST_IS_SLAVE", self.master)
            if not given or given[0] not in self.sessions:
                raise Failure("SESSION_INVALID", str(given[0]) if given else "")
            session, parameters = str(given[0]), given[1:]
            role = self.users[self.sessions[session]][1]
            if role is not None and role not in reported.roles:
                raise Failure("RBAC_PERMISSION_DENIED", reported.name.lower(), "No permission in user session")
            model.check_parameters(reported, parameters)
            self._refuse_wrong_references(reported, parameters)
        if background:
            return self._background(session, reported, parameters)
        return self._answered(session, reported, parameters)

    def _answered(self, session: str, message: model.Message, parameters: list[Any]) -> Any:
        with self.lock:
            for number, (method, failure, times) in enumerate(self.faults):
                if method == message.name and times:
                    self.faults[number] = (method, failure, times - 1)
                    raise failure
            answer = self._carried_out(session, message, parameters)
        assert self._allowed(answer, message.result), f"{message.name} answers {answer!r}, which is no {message.result}"
        return answer

    def _allowed(self, answer: Any, kind: str) -> bool:
        if kind.endswith("_server_info record set"):
            return all(one.keys() == model.fields("vdi_nbd_server_info").keys() for one in answer)
        return model.fits(answer, kind)

    def _refuse_wrong_references(self, message: model.Message, parameters: list[Any]) -> None:
        for (_, kind), value in zip(message.parameters, parameters, strict=False):
            if kind.endswith(" ref") and (named := kind.removesuffix(" ref")) in self.tables and named != "session":
                self.at(named, value)

    def _waits_for_guest(self, doing: Record, task: str, vm: str) -> None:
        for other, operation in doing.items():
            if operation == "clean_shutdown" and other != task:
                raise Failure("OTHER_OPERATION_IN_PROGRESS", "VM", vm, operation, other)
        record = self.at("VM", vm)
        while record["uuid"] in self.takes_its_time and record["power_state"] == "Running":
            time.sleep(0.02)

    def _background(self, session: str, message: model.Message, parameters: list[Any]) -> str:
        task = self.add("task", name_label=f"Async.{message.name}", status="pending", created=self._clock)
        shown = message.name in ("VM.snapshot", "VM.clean_shutdown")
        doing: Record = self.at("VM", parameters[0])["current_operations"] if shown else {}
        doing[task] = message.name.partition(".")[2]

        def run() -> None:
            record = self.tables["task"][task]
            self.at_work.wait(60)
            try:
                if message.name == "VM.clean_shutdown":
                    self._waits_for_guest(doing, task, parameters[0])
                answer = self._answered(session, message, parameters)
            except Failure as failure:
                record |= {"error_info": failure.description, "status": "failure"}
            else:
                record |= {"result": f"<value>{answer}</value>" if answer != "" else "", "status": "success"}
            finally:
                del doing[task]

        threading.Thread(target=run, daemon=True).start()
        return task

    def _carried_out(self, session: str, message: model.Message, parameters: list[Any]) -> Any:
        kind, _, name = message.name.partition(".")
        own: Callable[..., Any] | None = getattr(self, f"{kind.lower()}_{name}", None)
        if own is not None:
            answer = own(*([session] if kind == "session" or name == "get_nbd_info" else []), *parameters)
            return answer or common_calls.void(message)
        return common_calls.carried_out(self.tables[kind], message, parameters)

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _log_in(self, address: str, message: model.Message, given: list[Any]) -> str:
        model.check_parameters(message, given)
        if address != self.master:
            raise Failure("HOST_IS_SLAVE", self.master)
        user, password = given[:2]
        if self.users.get(user, ("", None))[0] != password:
            raise Failure("SESSION_AUTHENTICATION_FAILED")
        role = self.users[user][1]
        session = self.add("session", is_local_superuser=role is None, rbac_permissions=model.permissions(role) if role else [])
        self.sessions[session] = user
        return session

    def session_logout(self, session: str) -> None:
        self.end_session(session)

    def end_session(self, session: str) -> None:
        with self.lock:
            self.sessions.pop(session, None)
            self.tables["session"].pop(session, None)
            for link in self.exports.glob(f"*{session}"):
                link.unlink()

    def session_get_record(self, session: str, wanted: str) -> Record:
        return dict(self.at("session", wanted))

    def session_get_uuid(self, session: str, wanted: str) -> str:
        return str(self.at("session", wanted)["uuid"])

    def host_get_server_certificate(self, host: str) -> str:
        return self.certificates[self.tables["host"][host]["address"]]

    # ── VMs ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def vm_snapshot(self, vm: str, name: str, ignored: list[str] | None = None) -> str:
        source = self.at("VM", vm)
        made = self.add("VM", **{**source, "uuid": str(uuid4()), "name_label": name, "VBDs": [], "VIFs": [], "snapshots": []})
        snapshot = self.tables["VM"][made]
        snapshot |= {"is_a_snapshot": True, "snapshot_of": vm, "power_state": "Halted", "is_a_template": True}
        snapshot |= {"current_operations": {}, "other_config": dict(source["other_config"])}
        try:
            for one in list(source["VBDs"]):
                vbd = self.tables["VBD"][one]
                if vbd["type"] == "Disk" and vbd["VDI"] not in (ignored or []):
                    self._add_vbd(made, self._snapshot_vdi(vbd["VDI"]), vbd["userdevice"], attached=False)
        except Failure:
            self.vm_destroy(made)
            raise
        source["snapshots"].append(made)
        return made

    def vm_destroy(self, vm: str) -> None:
        record = self.at("VM", vm)
        for one in list(record["VBDs"]):
            self.vbd_destroy(one)
        source = self.tables["VM"].get(record["snapshot_of"])
        if source is not None and vm in source["snapshots"]:
            source["snapshots"].remove(vm)
        del self.tables["VM"][vm]

    def vm_clean_shutdown(self, vm: str) -> None:
        record = self._in_state(vm, "Running")
        if record["uuid"] in self.deaf:
            raise Failure("VM_LACKS_FEATURE", vm)
        self.power(record["uuid"], "Halted")

    def vm_hard_shutdown(self, vm: str) -> None:
        self.power(self._in_state(vm, "Running")["uuid"], "Halted")

    def vm_start(self, vm: str, paused: bool, force: bool) -> None:
        self.power(self._in_state(vm, "Halted")["uuid"], "Running")

    def vm_resume(self, vm: str, paused: bool, force: bool) -> None:
        self.power(self._in_state(vm, "Suspended")["uuid"], "Running")

    def vm_unpause(self, vm: str) -> None:
        self.power(self._in_state(vm, "Paused")["uuid"], "Running")

    def _in_state(self, vm: str, state: str) -> Record:
        record = self.at("VM", vm)
        if record["power_state"] != state:
            raise Failure("VM_BAD_POWER_STATE", vm, state.lower(), record["power_state"].lower())
        return record

    # ── disks ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _snapshot_vdi(self, vdi: str) -> str:
        source = self.at("VDI", vdi)
        store = self.tables["SR"][source["SR"]]
        if "vdi_snapshot" not in store["allowed_operations"]:
            raise Failure("SR_OPERATION_NOT_SUPPORTED", source["SR"])
        if store["physical_size"] - store["physical_utilisation"] < 0:
            raise Failure("SR_FULL", str(source["virtual_size"]), "0")
        # Both lie on the same layer from now on, which holds what was there.
        parent = source["sm_config"].get("vhd-parent")
        config = {"vhd-parent": parent} if parent else {}
        base = self._add_vdi(source["SR"], source["virtual_size"], name_label="base copy", managed=False, sm_config=config)
        source["sm_config"]["vhd-parent"] = self.tables["VDI"][base]["uuid"]
        made = self._add_vdi(
            source["SR"], source["virtual_size"], name_label=source["name_label"], type=source["type"], is_a_snapshot=True,
            managed=True, snapshot_of=vdi, cbt_enabled=source["cbt_enabled"], sm_config=dict(source["sm_config"]),
        )  # fmt: skip
        shutil.copyfile(self._file(vdi), self._file(made))
        self._moments[made] = (self._tracking.get(vdi, ""), self._sequence)
        source["snapshots"].append(made)
        return made

    def vdi_snapshot(self, vdi: str, parameters: Any = None) -> str:
        return self._snapshot_vdi(vdi)

    def _refuse_in_use(self, vdi: str, operation: str, *, any_vbd: bool = False) -> Record:
        record = self.at("VDI", vdi)
        for one in record["VBDs"]:
            if any_vbd or self.tables["VBD"][one]["currently_attached"]:
                raise Failure("VDI_IN_USE", vdi, operation)
        return record

    def vdi_destroy(self, vdi: str) -> None:
        record = self._refuse_in_use(vdi, "destroy")
        for one in list(record["VBDs"]):
            self.vbd_destroy(one)
        self._file(vdi).unlink(missing_ok=True)
        source = self.tables["VDI"].get(record["snapshot_of"])
        if source is not None:
            source["snapshots"].remove(vdi)
        self.tables["SR"][record["SR"]]["VDIs"].remove(vdi)
        del self.tables["VDI"][vdi]
        self._coalesce()

    def _coalesce(self) -> None:
        """A layer under one disk alone is joined with it."""
        vdis = self.tables["VDI"]
        for ref, layer in [(ref, one) for ref, one in vdis.items() if not one["managed"]]:
            above = [one for one in vdis.values() if one["sm_config"].get("vhd-parent") == layer["uuid"]]
            if len(above) > 1:
                continue
            for one in above:
                one["sm_config"].pop("vhd-parent")
                one["sm_config"] |= layer["sm_config"]
            self.tables["SR"][layer["SR"]]["VDIs"].remove(ref)
            del vdis[ref]

    def vdi_enable_cbt(self, vdi: str) -> None:
        record = self.at("VDI", vdi)
        if "vdi_enable_cbt" not in self.tables["SR"][record["SR"]]["allowed_operations"]:
            raise Failure("SR_OPERATION_NOT_SUPPORTED", record["SR"])
        if record["is_a_snapshot"]:
            raise Failure("OPERATION_NOT_ALLOWED", "VDI is a snapshot")
        if not record["cbt_enabled"]:
            record["cbt_enabled"], self._tracking[vdi] = True, str(uuid4())

    def vdi_disable_cbt(self, vdi: str) -> None:
        self.at("VDI", vdi)["cbt_enabled"] = False
        self._tracking.pop(vdi, None)

    def vdi_data_destroy(self, vdi: str) -> None:
        record = self._refuse_in_use(vdi, "data_destroy", any_vbd=True)
        if not record["is_a_snapshot"]:
            raise Failure("OPERATION_NOT_ALLOWED", "VDI is not a snapshot")
        if not record["cbt_enabled"]:
            raise Failure("VDI_NO_CBT_METADATA", vdi)
        self._file(vdi).unlink(missing_ok=True)
        record |= {"type": "cbt_metadata", "physical_utilisation": 0}
        record["sm_config"].pop("vhd-parent", None)
        self._coalesce()

    def vdi_list_changed_blocks(self, old: str, new: str) -> str:
        self._refuse_in_use(new, "list_changed_blocks")
        if not (self.at("VDI", old)["cbt_enabled"] and self.at("VDI", new)["cbt_enabled"]):
            raise Failure("VDI_NO_CBT_METADATA", old)
        source, size = self.tables["VDI"][new]["snapshot_of"], self.tables["VDI"][new]["virtual_size"]
        (epoch, since), (epoch_now, until) = self._moments[old], self._moments[new]
        if self.tables["VDI"][old]["snapshot_of"] != source or epoch != epoch_now:
            reported = "Failed to calculate changed blocks for given VDIs. [opterr=Source and target VDI are unrelated]"
            raise Failure("SR_BACKEND_FAILURE_460", "", reported, "")
        bits = bytearray(-(-size // (TRACKED_BYTES * 8)))
        for moment, first, last in self._journal.get(source, ()):
            if since < moment <= until:
                for block in range(first, last + 1):
                    bits[block // 8] |= 0x80 >> block % 8
        return base64.b64encode(bits).decode()

    def vdi_get_nbd_info(self, session: str, vdi: str) -> list[Record]:
        record = self.at("VDI", vdi)
        if record["type"] == "cbt_metadata":
            raise Failure("VDI_INCOMPATIBLE_TYPE", vdi, record["type"])
        # xapi's begins with a slash, which nbdkit takes for a path.
        export = f"{record['uuid']}?session_id={session}"
        with suppress(FileExistsError):
            os.link(self._file(vdi), self.exports / export)
        return [{**server, "exportname": export} for server in self.nbd_servers]

    def vbd_unplug(self, vbd: str) -> None:
        record = self.at("VBD", vbd)
        if not record["currently_attached"]:
            raise Failure("DEVICE_ALREADY_DETACHED", vbd)
        record["currently_attached"] = False

    def vbd_destroy(self, vbd: str) -> None:
        record = self.at("VBD", vbd)
        self.tables["VM"][record["VM"]]["VBDs"].remove(vbd)
        if record["VDI"] in self.tables["VDI"]:
            self.tables["VDI"][record["VDI"]]["VBDs"].remove(vbd)
        del self.tables["VBD"][vbd]

    # ── exports ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def exported(self, address: str, vdi: str) -> tuple[str, Path]:
        """Held by the host's own domain while it is sent: the VBD to end with, and the file."""
        domain = self.tables["host"][self.hosts[address]]["control_domain"]
        with self.lock:
            return self._add_vbd(domain, vdi, "autodetect", attached=True), self._file(vdi)

    def sees(self, address: str, vdi: str) -> bool:
        store = self.tables["SR"][self.at("VDI", vdi)["SR"]]
        pbds = [self.tables["PBD"][one] for one in store["PBDs"]]
        return any(pbd["host"] == self.hosts[address] and pbd["currently_attached"] for pbd in pbds)
