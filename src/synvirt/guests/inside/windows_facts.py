"""Facts from the registry of a Windows guest, by the names of `model/facts.py`. Pure, over Files.

Names and meanings: Microsoft, «HKLM\\SYSTEM\\CurrentControlSet\\Services», «TCPIP and NBT configuration parameters»,
«TIME_ZONE_INFORMATION in the registry». A user's name is a key of the SAM.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pyregf

from synvirt.guests.inside.files import Files
from synvirt.model.facts import FACTS_MAX, several, short

_CONFIG = "/Windows/System32/config/"
# SERVICE_AUTO_START, only of programs (SERVICE_WIN32_OWN_PROCESS, SERVICE_WIN32_SHARE_PROCESS): drivers belong to the hardware.
_AUTOMATIC, _PROGRAMS = 2, 0x30
_MULTIPLE, _TEXTS = 7, (1, 2)


def facts_of(files: Files) -> dict[str, str]:
    """The facts; empty, where there is no Windows."""
    system, software, sam = (_hive(files, name) for name in ("SYSTEM", "SOFTWARE", "SAM"))
    if system is None:
        return {}
    current = _number(_key(system, "Select"), "Current") or 1
    control = f"ControlSet{current:03d}"
    parameters = f"{control}\\Services\\Tcpip\\Parameters"
    name = _text(_key(system, f"{control}\\Control\\ComputerName\\ComputerName"), "ComputerName")
    version = _key(software, "Microsoft\\Windows NT\\CurrentVersion")
    found = {
        "host name": _text(_key(system, parameters), "Hostname") or name,
        "system": _text(version, "ProductName"),
        "kernel": _text(version, "CurrentBuildNumber"),
        "time zone": _text(_key(system, f"{control}\\Control\\TimeZoneInformation"), "TimeZoneKeyName"),
    }
    return {
        **{fact: value for fact, value in found.items() if value},
        **dict(_enabled(_key(system, f"{control}\\Services"))),
        **dict(_cards(_key(system, f"{parameters}\\Interfaces"))),
        **{f"user {short(one.name)}": "has an account" for one in _keys(_key(sam, "SAM\\Domains\\Account\\Users\\Names"))},
    }


def _hive(files: Files, name: str) -> Any:
    entry = files.entry(_CONFIG + name)
    if entry is None:
        return None
    hive = pyregf.file()
    hive.open_file_object(entry)
    return hive


def _key(hive: Any, path: str) -> Any:
    """The registry key at a path. None, where there is none."""
    if hive is None:
        return None
    key = hive.get_root_key()
    for word in path.split("\\"):
        key = None if key is None else key.get_sub_key_by_name(word)
    return key


def _keys(key: Any) -> Iterator[Any]:
    for number in range(min(key.number_of_sub_keys, FACTS_MAX) if key is not None else 0):
        with contextlib.suppress(OSError):
            yield key.get_sub_key(number)


def _value(key: Any, name: str) -> Any:
    return None if key is None else key.get_value_by_name(name)


def _text(key: Any, name: str) -> str:
    value = _value(key, name)
    if value is None or value.type not in _TEXTS:
        return ""
    return short((value.get_data_as_string() or "").partition("\0")[0])


def _number(key: Any, name: str) -> int | None:
    value = _value(key, name)
    return int(value.get_data_as_integer()) if value is not None and value.type == 4 else None


def _enabled(services: Any) -> Iterator[tuple[str, str]]:
    for one in _keys(services):
        if _number(one, "Start") == _AUTOMATIC and (_number(one, "Type") or 0) & _PROGRAMS:
            yield f"enabled {short(one.name)}", "automatic"


def _cards(interfaces: Any) -> Iterator[tuple[str, str]]:
    """Cards that have or had an address, by Windows' name for them."""
    for one in _keys(interfaces):
        addresses: list[str] = []
        value = _value(one, "IPAddress")
        if value is not None and value.type == _MULTIPLE:
            addresses += [short(address) for address in value.get_data_as_multi_string() if address]
        leased = _text(one, "DhcpIPAddress") if _number(one, "EnableDHCP") else ""
        if addresses or leased:
            yield f"network file {short(one.name)}", f"{several(addresses)}; {'by DHCP' if leased else 'its own'}"
