"""Puts this host on a container's NFS allow-list while snapshots are read, if the operator permits it. Blocking code.

A container that inherits the cluster's list has none of its own; with its own first entry it no longer inherits. So it gets the
cluster's entries too, and all hosts that had access keep it. The old list is noted in a file before it is changed, and restored
when no snapshot is left that this host reads. A service that was killed in between finds the file.
"""

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import structlog

from synvirt import outgoing
from synvirt.durable import put_private_file
from synvirt.errors import AuthFailed, Internal
from synvirt.live.nutanix.element import Element
from synvirt.live.nutanix.prism import text

_ONE_HOST: Final = "255.255.255.255"
_READS: Final = "reads-"

log = structlog.get_logger(__name__)


class AllowList:
    """`folder` is the service's own, with the containers' old lists."""

    def __init__(self, element: Element, folder: Path, client_address: str | None) -> None:
        self._element, self._folder, self._client_address = element, folder, client_address

    def extend(self, container: str) -> None:
        """AuthFailed: there is no such container, or we may not change its list."""
        found = next((one for one in self._element.containers() if text(one, "name") == container), None)
        if found is None:
            raise AuthFailed(f"{self._element.host} shows no container {container} to let this host in to")
        entry = f"{self._address()}/{_ONE_HOST}"
        inherits = found.get("nfs_whitelist_inherited") is not False
        entries = self._element.common_allow_list() if inherits else [str(one) for one in found.get("nfs_whitelist") or ()]
        if entry in entries:
            return
        note = {"container": _id(found), "entry": entry, "inherited": inherits, "entries": entries}
        self._folder.mkdir(parents=True, exist_ok=True)
        safe = "".join(char if char.isalnum() or char == "-" else "_" for char in _id(found))[:100]
        put_private_file(self._folder / f"allow-list-{safe}.json", json.dumps(note).encode())
        log.info("this host is put on a container's allow-list", container=container, entry=entry, inherited=inherits)
        self._element.change_container({**found, "nfs_whitelist": [*entries, entry], "nfs_whitelist_inherited": False})

    def note(self, snapshot: str) -> None:
        """Notes that this host reads the snapshot of that name. Durable on return."""
        self._folder.mkdir(parents=True, exist_ok=True)
        put_private_file(self._folder / f"{_READS}{snapshot}", b"")

    def forget(self, snapshot: str) -> None:
        """Call it once that snapshot is removed."""
        (self._folder / f"{_READS}{snapshot}").unlink(missing_ok=True)

    def read_here(self) -> frozenset[str]:
        """The names of the snapshots that this host reads; by any of its sources, as two of them may be one cluster."""
        return frozenset(path.name.removeprefix(_READS) for path in self._folder.parent.glob(f"*/{_READS}*"))

    def restore(self) -> None:
        """Removes only what we added, as others may have changed the list since."""
        for note in sorted(self._folder.glob("allow-list-*.json")) if self._folder.is_dir() else ():
            kept = json.loads(note.read_text())
            for found in self._element.containers():
                # Already done: a service was killed after it restored the list, and before it removed its note.
                if _id(found) == kept["container"] and kept["entry"] in (found.get("nfs_whitelist") or ()):
                    self._element.change_container(self._without(found, kept))
            note.unlink(missing_ok=True)

    def _without(self, container: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
        entries = [str(one) for one in container.get("nfs_whitelist") or () if str(one) != kept["entry"]]
        if kept["inherited"]:
            inherited = sorted(entries) == sorted(kept["entries"])
        else:
            # Another host of ours was on the list already, and is not any more: the container inherited before that one came.
            gone = set(kept["entries"]).difference(entries)
            ours = bool(gone) and all(one.endswith(f"/{_ONE_HOST}") for one in gone)
            inherited = ours and sorted(entries) == sorted(self._element.common_allow_list())
        return {**container, "nfs_whitelist": [] if inherited else entries, "nfs_whitelist_inherited": inherited}

    def _address(self) -> str:
        """This host's address as the cluster sees it, unless a router hides it."""
        if self._client_address:
            return self._client_address
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((outgoing.sources().address(self._element.host, 2049), 2049))  # sends nothing
            except OSError as error:
                raise Internal(
                    f"this host does not know its address towards {self._element.host}", hint="name it: options.client_address"
                ) from error
            return str(probe.getsockname()[0])


def _id(container: Mapping[str, Any]) -> str:
    return text(container, "storage_container_uuid") or text(container, "name")
