"""The QEMU guest agent of a running domain (qemu.org, QEMU Guest Agent Protocol Reference), asked by way of libvirt."""

import base64
import contextlib
import ipaddress
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from synvirt.errors import Internal, SynvirtError
from synvirt.kvm.connection import load, translated

# It answers a ping in milliseconds; libvirt also gives it up to 5 s to find its step again.
ANSWER_TIMEOUT_S = 2
# What is asked of a guest's files is small; the guest decides what it sends.
FILE_LIMIT_BYTES = 1 << 20
# A guest that names more of them has no card for each: trying all would take hours.
ADDRESSES_MAX = 16
RUN_POLL_S = 0.2
# Of a guest that says more of itself, the rest is not compared.
FACTS_MAX, FACT_CHARS = 100, 200


def answers(domain: Any) -> bool:
    try:
        ask(domain, "guest-ping")
    except (load().libvirtError, SynvirtError):
        return False
    return True


def is_windows(domain: Any) -> bool:
    """By its agent's word; False, where it does not say."""
    try:
        said = ask(domain, "guest-get-osinfo")
    except (load().libvirtError, SynvirtError):
        return False
    return isinstance(said, dict) and said.get("id") == "mswindows"


def read_file(domain: Any, path: str) -> bytes:
    """Internal, where there is no agent, no such file, or a larger one than is ever asked for."""
    with translated(Internal, f"the agent of {domain.name()} does not give {path}"):
        opened = ask(domain, "guest-file-open", path=path, mode="r")
        try:
            answer = ask(domain, "guest-file-read", handle=opened, count=FILE_LIMIT_BYTES)
        finally:
            ask(domain, "guest-file-close", handle=opened)
    if not isinstance(answer, dict) or not answer.get("eof"):
        raise Internal(f"{path} in {domain.name()} is larger than {FILE_LIMIT_BYTES} bytes")
    try:
        return base64.b64decode(str(answer.get("buf-b64", "")))
    except ValueError as error:
        raise Internal(f"the agent of {domain.name()} answers with nonsense for {path}") from error


def addresses(domain: Any) -> list[str]:
    """All that the guest says it has, but those by which it reaches itself. None, where there is no agent. What a guest says
    is hostile: a caller that connects there does so by a guard."""
    try:
        said = ask(domain, "guest-network-get-interfaces")
    except (load().libvirtError, SynvirtError):
        return []
    found = []
    for interface in said if isinstance(said, list) else []:
        for one in interface.get("ip-addresses", []) if isinstance(interface, dict) else []:
            with contextlib.suppress(ValueError, AttributeError):
                address = ipaddress.ip_address(str(one.get("ip-address")))
                if not address.is_loopback and not address.is_link_local:
                    found.append(str(address))
    return found[:ADDRESSES_MAX]


def run(domain: Any, argv: Sequence[str], timeout_s: float) -> int:
    """How the program ended; a signal is minus its number. Internal, where there is no agent or it does not end in time."""
    with translated(Internal, f"the agent of {domain.name()} does not run {argv[0]}"):
        arguments = {"path": argv[0], "arg": list(argv[1:]), "capture-output": False}
        said = ask(domain, "guest-exec", **arguments)
        pid = said.get("pid") if isinstance(said, dict) else None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            said = ask(domain, "guest-exec-status", pid=pid)
            if isinstance(said, dict) and said.get("exited"):
                code, signal = said.get("exitcode"), said.get("signal")
                return code if isinstance(code, int) else -signal if isinstance(signal, int) else -1
            time.sleep(RUN_POLL_S)
    raise Internal(f"{argv[0]} in {domain.name()} did not end within {timeout_s:g} s")


def facts(domain: Any) -> dict[str, str]:
    """What the guest says of itself, by name: its host name, system, kernel, time zone, addresses, file systems. What it does
    not say is left out; none, where there is no agent. Texts of a guest are hostile, and cut short.

    Command by command, each with its own time: libvirt's guestInfo would want a time limit that stays with the domain."""
    if not answers(domain):
        return {}
    found: dict[str, str] = {}
    for command, keys in _FACTS.items():
        said = _said(domain, command)
        found |= {name: _short(said[key]) for name, key in keys.items() if isinstance(said, dict) and key in said}
    for one in _listed(domain, "guest-get-fsinfo"):
        used, total = one.get("used-bytes"), one.get("total-bytes")
        room = f", {used} of {total} bytes" if isinstance(used, int) and isinstance(total, int) else ""
        found[f"file system {_short(one.get('mountpoint'))}"] = f"{_short(one.get('type'))}{room}"
    for one in _listed(domain, "guest-network-get-interfaces"):
        mac = _short(one.get("hardware-address", "")).lower()
        if mac and mac != "00:00:00:00:00:00":
            found[f"addresses of {mac}"] = ", ".join(sorted(_addresses_of(one)))
    return dict(list(found.items())[:FACTS_MAX])


_FACTS = {
    "guest-get-host-name": {"host name": "host-name"},
    "guest-get-osinfo": {"system": "pretty-name", "kernel": "kernel-release"},
    "guest-get-timezone": {"time zone": "zone"},
}


def _said(domain: Any, command: str) -> object:
    """None, where this agent does not know that command, or has nothing to say."""
    try:
        return ask(domain, command)
    except (load().libvirtError, SynvirtError):
        return None


def _listed(domain: Any, command: str) -> list[dict[str, Any]]:
    said = _said(domain, command)
    return [one for one in said[:FACTS_MAX] if isinstance(one, dict)] if isinstance(said, list) else []


def _addresses_of(card: dict[str, Any]) -> Iterator[str]:
    """Those that others reach it by."""
    listed = card.get("ip-addresses")
    for one in listed[:FACTS_MAX] if isinstance(listed, list) else []:
        with contextlib.suppress(ValueError, AttributeError):
            address = ipaddress.ip_address(_short(one.get("ip-address")))
            if not address.is_link_local:
                yield f"{address}/{_short(one.get('prefix'))}"


def _short(text: object) -> str:
    return "".join(character for character in str(text) if character.isprintable())[:FACT_CHARS]


def ask(domain: Any, command: str, **arguments: object) -> object:
    """One command; libvirt bounds its answer. libvirtError, or Internal on a senseless answer."""
    import libvirt_qemu

    question = json.dumps({"execute": command, "arguments": arguments} if arguments else {"execute": command})
    answer = libvirt_qemu.qemuAgentCommand(domain, question, ANSWER_TIMEOUT_S, 0)
    try:
        return json.loads(answer)["return"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Internal(f"the guest's agent answers {command} with nonsense") from error
