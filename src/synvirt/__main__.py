"""`synvirt`, and `python -m synvirt`."""

import os
import sys

from synvirt.cli.interrupts import end_at_once


def main() -> None:
    """The program: `synvirt disk` by its own small parser, every other command by Typer."""
    end_at_once()
    # What only looks at disks needs nothing of the service's, and does not wait for it to load.
    if sys.argv[1:2] == ["disk"]:
        from synvirt.cli.disk import program as disk

        _leave(disk.main(sys.argv[2:]))
    from synvirt.main import main as every_command

    every_command()


def _leave(code: int) -> None:
    """All is closed and durable: taking every module down again would take as long as copying a small disk."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        code = code or 1
    os._exit(code)


if __name__ == "__main__":
    main()
