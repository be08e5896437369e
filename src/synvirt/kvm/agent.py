"""The QEMU guest agent of a running domain (qemu.org, QEMU Guest Agent Protocol Reference), by way of libvirt."""

import base64
import contextlib
import ipaddress
import json
import time
from collections.abc import Sequence
from typing import Any

from synvirt.errors import Internal, SynvirtError
from synvirt.kvm import agent_facts
from synvirt.kvm.connection import load, translated
from synvirt.kvm.library import is_lost

# It answers a ping in milliseconds. libvirt also gives it up to 5 s to get back in step.
ANSWER_TIMEOUT_S = 2
ANSWER_TRIES = 2
# The files that are read from guests are small. The guest decides how much it sends.
FILE_LIMIT_BYTES = 1 << 20
# A guest that reports more addresses has no card for each. Trying all of them would take hours.
ADDRESSES_MAX = 16
RUN_POLL_S = 0.2
# The programs list what the guest has. This takes milliseconds, and seconds in a guest that has just started.
PROGRAM_WITHIN_S, PROGRAMS_WITHIN_S = 10.0, 45.0
# In base64. Two thousand packages are 100 KiB.
OUTPUT_LIMIT_BYTES = 4 << 20


def answers(domain: Any) -> bool:
    """Whether the agent answers a ping."""
    try:
        ask(domain, "guest-ping")
    except (load().libvirtError, SynvirtError):
        return False
    return True


def is_windows(domain: Any) -> bool:
    """Whether the agent reports Windows; False, where it reports nothing."""
    try:
        answer = ask(domain, "guest-get-osinfo")
    except (load().libvirtError, SynvirtError):
        return False
    return isinstance(answer, dict) and answer.get("id") == "mswindows"


def read_file(domain: Any, path: str) -> bytes:
    """Internal, where there is no agent, no such file, or a file larger than FILE_LIMIT_BYTES."""
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
        raise Internal(f"the agent of {domain.name()} gives an invalid answer for {path}") from error


def addresses(domain: Any) -> list[str]:
    """All addresses that the guest reports, without loopback and the like. None, where there is no agent. A guest's answers are
    hostile: a caller that connects there does so through a guard. libvirtError, where the connection to libvirt was lost."""
    try:
        answer = ask(domain, "guest-network-get-interfaces")
    except (load().libvirtError, SynvirtError) as error:
        _refuse_lost(error)
        return []
    found = []
    for interface in agent_facts.rows(answer):
        for one in agent_facts.rows(interface.get("ip-addresses")):
            with contextlib.suppress(ValueError):
                address = ipaddress.ip_address(str(one.get("ip-address")))
                if not address.is_loopback and not address.is_link_local:
                    found.append(str(address))
    return found[:ADDRESSES_MAX]


def run(domain: Any, argv: Sequence[str], timeout_s: float) -> int:
    """The exit code of a program in the guest; a signal is minus its number. Internal, where there is no agent or it does not
    end in time."""
    with translated(Internal, f"the agent of {domain.name()} does not run {argv[0]}"):
        arguments = {"path": argv[0], "arg": list(argv[1:]), "capture-output": False}
        answer = ask(domain, "guest-exec", **arguments)
        pid = answer.get("pid") if isinstance(answer, dict) else None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            answer = ask(domain, "guest-exec-status", pid=pid)
            if isinstance(answer, dict) and answer.get("exited"):
                code, signal = answer.get("exitcode"), answer.get("signal")
                return code if isinstance(code, int) else -signal if isinstance(signal, int) else -1
            time.sleep(RUN_POLL_S)
    raise Internal(f"{argv[0]} in {domain.name()} did not end within {timeout_s:g} s")


def output(domain: Any, argv: Sequence[str], timeout_s: float) -> str | None:
    """The output of a program in the guest; None, where it fails, takes too long or prints too much. libvirtError, where the
    connection to libvirt was lost."""
    try:
        answer = ask(domain, "guest-exec", **{"path": argv[0], "arg": list(argv[1:]), "capture-output": True})
        pid = answer.get("pid") if isinstance(answer, dict) else None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            answer = ask(domain, "guest-exec-status", pid=pid)
            if not isinstance(answer, dict) or answer.get("exited"):
                break
            time.sleep(RUN_POLL_S)
        if not isinstance(answer, dict) or answer.get("exitcode") != 0:
            return None
        printed = str(answer.get("out-data", ""))
        return base64.b64decode(printed).decode(errors="replace") if len(printed) <= OUTPUT_LIMIT_BYTES else None
    except (load().libvirtError, SynvirtError, ValueError) as error:
        _refuse_lost(error)
        return None


def facts(domain: Any, *, programs: bool = False) -> dict[str, str]:
    """What the agent reports of the guest (see `agent_facts`); none, where there is no agent. With `programs`, it also runs
    some programs in the guest that only read.

    Each command has its own time limit: the limit of libvirt's guestInfo would stay with the domain. libvirtError, where the
    connection to libvirt was lost."""
    if _answer(domain, "guest-ping") is None:
        return {}
    deadline = time.monotonic() + PROGRAMS_WITHIN_S

    def run(argv: Sequence[str]) -> str | None:
        left_s = min(deadline - time.monotonic(), PROGRAM_WITHIN_S)
        return output(domain, argv, left_s) if left_s > 0 else None

    return agent_facts.facts_of(lambda command: _answer(domain, command), time.time_ns, run if programs else None)


def _answer(domain: Any, command: str) -> object:
    """The answer to a command; None, where this agent does not know it, or has nothing to report. An agent that is late, as in
    a guest that has just started on a busy host, is asked once more."""
    for _ in range(ANSWER_TRIES):
        try:
            return ask(domain, command)
        except SynvirtError:
            return None
        except load().libvirtError as error:
            _refuse_lost(error)
            if error.get_error_code() not in _late():
                return None
    return None


def _refuse_lost(error: Exception) -> None:
    """Raises the libvirtError of a connection that was lost: it says nothing about the agent."""
    if isinstance(error, load().libvirtError) and is_lost(error):
        raise error


def _late() -> set[int]:
    """libvirt's errors for an agent that has not answered in time. An older libvirt has only the first."""
    names = ("VIR_ERR_AGENT_UNRESPONSIVE", "VIR_ERR_AGENT_COMMAND_TIMEOUT")
    return {getattr(load(), name) for name in names if hasattr(load(), name)}


def ask(domain: Any, command: str, **arguments: object) -> object:
    """Sends one command; libvirt limits the time for its answer. libvirtError, or Internal on an answer without sense."""
    import libvirt_qemu

    question = json.dumps({"execute": command, "arguments": arguments} if arguments else {"execute": command})
    answer = libvirt_qemu.qemuAgentCommand(domain, question, ANSWER_TIMEOUT_S, 0)
    try:
        return json.loads(answer)["return"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Internal(f"the guest's agent gives an invalid answer to {command}") from error
