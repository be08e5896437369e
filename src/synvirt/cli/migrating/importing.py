"""synvirt import PATH and synvirt inspect PATH: an appliance or a disk image, from a file, a folder or a URL.

The service finds the kind of a file. A file that the service cannot reach is sent to it first (`--upload`).
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from synvirt.cli.describing import describe
from synvirt.cli.migrating.dry_runs import show_dry_run, speaking_as_options
from synvirt.cli.migrating.elsewhere import ElsewhereOptions, is_url, request
from synvirt.cli.migrating.following import follow
from synvirt.cli.migrating.plan_options import PlanOptions, as_plan, checked
from synvirt.cli.migrating.upload_shown import file_stays, kept, send
from synvirt.cli.options import Options, with_options
from synvirt.cli.program import INTERRUPTED
from synvirt.cli.sources import live_vm
from synvirt.errors import BadRequest, HostPathRejected, NotFound, SynvirtError
from synvirt.nearest import did_you_mean_file
from synvirt.texts import escaped_json

if TYPE_CHECKING:
    from synvirt.cli.client import Client
    from synvirt.model.values import Received as Received_

Received = TypeVar("Received", bound="Received_")


def _named(path: str) -> str:
    """An empty text, as from an unset variable of a script, would be the present folder."""
    if not path:
        raise typer.BadParameter("a file, a folder or a URL is needed, and this text is empty")
    return path


Source = Annotated[
    str,
    typer.Argument(
        metavar="PATH", callback=_named, help="A file or folder, relative to the import root or to here; or its URL"
    ),
]
SourceOrVm = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        callback=_named,
        help="A file or folder, in the import root or here; its URL (http, https, s3, smb); with --source a VM",
    ),
]
# Spelled out: the enumeration's module is too slow to load for `--help`. A test compares the two.
KINDS = ("ova_archive", "ovf_folder", "vmx_folder", "vhdx", "qcow2", "vmdk", "vmcx_export", "vbox_folder", "xva_archive")
# Kinds of several files: a description and its disks.
FOLDER_KINDS = ("ovf_folder", "vmx_folder", "vbox_folder", "vmcx_export")
ChosenVm = Annotated[str | None, typer.Option("--vm", metavar="NAME", help="Of a file with several VMs, the one that is meant")]


@with_options
def import_(
    options: Options,
    path: SourceOrVm,
    *,
    source: Annotated[str | None, typer.Option(help="The platform that the VM runs on: synvirt sources list")] = None,
    kind: Annotated[str | None, typer.Option(help=f"What it is, if it is not recognised: {', '.join(KINDS)}")] = None,
    elsewhere: ElsewhereOptions,
    vm: ChosenVm = None,
    upload: Annotated[bool, typer.Option("--upload", help="Send the file to the service first, and import it there")] = False,
    chosen: PlanOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show how it would run and what is wrong; create no job")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until the job has ended, and show its progress")] = False,
) -> None:
    """Import a VM from a file, a URL or a platform.

    A file or folder lies in the import root of this host; with --upload, or where --server is elsewhere, a file from here is
    sent to the service first. The service reads a URL itself; with --source the VM is moved from the platform that it runs on.

    Examples: synvirt import web.ova --name web --wait; synvirt import web --source lab --mode warm;
    synvirt import smb://nas.example/exports/web.ova --login importer
    """
    checked("--kind", kind, KINDS)
    plan = as_plan(chosen)
    stays = ["no job is created"]
    with _interruptible(stays), options.connect() as client:
        inspection: Inspection | None = None
        if source is not None:
            plan["source"], plan["source_ref"] = live_vm(client, source, path)
        elif is_url(path):
            asked = request(path, elsewhere) | _meant(vm)
            plan["source_ref"], inspection = {"kind": "remote_url", **asked}, ("/remote-files/inspect", asked)
        else:
            plan["source_ref"], inspection = _placed(options, client, Path(path), vm=vm, upload=upload, known=kind is not None)
        upload_id = plan["source_ref"].get("upload_id")
        if upload_id is not None:
            stays.append(f"no job is created; {file_stays(upload_id)}")
        with kept(upload_id), speaking_as_options():
            if inspection is not None:
                plan["source"] = {"Offline": kind or _kind(client, inspection)}
            if dry_run:
                show_dry_run(options, client, plan)
                raise typer.Exit  # no job is created: `kept` reports what stays
            stays.append("the service may have taken the job: synvirt migrations list")
            answer = client.ask("POST", "/migrations", json={"plan": plan})
        if wait:
            follow(options, client, _field(answer, "id"))
        elif options.json:
            print(answer)
        else:
            print(f"Job {_field(answer, 'id')} is queued. Watch it: synvirt migrations watch {_field(answer, 'id')}")


@contextmanager
def _interruptible(stays: list[str]) -> Iterator[None]:
    """Ctrl-C ends the command; the last text of `stays` says what remains."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"Interrupted: {stays[-1]}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


@with_options
def inspect(
    options: Options,
    path: Source,
    *,
    vm: ChosenVm = None,
    elsewhere: ElsewhereOptions,
) -> None:
    """Say what a file or folder is and which VM is in it. Nothing is copied, and no service is needed.

    With --server it is a path there, or a URL that the service there reads.

    Example: synvirt inspect web01.ova
    """
    asked: dict[str, Any] = {"path": path}
    if is_url(path):
        asked = request(path, elsewhere)
    asked |= _meant(vm)
    if options.address is not None:
        with options.connect() as client:
            answer = client.ask("POST", "/remote-files/inspect" if is_url(path) else "/host-files/inspect", json=asked)
    else:
        answer = _inspected_elsewhere(options, asked) if is_url(path) else _inspected_here(options, Path(path), vm)
    print_inspection(answer, as_json=options.json)


