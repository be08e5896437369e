"""The concerns as the user's page lists them: a row each constructor of `machines/concerns.py`, with its arguments' names.

`python -m tests.offline.concern_table` prints it.
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any

from synvirt.machines import concerns
from synvirt.model.machine import Concern

HEAD = ["| Id | Category | What it is | What to do |", "|---|---|---|---|"]
RANK = {"Critical": 0, "Warning": 1, "Information": 2}


def made() -> Iterator[Concern]:
    """Each concern once, its texts filled with what stands for a key, a name or a number."""
    for constructor in vars(concerns).values():
        if inspect.isfunction(constructor) and inspect.signature(constructor).return_annotation in (Concern, "Concern"):
            yield constructor(
                **{name: _standing_for(name, each) for name, each in inspect.signature(constructor).parameters.items()}
            )


def _standing_for(name: str, parameter: inspect.Parameter) -> Any:
    if parameter.annotation is int:
        return 2
    return name.upper() if parameter.annotation is str else (name.upper(),)


def rows() -> list[str]:
    """Lines of the table, the gravest first."""
    listed = sorted(made(), key=lambda each: (RANK[each.category], each.id))
    return HEAD + [f"| `{each.id}` | {each.category} | {each.label} | {_one_line(each.remedy)} |" for each in listed]


def _one_line(text: str) -> str:
    if text == "REMEDY":  # told by whatever the disk lacks
        text = "As the concern says; or leave the disk out (`skip_disks`)."
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


if __name__ == "__main__":
    print("\n".join(rows()))
