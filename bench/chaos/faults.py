"""The table of faults. Each hits one service for some seconds, and then ends; a fault of the database hits all."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.chaos.line import Line
from tests.servers import postgres

LEASE_S = 6.0
# Nothing at all, a moment, about the lease, and well beyond lease and grace: then others take over.
SPANS_S = (0.2, 1.0, LEASE_S, 2.5 * LEASE_S)
CLOCK_S = 7200.0


class Service:
    """A host's engine in a process of its own, with a line of its own to the database."""

    def __init__(self, host: str, folder: Path, database: Path, url: str, shared: Path) -> None:
        self.host, self.folder = host, folder
        self.deaths = 0
        folder.mkdir()
        self.line = Line(folder / "line", database)
        self._url = url.replace(str(database), str(self.line.folder))
        self._shared = shared
        self._log = (folder / "log").open("ab")
        self.begin()

    def begin(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.chaos.service", str(self.folder), self._url],
            stdout=self._log,
            stderr=self._log,
            env=os.environ | {"LEASE_S": str(LEASE_S), "HOST": self.host, "SHARED": str(self._shared)},
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def keep(self) -> None:
        """One that ended though nobody killed it is counted."""
        if self.process.poll() is not None:
            self.deaths += 1
            self.begin()

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.kill()
        self.line.close()
        self._log.close()


@dataclass(frozen=True)
class Fault:
    """`weight`: how often it is drawn. `strike` does it; `mend` ends it after a span that is drawn too."""

    weight: int
    strike: Callable[[Service, random.Random], None]
    mend: Callable[[Service], None] = lambda service: None


def _clock(service: Service, chance: random.Random) -> None:
    new = service.folder / "clock.new"
    new.write_text(str(chance.uniform(-CLOCK_S, CLOCK_S)))
    new.rename(service.folder / "clock")


FAULTS: dict[str, Fault] = {
    "kill -9": Fault(5, lambda service, _: service.kill(), Service.begin),
    "SIGSTOP": Fault(
        4,
        lambda service, _: service.process.send_signal(signal.SIGSTOP),
        lambda service: service.process.send_signal(signal.SIGCONT),
    ),
    "connection cut": Fault(3, lambda service, _: service.line.cut(), lambda service: service.line.mend()),
    "connection silent": Fault(3, lambda service, _: service.line.silence(), lambda service: service.line.mend()),
    "clock jump": Fault(2, _clock),
    "database restart": Fault(1, lambda service, _: postgres.restart(service.line.database)),
}
