"""The options of `synvirt import` against the plan of the API: each field has an option, and says the same words."""

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import typer
from pydantic import BaseModel

from synvirt.cli.migrating.dry_runs import as_options
from synvirt.cli.migrating.plan_options import ROWS, PlanOptions, Sets, as_plan
from synvirt.model.plan import MigrationPlan

# The command finds them by its argument, --source, --kind and --vm.
OF_THE_ARGUMENT = {"source", "source_ref"}
ALL = {field for row in ROWS.values() for field in (row.field, row.also) if field}


def _alternatives(annotation: Any) -> list[Any]:
    if get_origin(annotation) is typing.Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        return [one for each in get_args(annotation) for one in _alternatives(each)]
    return [annotation]


def _leaves(model: type[BaseModel], before: str = "") -> Iterator[tuple[str, list[Any]]]:
    for name, field in model.model_fields.items():
        kinds = _alternatives(field.annotation)
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if name in OF_THE_ARGUMENT and not before:
            continue
        if inner:
            yield from _leaves(inner[0], f"{before}{name}.")
        else:
            yield f"{before}{name}", kinds


LEAVES = dict(_leaves(MigrationPlan))


def test_every_field_of_a_plan_has_an_option() -> None:
    assert set(LEAVES) == ALL


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.words and row.field != "mode"])
def test_an_option_of_a_few_words_has_the_fields_words(name: str) -> None:
    row = ROWS[name]
    words = [word for kind in LEAVES[row.field] if get_origin(kind) is Literal for word in get_args(kind)]
    assert list(row.words) == words


def test_what_was_not_given_is_the_plans_default() -> None:
    required = {"source": {"Offline": "qcow2"}, "source_ref": {"kind": "offline_host_path", "path": "/x"}}
    plain = MigrationPlan.model_validate({**required, "mode": "Cold"})
    assert MigrationPlan.model_validate({**required, **as_plan(PlanOptions())}) == plain


def test_options_arrive_in_their_fields() -> None:
    chosen = PlanOptions(
        mode="Warm", name="web", memory="4GiB", network=["VM=1=bridge:br0"], new_identity=True, no_start=True, skip_disk=["a"]
    )
    plan = as_plan(chosen)
    assert plan["mode"] == "Warm"
    assert plan["name"] == "web"
    assert plan["skip_disks"] == ["a"]
    assert plan["target"] == {
        "name": "web",
        "memory_bytes": 4 << 30,
        "network_map": [{"source": "VM=1", "target": "bridge:br0"}],
        "identity": "new",
        "start": False,
    }


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        (PlanOptions(cutover="never"), "--cutover"),
        (PlanOptions(memory="much"), "--memory"),
        (PlanOptions(network=["br0"]), "--network"),
        (PlanOptions(on_host_lost="panic"), "--on-host-lost"),
    ],
)
def test_what_is_no_value_names_its_option(chosen: PlanOptions, named: str) -> None:
    with pytest.raises(typer.BadParameter) as refused:
        as_plan(chosen)
    assert refused.value.param_hint == named


@pytest.mark.parametrize("row", [row for row in ROWS.values() if "." in row.field], ids=lambda row: row.field)
def test_a_field_is_called_by_its_option(row: Sets) -> None:
    message = as_options(f"set {row.field} to something, or {row.field}[0] to another")
    assert row.field not in message
    assert "--" in message
