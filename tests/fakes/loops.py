"""An event loop that asks the store at once instead of in a thread, for the laws of kinds. They ask it a hundred thousand
times, and two threads that wait for one another cost more than the answer. Each call is a turn of the loop all the same, so
that whatever else is ready goes on between two of them. All other blocking calls have their threads. One scenario of each loop
keeps them for the store too."""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from typing import Any


class _Answered:
    """An answer that is there, after one turn of the loop: as `asyncio.sleep(0)`, it costs no future and no second turn."""

    def __init__(self, answer: Any, error: BaseException | None) -> None:
        self._answer, self._error = answer, error

    def __await__(self) -> Generator[None, None, Any]:
        yield
        if self._error is not None:
            raise self._error
        return self._answer


class StoreAtOnce(asyncio.SelectorEventLoop):
    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *arguments: Any
    ) -> Awaitable[Any]:
        if executor is not None or not _is_of_store(func):
            return super().run_in_executor(executor, func, *arguments)
        try:
            return _Answered(func(*arguments), None)
        except BaseException as error:  # as a thread hands it over
            return _Answered(None, error)


def _is_of_store(func: Callable[..., Any]) -> bool:
    """`to_thread` wraps what it calls in its context."""
    while isinstance(func, partial):
        func = func.args[0] if getattr(func.func, "__name__", "") == "run" and func.args else func.func
    return type(getattr(func, "__self__", None)).__module__.startswith("synvirt.store.")


class _Policy(asyncio.DefaultEventLoopPolicy):
    _loop_factory = StoreAtOnce


@contextmanager
def store_at_once() -> Iterator[None]:
    """For loops that are made in this block, in any thread."""
    asyncio.set_event_loop_policy(_Policy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(None)
