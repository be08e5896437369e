"""A Hyper-V host, or the nodes of a cluster: finds the one that has a VM. Blocking code.

Each node needs its own login: a session cannot pass our login on to another host (the second hop). A VM that has moved to
another node, or whose node is down, is looked for again. It is gone only if all nodes say so.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from synvirt.errors import BadRequest, SourceUnreachable, SynvirtError, VmNotFound
from synvirt.live import VmRow
from synvirt.live.folder import private_folder
from synvirt.live.form import Place
from synvirt.live.hyperv import exporting, machines
from synvirt.live.hyperv.exporting import Exports
from synvirt.live.hyperv.form import Login, Options, pairs
from synvirt.live.hyperv.places import Shares
from synvirt.live.hyperv.session import Address, Credentials, Session
from synvirt.transport import Recorder

log = structlog.get_logger(__name__)

T = TypeVar("T")
NODES_MAX: Final = 64
# How often a VM is looked for that moves meanwhile: while nodes are asked one after the other, it may be on none of them.
LOOKS: Final = 3
# How many nodes list their VMs at a time.
LISTS_AT_ONCE: Final = 8


class Host:
    """One host: its session, and the access to its files. `node`: its name in a cluster, else empty. `exports`: where it may
    write disks for us, if it may."""

    def __init__(self, session: Session, shares: Shares, node: str = "", exports: Exports | None = None) -> None:
        self.session, self.shares, self.node, self.exports = session, shares, node, exports
        # For each share's URL: its protocol, and whether it lets us in. See ways.py.
        self.protections: dict[str, tuple[str, bool]] = {}

    def run(self, name: str, **parameters: object) -> Any:
        return self.session.run(name, **parameters)

    def remove_export(self, path: str) -> None:
        """Removes the folder that a snapshot's disks were exported to, on whichever share it is."""
        # The options may now name another folder, or none: it is removed where it was written.
        exporting.remove(self.exports or Exports(self.shares, "", always=False), path)


