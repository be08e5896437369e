"""New SQLite stores are copies of one that Alembic has made once: thousands of tests open one. That an empty file becomes a
store is seen by tests that have Python itself start the service, and by those of each revision.

Nor do these stores wait for the disk at each commit: tests kill processes, and never the machine's power.

And what SQLAlchemy has compiled for one of them serves the next: to compile a statement costs more than its answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event
from sqlalchemy.util import LRUCache

from synvirt.store import Store, opening, store

# More statements than all stores make.
STATEMENTS = 2000


class Compiled(LRUCache[Any, Any]):
    """Known by the sort of database: SQLAlchemy's own key has the engine's dialect, which each engine makes anew."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get((type(key[0]), *key[1:]), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__((type(key[0]), *key[1:]), value)


@contextmanager
def stores_from(template: Path) -> Iterator[None]:
    """`template`: made where it is not there."""
    init, opened, compiled = Store.__init__, opening.opened, Compiled(STATEMENTS)
    if not template.exists():
        # Whoever looks next finds all of it or nothing.
        begun = template.with_suffix(".begun")
        Store(f"sqlite:///{begun}").close()
        begun.rename(template)
    empty = template.read_bytes()

    def from_template(self: Store, url: str, **named: Any) -> None:
        path = Path(url.removeprefix("sqlite:///"))
        if path.suffix == ".db" and path.is_absolute() and not path.exists() and path.parent.is_dir():
            path.write_bytes(empty)
        init(self, url, **named)

    def unsynced(url: str) -> Engine:
        engine = opened(url)
        if engine.name == "sqlite":
            engine._compiled_cache = compiled
            event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=OFF").close())
        return engine

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store, "opened", unsynced)
        patched.setattr(Store, "__init__", from_template)
        yield
