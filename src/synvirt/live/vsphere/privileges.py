"""The privileges that our vSphere user needs, and their purpose. Blocking code."""

from collections.abc import Sequence
from typing import Any, Final, Literal

from synvirt.errors import Internal
from synvirt.live.vsphere import ways as vim_ways
from synvirt.live.vsphere.session import VimSession, library
from synvirt.live.vsphere.ways import WayName
from synvirt.model.sources import SourceCheck

# Held on the root folder, or on the VMs and datastores themselves.
PRIVILEGES: Final = (
    ("System.View", "see the VMs, and by their events when they were started"),
    ("VirtualMachine.State.CreateSnapshot", "take snapshots"),
    ("VirtualMachine.State.RemoveSnapshot", "remove them again"),
    ("VirtualMachine.Config.ChangeTracking", "switch change tracking on"),
    ("VirtualMachine.Provisioning.DiskRandomRead", "ask what changed"),
    ("VirtualMachine.Interact.PowerOff", "shut the VM down at the cut-over"),
    ("VirtualMachine.Interact.PowerOn", "start it again when a cut-over fails"),
    ("VirtualMachine.Config.Annotation", "note on the VM that it has moved"),
    ("Datastore.Browse", "read its disks"),
    ("Datastore.FileManagement", "read its disks"),
)
# Without it no file of a datastore can be read.
FILES: Final = "Datastore.Browse"
# The third way to the disks needs this instead of those of the datastores.
EXPORT: Final = (vim_ways.EXPORT, "read its disks by an export lease")
_OF_FILES: Final = "Datastore."


def checks(session: VimSession, transport: Literal["auto"] | WayName, *, has_vddk: bool) -> list[SourceCheck]:
    """One check per privilege that `transport` needs. If an export lease is possible, missing ones for files are warnings."""
    vim = library().vim
    # A privilege may be granted only on a part of the inventory: then a VM or a datastore of that part has it.
    samples = [one.id for one in session.all_of([vim.VirtualMachine], ("name",), what="look for VMs")[:1]]
    stores = [one.id for one in session.all_of([vim.Datastore], ("name",), what="look for datastores")[:1]]

    def ask(content: Any) -> Any:
        entities = [
            content.rootFolder,
            *(session.managed(vim.VirtualMachine, one) for one in samples),
            *(session.managed(vim.Datastore, one) for one in stores),
        ]
        wanted = [privilege for privilege, _ in (*PRIVILEGES, EXPORT)]
        return content.authorizationManager.HasPrivilegeOnEntities(entities, content.sessionManager.currentSession.key, wanted)

    try:
        answer = session.call("say what we may do", ask)
    except Internal as error:  # hosts of some versions do not know this call
        return [SourceCheck(name="privileges", ok=True, detail=f"not known: {error.detail}")]
    granted = {one.privId for entity in answer for one in entity.privAvailability if one.isGranted}
    needed = list(PRIVILEGES)
    if transport == "lease":
        needed = [*(one for one in PRIVILEGES if not one[0].startswith(_OF_FILES)), EXPORT]
    may_export = transport == "auto" and not has_vddk and EXPORT[0] in granted
    return [_check(session.login_.user, *one, granted=granted, may_export=may_export) for one in needed]


def _check(user: str, privilege: str, what_for: str, *, granted: set[str], may_export: bool) -> SourceCheck:
    name = f"privilege {privilege}"
    if privilege in granted:
        return SourceCheck(name=name, ok=True, detail=f"to {what_for}")
    of_files = privilege.startswith(_OF_FILES)
    if of_files and may_export:
        return SourceCheck(
            name=name,
            ok=True,
            warning=True,
            detail=f"{user} lacks it: disks are read by an export lease ({EXPORT[0]}), which has no deltas, so VMs move cold",
            hint=f"to move VMs warm, give the user a role with {privilege} on the datastores",
        )
    return SourceCheck(
        name=name,
        ok=False,
        detail=f"{user} lacks it; it is needed to {what_for}",
        hint="give the user a role with it, on the root folder or on the VMs that are to move"
        + (f"; with {EXPORT[0]} instead, VMs move cold" if of_files else ""),
    )


def may(session: VimSession, privilege: str, things: Sequence[Any]) -> bool:
    """Whether our user has the privilege on all these. Where the platform does not say, it is tried."""

    def ask(content: Any) -> Any:
        key = content.sessionManager.currentSession.key
        return content.authorizationManager.HasPrivilegeOnEntities(list(things), key, [privilege])

    try:
        answer = session.call("say what we may do", ask)
    except Internal:
        return True
    return all(one.isGranted for entity in answer for one in entity.privAvailability)