class Hosts:
    """The Hyper-V host of a source, or all nodes of its cluster."""

    def __init__(self, place: Place, login: Login, options: Options, recorder: Recorder | None = None) -> None:
        if place.host is None or place.port is None:
            raise BadRequest("endpoint: has no host")
        self._login, self._options = login, options
        self._recorder = recorder
        self._files = contextlib.ExitStack()
        self._port, self._tls = place.port, place.scheme == "https"
        self._addresses = pairs(options.nodes)
        self._certificate: tuple[Path, Path] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._nodes: dict[str, Host] = {}
        self._at: dict[str, Host] = {}
        self.first = self._host(place.host, place.port)

    # ── open and close ───────────────────────────────────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """Logs in at the first host. AuthFailed, SourceUnreachable."""
        if self._login.certificate is not None and self._certificate is None:
            self._certificate = self._keep_certificate()
            self.first = self._host(self.first.session.address.host, self.first.session.address.port)
        self._closed = False
        self.first.session.open()

    def close(self) -> None:
        """Logs out of every host."""
        with self._lock:
            self._closed = True
            hosts, self._nodes, self._at = [self.first, *self._nodes.values()], {}, {}
        for host in hosts:
            host.session.close()
        self._certificate = None
        self._files.close()

    def _host(self, address: str, port: int, node: str = "") -> Host:
        login, options = self._login, self._options
        user = login.user or ""
        password = login.password.get_secret_value() if login.password else ""
        credentials = Credentials(
            "certificate" if not user else options.auth,
            user,
            password,
            *(self._certificate or (None, None)),
        )
        where = Address(address, port, self._tls, options.verify_tls, options.fingerprint_sha256)
        smb_password = login.smb_password.get_secret_value() if login.smb_password else password
        shares = Shares(address, options.smb_port, login.smb_user or user, smb_password, pairs(options.shares))
        exports = None
        if options.export_to and options.read_by != "in_place":
            exports = Exports(shares, options.export_to, always=options.read_by == "export")
        return Host(Session(where, credentials, self._recorder), shares, node, exports)

    def _keep_certificate(self) -> tuple[Path, Path]:
        """As files in memory, since the library reads nothing else: only for us, and removed with the session."""
        folder = self._files.enter_context(private_folder())
        key = self._login.key.get_secret_value() if self._login.key else ""
        paths = folder / "certificate.pem", folder / "key.pem"
        for path, text in zip(paths, (self._login.certificate or "", key), strict=True):
            path.touch(0o600)
            path.write_text(text)
        return paths

    # ── which host has a VM ──────────────────────────────────────────────────────────────────────────────────────────

    def all(self) -> tuple[list[Host], list[str]]:
        """The host; or the nodes of a cluster that are up, and the names of the others."""
        nodes = self.first.run("about")
        known = {str(one["name"]): bool(one["up"]) for one in nodes["nodes"] or ()}
        up = [name for name, is_up in known.items() if is_up][:NODES_MAX]
        if not up:
            return [self.first], []
        with self._lock:
            if self._closed:
                raise SourceUnreachable(f"the session with {self.first.session.address.name} is closed")
            for name in up:
                if name not in self._nodes:
                    address, port = self._address_of(name, str(nodes["domain"] or "") if nodes["in_domain"] else "")
                    self._nodes[name] = self._host(address, port, name)
            return [self._nodes[name] for name in up], [name for name, is_up in known.items() if not is_up]

    def _address_of(self, name: str, domain: str) -> tuple[str, int]:
        given = next((value for key, value in self._addresses.items() if key.lower() == name.lower()), None)
        if given is None:
            return (f"{name}.{domain}" if domain else name), self._port
        host, colon, port = given.rpartition(":")
        return (host, int(port)) if colon and port.isdigit() and "]" not in port else (given, self._port)

    def list_vms(self) -> list[VmRow]:
        """The VMs of all nodes; if a node does not answer, the others' are still shown. The nodes of a cluster are asked twice:
        a VM that moves while they answer may be in two answers, or in none. It is where the last answer has it."""
        hosts, _ = self.all()
        found = dict[str, VmRow]()
        with ThreadPoolExecutor(LISTS_AT_ONCE) as pool:
            for look in range(1 if len(hosts) == 1 else 2):
                answers = list(zip(hosts, pool.map(self._listed, hosts), strict=True))
                failures = [rows for _, rows in answers if isinstance(rows, SourceUnreachable)]
                if len(failures) == len(hosts) and not look:
                    raise failures[0]
                hosts = [host for host, rows in answers if isinstance(rows, list)]
                for host, rows in answers:
                    for row in rows if isinstance(rows, list) else ():
                        self._at[row.vm_id] = host
                        found[row.vm_id] = row
        return list(found.values())

    def _listed(self, host: Host) -> list[VmRow] | SourceUnreachable:
        try:
            return [machines.row(one, host.node) for one in host.run("list")["vms"] or []]
        except SourceUnreachable as error:
            log.warning("a node does not answer; its VMs are not listed", node=host.node, cause=error.detail)
            return error

    def at(self, vm_id: str, use: Callable[[Host], T]) -> T:
        """Calls `use` with the host that has the VM; again with another one, if it has moved meanwhile. VmNotFound."""
        if not _is_guid(vm_id):
            raise VmNotFound(f"{vm_id[:100]!r} is not the id of a Hyper-V VM")
        for left in reversed(range(LOOKS)):
            known = self._at.get(vm_id.lower())
            host = known or self._found(vm_id)
            try:
                return use(host)
            except (VmNotFound, SourceUnreachable) as error:
                self._at.pop(vm_id.lower(), None)
                # One that was found long ago and does not answer now: its VMs may be on another one.
                elsewhere = isinstance(error, VmNotFound) or known is not None
                if not host.node or not elsewhere or not left:
                    raise
        raise AssertionError("the last look returns or raises")

    def _found(self, vm_id: str) -> Host:
        for _ in range(LOOKS):
            hosts, down = self.all()
            host = hosts[0] if not hosts[0].node else self._on_node(hosts, vm_id)
            if host is not None:
                self._at[vm_id.lower()] = host
                return host
        if down:
            raise SourceUnreachable(
                f"none of the cluster's nodes that are up has the VM {vm_id}; {', '.join(down)} is not",
                hint="its VMs come up on another node, or when it is up again",
            )
        raise VmNotFound(f"none of the cluster's {len(hosts)} nodes has the VM {vm_id}")

    def _on_node(self, hosts: Sequence[Host], vm_id: str) -> Host | None:
        failure: SynvirtError | None = None
        for host in hosts:
            try:
                present = {str(one["id"]).lower() for one in host.run("list")["vms"] or []}
            except SynvirtError as error:
                failure = error
                continue
            if vm_id.lower() in present:
                return host
        if failure is not None:  # the VM may be there
            raise failure
        return None


def _is_guid(text: str) -> bool:
    return len(text) == 36 and all(one in "0123456789abcdefABCDEF-" for one in text)
