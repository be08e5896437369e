"""What a plan would do, without doing it: `synvirt import --dry-run`, `synvirt migrations dry-run`."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from synvirt.cli import json_files
from synvirt.cli.listing import at
from synvirt.cli.migrating.plan_options import ROWS, option_of
from synvirt.cli.options import Options
from synvirt.cli.program import FAILED, print_sheet
from synvirt.errors import BadRequest, SynvirtError
from synvirt.sizes import counted, duration, sized

if TYPE_CHECKING:
    from synvirt.cli.client import Client

# A plan has some kilobytes; the names of a thousand disks need some more.
_PLAN_BYTES_MAX = 4 << 20


_PLAIN = {row.field: option_of(name) for name, row in ROWS.items() if not re.search(r"[._]", row.field)}


@cache
def _named() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Patterns of the API's names of fields, each with the option of `synvirt import`. To compile them takes a tenth of what
    `synvirt --help` takes, so it waits until there is a text."""
    return tuple(_patterns())


def _patterns() -> Iterator[tuple[re.Pattern[str], str]]:
    """A plain word, like `name`, may be any word of a sentence."""
    yield re.compile(r"\bset target\.identity to new\b"), "give --new-identity"
    yield re.compile(r"\bset target\.start to false\b"), "give --no-start"
    yield re.compile(r"\btarget\.start false\b"), "--no-start"
    yield re.compile(r"\bsubmit it as \{Offline: (\w+)\}"), r"give --kind \1, or leave --kind out"
    yield re.compile(r"\btarget\.identity is new\b"), "--new-identity asks for it"
    fields = {row.field: option_of(name) for name, row in ROWS.items() if re.search(r"[._]", row.field)}
    for field in sorted(fields, key=len, reverse=True):
        yield re.compile(rf"\b(?:plan\.)?{re.escape(field)}\b(\[\d+\](\.\w+)?)?"), fields[field]
    for field, option in _PLAIN.items():
        yield re.compile(rf"\bplan\.{re.escape(field)}\b|^{re.escape(field)}$"), option
    for name, row in ROWS.items():
        if row.also is not None:
            yield re.compile(rf"\bplan\.{re.escape(row.also)}\b"), option_of(name)


def as_options(text: str) -> str:
    """Replaces the API's words for a plan's fields by this command's options."""
    for field, option in _named():
        text = field.sub(option, text)
    # An option that sets two fields would be reported twice.
    return "; ".join(dict.fromkeys(text.split("; ")))


@contextmanager
def speaking_as_options() -> Iterator[None]:
    """The service's errors, in terms of the typed options."""
    try:
        yield
    except SynvirtError as error:
        raise type(error)(as_options(error.detail), hint=error.hint and as_options(error.hint)) from None


def plan_in(path: Path) -> dict[str, Any]:
    """The plan in a file, with or without its envelope. BadRequest."""
    content = json_files.content(path)
    if len(content) > _PLAN_BYTES_MAX:
        raise BadRequest(f"{path} has over {_PLAN_BYTES_MAX} bytes; a plan has some thousand")
    document = json_files.parsed(path, content)
    plan = document.get("plan", document)
    if not isinstance(plan, dict):
        raise BadRequest(f"{path} holds no plan: an object with source, source_ref and mode")
    return plan


def patch_of(changes: Sequence[str]) -> dict[str, Any]:
    """Makes a patch of a plan from texts like `target.name=web2`. A value that is JSON is used as such, else as a text.
    BadRequest."""
    patch: dict[str, Any] = {}
    for change in changes:
        path, equals, text = change.partition("=")
        names = path.split(".")
        if not equals or not all(names):
            raise BadRequest(f"--set {change}: is not FIELD=VALUE", hint="--set target.name=web2, for example")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        inner = patch
        for name in names[:-1]:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise BadRequest(f"--set {path}: a part of it is also set")
        inner[names[-1]] = value
    return patch


def show_dry_run(options: Options, client: "Client", plan: dict[str, Any]) -> None:
    """Exits 1, if something is wrong with the plan."""
    answer = client.ask("POST", "/migrations", json={"plan": plan}, params={"dry_run": True})
    found = json.loads(answer)
    if options.json:
        print(answer)
    else:
        print_sheet(_rows(found))
    if found["problems"]:
        raise typer.Exit(FAILED)


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    manifest = found["manifest"]
    if manifest is not None:
        yield (
            "machine",
            f"{manifest['name']}, {counted(manifest['cpu_count'], 'CPU')}, {sized(manifest['memory_bytes'])} of memory",
        )
    for way in found["ways"]:
        yield "disk", f"{way['disk_key']}: {way['way']} ({way['reason']})"
    if found["forecast"] is not None:
        yield "forecast", _forecast(found["forecast"])
    if found.get("cut_over") is not None:  # an earlier version of the service knows no windows
        yield "cut-over", _cut_over(found["cut_over"])
    for one in found["differences"]:
        yield "differs", f"{one['what']}: {one['source']} → {one['here']} ({as_options(one['why'])})"
    for one in found["concerns"]:
        yield one["category"].lower(), f"{one['id']}: {one['label']}. {one['assessment']} {as_options(one['remedy'])}"
    for one in found["problems"]:
        hint = f"; {as_options(one['hint'])}" if one["hint"] else ""
        yield "problem", f"{as_options(one['field'])}: {as_options(one['detail'])}{hint}"
    if not found["problems"]:
        yield "result", "nothing is wrong with it"


def _cut_over(one: dict[str, Any]) -> str:
    if one["not_before"] is None:
        return f"no opening of window {one['window_id']} is as long as the outage may be"
    return f"in window {one['window_id']}, from {at(one['not_before'])} to {at(one['not_after'])}"


def _forecast(one: dict[str, Any]) -> str:
    text = f"{sized(one['bytes_to_read'])} to read"
    if one["copy_s"] is not None:
        text += f", about {duration(one['copy_s'])}"
    if one["outage_p50_s"] is not None:
        text += f"; the guest is off for {duration(one['outage_p50_s'])}, {duration(one['outage_p95_s'])} at p95"
    return f"{text} ({one['basis']})" if one["basis"] else text
