"""New SQLite stores are copies of one that Alembic has made once: thousands of tests open one. That an empty file becomes a
store is seen by tests of the service's own process, and by those of each revision."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from synvirt.store import Store


@contextmanager
def stores_from(template: Path) -> Iterator[None]:
    """`template`: made where it is not there."""
    init = Store.__init__
    if not template.exists():
        Store(f"sqlite:///{template}").close()

    def from_template(self: Store, url: str, **named: Any) -> None:
        path = Path(url.removeprefix("sqlite:///"))
        if path.suffix == ".db" and path.is_absolute() and not path.exists() and path.parent.is_dir():
            shutil.copyfile(template, path)
        init(self, url, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Store, "__init__", from_template)
        yield
