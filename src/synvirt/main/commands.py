"""The two commands that need the whole service: serve and demo."""

import os
import sys
from contextlib import suppress
from functools import partial
from typing import Annotated, NoReturn

import typer

from synvirt.cli import app
from synvirt.cli.completion import VARIABLE
from synvirt.cli.interrupts import end_at_once
from synvirt.cli.named import named
from synvirt.cli.options import Options, with_options
from synvirt.cli.program import code_at_end
from synvirt.main.arenas import keep_few_arenas
from synvirt.main.running import service


def _say_layers() -> None:
    import structlog

    from synvirt.cage import layers

    found = layers()
    log = structlog.get_logger("synvirt.cage")
    log.info("readers are confined by", layers=[name for name, there in found.items() if there])
    if missing := [name for name, there in found.items() if not there]:
        log.warning("this host lacks layers that would confine readers", layers=missing, hint="synvirt doctor")


def _say(line: str) -> None:
    with suppress(OSError):  # nobody reads it, or its disk is full: the service runs all the same
        typer.echo(line, err=True)


Listen = Annotated[
    str | None, typer.Option("--listen", help="HOST:PORT to listen on; 127.0.0.1:8441 unless a setting names another")
]


@app.command()
@with_options
def serve(
    options: Options,
    listen: Listen = None,
) -> None:
    """Run the service until Ctrl-C or SIGTERM. Its jobs go on at the next start.

    Example: synvirt serve --data-dir /var/lib/synvirt --listen 0.0.0.0:8441
    """
    options.work_here("this starts one here: --listen says where")
    end_at_once()
    os.umask(0o027)  # in any folder: other users must not read what the service makes
    from synvirt.logs import log_to
    from synvirt.settings import load

    settings = load(config=options.config, flags={"data_dir": options.data_dir, "listen": listen})
    log_to(settings.log_level, sys.stderr)
    keep_few_arenas()
    _say_layers()
    with service(settings, announce=partial(typer.echo, err=True)) as running:
        running.run(on_ready=partial(_say, f"SynVirt serves at {running.address}"))
    _leave(0)


@app.command()
@with_options
def demo(
    options: Options,
    listen: Listen = None,
    payload_mib: Annotated[int, typer.Option(min=1, max=65536, help="MiB of real files on the sample's disk")] = 64,
) -> None:
    """Make a sample appliance, import it, see it boot.

    In a terminal the service is left running until Ctrl-C; elsewhere it ends by itself. Example: synvirt demo --payload-mib 512
    """
    from synvirt.cli.demo import demo as run_demo
    from synvirt.logs import log_to
    from synvirt.settings import load
    from synvirt.settings.data_dir import prepare_data_dir

    options.work_here("this starts one here: --listen says where")
    os.umask(0o027)  # as `serve`
    # The demo asks the guest's agent for the content of its disk.
    settings = load(config=options.config, flags={"data_dir": options.data_dir, "listen": listen, "boot_check": "agent"})
    prepare_data_dir(settings)
    # The terminal shows the demo, so the service's log goes to a file.
    log_to(settings.log_level, (settings.data_dir / "demo.log").open("a"))
    done = run_demo(
        lambda chosen: service(chosen, announce=partial(typer.echo, err=True)),
        settings,
        payload_mib=payload_mib,
        stay=sys.stdout.isatty() and sys.stdin.isatty(),
    )
    _leave(0 if done else 1)


def _leave(code: int) -> NoReturn:
    """Ends the process at once. A step may wait in a thread for a guest to boot, and Python would wait for that thread, also
    where the service ends by an error."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def main() -> None:
    """The program `synvirt`."""
    # A shell that completes a line does not pass it as arguments.
    try:
        (app if VARIABLE in os.environ else named(app, sys.argv[1:]))()
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        _leave(code_at_end(end.code or 0))
