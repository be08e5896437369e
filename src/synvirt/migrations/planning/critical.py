"""Critical concerns refuse a plan, as its migration would fail. A plan may waive a concern by its id.

A concern about a disk does not count if the plan leaves that disk out.
"""

from collections.abc import Iterator

from synvirt.errors import InvalidPlan
from synvirt.model.machine import Concern, VmManifest
from synvirt.model.plan import MigrationPlan
from synvirt.nearest import in_short
from synvirt.sizes import counted

# Ids of concerns about one disk: `disk-unreadable:KEY`.
_OF_A_DISK = "disk-"


def refuse_critical(plan: MigrationPlan, manifest: VmManifest) -> None:
    """InvalidPlan names every critical concern that the plan neither waives nor skips."""
    critical = list(still_open(plan, manifest))
    if critical:
        ids = in_short([one.id for one in critical])
        raise InvalidPlan(
            f"{manifest.name} has {counted(len(critical), 'critical concern')}: {ids}. "
            f"{critical[0].label}: {critical[0].assessment}",
            hint=f"{critical[0].remedy} To continue anyway, name the concern's id in waive_concerns.",
        )


def still_open(plan: MigrationPlan, manifest: VmManifest) -> Iterator[Concern]:
    """The critical concerns that the plan neither waives nor skips."""
    for one in manifest.concerns:
        of_disk = one.id.partition(":")[2] if one.id.startswith(_OF_A_DISK) else None
        if one.category == "Critical" and one.id not in plan.waive_concerns and of_disk not in plan.skip_disks:
            yield one
