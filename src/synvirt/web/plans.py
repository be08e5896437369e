"""Turns a form into a plan, and a plan into a form. It connects to nothing; `FIELDS` is the whole mapping.

Form ── filled ─▶ MigrationPlan, or a mistake at each field
MigrationPlan ── written ─▶ Form
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from synvirt.migrations.planning.critical import still_open
from synvirt.model.kinds import Mode
from synvirt.model.machine import Concern, VmManifest
from synvirt.model.plan import MigrationPlan, PlanSource, SourceRef
from synvirt.offline.units import size_bytes
from synvirt.sizes import exact_size
from synvirt.web.forms import Form
from synvirt.web.words import MISTAKES

# The form's names, with their places in a plan.
FIELDS: Mapping[str, tuple[str, ...]] = {
    "name": ("target", "name"),
    "cpu_count": ("target", "cpu_count"),
    "memory": ("target", "memory_bytes"),
    "disk_bus": ("target", "disk_bus"),
    "destination": ("target", "destination"),
    "identity": ("target", "identity"),
    "mode": ("mode",),
    "conversion": ("conversion",),
    "cutover": ("warm", "cutover"),
    "window": ("warm", "window_id"),
    "verify": ("warm", "verify"),
    "max_passes": ("warm", "max_passes"),
    "delta_threshold": ("warm", "delta_threshold_bytes"),
    "interval": ("warm", "interval_s"),
    "sync_rule": ("warm", "schedule", "rrule"),
    "sync_start": ("warm", "schedule", "start"),
    "sync_zone": ("warm", "schedule", "timezone"),
    "start_at": ("schedule", "start_at"),
    "sync_every": ("schedule", "interval_s"),
    "shutdown": ("shutdown",),
    "shutdown_timeout": ("shutdown_timeout_s",),
    "outage_budget": ("outage_budget_s",),
    "on_overrun": ("on_overrun",),
    "bandwidth": ("limits", "bandwidth_bps"),
    "instant": ("instant",),
}
# Only plans with mode Warm have these. The form hides them for others, but sends them all the same.
_OF_WARM = frozenset({"window", "outage_budget", "on_overrun", "sync_rule", "sync_start", "sync_zone", "sync_every"})
_SIZES = frozenset({"memory", "delta_threshold", "bandwidth"})
# A job is named after its machine.
_AT = {path: name for name, path in FIELDS.items()} | {("name",): "name"}


@dataclass(frozen=True, slots=True)
class Filled:
    """`plan` is None, if there are mistakes: what is wrong, by the form's name of the field; "" is the whole form."""

    plan: MigrationPlan | None
    mistakes: Mapping[str, str] = field(default_factory=dict)


def filled(form: Form, *, ref: SourceRef, source: PlanSource, manifest: VmManifest) -> Filled:
    """The plan in the form, or a mistake for each wrong field."""
    document: dict[str, Any] = {
        "source": source.model_dump(),
        "source_ref": ref.model_dump(),
        "mode": "Cold",
        "name": form.text("name") or _job_name(manifest),
        "target": {"start": form.text("start") == "on", "network_map": list(_mapped(form))},
        "skip_disks": [disk.key for disk in manifest.disks if disk.key not in form.many("disk")],
        "waive_concerns": list(form.many("waive")),
    }
    mistakes: dict[str, str] = {}
    for name, path in FIELDS.items():
        if (value := form.text(name)) and (name not in _OF_WARM or form.text("mode") == Mode.WARM):
            try:
                _put(document, path, size_bytes(value) if name in _SIZES else value)
            except ValueError:
                mistakes[name] = "is not a size, such as 4 GiB or 512 MiB"
    try:
        plan = MigrationPlan.model_validate(document)
    except ValidationError as error:
        return Filled(None, _mistakes(error.errors(include_url=False)) | mistakes)
    mistakes |= _of_the_machine(plan, manifest)
    return Filled(None if mistakes else plan, mistakes)


def critical(plan: MigrationPlan, manifest: VmManifest) -> list[Concern]:
    """What the plan must waive, or skip, to be accepted."""
    return list(still_open(plan, manifest))


def _of_the_machine(plan: MigrationPlan, manifest: VmManifest) -> dict[str, str]:
    """Mistakes that depend on this machine."""
    mistakes = {}
    if manifest.disks and len(plan.skip_disks) == len(manifest.disks):
        mistakes["disk"] = "Choose at least one disk to copy."
    if critical(plan, manifest):
        mistakes["waive"] = "Confirm each critical concern, or leave out what it is about."
    return mistakes


def written(plan: MigrationPlan, manifest: VmManifest) -> Form:
    """The form for this plan; default values are left empty."""
    document = plan.model_dump(mode="json")
    usual = MigrationPlan(source=plan.source, source_ref=plan.source_ref, mode=plan.mode).model_dump(mode="json")
    fields: dict[str, tuple[str, ...]] = {
        "start": ("on",) if plan.target.start else (),
        "disk": tuple(disk.key for disk in manifest.disks if disk.key not in plan.skip_disks),
        "waive": plan.waive_concerns,
        "network_source": tuple(entry.source for entry in plan.target.network_map),
        "network_target": tuple(entry.target for entry in plan.target.network_map),
    }
    for name, path in FIELDS.items():
        value = _at(document, path)
        if name == "mode" or value != _at(usual, path):
            fields[name] = (exact_size(value) if name in _SIZES else str(value),)
    return Form(fields)


def networks_of(manifest: VmManifest) -> dict[str, int]:
    """The networks at the source, each with how many of the machine's cards are on it."""
    found: dict[str, int] = {}
    for nic in manifest.nics:
        found[nic.network] = found.get(nic.network, 0) + 1
    return found


def _job_name(manifest: VmManifest) -> str | None:
    """A name from a foreign file may be anything; a job's has a fixed format."""
    return "".join(character for character in manifest.name if character.isprintable())[:255] or None


def _mapped(form: Form) -> Iterator[dict[str, str]]:
    for source, target in zip(form.many("network_source"), form.many("network_target"), strict=False):
        if target.strip():
            yield {"source": source, "target": target.strip()}


def _mistakes(errors: list[ErrorDetails]) -> dict[str, str]:
    found: dict[str, str] = {}
    for error in errors:
        path = tuple(str(part) for part in error["loc"])
        name, words = _AT.get(path, ""), MISTAKES.get(error["type"])
        bounds = {key: exact_size(int(value)) if name in _SIZES else value for key, value in error.get("ctx", {}).items()}
        found.setdefault(name, words.format_map(bounds) if words else error["msg"].removeprefix("Value error, "))
    return found


def _put(document: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    for name in path[:-1]:
        document = document.setdefault(name, {})
    document[path[-1]] = value


def _at(document: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    found: Any = document
    for name in path:
        found = None if found is None else found[name]
    return found
