"""synvirt sources add|list|show|change|test|record|vms|inspect|remove, and synvirt keyring rotate"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from synvirt.cli.listing import Cursor, Limit, at, full_id, print_list, print_one, print_table, segment
from synvirt.cli.options import Options, with_options
from synvirt.cli.program import FAILED, print_sheet, shown
from synvirt.cli.secret import secret
from synvirt.nearest import did_you_mean, most_like, none_of

app = typer.Typer(no_args_is_help=True, help="The platforms that VMs are moved from.")
keyring = typer.Typer(no_args_is_help=True, help="The key that seals the credentials of sources.")

SourceId = Annotated[str, typer.Argument(metavar="SOURCE", help="The source's name, its id, or the id's beginning")]
# Spelled out: the enumeration's module is too slow to load for `--help`. A test compares the two.
KINDS = ("vim_api", "wmi_api", "pve_api", "libvirt_remote", "xen_api", "prism_api")
# What people call them.
PLATFORMS = {
    **dict.fromkeys(("vsphere", "vcenter", "vmware", "esxi"), "vim_api"),
    **dict.fromkeys(("hyper-v", "windows"), "wmi_api"),
    **dict.fromkeys(("proxmox", "pve"), "pve_api"),
    **dict.fromkeys(("libvirt", "kvm", "qemu"), "libvirt_remote"),
    **dict.fromkeys(("xenserver", "xcp-ng", "citrix"), "xen_api"),
    **dict.fromkeys(("nutanix", "ahv"), "prism_api"),
}

Name = Annotated[str, typer.Argument(metavar="NAME", help="Its name here")]
Endpoint = Annotated[str, typer.Argument(metavar="URL", help="https://vcenter.example, or qemu+ssh://root@host/system")]
Kind = Annotated[str | None, typer.Option(metavar="KIND", help=f"{', '.join(KINDS)}; qemu… URLs are libvirt_remote")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How the service gets into a platform: the options that `add` and `change` share."""

    source_user: Annotated[
        str | None, typer.Option("--source-user", help="The user on the platform; its password is asked for")
    ] = None
    secret: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD", help="Another secret to be asked for, as token_secret; a line of the standard input each"
        ),
    ] = None
    credential: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE", help="Another field of the credentials, which is not secret; FIELD=@FILE: a file's text"
        ),
    ] = None
    option: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=VALUE", help="An option of the platform: docs/platforms")
    ] = None
    fingerprint: Annotated[
        str | None, typer.Option(metavar="SHA256", help="Pin the certificate that the platform must show")
    ] = None
    any_certificate: Annotated[bool, typer.Option("--any-certificate", help="Accept any certificate, an attacker's too")] = (
        False
    )

    def credentials(self) -> dict[str, str]:
        """Asks for the secrets among them."""
        user, secrets = self.source_user, self.secret or []
        given = {"user": user} if user else {}
        for field, value in map(_pair, self.credential or []):
            given[field] = _text(Path(value[1:])) if value.startswith("@") else value
        asked = dict.fromkeys([*(["password"] if user and not secrets and "password" not in given else []), *secrets])
        return given | {field: secret(field.replace("_", " ").capitalize()) for field in asked}

    def platform_options(self) -> dict[str, Any]:
        """The `options` of a source, from what was typed."""
        given: dict[str, Any] = dict(map(_pair, self.option or []))
        if self.fingerprint is not None:
            given["fingerprint_sha256"] = self.fingerprint
        if self.any_certificate:
            given["verify_tls"] = False
        return given


def _no_kind(word: str) -> str:
    """The error for an unknown kind. It suggests the nearest kind, also by the platform's name."""
    near = None if most_like(word.lower(), KINDS) else most_like(word.lower(), PLATFORMS)
    return none_of(word if near is None else PLATFORMS[near], KINDS, typed=word)


@app.command()
@with_options
def add(
    options: Options,
    name: Name,
    endpoint: Endpoint,
    *,
    kind: Kind = None,
    access: Access,
) -> None:
    """Register a platform. A password is asked for on a terminal, else it is the first line of the standard input.

    Example: synvirt sources add lab https://vcenter.example --kind vim_api --source-user administrator@vsphere.local
    """
    import json

    if kind is None and endpoint.strip().lower().startswith("qemu"):
        kind = "libvirt_remote"
    if kind not in KINDS:
        reason = f"this address does not say what answers there: {', '.join(KINDS)}" if kind is None else _no_kind(kind)
        raise typer.BadParameter(reason, param_hint="--kind")
    body = {
        "name": name,
        "kind": kind,
        "endpoint": endpoint,
        "credentials": access.credentials(),
        "options": access.platform_options(),
    }
    with options.connect() as client:
        answer = client.ask("POST", "/sources", json=body)
    if options.json:
        print(answer)
        return
    print(f"Source {shown(name)} is registered as {json.loads(answer)['id']}. Try it: synvirt sources test '{shown(name)}'")


