"""A service with one job, in a process of its own: `python -m tests.fakes.serving FOLDER`.

It says its address, and ends with its standard input. For tests whose many requests would make their own worker grow."""

import sys
from pathlib import Path

from tests.fakes.service import Service
from tests.running.logs import logs_to


def main(folder: Path) -> None:
    logs_to(sys.stderr)
    service = Service(folder, tls=False)
    try:
        service.submit()
        with service.served() as server:
            print(server.address, flush=True)
            sys.stdin.read()
    finally:
        service.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
