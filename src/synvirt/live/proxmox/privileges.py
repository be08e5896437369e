"""What our user may do in a cluster, and what is missing. Blocking code."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from synvirt.errors import AuthFailed, SynvirtError
from synvirt.live.proxmox.api import Api, mapping
from synvirt.model.sources import SourceCheck


class _Need(NamedTuple):
    """One of `names`, on `path`. `missing`: what does not work without it; a warning, where the rest works."""

    names: tuple[str, ...]
    path: str
    what_for: str
    warning: bool = False


# Newer versions split VM.Monitor (9.0: VM.GuestAgent.Audit and others).
NEEDS: Final = (
    _Need(("VM.Audit",), "/vms", "see the VMs and their configuration"),
    _Need(("VM.PowerMgmt",), "/vms", "shut the VM down at the cut-over, and start it again when that fails"),
    _Need(("VM.Config.Options",), "/vms", "note on the VM that it has moved"),
    _Need(("Sys.Audit",), "/nodes", "see by a node's tasks when a VM was started"),
    _Need(("Sys.Audit",), "/", "see the nodes' addresses and what is managed for high availability", warning=True),
    _Need(("Datastore.Audit", "Datastore.AllocateSpace"), "/storage", "see how much of a disk is used", warning=True),
    _Need(
        ("VM.GuestAgent.Audit", "VM.GuestAgent.Unrestricted", "VM.Monitor"),
        "/vms",
        "ask the guest's agent for its system and addresses",
        warning=True,
    ),
    _Need(
        ("VM.GuestAgent.FileSystemMgmt", "VM.GuestAgent.Unrestricted", "VM.Monitor"),
        "/vms",
        "freeze the guest's file systems for the moment of a snapshot",
        warning=True,
    ),
)


def checks(api: Api) -> list[SourceCheck]:
    """One check per privilege, by its name and path."""
    try:
        granted = mapping(api.get("/access/permissions"), "our permissions")
    except AuthFailed:
        raise
    except SynvirtError as error:
        return [SourceCheck(name="privileges", ok=True, warning=True, detail=f"not known: {error.detail}")]
    return [_check(api.user, need, granted) for need in NEEDS]


def _check(user: str, need: _Need, granted: Mapping[str, Any]) -> SourceCheck:
    name = f"privilege {' or '.join(need.names)} on {need.path}"
    if any(_has(granted, need.path, one) for one in need.names):
        return SourceCheck(name=name, ok=True, detail=f"to {need.what_for}")
    return SourceCheck(
        name=name,
        ok=need.warning,
        warning=need.warning,
        detail=f"{user} lacks it; it is needed to {need.what_for}",
        hint=f"give it a role with {need.names[0]} on {need.path}, with propagation, or on the VMs that are to move; "
        "a token with privilege separation needs a permission of its own",
    )


def _has(granted: Mapping[str, Any], path: str, privilege: str) -> bool:
    """On the path, on one above it that propagates, or on one under it: we may have only a part of the cluster."""
    for where, privileges in granted.items():
        if not isinstance(privileges, dict) or privilege not in privileges:
            continue
        above = path == where or (privileges[privilege] and (where == "/" or path.startswith(f"{where}/")))
        beneath = where.startswith(f"{path.rstrip('/')}/") and path != "/"
        if above or beneath:
            return True
    return False
