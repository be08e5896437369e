"""synvirt accounts, tokens, audit: who may call, and who did what."""

import json
import sys
from typing import Annotated, Any

import typer

from synvirt.cli.listing import Cursor, Limit, Listed, at, id_of, print_list, print_table
from synvirt.cli.options import Options, with_options
from synvirt.cli.password import users_file
from synvirt.cli.program import shown
from synvirt.cli.secret import secret
from synvirt.nearest import none_of

accounts = typer.Typer(
    help="Accounts of the users file, and their roles.\n\nExample: synvirt accounts list", no_args_is_help=True
)
tokens = typer.Typer(help="Secrets for scripts.\n\nExample: synvirt tokens list", no_args_is_help=True)
audit = typer.Typer(help="Who did what.\n\nExample: synvirt audit list", no_args_is_help=True)

ROLE = Annotated[str, typer.Option(help="viewer, operator or admin")]


@accounts.command("list")
@with_options
def list_accounts(options: Options) -> None:
    """List the accounts and their roles, on the service's own host.

    Example: synvirt accounts list
    """
    from synvirt.accounts import listed

    found = listed(users_file(options))
    if options.json:
        items = [{"name": name, "role": role} for name, role in found.items()]
        print(json.dumps({"items": items, "next_cursor": None}))
        return
    print_table(("NAME", "ROLE"), [(shown(name), str(role)) for name, role in found.items()])


@accounts.command()
@with_options
def add(options: Options, name: Annotated[str, typer.Argument(metavar="USER")], role: ROLE = "operator") -> None:
    """Add an account, or change its password and role; the password is asked for, or read from the standard input.

    Example: synvirt accounts add eve --role viewer
    """
    from synvirt.accounts import Role, set_password
    from synvirt.errors import BadRequest

    path = users_file(options)
    if role not in list(Role):
        raise BadRequest(none_of(role, [str(one) for one in Role]))
    set_password(path, name, secret(f"New password of {name}", confirm=True), Role(role))
    print(f"{shown(name)} is {role}")


@accounts.command()
@with_options
def remove(options: Options, name: Annotated[str, typer.Argument(metavar="USER")]) -> None:
    """Remove an account; what it logged in to ends within a minute.

    Example: synvirt accounts remove eve
    """
    from synvirt.accounts import remove_account

    remove_account(users_file(options), name)
    print(f"{shown(name)} is removed")


@tokens.command()
@with_options
def create(
    options: Options,
    name: Annotated[str, typer.Argument(help="What it is for")],
    role: ROLE = "viewer",
    days: Annotated[float, typer.Option(help="How long it is valid; 0: until it is revoked")] = 90,
) -> None:
    """Make a token. Its secret is shown this once: send it as Authorization: Bearer SECRET.

    Example: synvirt tokens create prometheus --days 365
    """
    with options.connect() as client:
        answer = client.ask("POST", "/tokens", json={"name": name, "role": role, "expires_days": days or None})
    if options.json:
        print(answer)
        return
    print(json.loads(answer)["secret"])
    print("It is not shown again.", file=sys.stderr)


@tokens.command("list")
@with_options
def list_tokens(options: Options, limit: Limit = 1000, cursor: Cursor = None) -> None:
    """List the tokens, without their secrets.

    Example: synvirt tokens list
    """
    print_list(options, "/tokens", limit, cursor, none="There are no tokens", show=_tokens_table)


def _tokens_table(items: list[dict[str, Any]]) -> None:
    rows = [
        (
            one["id"],
            shown(one["name"]),
            one["role"],
            shown(one["account"]),
            at(one["expires_at"] or ""),
            at(one["last_used_at"] or ""),
        )
        for one in items
    ]
    print_table(("ID", "NAME", "ROLE", "MADE BY", "EXPIRES", "LAST USED"), rows)


@tokens.command()
@with_options
def revoke(
    options: Options, token: Annotated[str, typer.Argument(metavar="TOKEN", help="Its name, or its id or the beginning of it")]
) -> None:
    """Revoke a token.

    Example: synvirt tokens revoke 0c6b
    """
    with options.connect() as client:
        id_ = id_of(client, Listed("token", "/tokens", "synvirt tokens list", "name"), token)
        client.ask("DELETE", f"/tokens/{id_}")
    if not options.json:
        print(f"Token {id_} is revoked")


@audit.command("list")
@with_options
def list_audit(
    options: Options,
    limit: Annotated[int, typer.Option(min=1, max=500, help="How many")] = 50,
    cursor: Cursor = None,
) -> None:
    """List the audit trail, newest first.

    Example: synvirt audit list --limit 20
    """
    print_list(options, "/audit", limit, cursor, none="Nothing is in the audit trail", show=_audit_table)


def _audit_table(items: list[dict[str, Any]]) -> None:
    fields = ("seq", "at", "account", "address", "method", "resource", "result")
    rows = [tuple(shown(str(one[field])) for field in fields) for one in items]
    print_table(("NO", "AT", "ACCOUNT", "FROM", "METHOD", "RESOURCE", "RESULT"), rows)


@audit.command()
@with_options
def export(
    options: Options,
    after: Annotated[int, typer.Option(min=0, help="Only entries after this number")] = 0,
    limit: Annotated[int, typer.Option(min=1, help="At most this many; by default all")] = sys.maxsize,
) -> None:
    """Print the audit trail as JSON lines, oldest first: keep the last line's seq, and ask --after it next time.

    Example: synvirt audit export --after 1200 >> audit.jsonl
    """
    with options.connect() as client:
        while limit > 0:
            lines = client.ask("GET", "/audit/export", params={"after": after, "limit": min(limit, 5000)}).splitlines()
            if not lines:
                return
            for line in lines:
                print(line)
            after, limit = int(json.loads(lines[-1])["seq"]), limit - len(lines)


@audit.command()
@with_options
def verify(options: Options) -> None:
    """Whether an entry was changed or removed since it was written: exit code 1 where one was.

    Example: synvirt audit verify
    """
    with options.connect() as client:
        answer = client.ask("GET", "/audit/verify")
    found = json.loads(answer)
    if options.json:
        print(answer)
    elif found["broken_at"] is None:
        print(f"All {found['entries']} entries are as they were written")
    else:
        print(f"Entry {found['broken_at']} was changed, or the one before it was removed")
    if found["broken_at"] is not None:
        raise typer.Exit(1)
