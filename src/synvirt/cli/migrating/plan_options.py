"""The options of `synvirt import` that set fields of the plan: each row has an option, its help, and its field."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer

from synvirt.cli.options import size_given
from synvirt.nearest import none_of

BUSES = ("virtio", "scsi", "sata", "ide", "nvme")
CONVERSIONS = ("auto", "always", "never")


def _as_it_is(value: Any, _option: str) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Sets:
    """The field of the plan that an option sets, and `also` a second one. `words`: the allowed ones. `value`: makes the field's
    value from the typed text and the option's name; typer.BadParameter."""

    field: str
    also: str | None = None
    words: Sequence[str] = ()
    value: Callable[[Any, str], Any] = _as_it_is


def networks(asked: list[str], option: str) -> list[dict[str, str]]:
    """A source's network may have any name, even with an equals sign; this host's networks have none."""
    pairs = [one.rpartition("=") for one in asked]
    for (source, _, target), one in zip(pairs, asked, strict=True):
        if not source or not target:
            raise typer.BadParameter(f"{one} is not SOURCE=TARGET", param_hint=option)
    return [{"source": source, "target": target} for source, _, target in pairs]


def _capital(word: str, _option: str) -> str:
    return word.capitalize()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The typed options; `as_plan` makes the plan from them."""

    mode: Annotated[
        str,
        typer.Option(help="warm or cold; an offline import is cold", metavar="MODE"),
        Sets("mode", words=("warm", "cold"), value=_capital),
    ] = "cold"
    cutover: Annotated[
        str,
        typer.Option(help="Warm: auto, or manual: by migrations cutover", metavar="WHEN"),
        Sets("warm.cutover", words=("auto", "manual")),
    ] = "auto"
    window: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Warm: cut over by itself, but within this window alone (synvirt windows list)"),
        Sets("warm.window_id"),
    ] = None
    verify: Annotated[
        str,
        typer.Option(
            help="Warm: full compares all that the source reports as unchanged, not a sample; auto if there is time",
            metavar="HOW",
        ),
        Sets("warm.verify", words=("auto", "sample", "full")),
    ] = "auto"
    confidence: Annotated[
        float | None,
        typer.Option(min=0.5, max=0.9999, help="Warm: the confidence of the samples' result, by default 0.95"),
        Sets("warm.confidence"),
    ] = None
    untracked: Annotated[
        str,
        typer.Option(help="Warm, and the source cannot track changes: copy it cold, or fail", metavar="WHAT"),
        Sets("warm.untracked", words=("cold", "fail")),
    ] = "cold"
    max_passes: Annotated[
        int | None, typer.Option(min=1, help="Warm: after this many deltas it fails"), Sets("warm.max_passes")
    ] = None
    delta_threshold: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Warm: a delta as small as this is the last before the cut-over"),
        Sets("warm.delta_threshold_bytes", value=size_given),
    ] = None
    interval: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Warm: the pause between two deltas"),
        Sets("warm.interval_s"),
    ] = None
    start_at: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="When it begins, for example 2026-11-28T22:00:00+01:00"),
        Sets("schedule.start_at"),
    ] = None
    sync_every: Annotated[
        float | None,
        typer.Option(min=60, metavar="SECONDS", help="Held: copy changes at this interval, from --start-at on"),
        Sets("schedule.interval_s"),
    ] = None
    sync_rule: Annotated[
        str | None,
        typer.Option(metavar="RRULE", help="Held: copy what has changed by this rule of RFC 5545, as FREQ=DAILY"),
        Sets("warm.schedule.rrule"),
    ] = None
    sync_start: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="First time of --sync-rule, local: 2026-11-28T22:00:00"),
        Sets("warm.schedule.start"),
    ] = None
    sync_zone: Annotated[
        str | None,
        typer.Option(metavar="ZONE", help="Time zone of --sync-start: Europe/Berlin; UTC where not given"),
        Sets("warm.schedule.timezone"),
    ] = None
    bandwidth: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="At most this much is copied per second, for example 50MiB"),
        Sets("limits.bandwidth_bps", value=size_given),
    ] = None
    name: Annotated[str | None, typer.Option(help="The new domain's name"), Sets("target.name", also="name")] = None
    cpus: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Its processors; by default as at the source"),
        Sets("target.cpu_count"),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Its memory, for example 4GiB"),
        Sets("target.memory_bytes", value=size_given),
    ] = None
    disk_bus: Annotated[
        str | None,
        typer.Option(metavar="BUS", help=f"Its disks' bus: {', '.join(BUSES)}"),
        Sets("target.disk_bus", words=BUSES),
    ] = None
    destination: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Where its volumes go; the settings name the destinations"),
        Sets("target.destination"),
    ] = None
    network: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE=TARGET", help="Plug cards of that network into bridge:NAME, network:NAME or user here"),
        Sets("target.network_map", value=networks),
    ] = None
    new_identity: Annotated[
        bool,
        typer.Option("--new-identity", help="UUID and MAC addresses of its own, for a copy beside the original"),
        Sets("target.identity", value=lambda new, _: "new" if new else "keep"),
    ] = False
    no_start: Annotated[
        bool,
        typer.Option("--no-start", help="Define it and leave it off"),
        Sets("target.start", value=lambda off, _: not off),
    ] = False
    skip_disk: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Leave this disk out; may be repeated"), Sets("skip_disks")
    ] = None
    waive: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Continue in spite of this critical concern; may be repeated"),
        Sets("waive_concerns"),
    ] = None
    conversion: Annotated[
        str,
        typer.Option(
            metavar="WHEN", help="Put virtio drivers into the guest: auto (where it cannot start without), always or never"
        ),
        Sets("conversion", words=CONVERSIONS),
    ] = "auto"
    shutdown: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="How the source's guest is shut down before the last copy: polite, hold (never by force) or force",
        ),
        Sets("shutdown", words=("polite", "hold", "force")),
    ] = "polite"
    shutdown_timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="How long the guest may take to shut down; by default the source's option"),
        Sets("shutdown_timeout_s"),
    ] = None
    outage_budget: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Warm: hold until the expected outage is no longer (p95)"),
        Sets("outage_budget_s"),
    ] = None
    on_overrun: Annotated[
        str,
        typer.Option(metavar="WHAT", help="If the outage becomes longer: go_on, or roll_back to the source"),
        Sets("on_overrun", words=("go_on", "roll_back")),
    ] = "go_on"
    instant: Annotated[
        bool,
        typer.Option("--instant", help="Start the guest at once from its source, and copy it while it runs"),
        Sets("instant"),
    ] = False
    on_host_lost: Annotated[
        str | None,
        typer.Option(metavar="WHAT", help="Where the host of its volumes is lost: wait for it, or restart_elsewhere"),
        Sets("on_host_lost", words=("wait", "restart_elsewhere")),
    ] = None


def _rows() -> dict[str, Sets]:
    hints = get_type_hints(PlanOptions, include_extras=True)
    return {
        field.name: next(one for one in hints[field.name].__metadata__ if isinstance(one, Sets))
        for field in fields(PlanOptions)
    }


ROWS = _rows()


def option_of(name: str) -> str:
    """An option in its typed form: `--disk-bus` for `disk_bus`."""
    return f"--{name.replace('_', '-')}"


def checked(option: str, word: str | None, words: Sequence[str]) -> None:
    """typer.BadParameter for a word that is not in `words`."""
    if word is not None and word not in words:
        raise typer.BadParameter(none_of(word, words), param_hint=option)


def as_plan(chosen: PlanOptions) -> dict[str, Any]:
    """The plan's fields that options set; others are left out. typer.BadParameter."""
    plan: dict[str, Any] = {}
    for name, row in ROWS.items():
        typed, option = getattr(chosen, name), option_of(name)
        if typed is None:
            continue
        if row.words:
            typed = typed.lower()
            checked(option, typed, row.words)
        for field in filter(None, (row.field, row.also)):
            _put(plan, field.split("."), row.value(typed, option))
    return plan


def _put(plan: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        plan = plan.setdefault(part, {})
    plan[path[-1]] = value
