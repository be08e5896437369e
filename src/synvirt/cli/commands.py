"""All commands, assembled. A command's modules are imported when it runs, so that `synvirt --help` is quick."""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from synvirt.cli import accounts, completion, password, receipt, rehearsals, sources, uploads
from synvirt.cli.backup import commands as backups
from synvirt.cli.disk import program as disk
from synvirt.cli.interrupts import exit_code, is_hung_up, raised
from synvirt.cli.migrating import importing, migrations
from synvirt.cli.operating import config, destinations, doctor, host_files, hosts, support_bundle, windows
from synvirt.cli.options import Options, with_options
from synvirt.cli.program import INTERRUPTED, drop_what_was_refused, failed, print_error_as_json
from synvirt.cli.waves import commands as waves
from synvirt.errors import BackupBadRequest, BadRequest, shortened
from synvirt.mistakes import worded
from synvirt.nearest import none_of

# The order of `synvirt --help`: what a new user needs first, then the daily commands, then those for setting up.
_ORDER = (
    "demo", "serve", "doctor", "inspect", "import", "migrations", "sources", "waves",
    "rehearse", "rehearsals", "receipt", "backup", "disk", "files", "uploads", "destinations", "windows", "hosts",
    "config", "password", "accounts", "tokens", "audit", "keyring", "support-bundle", "completion",
)  # fmt: skip


# Typer's message for a wrong value of an enumeration.
_NO_CHOICE = re.compile(r"'(.*)' is not one of (.*)\.")
# Typer's message for a command that a group does not have; where one is nearly called so, it goes on.
_NO_COMMAND = re.compile(r"No such command '(.*)'\.", re.DOTALL)
# Words of other command lines for ours.
_ALSO_CALLED = (
    ("add", "create", "new", "make", "register"), ("remove", "revoke", "delete", "rm", "del", "forget"),
    ("list", "ls"), ("show", "get", "info", "describe", "status"), ("watch", "follow", "tail", "wait"),
    ("cancel", "stop", "abort", "kill"), ("go", "start", "begin", "resume"), ("change", "edit", "update", "set"),
    ("migrations", "jobs", "migrate"), ("files", "ls"), ("sources", "vcenter", "platforms"), ("doctor", "check"),
)  # fmt: skip
# The key in a context that holds whether --json was typed anywhere: a command that cannot be parsed has stored no options.
_JSON = "synvirt.json"


class Program(TyperGroup):
    """The group of all commands: an error of any of them is printed here."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=_ORDER.index)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Click's. Wrong usage gets its message here, and is printed as JSON if the command line has `--json`."""
        as_json = "--json" in args
        try:
            context = super().make_context(info_name, args, parent, **extra)
        except typer.TyperException as error:
            raise _worded(error, as_json=as_json) from error
        except BrokenPipeError:
            raise
        except OSError as error:  # of a help text
            raise typer.Exit(failed(error, as_json=as_json)) from error
        context.meta[_JSON] = as_json
        return context

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; an error becomes a line on stderr and an exit code."""
        try:
            with raised():
                return super().invoke(ctx)
        except typer.TyperException as error:
            raise _worded(error, as_json=ctx.meta[_JSON], of_backups=_is_of_backups(ctx)) from error
        except KeyboardInterrupt as error:
            raise _interrupted("\nAborted!") from error
        except typer.Abort as error:
            if exit_code() is None:  # Ctrl-D at a prompt, or «no»
                raise
            raise _interrupted("Aborted!") from error
        except typer.Exit as end:
            if end.exit_code == INTERRUPTED:
                raise _interrupted() from end
            raise
        except BrokenPipeError:
            raise
        except Exception as error:
            if is_hung_up():
                raise _interrupted() from error
            code = failed(error, as_json=_json_is_wanted(ctx), of_backups=_is_of_backups(ctx))
            raise typer.Exit(code) from error


def _interrupted(message: str | None = None) -> typer.Exit:
    """The end of a command that a signal ended; the message is for the terminal, if that is still there."""
    if message is not None:
        with suppress(OSError):
            typer.echo(message, err=True)
    drop_what_was_refused()
    return typer.Exit(exit_code() or INTERRUPTED)


def _json_is_wanted(context: Any) -> bool:
    """Whether the failed command had --json, at any place."""
    given = context.find_root().obj
    return isinstance(given, Options) and given.json


def _is_of_backups(context: Any) -> bool:
    return bool(context.invoked_subcommand == "backup")


def _worded(error: Any, *, as_json: bool, of_backups: bool = False) -> Any:
    """The message for a wrong option or argument, which Typer prints with the command's usage: in words for people, and as JSON
    too."""
    cause = error.__cause__
    if hasattr(cause, "errors"):  # pydantic's ValidationError, of a value
        error.message = worded(cause.errors(include_url=False)[0])
    if (wrong := _NO_CHOICE.fullmatch(error.message)) is not None:
        error.message = none_of(wrong[1], re.findall("'([^']*)'", wrong[2]))
    if (missing := _NO_COMMAND.fullmatch(error.message)) is not None:
        error.message += _meant(missing[1], error.ctx.command.list_commands(error.ctx))
    message = shortened(error.format_message())
    error.format_message = lambda: message
    if as_json:
        print_error_as_json(BackupBadRequest(message) if of_backups else BadRequest(message))
    return error


def _meant(typed: str, commands: Sequence[str]) -> str:
    """Which of the group's commands another word may mean; else, what they are."""
    found = [one for words in _ALSO_CALLED if typed in words for one in commands if one in words]
    return f" Did you mean {' or '.join(map(repr, found))}?" if found else f" There are: {', '.join(commands)}"


app = typer.Typer(
    cls=Program,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # it would print the values of variables, including passwords
    rich_markup_mode=None,
    help="Moves virtual machines to this KVM host, from other platforms and from files.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from synvirt import __version__

        print(f"synvirt {__version__}")
        raise typer.Exit


@app.callback()
@with_options
def _before(
    options: Options,
    version: Annotated[bool, typer.Option("--version", help="Print the version", callback=_version, is_eager=True)] = False,
) -> None:
    pass


app.add_typer(migrations.app, name="migrations")
app.add_typer(sources.app, name="sources")
app.add_typer(sources.keyring, name="keyring")
app.add_typer(uploads.app, name="uploads")
app.add_typer(receipt.app, name="receipt")
app.add_typer(rehearsals.app, name="rehearsals")
app.add_typer(config.app, name="config")
app.add_typer(destinations.app, name="destinations")
app.add_typer(windows.app, name="windows")
app.add_typer(hosts.app, name="hosts")
app.add_typer(waves.app, name="waves")
app.add_typer(accounts.accounts, name="accounts")
app.add_typer(accounts.tokens, name="tokens")
app.add_typer(accounts.audit, name="audit")
app.add_typer(backups.app, name="backup")
app.command("files")(host_files.files)
app.command("rehearse")(rehearsals.rehearse)
app.command("import")(importing.import_)
app.command("inspect")(importing.inspect)
app.command("password")(password.password)
app.command("completion")(completion.completion)
app.command("support-bundle")(support_bundle.support_bundle)


@app.command("disk", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def _disk(context: typer.Context) -> None:
    """Look at disk images, compare them, convert them to raw. No service is needed.

    Example: synvirt disk info web01.qcow2
    """
    before = context.find_root().obj or Options()
    before.work_here("disk images are read here")
    raise typer.Exit(disk.main(context.args, json=before.json))


app.add_typer(doctor.app, name="doctor")
