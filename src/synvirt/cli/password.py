"""synvirt password [USER]: sets a password in the users file. It works at once, also in a running service."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from synvirt.cli.options import Options, with_options
from synvirt.cli.program import shown
from synvirt.cli.secret import secret


@with_options
def password(
    options: Options, name: Annotated[str, typer.Argument(metavar="USER", help="Added as an operator if it is new")] = "admin"
) -> None:
    """Set a user's password. It is asked for on a terminal, else it is the first line of the standard input.

    It is written into the service's users file (auth = "file"), so it is run on the service's host, by the service's user.

    Example: synvirt password admin
    """
    from synvirt.accounts import Role, set_password

    path = users_file(options)
    added = set_password(path, name, secret(f"New password of {name}", confirm=True))
    print(f"The password of {name} is set")
    if added is not None:  # the name may be mistyped, or be one of an offer alone
        taken_back = "" if added is Role.ADMIN else f"; if that is not meant: synvirt accounts remove {shlex.quote(name)}"
        print(f"{shown(name)} is a new account, with the role {added}{taken_back}")


def users_file(options: Options) -> "Path":
    """The users file. BadRequest, if there is none to write to."""
    from synvirt.errors import BadRequest
    from synvirt.settings.data_dir import prepare_data_dir

    options.work_here("its accounts are set on its own host", about_service=True)
    settings = options.settings
    if settings.auth != "file":
        raise BadRequest(f'the service checks the host\'s own accounts (auth = "{settings.auth}")', hint="passwd sets those")
    prepare_data_dir(settings)
    return settings.keyring_dir / "users"
