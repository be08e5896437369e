"""Facts of a guest by QEMU's agent in it: the agent's documents, and the output of a few fixed programs. The caller passes in
how an agent is asked: by libvirt, or by Proxmox VE's API. Pure.

    DOCUMENTS   a command of the agent ─▶ facts
    PROGRAMS    a fixed argv, run in the guest, ─▶ facts            only in guests that are ours to look into

An old agent knows less, and a guest may lack a program: what is not reported is left out.
"""

import contextlib
import ipaddress
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from synvirt.addresses import is_network
from synvirt.model.facts import FACTS_MAX, PORTS_GIVEN_OUT, bounded, file_system, several, short

# 2262: what fits into 64 bits. A guest may report any number.
_NANOSECONDS_MAX: Final = 1 << 63
# None, where the agent does not know that command, or has nothing to report.
Ask = Callable[[str], object]
# The output of a program; None, where the guest does not have it, or it fails.
Run = Callable[[Sequence[str]], str | None]


def facts_of(ask: Ask, now_ns: Callable[[], int] | None = None, run: Run | None = None) -> dict[str, str]:
    """None, where no agent answers. `now_ns`: this host's clock, with which the guest's is compared. `run`: see PROGRAMS."""
    found: dict[str, str] = {}
    for command, read in DOCUMENTS.items():
        found |= read(ask(command))
    if now_ns is not None and isinstance(ahead := ask("guest-get-time"), int) and 0 <= ahead < _NANOSECONDS_MAX:
        found["clock"] = f"{(ahead - now_ns()) / 1e9:+.1f} s"
    if run is not None and found:
        windows = isinstance(info := ask("guest-get-osinfo"), dict) and info.get("id") == "mswindows"
        for program in PROGRAMS_OF_WINDOWS if windows else PROGRAMS:
            printed = run(program.argv)
            if printed:
                found |= program.read(printed)
        versions = found.pop(_PACKAGES, None)
        if versions is not None:
            found = _with_versions(found, json.loads(versions))
    return bounded(found)


# ── documents ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _words(names: Mapping[str, str]) -> Callable[[object], dict[str, str]]:
    def read(answer: object) -> dict[str, str]:
        return {name: short(answer[key]) for name, key in names.items() if isinstance(answer, dict) and answer.get(key)}

    return read


def _file_systems(answer: object) -> dict[str, str]:
    found = ((one.get("mountpoint"), one.get("type"), one.get("used-bytes"), one.get("total-bytes")) for one in rows(answer))
    return {f"file system {short(place)}": file_system(kind, used, total) for place, kind, used, total in found}


def _cards(answer: object) -> dict[str, str]:
    found = {}
    for one in rows(answer):
        mac = short(one.get("hardware-address", "")).lower()
        if mac and mac != "00:00:00:00:00:00":
            found[f"addresses of {mac}"] = several(_addresses_of(one))
    return found


def _addresses_of(card: dict[str, Any]) -> Iterator[str]:
    """The addresses by which others reach the card."""
    for one in rows(card.get("ip-addresses")):
        with contextlib.suppress(ValueError, AttributeError):
            address = ipaddress.ip_address(short(one.get("ip-address")))
            if not address.is_link_local:
                prefix = one.get("prefix")
                yield f"{address}/{prefix}" if isinstance(prefix, int) else str(address)


def rows(answer: object) -> list[dict[str, Any]]:
    return [one for one in answer[:FACTS_MAX] if isinstance(one, dict)] if isinstance(answer, list) else []


DOCUMENTS: Final[Mapping[str, Callable[[object], dict[str, str]]]] = {
    "guest-get-host-name": _words({"host name": "host-name"}),
    "guest-get-osinfo": _words({"system": "pretty-name", "kernel": "kernel-release"}),
    "guest-get-timezone": _words({"time zone": "zone"}),
    "guest-get-fsinfo": _file_systems,
    "guest-network-get-interfaces": _cards,
}


# ── programs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Program:
    """A program, found by the guest's own search path. It changes nothing in the guest."""

    argv: tuple[str, ...]
    read: Callable[[str], dict[str, str]]


# Packages are no fact by themselves; the versions of applications come from them.
_PACKAGES = "packages"
_USER = re.compile(r'\("([^"]{1,100})"')
_PORT = re.compile("[0-9]{1,5}")


def _listening(printed: str) -> dict[str, str]:
    """ss(8): protocol, state, two queues, the local address and port, the remote ones, the process."""
    found: dict[str, set[str]] = {}
    for line in printed.splitlines()[:FACTS_MAX]:
        words = line.split(None, 6)
        if len(words) < 6 or words[0] not in ("tcp", "udp"):
            continue
        port = words[4].rpartition(":")[2]
        if _PORT.fullmatch(port) and int(port) < PORTS_GIVEN_OUT:
            found.setdefault(f"listens on {words[0]} {port}", set()).update(map(short, _USER.findall(" ".join(words[6:]))))
    return {name: several(programs) or "a program" for name, programs in found.items()}


def _services(printed: str) -> dict[str, str]:
    return {f"service {short(line.split()[0])}": "runs" for line in printed.splitlines()[:FACTS_MAX] if line.split()}


