"""A service as its program runs it, in a process of its own: `python -m tests.fakes.serving_till_signal FOLDER`.

It prints `ready` once it serves, and `ended` once a signal has ended it in order."""

import sys
from pathlib import Path

from synvirt.api import serve
from tests.fakes.service import Service
from tests.running.logs import logs_to


def main(folder: Path) -> None:
    logs_to(sys.stderr)
    service = Service(folder)
    serve(service.app, service.settings, on_ready=lambda: print("ready", flush=True))
    service.close()
    print("ended", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
