"""A call held up in its middle, until a test lets it go on."""

import threading
from collections.abc import Callable
from typing import Any

PATIENCE_S = 120.0


class Gate:
    """The first who gets there waits; `reached` tells of that, and `opened` lets them go on. Nobody after them waits."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def wait(self) -> None:
        if not self.reached.is_set():
            self.reached.set()
            assert self.opened.wait(PATIENCE_S)

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def late(*given: Any, **named: Any) -> Any:
            self.wait()
            return call(*given, **named)

        return late
