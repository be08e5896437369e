"""synvirt import PATH and synvirt inspect PATH: an appliance or a disk image, from a file or a folder."""

from pathlib import Path
from typing import Annotated, Any

import typer

from synvirt.cli.migrations import follow
from synvirt.cli.options import Options, with_options
from synvirt.cli.program import shown

Source = Annotated[Path, typer.Argument(metavar="PATH", help="A file or folder; relative to the import root, or to here")]
# Spelled out: the enumeration's module is too slow to load for `--help`. A test holds the two together.
KINDS = ("ova_archive", "ovf_folder", "vmx_folder", "vhdx", "qcow2", "vmdk", "vmcx_export", "vbox_folder", "xva_archive")


@with_options
def import_(
    options: Options,
    path: Source,
    *,
    mode: Annotated[str, typer.Option(help="warm or cold; an offline import is cold", metavar="MODE")] = "cold",
    kind: Annotated[str | None, typer.Option(help=f"What it is, if it is not recognised: {', '.join(KINDS)}")] = None,
    name: Annotated[str | None, typer.Option(help="The new domain's name")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until the job has ended, and show its progress")] = False,
) -> None:
    """Import a VM from a file or folder inside the import root."""
    from synvirt.model import HostPathRef, MigrationPlan, Mode, OfflineKind, PlanSource, Target

    if mode.capitalize() not in tuple(Mode):
        raise typer.BadParameter(f"{mode} is neither warm nor cold", param_hint="--mode")
    if kind is not None and kind not in KINDS:
        raise typer.BadParameter(f"{kind} is none of {', '.join(KINDS)}", param_hint="--kind")
    where = _in_import_root(options, path)
    plan = MigrationPlan(
        source=PlanSource(Offline=OfflineKind(kind) if kind else _detected(options, where)),
        source_ref=HostPathRef(kind="offline_host_path", path=str(where)),
        mode=Mode(mode.capitalize()),
        name=name,
        target=Target(name=name),
    )
    with options.connect() as client:
        if not wait:
            answer = client.ask("POST", "/migrations", json={"plan": plan.model_dump(mode="json")})
            print(
                answer
                if options.json
                else f"Job {_id_of(answer)} is queued. Watch it: synvirt migrations watch {_id_of(answer)}"
            )
            return
        follow(options, client, str(client.submit(plan).id))


@with_options
def inspect(options: Options, path: Source) -> None:
    """Say what a file or folder is and which VM is in it. Nothing is copied, and no service is needed."""
    from synvirt.disks.beneath import resolve_beneath
    from synvirt.model import Inspection
    from synvirt.offline.registry import detect

    where = _in_import_root(options, path)
    imports = options.settings.imports_dir.absolute()
    # The files a VM is made of lie beside one another: outside the import root, its folder is all that may be read.
    root = imports if where.is_relative_to(imports) else where.parent
    importer = detect(where, root)
    manifest = importer.inspect(resolve_beneath(root, str(where)), root)
    print_inspection(Inspection(offline_kind=importer.kind, manifest=manifest).model_dump_json(), as_json=options.json)


def print_inspection(answer: str, *, as_json: bool) -> None:
    """`answer` is an Inspection: the service's, or our own."""
    from synvirt.model import Inspection

    if as_json:
        print(answer)
    else:
        found = Inspection.model_validate_json(answer)
        _describe(str(found.offline_kind), found.manifest)


def _in_import_root(options: Options, path: Path) -> Path:
    """An absolute path: what lies in the import root by that name, or else from here."""
    from synvirt.errors import BadRequest

    if options.address is not None and not path.is_absolute():
        raise BadRequest(f"{path}: a service elsewhere needs the absolute path, as it is there")
    if path.is_absolute():
        return path
    inside = options.settings.imports_dir.absolute() / path
    return inside if inside.exists() else path.absolute()


def _detected(options: Options, where: Path) -> Any:
    from synvirt.errors import SynvirtError, UnsupportedFormat
    from synvirt.offline.registry import detect

    try:
        root = where.parent if options.address is not None else options.settings.imports_dir.absolute()
        return detect(where, root).kind
    except UnsupportedFormat as error:
        raise UnsupportedFormat(error.detail, hint=error.hint or "--kind says what it is") from None
    except SynvirtError as error:
        if options.address is None:
            raise
        raise UnsupportedFormat(f"{where} cannot be looked at from here", hint="--kind says what it is") from error


def _id_of(answer: str) -> str:
    import json

    return str(json.loads(answer)["id"])


def _describe(kind: str, manifest: Any) -> None:
    from synvirt.cli.watching import sized

    rows = [
        ("kind", kind),
        ("name", manifest.name),
        ("guest", f"{manifest.guest_os.name or manifest.guest_os.id or '-'} ({manifest.guest_os.family})"),
        ("firmware", manifest.firmware + (", secure boot" if manifest.secure_boot else "") + (", TPM" if manifest.tpm else "")),
        ("hardware", f"{manifest.cpu_count} CPUs, {sized(manifest.memory_bytes)} of memory"),
        *(
            ("disk", f"{disk.key} {disk.label}: {sized(disk.capacity_bytes)}, {disk.format}, {disk.bus}")
            for disk in manifest.disks
        ),
        *(("network", f"{nic.key} {nic.mac or '-'} in {nic.network or '-'}") for nic in manifest.nics),
        *(
            (concern.category.lower(), f"{concern.label}: {concern.assessment} {concern.remedy}")
            for concern in manifest.concerns
        ),
    ]
    for name, value in rows:
        print(f"{name:12} {shown(value)}")
