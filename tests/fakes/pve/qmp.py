"""Proxmox VE's own QMP commands, played before a real QEMU's monitor: backup-access-setup and what belongs to it.

They are patches of Proxmox's QEMU, which no distribution has. Their words are those of its published QAPI text (qmp.json), both
ways; what they do to the disks is done with a real QEMU's filters, as the patch does it. All else goes to QEMU as it is.
"""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any


@cache
def loaded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parent / "qmp.json").read_text())
    return found


class Refused(Exception):
    """QMP's GenericError."""


Ask = Callable[..., Any]


class BackupAccess:
    """Listens at `front`, and asks the QEMU at `back`. `active`: the target whose access lasts."""

    def __init__(self, front: Path, back: Path) -> None:
        self._back = back
        self.active: str | None = None
        self.held: dict[str, tuple[str, str]] = {}
        self._serial = 0
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(front))
        self._listening.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # an accept that waits does not see a close
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                # One after the other, as QEMU itself serves a monitor.
                with client, contextlib.suppress(OSError, ValueError):
                    self._serve(client)

    def _serve(self, client: socket.socket) -> None:
        with socket.socket(socket.AF_UNIX) as qemu:
            qemu.settimeout(60)
            qemu.connect(str(self._back))
            from_qemu, from_client = qemu.makefile("r"), client.makefile("r")
            client.sendall(from_qemu.readline().encode())

            def asked(line: str) -> dict[str, Any]:
                qemu.sendall(line.encode())
                while True:
                    answer: dict[str, Any] = json.loads(from_qemu.readline())
                    if "event" not in answer:
                        return answer

            def ask(command: str, **arguments: Any) -> Any:
                answer = asked(json.dumps({"execute": command, "arguments": arguments}) + "\n")
                if "error" in answer:
                    raise Refused(answer["error"]["desc"])
                return answer["return"]

            for line in from_client:
                question = json.loads(line)
                command = str(question["execute"])
                if command in loaded()["commands"]:
                    answer = self._answer(ask, command, question.get("arguments", {}))
                else:
                    answer = asked(line)
                client.sendall(json.dumps(answer).encode() + b"\n")

    def _answer(self, ask: Ask, command: str, given: Mapping[str, Any]) -> dict[str, Any]:
        commands: dict[str, Callable[[Ask, Mapping[str, Any]], Any]] = {
            "query-proxmox-support": lambda _ask, _given: _support(),
            "backup-access-setup": self._setup,
            "backup-access-teardown": self._teardown,
        }
        try:
            _check(given, loaded()["commands"][command]["params"])
            return {"return": commands[command](ask, given)}
        except Refused as refused:
            return {"error": {"class": "GenericError", "desc": str(refused)}}

    def _setup(self, ask: Ask, given: Mapping[str, Any]) -> list[dict[str, Any]]:
        if self.active is not None:
            raise Refused(f"previous backup for target '{self.active}' not finished")
        found = []
        for one in given["devices"]:
            _check(one, loaded()["structs"]["BackupAccessSourceDevice"])
            if one.get("bitmap-mode", "none") != "none":
                raise Refused("bitmaps are not played here")
            found.append(self._source(ask, str(one["device"])))
        self.active = str(given["target-id"])
        answers = []
        for device, source, path, size in found:
            self._serial += 1
            node, access = f"pve-cbw-{self._serial}", f"pve-access-{self._serial}"
            cbw = {"driver": "copy-before-write", "node-name": node, "file": source, "target": f"{device}-fleecing"}
            ask("blockdev-add", **cbw, **{"on-cbw-error": "break-snapshot"})
            ask("qom-set", path=path, property="drive", value=node)
            ask("blockdev-add", **{"driver": "snapshot-access", "node-name": access, "file": node})
            self.held[node] = (path, source)
            answer = {"node-name": access, "device": device, "size": size}
            _check(answer, loaded()["structs"]["BackupAccessInfo"])
            answers.append(answer)
        return answers

    def _source(self, ask: Ask, device: str) -> tuple[str, str, str, int]:
        one = next((one for one in ask("query-block") if one["device"] == device), None)
        if one is None:
            raise Refused(f"Device '{device}' not found")
        nodes = {node["node-name"]: node for node in ask("query-named-block-nodes", flat=True)}
        fleecing = nodes.get(f"{device}-fleecing")
        if fleecing is None:
            raise Refused(f"Device '{device}-fleecing' not found")
        size = one["inserted"]["image"]["virtual-size"]
        if fleecing["image"]["virtual-size"] != size:
            raise Refused(f"Size mismatch for '{device}-fleecing'")
        qdev = str(one["qdev"])
        return device, one["inserted"]["node-name"], qdev if qdev.startswith("/") else f"/machine/peripheral/{qdev}", size

    def _teardown(self, ask: Ask, given: Mapping[str, Any]) -> dict[str, Any]:
        if self.active is None:
            return {}
        if self.active != given["target-id"]:
            raise Refused(f"cannot teardown backup access for {given['target-id']}: {self.active} is active")
        for node, (path, source) in list(self.held.items()):
            ask("blockdev-del", **{"node-name": node.replace("cbw", "access")})
            ask("qom-set", path=path, property="drive", value=source)
            ask("blockdev-del", **{"node-name": node})
            del self.held[node]
        self.active = None
        return {}


def _support() -> dict[str, Any]:
    supported = {name: True for name, kind in loaded()["structs"]["ProxmoxSupportStatus"].items() if kind.startswith("bool")}
    return {**supported, "pbs-library-version": "1.5.1 (played)"}


def _check(given: Mapping[str, Any], members: Mapping[str, str]) -> None:
    """By the QAPI text: `name*` may be left out."""
    known = {name.rstrip("*") for name in members}
    if more := sorted(set(given) - known):
        raise Refused(f"Parameter '{more[0]}' is unexpected")
    if lacking := sorted({name for name in members if not name.endswith("*")} - set(given)):
        raise Refused(f"Parameter '{lacking[0]}' is missing")
    kinds = {"str": str, "bool": bool, "int": int, "size": int, "[": list}
    for name, value in given.items():
        declared = members.get(name, members.get(f"{name}*", ""))
        kind = next((kind for word, kind in kinds.items() if declared.startswith(word)), str)
        if not isinstance(value, kind):
            raise Refused(f"Invalid parameter type for '{name}', expected: {declared}")
