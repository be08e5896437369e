"""Commands for repositories: synvirt backup add-repository, change-repository, forget-repository, their keys …"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from synvirt.cli.backup.asking import REPOSITORIES, Repository, ask, list_things, show_thing, start_run
from synvirt.cli.listing import Cursor, Limit, id_of, print_table
from synvirt.cli.options import Options, size_given, with_options
from synvirt.cli.program import shown
from synvirt.cli.secret import secret
from synvirt.sizes import sized


class BoundTo(StrEnum):
    """What a copy of a key is bound to."""

    HOST = "host"
    TPM2 = "tpm2"


@with_options
def repositories(options: Options, limit: Limit = 1000, cursor: Cursor = None) -> None:
    """List the repositories.

    Example: synvirt backup repositories
    """
    list_things(options, REPOSITORIES, _repositories, limit, cursor)


@with_options
def add_repository(
    options: Options,
    folder: Annotated[Path | None, typer.Argument(metavar="[FOLDER]", help="A folder of the service's host")] = None,
    *,
    name: Annotated[str, typer.Option(help="Its name")],
    nfs: Annotated[bool, typer.Option("--nfs", help="An NFS export must be mounted there")] = False,
    peer: Annotated[
        str | None, typer.Option(metavar="URL", help="The address of another SynVirt's backup offer, in place of a folder")
    ] = None,
    fingerprint: Annotated[str | None, typer.Option(help="SHA-256 of the peer's certificate")] = None,
    peer_user: Annotated[
        str, typer.Option(help="The offer's account; the password: env SYNVIRT_PEER_PASSWORD, or asked for")
    ] = "",
    existing: Annotated[
        bool,
        typer.Option(
            "--existing",
            help="Use an existing repository; its recovery key, or a sealed copy: env SYNVIRT_RECOVERY_KEY, or asked for",
        ),
    ] = False,
) -> None:
    """Make a repository in an empty folder, or use one again with its recovery key.

    Example: synvirt backup add-repository /srv/backups --name here

    Example: synvirt backup add-repository /mnt/nas/backups --nfs --name nas --existing
    """
    import json

    kind = "peer" if peer is not None else "nfs" if nfs else "local"
    body: dict[str, Any] = {"name": name, "kind": kind}
    if folder is not None:
        body["path"] = str(folder)
    if peer is not None:
        password = secret("The peer's password", variable="SYNVIRT_PEER_PASSWORD")
        account = {"username": peer_user, "password": password}
        body["peer"] = {"url": peer, "fingerprint_sha256": fingerprint or "", "credentials": account}
    if existing:
        key = secret("Recovery key", variable="SYNVIRT_RECOVERY_KEY")
        body["recovery_key"] = key
        if key.strip().startswith("synvirt-key-1:scrypt:"):
            body["passphrase"] = secret("Passphrase", variable="SYNVIRT_PASSPHRASE")
    with options.connect() as client:
        answer = client.ask("POST", REPOSITORIES.path, json=body)
        made = json.loads(answer)
        key = json.loads(client.ask("GET", f"{REPOSITORIES.path}/{made['id']}/recovery-key"))["recovery_key"]
    print(answer if options.json else f"Repository {made['id']} is ready. Keep its recovery key elsewhere than here:\n{key}")


@with_options
def show_repository(options: Options, repository: Repository) -> None:
    """Show one repository.

    Example: synvirt backup show-repository nas
    """
    show_thing(options, REPOSITORIES, repository)


@with_options
def change_repository(
    options: Options,
    repository: Repository,
    *,
    name: Annotated[str | None, typer.Option(help="Its new name")] = None,
    folder: Annotated[Path | None, typer.Option(help="The folder in which it lies now")] = None,
    peer: Annotated[
        str | None, typer.Option(metavar="URL", help="The peer's new address; --peer-user and its password are needed, too")
    ] = None,
    fingerprint: Annotated[str | None, typer.Option(help="SHA-256 of the peer's new certificate")] = None,
    peer_user: Annotated[
        str | None, typer.Option(help="The offer's account; its password: env SYNVIRT_PEER_PASSWORD, or asked for")
    ] = None,
) -> None:
    """Change a repository: its name, or where it lies now. What lies there must open with its key. Restore points there that
    this host does not know are registered: name the same folder again to find those.

    Example: synvirt backup change-repository elsewhere --fingerprint SHA256

    Example: synvirt backup change-repository elsewhere --peer-user office
    """
    from synvirt.errors import BackupBadRequest

    if peer is not None and peer_user is None:
        raise BackupBadRequest("--peer needs --peer-user: what was sealed for one host is not sent to another")
    of_peer: dict[str, Any] = {"url": peer, "fingerprint_sha256": fingerprint}
    if peer_user is not None:
        password = secret("The peer's password", variable="SYNVIRT_PEER_PASSWORD")
        of_peer["credentials"] = {"username": peer_user, "password": password}
    of_peer = {field: value for field, value in of_peer.items() if value is not None}
    fields = {"name": name, "path": None if folder is None else str(folder), "peer": of_peer or None}
    body = {field: value for field, value in fields.items() if value is not None}
    ask(options, "PATCH", REPOSITORIES, repository, json=body, outcome="is changed")


@with_options
def recovery_key(options: Options, repository: Repository) -> None:
    """Print a repository's recovery key: with it and the folder, the backups can be read without this host.

    Example: synvirt backup recovery-key here
    """
    import json

    with options.connect() as client:
        answer = client.ask("GET", f"{REPOSITORIES.path}/{id_of(client, REPOSITORIES, repository)}/recovery-key")
    print(answer if options.json else json.loads(answer)["recovery_key"])


@with_options
def change_key(options: Options, repository: Repository) -> None:
    """Give a repository a new key, and print its recovery key. What is there opens with the new one too.

    Example: synvirt backup change-key here
    """
    import json

    with options.connect() as client:
        answer = client.ask("POST", f"{REPOSITORIES.path}/{id_of(client, REPOSITORIES, repository)}/change-key")
    notice = "What is written from now on opens only with this recovery key. Keep it elsewhere than here:"
    print(answer if options.json else f"{notice}\n{json.loads(answer)['recovery_key']}")


@with_options
def seal_key(
    options: Options,
    repository: Repository,
    bound_to: Annotated[
        BoundTo | None, typer.Option(help="By systemd-creds: opens only on this host, or only with its TPM")
    ] = None,
) -> None:
    """Print a copy of a repository's key that a passphrase opens: env SYNVIRT_PASSPHRASE, or asked for.

    Example: synvirt backup seal-key here > here.key
    """
    import json

    body = (
        {"bound_to": bound_to.value}
        if bound_to is not None
        else {"passphrase": secret("Passphrase", variable="SYNVIRT_PASSPHRASE", confirm=True)}
    )
    with options.connect() as client:
        path = f"{REPOSITORIES.path}/{id_of(client, REPOSITORIES, repository)}/sealed-key"
        answer = client.ask("POST", path, json=body)
    print(answer if options.json else json.loads(answer)["sealed_key"])


@with_options
def verify_repository(options: Options, repository: Repository) -> None:
    """Read a whole repository, and compare it with its hashes. Exit 1: something in it is damaged.

    Example: synvirt backup verify-repository here
    """
    start_run(options, REPOSITORIES, repository, "verify")


@with_options
def collect(
    options: Options,
    repository: Repository,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, only count")] = False,
    bandwidth: Annotated[
        str | None, typer.Option(metavar="SIZE", help="At most this much is read per second, for example 50MiB")
    ] = None,
) -> None:
    """Remove what no restore point needs, in two steps a day apart; each backup run does so at its end.

    Example: synvirt backup collect here --dry-run
    """
    params = {"dry_run": dry_run, "bandwidth_bps": size_given(bandwidth, "--bandwidth")}
    start_run(options, REPOSITORIES, repository, "collect", params=params)


@with_options
def forget_repository(options: Options, repository: Repository) -> None:
    """Forget a repository that no job writes to. Its content stays: add it again with its recovery key.

    Example: synvirt backup forget-repository here
    """
    ask(options, "DELETE", REPOSITORIES, repository, outcome="is forgotten; its content stays")


def _repositories(items: list[Any]) -> None:
    rows = [(one["id"], shown(one["name"]), one["kind"], one["state"], str(one["points_count"]), _room(one)) for one in items]
    print_table(("ID", "NAME", "KIND", "STATE", "POINTS", "FREE"), rows)
    for one in items:
        if one["problem"]:
            print(shown(f"{one['name']}: {one['problem']}"))


def _room(one: dict[str, Any]) -> str:
    return "" if one["capacity_bytes"] is None else sized(max(0, one["capacity_bytes"] - (one["used_bytes"] or 0)))
