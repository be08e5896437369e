"""What each file of tests costs: time, and seconds of a processor, of which a run of the suite is made; and which tests took
most memory. Said at the end, where `--durations` is given; always: each worker's peak, in red where it is more than it may be.

Memory is what is resident: also the pages of mapped files, of libraries above all, which are some 50 MiB of a worker. Its peak
is begun anew for each part of a test, so that each has its own. It is not that of getrusage, which is never less than what the
process had that this one was started from.

Said in red, too: a thread that outlives the file of tests that began it. Beside one, no buffer is emptied (`kept_small.py`)."""

import os
import resource
import threading
from collections import defaultdict
from collections.abc import Generator
from contextlib import suppress
from typing import Any

import pytest

from tests.running import forked
from tests.running.kept_small import more_threads, own, resident_bytes

FILES = 40
PEAKS = 20
LEAST_PEAK_MIB = 40
# Five workers and what they start, guests too, are on a machine with 8 GiB.
WORKER_MIB = 600


def processor_s() -> float:
    """Of this process, and of those that it has waited for: a container's daemon and what it starts are not seen."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used) + forked.processor_s()


def peak_mib() -> int:
    """The peak of resident memory since it was last reset; since the process began, where the kernel cannot reset it."""
    _, _, rest = own("status").partition(b"VmHWM:")
    return int(rest.split(maxsplit=1)[0]) >> 10 if rest else 0


def begin_peak() -> None:
    with suppress(OSError):
        descriptor = os.open("/proc/self/clear_refs", os.O_WRONLY)
        try:
            os.write(descriptor, b"5")
        finally:
            os.close(descriptor)


class Costs:
    def __init__(self) -> None:
        self._used: float | None = None
        self._had_mib = self._peak_mib = 0
        self._peak_of = ""
        self._workers: dict[str, tuple[int, str]] = {}
        self._files: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
        self._raised: list[tuple[int, int, str]] = []
        # The running threads, each with its name and the file of tests that began it.
        self._threads: dict[threading.Thread, str] = {}
        self._threads_left: list[str] = []

    def pytest_runtest_logstart(self) -> None:
        """Starts to count at the first test: what was used before belongs to none."""
        if self._used is None:
            self._used = processor_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
        done = yield
        if nextitem is None or nextitem.path != item.path:
            for thread in more_threads():
                self._threads.setdefault(thread, f"{thread.name} of {item.nodeid.partition('::')[0]}")
        return done

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        """Where the test runs. The report takes what it is given to the process that prints."""
        report = yield
        used, peak = processor_s(), peak_mib()
        report.processor_s = used - (self._used or 0.0)
        # Before the first one is what all tests share: their modules.
        report.peak_mib = (peak, peak - self._had_mib) if self._had_mib else (peak, 0)
        if peak > self._peak_mib:
            self._peak_mib, self._peak_of = peak, report.nodeid
        self._used, self._had_mib = used, resident_bytes() >> 20
        begin_peak()
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Where it is printed. Of a worker that crashed there is a report without figures."""
        total = self._files[report.nodeid.partition("::")[0]]
        total[0] += report.duration
        total[1] += getattr(report, "processor_s", 0.0)
        total[2] += report.when == "call"
        peak, raised = getattr(report, "peak_mib", (0, 0))
        if raised >= LEAST_PEAK_MIB:
            self._raised.append((raised, peak, f"{report.when:8} {report.nodeid}"))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        self._threads_left += [where for thread, where in self._threads.items() if thread.is_alive()]
        if output is not None:
            output["threads_left"] = self._threads_left
            output["peak_mib"], output["peak_of"] = self._peak_mib, self._peak_of

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        output = getattr(node, "workeroutput", {})
        self._workers[node.gateway.id] = output.get("peak_mib", 0), output.get("peak_of", "")
        self._threads_left += output.get("threads_left", ())

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if config.getoption("durations") is not None:
            self._say_all(terminalreporter)
        workers = self._workers or {"alone": (self._peak_mib, self._peak_of)}
        peaks = {name: peak for name, (peak, _) in workers.items()}
        terminalreporter.write_line(f"peak memory in MiB: {peaks}")
        above = {f"{name}, in {where}": peak for name, (peak, where) in workers.items() if peak > WORKER_MIB}
        if above:
            terminalreporter.section(f"more than the {WORKER_MIB} MiB that a worker may have: {above}", red=True)
        if self._threads_left:
            terminalreporter.section(f"threads that outlived their file: {self._threads_left}", red=True)

    def _say_all(self, terminalreporter: Any) -> None:
        say = terminalreporter.write_line
        terminalreporter.section(f"most expensive {FILES} files")
        seconds, used, tests = (sum(column) for column in zip(*self._files.values(), strict=True)) if self._files else (0, 0, 0)
        say("  time  processor  tests")
        say(f"{seconds:6.0f}s {used:9.0f}s {tests:6.0f}  in all")
        for name, (seconds, used, tests) in sorted(self._files.items(), key=lambda item: -item[1][0])[:FILES]:
            say(f"{seconds:6.1f}s {used:9.1f}s {tests:6.0f}  {name}")
        for raised, peak, where in sorted(self._raised, reverse=True)[:PEAKS]:
            say(f"{raised:6} MiB more memory, to {peak:5} MiB  {where}")
