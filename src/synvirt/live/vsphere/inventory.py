"""The inventory of a vCenter or an ESXi host: its VMs, their folders, hosts, networks and datastores. Blocking code."""

import contextlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from synvirt.errors import AuthFailed, VmNotFound
from synvirt.live import About, VmRow
from synvirt.live.odd import reading
from synvirt.live.vsphere import privileges as vim_privileges
from synvirt.live.vsphere.disks import stores_of, type_name, virtual_disks
from synvirt.live.vsphere.files import FOLDERS_DEEP_MAX
from synvirt.live.vsphere.form import VimOptions
from synvirt.live.vsphere.machines import INSPECTED, LISTED, NETWORK_PATHS, manifest, network_names, row, shown
from synvirt.live.vsphere.session import VimSession, library
from synvirt.live.vsphere.ways import Way, mostly_empty_disks, way
from synvirt.model.machine import VmManifest


class Inventory:
    """The inventory of one source, requested again by each call."""

    def __init__(self, session: VimSession, options: VimOptions) -> None:
        self._session, self._options = session, options

    def about(self) -> About:
        """The product, its version, and our user's privileges."""
        library()
        about = self._session.call("say who it is", lambda content: content.about)
        version = f"{about.version} build {about.build}"
        options = self._options
        checks = vim_privileges.checks(self._session, options.transport, has_vddk=options.vddk_libdir is not None)
        return About(str(about.name), version, tuple(checks), str(about.instanceUuid or ""))

    def vms(self) -> list[VmRow]:
        """All VMs; templates are left out."""
        with reading(self._session.host, "for its VMs"):
            return self._vms()

    def _vms(self) -> list[VmRow]:
        vim = library().vim
        found = self._session.all_of([vim.VirtualMachine], LISTED, what="list its VMs")
        folders, hosts = self._folders(), self._host_names()
        return [
            row(
                one.id,
                one.properties,
                _path(folders, one.properties.get("parent")),
                hosts.get(getattr(one.properties.get("runtime.host"), "_moId", ""), ""),
            )
            for one in found
            if not one.properties.get("summary.config.template")
        ]

    def vm(self, vm_id: str, paths: tuple[str, ...]) -> Mapping[str, Any]:
        """The properties `paths` of a VM, by name. VmNotFound."""
        found = self._session.properties(self._session.machine(vm_id), paths, what=f"inspect {vm_id}")
        if not found:
            raise VmNotFound(f"{self._session.host} has no VM {vm_id}", hint="list its VMs: it may have been registered again")
        return found

    def manifest(self, vm_id: str) -> VmManifest:
        """A VM's manifest. VmNotFound."""
        with reading(self._session.host, f"for VM {vm_id[:60]}"):
            return self._manifest(vm_id)

    def _manifest(self, vm_id: str) -> VmManifest:
        found = self.vm(vm_id, INSPECTED)
        types, space = self.stores(found.get("datastore") or ())
        disks = virtual_disks(found.get("config.hardware.device") or ())
        ways = self.ways(disks, types)
        host, networks = self._surroundings(found.get("runtime.host"), found.get("network") or ())
        may_export = bool(mostly_empty_disks(found, ways)) and vim_privileges.may(
            self._session, vim_privileges.EXPORT[0], [self._session.machine(vm_id)]
        )
        now = datetime.now(UTC)
        return manifest(vm_id, found, types, ways, host=host, networks=networks, may_export=may_export, space=space, now=now)

    def stores(self, stores: Sequence[Any]) -> tuple[Mapping[str, str], Mapping[str, tuple[int, int]]]:
        """By the datastores' names: their types; and (free bytes, capacity in bytes), where these are known."""
        paths = ("summary.name", "summary.type", "summary.freeSpace", "summary.capacity")
        found = self._session.each([(store, paths) for store in stores], what="look at datastores").values()
        types = {str(store.get("summary.name")): str(store.get("summary.type")) for store in found}
        bytes_ = [(str(one.get("summary.name")), one.get("summary.freeSpace"), one.get("summary.capacity")) for one in found]
        return types, {name: (int(free), int(has)) for name, free, has in bytes_ if free is not None and has}

    def ways(self, disks: Sequence[Any], store_types: Mapping[str, str]) -> Mapping[str, Way]:
        """The way to read each disk, by the disk's key."""
        wished, has_vddk = self._options.transport, self._options.vddk_libdir is not None
        # Only the datastores of disks: we do not read the one with the ISO image of a drive.
        stores = stores_of(disks)
        asked = wished == "auto" and not has_vddk and stores
        missing = (
            vim_privileges.FILES if asked and not vim_privileges.may(self._session, vim_privileges.FILES, stores) else None
        )
        return {
            str(disk.key): way(wished, has_vddk=has_vddk, disk=disk, store_types=store_types, missing_privilege=missing)
            for disk in disks
        }

    def _folders(self) -> Mapping[str, tuple[str, Any]]:
        """The name and the parent of each folder and datacenter, by its id. The root, and each datacenter's folder of VMs, have
        an empty name: the platform made them, and people do not see them."""
        vim = library().vim
        found = self._session.all_of([vim.Folder, vim.Datacenter], ("name", "parent"), what="list its folders")
        folders = {one.id: (str(one.properties.get("name", "")), one.properties.get("parent")) for one in found}
        of_vms = {id_: ("", lies_in) for id_, (name, lies_in) in folders.items() if name == "vm" and _is_datacenter(lies_in)}
        return folders | of_vms | {self._session.content.rootFolder._moId: ("", None)}  # noqa: SLF001

    def _host_names(self) -> Mapping[str, str]:
        found = self._session.all_of([library().vim.HostSystem], ("name",), what="list its hosts")
        return {one.id: shown(one.properties.get("name") or "") for one in found}

    def _surroundings(self, host: Any, networks: Sequence[Any]) -> tuple[str, Mapping[str, str]]:
        """The name of the VM's host; and the names of its networks, by the ids in its cards (`network_names`)."""
        wanted = [(network, NETWORK_PATHS.get(type_name(network), ("name",))) for network in networks]
        found: Mapping[str, Mapping[str, Any]] = {}
        with contextlib.suppress(AuthFailed, VmNotFound):  # our user may not see it, or it was just removed
            found = self._session.each([*wanted, *([] if host is None else [(host, ("name",))])], what="look at a VM's host")
        name = "" if host is None else shown(found.get(host._moId, {}).get("name") or "")  # noqa: SLF001
        return name, network_names([found[one._moId] for one in networks if one._moId in found])  # noqa: SLF001


def _is_datacenter(thing: Any) -> bool:
    return isinstance(thing, library().vim.Datacenter)


def _path(folders: Mapping[str, tuple[str, Any]], parent: Any) -> str:
    """The path that people see: datacenter and folders."""
    names: list[str] = []
    for _ in range(FOLDERS_DEEP_MAX):
        found = folders.get(parent._moId) if parent is not None else None  # noqa: SLF001
        if found is None:
            break
        names.insert(0, shown(found[0]))
        parent = found[1]
    return "/".join(filter(None, names))