@app.command("list")
@with_options
def list_(
    options: Options,
    limit: Limit = 1000,
    cursor: Cursor = None,
) -> None:
    """List the sources, newest first.

    Example: synvirt sources list
    """
    print_list(options, "/sources", limit, cursor, none="There are no sources", show=_source_table)


@app.command()
@with_options
def show(options: Options, source: SourceId) -> None:
    """Show one source. Its credentials are never shown.

    Example: synvirt sources show lab
    """
    print_one(options, lambda client: f"/sources/{source_id(client, source)}", _sheet)


def _sheet(found: dict[str, Any]) -> None:
    rows = [(name, str(found[name])) for name in ("id", "name", "kind", "endpoint", "created_at")]
    rows += [
        ("option", f"{name} = {_option_text(value)}") for name, value in found["options"].items() if value not in (None, "")
    ]
    print_sheet([*rows, ("tested", _tested(found))])


@app.command()
@with_options
def change(
    options: Options,
    source: SourceId,
    *,
    name: Annotated[str | None, typer.Option(help="A new name")] = None,
    endpoint: Annotated[str | None, typer.Option(metavar="URL", help="Another address; needs the credentials again")] = None,
    access: Access,
) -> None:
    """Change a source: rename it, pin its certificate, give it new credentials.

    Credentials replace all those it had. Options that are not named stay; `--option FIELD=` takes one back to its default.

    Example: synvirt sources change lab --name dc1
    """
    body: dict[str, Any] = {key: value for key, value in (("name", name), ("endpoint", endpoint)) if value is not None}
    if credentials := access.credentials():
        body["credentials"] = credentials
    platform = access.platform_options()

    def changed(before: dict[str, Any]) -> dict[str, Any]:
        given = (before["options"] | platform).items()
        return body | {"options": {name: value for name, value in given if value not in (None, "")}}

    with options.connect() as client:
        path = f"/sources/{source_id(client, source)}"
        answer = client.edit("PATCH", path, changed) if platform else client.ask("PATCH", path, json=body)
    print(answer if options.json else f"Source {shown(source)} is changed")


@app.command()
@with_options
def test(
    options: Options,
    source: SourceId,
    *,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also take a snapshot, read from it (by each way that there is), and remove it")
    ] = False,
    vm: Annotated[str | None, typer.Option(help="The VM to do that on, by id or name; else any that runs")] = None,
) -> None:
    """Try a source: address, port, certificate, login, privileges. Exits 1 when something is wrong.

    Example: synvirt sources test lab --deep
    """
    import json

    from synvirt.errors import AuthFailed, SourceUnreachable

    with options.connect() as client:
        id_ = source_id(client, source)
        if vm is not None:
            with suppress(AuthFailed, SourceUnreachable):  # the test itself will report it
                vm = _vm_id(client, id_, source, vm)
        answer = client.ask("POST", f"/sources/{id_}/test", params={"deep": deep, "vm_id": vm})
    found = json.loads(answer)
    if options.json:
        print(answer)
    else:
        for check in found["checks"]:
            word = "warning" if check["warning"] else "ok" if check["ok"] else "FAILED"
            print(shown(f"{word:7} {check['name']:12} {check['detail']}"))
            if check["hint"] and word != "ok":
                print(shown(f"{'':7} {'':12} {check['hint']}"))
        print("The source can be used." if found["ok"] else "The source cannot be used yet.")
    if not found["ok"]:
        raise typer.Exit(FAILED)


@app.command()
@with_options
def record(
    options: Options,
    source: SourceId,
    *,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write it; else the standard output")] = None,
    vm: Annotated[list[str] | None, typer.Option(help="A VM to be inspected, by id or name; without, the first 50")] = None,
) -> None:
    """Write down what a source's control plane answers, without secrets, names and addresses, to be replayed in tests.

    Example: synvirt sources record lab --output lab.jsonl
    """
    from synvirt.durable import put_text

    with options.connect() as client:
        id_ = source_id(client, source)
        chosen = [_vm_id(client, id_, source, one) for one in vm or ()]
        answer = client.ask("POST", f"/sources/{id_}/record", params={"vm_id": chosen})
    if output is None:
        print(answer, end="")
        return
    if output.exists() and not output.is_file():  # a device or a pipe
        output.write_text(answer)
    else:
        put_text(output, [answer])
    print(shown(f"{output}: {answer.count(chr(10)) - 1} answers. Check it before you send it to anyone."))


@app.command()
@with_options
def vms(
    options: Options,
    source: SourceId,
    *,
    search: Annotated[str, typer.Option(help="Part of a name or an id")] = "",
    limit: Annotated[int, typer.Option(min=1, max=5000, help="At most this many")] = 5000,
    cursor: Cursor = None,
) -> None:
    """List the VMs on a source, by name.

    Example: synvirt sources vms lab
    """
    print_list(
        options,
        lambda client: f"/sources/{source_id(client, source)}/vms",
        limit,
        cursor,
        none="There are no VMs",
        show=_vm_table,
        only={"search": search},
    )


