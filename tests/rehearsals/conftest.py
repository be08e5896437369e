"""What every test of rehearsals ends with."""

from collections.abc import Iterator

import pytest

from tests.rehearsals.stage import Stage


@pytest.fixture(autouse=True)
def stages_are_closed() -> Iterator[None]:
    yield
    for stage in list(Stage.open):
        stage.close()
