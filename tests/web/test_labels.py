"""A person reads the labels of a form, and the stations of a job: no field of the API reaches a page."""

import ast
import re
from pathlib import Path
from uuid import uuid4

import pytest

import synvirt
from synvirt.model.job import Migration
from synvirt.model.kinds import Mode, State
from synvirt.model.values import now
from synvirt.web.labels import LABELS, as_labels
from synvirt.web.plans import FIELDS
from synvirt.web.stations import stations
from tests.fakes.service import PLAN

# Where the texts are that a page shows of a machine, a plan and a job.
ROOMS = ("model", "machines", "hypervisor", "migrations", "kvm", "offline", "guests", "destinations")
# A plan's fields as texts name them.
FIELD = re.compile(
    r"\b(?:target|warm|schedule|limits|source_ref)\.[a-z_]+|\b(?:skip_disks|waive_concerns|outage_budget_s|shutdown_timeout_s)\b"
)


def _texts() -> list[str]:
    """Whole texts for people in those rooms: a constant, and what stands between the values of one that is put together."""
    found = []
    for room in ROOMS:
        for file in (Path(synvirt.__file__).parent / room).rglob("*.py"):
            tree = ast.parse(file.read_text())
            described = {
                id(node.body[0].value)
                for node in ast.walk(tree)
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and node.body
                and isinstance(node.body[0], ast.Expr)
            }
            found += [
                node.value
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in described
                and " " in node.value
                and FIELD.search(node.value)
            ]
    return found


def test_no_text_names_a_field_of_the_api_on_a_page() -> None:
    texts = _texts()
    assert len(texts) > 20
    assert {text: as_labels(text) for text in texts if FIELD.search(as_labels(text))} == {}


def test_every_field_of_the_form_has_a_label() -> None:
    assert FIELDS.keys() <= LABELS.keys()
    for name, path in FIELDS.items():
        assert as_labels(".".join(path)) == LABELS[name]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("target.network_map[0].target", "Network"),
        ("mode", "How it moves"),
        (
            "set target.memory_bytes lower, or set target.start to false",
            "set «Memory» lower, or leave «Start it here in the end» out",
        ),
        (
            "an instant start with target.start false starts nothing",
            "an instant start with «Start it here in the end» left out starts nothing",
        ),
        ("the name of a mode is its target", "the name of a mode is its target"),
        ("target.identity is new", "new ones are chosen at «UUID and MAC addresses»"),
        ("plan.mode: must be 'Warm' or 'Cold'", "«How it moves»: must be 'Warm' or 'Cold'"),
    ],
)
def test_words_of_the_api_as_labels(text: str, shown: str) -> None:
    assert as_labels(text) == shown


@pytest.mark.parametrize(("state", "shown"), [(State.COMPLETED, []), (State.STARTING, ["Completed"])])
def test_a_job_whose_document_has_no_history(state: State, shown: list[str]) -> None:
    """One of an earlier version, or that a tool has put there: its page is shown all the same."""
    job = Migration(id=uuid4(), name="web", plan=PLAN, state=state, mode_effective=Mode.COLD, created_at=now())
    assert [str(one.state) for one in stations(job)] == shown
