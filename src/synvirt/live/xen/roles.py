"""The permissions that our user's role needs, and their purpose. XenAPI's own data model lists the permissions of each role
(xapi-project/ xen-api, doc/data/xenapi.json). No I/O."""

from collections.abc import Collection
from typing import Final, Literal

from synvirt.model.sources import SourceCheck

Role = Literal["vm-operator", "vm-admin", "vm-power-admin", "pool-operator", "pool-admin"]

# Each role includes those before it. Only vm-power-admin has «vm.snapshot», and vm-admin does not; the rest needs less.
PERMISSIONS: Final[tuple[tuple[str, Role, str], ...]] = (
    ("vm.snapshot", "vm-power-admin", "make a snapshot of a VM's disks"),
    ("vm.destroy", "vm-admin", "remove that snapshot again"),
    ("vdi.destroy", "vm-admin", "remove that snapshot's disks again"),
    ("vdi.set_name_label", "vm-admin", "find them again after a crash"),
    ("vdi.enable_cbt", "vm-admin", "have changed blocks tracked"),
    ("vdi.disable_cbt", "vm-admin", "end what we began"),
    ("vdi.data_destroy", "vm-admin", "free what a snapshot holds between two passes"),
    ("vdi.list_changed_blocks", "vm-operator", "ask what changed"),
    ("vdi.get_nbd_info", "vm-admin", "read disks by NBD"),
    ("vdi.add_to_other_config", "vm-admin", "note that we began to track a disk"),
    ("vdi.remove_from_other_config", "vm-admin", "take that note away"),
    ("vbd.unplug", "vm-admin", "let go of a disk that an export left attached"),
    ("vbd.destroy", "vm-admin", "let go of a disk that an export left attached"),
    ("vm.clean_shutdown", "vm-operator", "shut the VM down at the cut-over"),
    ("vm.hard_shutdown", "vm-operator", "end a VM that does not shut down"),
    ("vm.start", "vm-operator", "start it again when a cut-over fails"),
    ("vm.resume", "vm-operator", "let it run on that was suspended meanwhile"),
    ("vm.unpause", "vm-operator", "let it run on that was paused meanwhile"),
    ("vm.add_to_other_config", "vm-admin", "note on the VM that it has moved"),
    ("vm.remove_from_other_config", "vm-admin", "note on the VM that it has moved"),
)


def role_for(permission: str) -> str:
    """The lowest role that has it."""
    lower = permission.lower()
    return next((role for name, role, _ in PERMISSIONS if name == lower), "vm-power-admin")


def checks(user: str, granted: Collection[str]) -> tuple[SourceCheck, ...]:
    """One check per permission. `granted`: from `session.get_rbac_permissions`."""
    held = {permission.lower() for permission in granted}

    def check(permission: str, role: Role, what_for: str) -> SourceCheck:
        name = f"permission {permission}"
        if permission in held:
            return SourceCheck(name=name, ok=True, detail=f"to {what_for}")
        return SourceCheck(
            name=name,
            ok=False,
            detail=f"{user} lacks it; it is needed to {what_for}",
            hint=f"give the user the role {role}, or one above it",
        )

    return tuple(check(*one) for one in PERMISSIONS)
