"""The command line: it speaks HTTP to the service, and nothing else of the service's. main.py adds `serve` and `demo`.

Modules that a command needs are imported when it runs: `synvirt --help` has nothing to wait for.
"""

from typing import Annotated

import typer

from synvirt.cli import disk, doctor, importing, migrations, password, sources, uploads
from synvirt.cli.options import Options, with_options
from synvirt.cli.program import Program

app = typer.Typer(
    cls=Program,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # it would print the values of variables: passwords among them
    rich_markup_mode=None,
    help="Brings virtual machines home: from other platforms and from files into this KVM host.",
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
app.command("import")(importing.import_)
app.command("inspect")(importing.inspect)
app.command("password")(password.password)
app.add_typer(disk.app, name="disk")
app.add_typer(doctor.app, name="doctor")
