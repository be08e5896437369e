"""What each file of tests costs: time, and seconds of a processor, of which a run of the suite is made; and which test raised
its worker's peak of memory. Said at the end, where `--durations` is given."""

import resource
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import pytest

from tests import forked

FILES = 40
PEAKS = 20
LEAST_PEAK_MIB = 20


def processor_s() -> float:
    """Of this process, and of those that it has waited for: a container's daemon and what it starts are not seen."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used) + forked.processor_s()


class Costs:
    def __init__(self) -> None:
        self._used = processor_s()
        self._peak_kib = 0
        self._files: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
        self._raised: list[tuple[int, int, str]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        """Where the test runs. The report takes what it is given to the process that prints."""
        report = yield
        used, peak_kib = processor_s(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        report.processor_s = used - self._used
        report.peak_mib = (peak_kib // 1024, (peak_kib - self._peak_kib) // 1024) if self._peak_kib else (0, 0)
        self._used, self._peak_kib = used, peak_kib
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

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if config.getoption("durations") is None:
            return
        say = terminalreporter.write_line
        terminalreporter.section(f"most expensive {FILES} files")
        seconds, used, tests = (sum(column) for column in zip(*self._files.values(), strict=True)) if self._files else (0, 0, 0)
        say("  time  processor  tests")
        say(f"{seconds:6.0f}s {used:9.0f}s {tests:6.0f}  in all")
        for name, (seconds, used, tests) in sorted(self._files.items(), key=lambda item: -item[1][0])[:FILES]:
            say(f"{seconds:6.1f}s {used:9.1f}s {tests:6.0f}  {name}")
        for raised, peak, where in sorted(self._raised, reverse=True)[:PEAKS]:
            say(f"{raised:6} MiB more memory, to {peak:5} MiB  {where}")