def passwd(text: str) -> dict[str, str]:
    """passwd(5), without its comment field, which may hold a person's name."""
    rows = [row for line in text.splitlines()[:FACTS_MAX] if len(row := line.split(":")) == 7 and row[0]]
    return {f"user {short(row[0])}": f"number {short(row[2])}, shell {short(row[6])}" for row in rows}


def _routes(printed: str) -> dict[str, str]:
    """ip-route(8), of the main table. Names of cards are left out, as they differ on other hardware."""
    found: dict[str, list[str]] = {}
    for line in printed.splitlines()[:FACTS_MAX]:
        words = line.split()
        if words and (words[0] == "default" or is_network(words[0])):
            via = words[words.index("via") + 1] if "via" in words[:-1] else ""
            found.setdefault(f"route {words[0]}", []).append(f"via {short(via)}" if via else "direct")
    return {name: several(ways) for name, ways in found.items()}


# The kernel's own threads are its children (kthreadd).
_KERNEL = "2"


def _running(printed: str) -> dict[str, str]:
    rows = [line.split(None, 2) for line in printed.splitlines()[: 10 * FACTS_MAX]]
    names = {short(row[2]) for row in rows if len(row) == 3 and _KERNEL not in row[:2]}
    return {f"application {name}": "runs" for name in sorted(names)}


def _packages(printed: str) -> dict[str, str]:
    rows = [line.split("\t") for line in printed.splitlines()[: 10 * FACTS_MAX]]
    return {_PACKAGES: json.dumps({row[0]: short(row[1]) for row in rows if len(row) == 2})}


def _with_versions(found: dict[str, str], versions: Mapping[str, str]) -> dict[str, str]:
    """Adds the versions of applications that come in a package of the same name."""
    names = {name: name.partition(" ")[2] for name in found if name.startswith("application ")}
    return found | {name: versions[package] for name, package in names.items() if package in versions}


PROGRAMS: Final = (
    Program(("ss", "-H", "-lntup"), _listening),
    Program(
        ("systemctl", "list-units", "--type=service", "--state=running", "--no-legend", "--no-pager", "--plain"), _services
    ),
    Program(("getent", "passwd"), passwd),
    Program(("ip", "-o", "-4", "route", "show"), _routes),
    Program(("ps", "-e", "-o", "pid=,ppid=,comm="), _running),
    Program(("dpkg-query", "-W", "-f", "${Package}\\t${Version}\\n"), _packages),
    Program(("rpm", "-qa", "--qf", "%{NAME}\\t%{VERSION}-%{RELEASE}\\n"), _packages),
)

# One program, as PowerShell takes a second to start. The names of its properties are the same in every language of Windows.
_SCRIPT = """
$ErrorActionPreference = 'SilentlyContinue'
$names = @{}; Get-Process | ForEach-Object { $names[[int]$_.Id] = $_ }
ConvertTo-Json -Compress -Depth 3 -InputObject @{
  services = @(Get-Service | Where-Object Status -eq 'Running' | ForEach-Object { $_.Name })
  users = @(Get-LocalUser | ForEach-Object { @{ name = $_.Name; sid = $_.SID.Value; enabled = $_.Enabled } })
  tcp = @(Get-NetTCPConnection -State Listen | ForEach-Object {
    @{ port = $_.LocalPort; by = $names[[int]$_.OwningProcess].Name } })
  routes = @(Get-NetRoute -AddressFamily IPv4 | ForEach-Object { @{ to = $_.DestinationPrefix; via = $_.NextHop } })
  programs = @($names.Values | ForEach-Object { @{ name = $_.Name; version = $_.ProductVersion } })
}
""".strip()


def windows(printed: str) -> dict[str, str]:
    """The facts in what the PowerShell script printed (JSON)."""
    try:
        answer = json.loads(printed)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(answer, dict):
        return {}
    services: object = answer.get("services")
    found = {f"service {short(one)}": "runs" for one in (services[:FACTS_MAX] if isinstance(services, list) else [])}
    for one in rows(answer.get("users")):
        found[f"user {short(one.get('name'))}"] = f"{short(one.get('sid'))}{'' if one.get('enabled') else ', disabled'}"
    for one in rows(answer.get("tcp")):
        if isinstance(port := one.get("port"), int) and 0 < port < PORTS_GIVEN_OUT:
            found[f"listens on tcp {port}"] = short(one.get("by") or "a program")
    for one in rows(answer.get("routes")):
        to, via = short(one.get("to")), short(one.get("via"))
        if is_network(to) and not to.endswith(("/32", "/4")):  # neither one host nor multicast
            name = "route default" if to == "0.0.0.0/0" else f"route {to}"
            found[name] = "direct" if via == str(ipaddress.IPv4Address(0)) else f"via {via}"
    for one in rows(answer.get("programs")):
        found[f"application {short(one.get('name'))}"] = short(one.get("version") or "") or "runs"
    return found


PROGRAMS_OF_WINDOWS: Final = (
    Program(("powershell.exe", "-NoProfile", "-NonInteractive", "-ExecutionPolicy", "Bypass", "-Command", _SCRIPT), windows),
)