@app.command()
@with_options
def inspect(
    options: Options, source: SourceId, vm: Annotated[str, typer.Argument(metavar="VM", help="Its id, or its name")]
) -> None:
    """Show a VM of a source, whether it can be moved warm, and what may go wrong.

    Example: synvirt sources inspect lab web01
    """
    from synvirt.cli.describing import describe
    from synvirt.errors import VmNotFound
    from synvirt.model.machine import VmManifest

    with options.connect() as client:
        id_ = source_id(client, source)
        try:
            answer = client.ask("GET", f"/sources/{id_}/vms/{segment(vm)}")
        except VmNotFound:
            answer = client.ask("GET", f"/sources/{id_}/vms/{segment(_vm_id(client, id_, source, vm))}")
    if options.json:
        print(answer)
        return
    manifest = VmManifest.model_validate_json(answer)
    describe(f"VM {vm}", manifest)
    why_not = manifest.cbt_reason or "its changes are not tracked"
    print(f"{'warm':12} {'yes' if manifest.cbt_available else f'no: {shown(why_not)}'}")


@app.command()
@with_options
def remove(options: Options, source: SourceId) -> None:
    """Remove a source and its credentials. Refused while a job reads from it.

    Example: synvirt sources remove lab
    """
    with options.connect() as client:
        id_ = source_id(client, source)
        client.ask("DELETE", f"/sources/{id_}")
    if not options.json:
        print(f"Source {shown(source)} is removed")


@keyring.command()
@with_options
def rotate(options: Options) -> None:
    """Make a new key, and seal the credentials of all sources with it.

    Example: synvirt keyring rotate
    """
    import json

    with options.connect() as client:
        answer = client.ask("POST", "/keyring/rotate")
    print(
        answer
        if options.json
        else f"The key is new; the credentials of {json.loads(answer)['resealed']} sources are sealed with it"
    )


# ── for other commands ───────────────────────────────────────────────────────────────────────────────────────────────


def source_id(client: Any, source: str) -> str:
    """The id of the one source that has this name, or whose id begins with it."""
    return full_id(client, "source", source)


def live_vm(client: Any, source: str, vm: str) -> tuple[dict[str, str], dict[str, str]]:
    """A plan's `source` and `source_ref` for the one VM of the source that has this id or name."""
    import json

    id_ = source_id(client, source)
    kind = json.loads(client.ask("GET", f"/sources/{id_}"))["kind"]
    return {"Live": kind}, {"kind": "live_vm", "source_id": id_, "vm_id": _vm_id(client, id_, source, vm)}


def _vm_id(client: Any, id_: str, source: str, vm: str) -> str:
    """The id of the one VM of that source with this id or name."""
    import json

    from synvirt.errors import BadRequest, VmNotFound

    path = f"/sources/{id_}/vms"
    items = json.loads(client.ask("GET", path, params={"search": vm}))["items"]
    ids = [one["vm_id"] for one in items if one["vm_id"] == vm] or [one["vm_id"] for one in items if one["name"] == vm]
    if not ids:
        there = json.loads(client.ask("GET", path))["items"]
        near = did_you_mean(vm, (shown(one["name"]) for one in there))
        raise VmNotFound(f"source {source} has no VM {vm}", hint=near or f"synvirt sources vms '{source}' lists them")
    if len(ids) > 1:
        raise BadRequest(f"{len(ids)} VMs of {source} are called {vm}: {', '.join(ids[:5])}", hint="give the id")
    return str(ids[0])


def _source_table(items: list[dict[str, Any]]) -> None:
    rows = [(one["id"], shown(one["name"]), one["kind"], shown(one["endpoint"]), _tested(one)) for one in items]
    print_table(("ID", "NAME", "KIND", "ENDPOINT", "TESTED"), rows)


def _vm_table(items: list[dict[str, Any]]) -> None:
    from synvirt.sizes import sized

    rows = [
        (
            shown(vm["vm_id"]),
            shown(vm["name"]),
            shown(vm["power_state"]),
            str(vm["cpu_count"] or ""),
            sized(vm["memory_bytes"]) if vm["memory_bytes"] else "",
            sized(vm["capacity_bytes"]) if vm["capacity_bytes"] else "",
            shown(vm["guest_os"]),
        )
        for vm in items
    ]
    print_table(("ID", "NAME", "POWER", "CPUS", "MEMORY", "DISKS", "GUEST"), rows)


def _option_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _tested(source: dict[str, Any]) -> str:
    last = source["last_test"]
    return "never" if last is None else f"{at(last['at'])} {'ok' if last['ok'] else 'FAILED'}"


def _text(path: Path) -> str:
    from synvirt.errors import text_of

    return text_of(path)


def _pair(text: str) -> tuple[str, str]:
    field, equals, value = text.partition("=")
    if not equals or not field:
        raise typer.BadParameter(f"{text!r} is not FIELD=VALUE")
    return field, value
