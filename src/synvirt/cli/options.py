"""The options that every command takes, before it or after it, and their meaning."""

import inspect
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from synvirt.cli.secret import secret
from synvirt.errors import shortened

if TYPE_CHECKING:  # imported at their use, so that `synvirt --help` is quick
    from synvirt.cli.client import Client
    from synvirt.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """None, or False: not given."""

    data_dir: Path | None = None
    config: Path | None = None
    json: bool = False
    server: str | None = None
    user: str | None = None
    cacert: Path | None = None
    insecure: bool = False

    def over(self, other: "Options") -> "Options":
        """Options after the command override those before it."""
        return Options(**{field.name: getattr(self, field.name) or getattr(other, field.name) for field in fields(Options)})

    @property
    def settings(self) -> "Settings":
        """The service's own settings: of --config, else of its settings file, if there is one and no folder is named."""
        from synvirt.settings import load

        return load(config=self.settings_file, flags={"data_dir": self.data_dir})

    @property
    def settings_file(self) -> Path | None:
        """The settings file to read; None: there is none, or --data-dir replaces it."""
        from synvirt.settings import service_config

        return self.config or (None if self.data_dir else service_config())

    @property
    def address(self) -> str | None:
        return self.server or os.environ.get("SYNVIRT_SERVER")

    def work_here(self, why: str, *, about_service: bool = False) -> None:
        """BadRequest, if a remote service is named for a command that works only on this host; `why` it does. `about_service`:
        SYNVIRT_SERVER counts too; for a command about files it has no meaning."""
        from synvirt.errors import BadRequest

        if self.address if about_service else self.server:
            names = "--server and SYNVIRT_SERVER" if about_service else "--server"
            raise BadRequest(f"a service elsewhere is named, and {why}", hint=f"leave {names} out")

    def _check_cacert(self) -> None:
        """BadRequest, before it asks for a password that cannot be used."""
        from synvirt.errors import unreadable

        if self.cacert is None:
            return
        try:
            self.cacert.open().close()
        except OSError as error:
            raise unreadable(self.cacert, error, what="the certificate file ") from error

    def check_whose(self, own: Collection[str] = ()) -> None:
        """BadRequest for options of a remote service, if none is named. `own`: all options of the command: one of them may be
        meant, as --source-user."""
        from synvirt.errors import BadRequest

        given = [name for name in ("user", "cacert", "insecure") if getattr(self, name)]
        if given and self.address is None:
            hint = "name it: --server https://HOST:8441"
            if other := next((option for option in own if option.endswith(f"-{given[0]}") and option != f"--{given[0]}"), None):
                hint += f"; or is {other} meant?"
            raise BadRequest(f"--{given[0]} is for a service elsewhere, and none is named", hint=hint)

    def connect(self) -> "Client":
        """The service at --server, else this host's by its Unix socket. The first request connects."""
        from synvirt.cli.client import Client

        if self.address is None:
            settings = self.settings
            return Client.local(settings.socket_path, base_url=settings.base_url)
        Client.checked_address(self.address)  # before it asks for a password in vain
        self._check_cacert()
        user = self.user or os.environ.get("SYNVIRT_USER") or "admin"
        password = secret(f"Password of {user} at {self.address}", variable="SYNVIRT_PASSWORD")
        return Client.remote(self.address, user=user, password=password, ca_file=self.cacert, verify=not self.insecure)


def confirm(options: Options, question: str, *, sure: bool) -> None:
    """Asks before an action that cannot be undone; `sure`: --yes was given. BadRequest: --json was given, so it does not ask,
    or there is no answer."""
    from synvirt.errors import BadRequest

    if sure:
        return
    if options.json:
        raise BadRequest("with --json the command does not ask for confirmation", hint="confirm with --yes")
    try:
        agreed = typer.confirm(shortened(question), err=True)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        typer.echo(err=True)
        raise BadRequest("there is no terminal to confirm this on", hint="confirm with --yes") from None
    if not agreed:
        raise typer.Abort


# Panel: the commands' own options come first in their help.
def _option(*names: str, help: str, **kind: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Service", show_default=False, **kind)


def _place(text: str) -> Path:
    """A path. An empty one, of an unset variable say, would be the folder in which the command was called."""
    if not text:
        raise typer.BadParameter("a path is needed, and this text is empty")
    return Path(text)


_PATH: dict[str, Any] = {"parser": _place, "metavar": "<path>"}


# A row for each option of `Options`, in its order.
SHARED: dict[str, Any] = {
    "data_dir": Annotated[
        Path | None,
        _option("--data-dir", help="The service's folder [env: SYNVIRT_DATA_DIR]; its Unix socket is in it", **_PATH),
    ],
    "config": Annotated[Path | None, _option("--config", help="The service's settings file [env: SYNVIRT_CONFIG]", **_PATH)],
    "json": Annotated[bool, _option("--json", help="Print exactly what the service answers")],
    "server": Annotated[str | None, _option("--server", help="A service elsewhere: https://HOST:8441 [env: SYNVIRT_SERVER]")],
    "user": Annotated[
        str | None, _option("--user", help="Its user [env: SYNVIRT_USER]; the password: env SYNVIRT_PASSWORD, or asked for")
    ],
    "cacert": Annotated[Path | None, _option("--cacert", help="Trust this certificate of the service", **_PATH)],
    "insecure": Annotated[
        bool, _option("--insecure", help="Trust any certificate: an attacker in between can read the password")
    ],
}


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


# Made once: there are over a hundred commands, and `synvirt --help` makes all of them.
_CONTEXT = (_parameter("context", typer.Context),)
_SHARED = tuple(_parameter(field.name, SHARED[field.name], field.default) for field in fields(Options))


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Makes a Typer command of `command(options, …)` that takes the shared options too. A parameter with a data class as its
    type stands for all its fields: each is an option.

    The program's own callback is such a command as well: the commands find its options in the root context.
    """
    declared = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    groups: dict[str, Any] = {one.name: one.annotation for one in declared if is_dataclass(one.annotation)}
    own = [
        one for parameter in declared for one in (_fields(groups[parameter.name]) if parameter.name in groups else [parameter])
    ]

    def run(**values: Any) -> None:
        context: typer.Context = values.pop("context")
        given = Options(**{name: values.pop(name) for name in SHARED})
        before = context.find_root().obj
        context.obj = given.over(before) if isinstance(before, Options) else given
        context.find_root().obj = context.obj  # the printer of the command's errors finds there whether to print JSON
        if context.parent is not None:
            context.obj.check_whose([option for one in context.command.params for option in one.opts])
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(context.obj, **values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [one if one.kind is keyword else one.replace(kind=keyword) for one in own]
    parameters = [*_CONTEXT, *own, *_SHARED]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _fields(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [_parameter(field.name, hints[field.name], field.default) for field in fields(group)]


def size_given(size: str | None, option: str) -> int | None:
    """Bytes of a text such as 4GiB; None, if it was not given. typer.BadParameter."""
    if size is None:
        return None
    from synvirt.offline.units import size_bytes

    try:
        return size_bytes(size)
    except ValueError:
        raise typer.BadParameter(f"{size} is not a size, such as 4GiB or 512MiB", param_hint=option) from None
