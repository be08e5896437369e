"""`synvirt`, and `python -m synvirt`."""

import gc
import io
import os
import sys

# The objects after which Python looks for garbage: loading modules makes ten thousand, hardly any of which is garbage.
GARBAGE_AFTER = 100_000


def main() -> None:
    """The program: `synvirt disk` by its own small parser, every other command by Typer."""
    is_disk = sys.argv[1:2] == ["disk"]
    if is_disk:
        # Before anything is loaded: Python would look for garbage eight times until `typing` is.
        gc.set_threshold(GARBAGE_AFTER)
    from synvirt.cli.interrupts import end_at_once

    end_at_once()
    if None in (sys.stdin, sys.stdout, sys.stderr):
        _open_standard_streams()
    _take_any_text()
    # `synvirt disk` needs no service and must start fast, so it does not load the rest.
    if is_disk:
        from synvirt.cli.disk import program as disk

        _leave(disk.main(sys.argv[2:]))
    from synvirt.main import main as every_command

    every_command()


def _open_standard_streams() -> None:
    """Those that the caller closed (`>&-`) lead nowhere. Else the next file that is opened would have such a number, and a
    program that is started would write into it."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, mode))


def _take_any_text() -> None:
    """A terminal of another encoding shows ? for what it lacks. JSON is UTF-8 everywhere (RFC 8259, section 8.1)."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        if "--json" in sys.argv:
            sys.stdout.reconfigure(encoding="utf-8")
        else:
            sys.stdout.reconfigure(errors="replace")


def _leave(code: int) -> None:
    """Ends the process at once. Everything is closed and durable; to unload all modules would take as long as copying a small
    disk."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        from synvirt.cli.program import code_at_end

        code = code_at_end(code)
    os._exit(code)


if __name__ == "__main__":
    main()