def _inspected_here(options: Options, path: Path, vm: str | None) -> str:
    from synvirt.offline import browsing
    from synvirt.offline.known_by import root_of

    where = _here(options, path)
    imports = options.settings.imports_dir.absolute()
    # The files of a VM are next to one another: outside the import root, only its folder may be read.
    if where.is_relative_to(imports):
        root = imports
    else:  # a person's own links may lead anywhere
        from synvirt.cli.disk.images import resolved

        where = resolved(where)
        root = where.parent if where.is_dir() else root_of(where)
    return escaped_json(browsing.inspect(root, str(where), vm=vm).model_dump_json())


def _inspected_elsewhere(options: Options, asked: dict[str, Any]) -> str:
    from synvirt.model.access import RemoteFileRequest
    from synvirt.offline import browsing
    from synvirt.offline.elsewhere import Rules, place

    # The person who runs the command may reach what this host reaches: the rules are for callers of a service.
    rules = Rules(allowed_hosts=("0.0.0.0/0", "::/0"), ca_file=options.settings.remote_ca_file)
    where, root = place(_received(RemoteFileRequest, asked), rules)
    return escaped_json(browsing.inspect(root, str(where), vm=asked.get("vm")).model_dump_json())


def _received(model: type[Received], asked: dict[str, Any]) -> Received:
    from pydantic import ValidationError

    from synvirt.mistakes import place, worded

    try:
        return model.model_validate(asked)
    except ValidationError as error:  # pydantic's message would show the input
        first = error.errors(include_url=False)[0]
        raise BadRequest(f"{place(first['loc'])}: {worded(first)}") from None


def print_inspection(answer: str, *, as_json: bool) -> None:
    """`answer` is an Inspection: the service's, or our own."""
    from synvirt.model.files import Inspection

    if as_json:
        print(answer)
    else:
        found = Inspection.model_validate_json(answer)
        describe(str(found.offline_kind), found.manifest)


# ── where the VM is ──────────────────────────────────────────────────────────────────────────────────────────────────

# A request for the service to inspect the source: its path and its body.
Inspection = tuple[str, dict[str, Any]]


def _placed(
    options: Options, client: "Client", path: Path, *, vm: str | None, upload: bool, known: bool
) -> tuple[dict[str, str], Inspection]:
    """The plan's source_ref. A remote service sees only its own files: a relative path, or one that it does not have, is a
    local file and is sent. If its kind is not `known`, it is inspected first, so that gigabytes without a VM are not sent."""
    elsewhere = options.address is not None
    if not upload and elsewhere:
        upload = not path.is_absolute() or (path.is_file() and not _is_there(client, path))
    if upload:
        if not known and path.is_file():
            from synvirt.cli.disk.images import resolved

            _require_whole_vm(resolved(path), vm)
        id_ = _field(send(client, path, quiet=options.json), "id")
        return {"kind": "upload", "upload_id": id_, **_meant(vm)}, (f"/uploads/{id_}/inspect", _meant(vm))
    where = str(path if elsewhere else _here(options, path))
    placed = {"path": where, **_meant(vm)}
    return {"kind": "offline_host_path", **placed}, ("/host-files/inspect", placed)


def _meant(vm: str | None) -> dict[str, str]:
    return {} if vm is None else {"vm": vm}


def _require_whole_vm(file: Path, vm: str | None) -> None:
    """UnsupportedFormat, MalformedArchive; BadRequest for a description, whose disks would not be sent."""
    from synvirt.offline import browsing

    kind = browsing.inspect(file.parent, str(file), vm=vm).offline_kind
    if kind in FOLDER_KINDS or file.name.lower() == "ova.xml":
        hint = "copy the VM's folder into the import root, or pack it: tar -cf web.ova web.ovf *.vmdk"
        raise BadRequest(f"{file.name} is a part of a VM ({kind}): its disks lie in files beside it", hint=hint)


def _is_there(client: "Client", path: Path) -> bool:
    try:
        client.ask("POST", "/host-files/inspect", json={"path": str(path)})
    except (HostPathRejected, NotFound):
        return False
    except SynvirtError:
        return True  # it exists, and is damaged: the service will report how
    return True


def _kind(client: "Client", inspection: Inspection) -> str:
    path, body = inspection
    try:
        return _field(client.ask("POST", path, json=body), "offline_kind")
    except HostPathRejected as error:
        hint = "Copy or move it into the import root, or send the file: --upload"
        raise HostPathRejected(error.detail, hint=hint) from None


def _here(options: Options, path: Path) -> Path:
    """An absolute path: in the import root, if that has the name, else from the present folder; `.` and `..` mean the present
    folder. NotFound."""
    inside = options.settings.imports_dir.absolute() / path
    places = (path.resolve(),) if path.parts[:1] in ((), ("..",)) else (inside, path.absolute())
    for where in places:
        if os.path.lexists(where):
            return where
    looked = ", neither in the import root nor here" if places[0] != places[-1] else ""
    near = did_you_mean_file(path, *(where.parent for where in places))
    raise NotFound(f"there is no {path}{looked}", hint=near or f"the import root is {options.settings.imports_dir.absolute()}")


def _field(answer: str, name: str) -> str:
    import json

    return str(json.loads(answer)[name])
