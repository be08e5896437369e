"""What is refused says which form is wanted, in words: no regular expression reaches a person."""

import ast
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import BaseModel, Field, StringConstraints, TypeAdapter, ValidationError

import synvirt
from synvirt.errors import BadRequest
from synvirt.live.registry import PLATFORMS
from synvirt.mistakes import BRANCHES, FORMS, place, worded, written
from synvirt.settings import Settings, load
from tests.documents import made as documents


def _patterns(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        for inner in schema.values():
            yield from _patterns(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _patterns(inner)


def test_each_form_that_is_asked_for_has_words() -> None:
    forms = [model for one in PLATFORMS for model in (one.form.credentials, one.form.options)]
    schemas = [documents.openapi(), Settings.model_json_schema(), *(model.model_json_schema() for model in forms)]
    assert set(_patterns(schemas)) == FORMS.keys()


class _Unknown(BaseModel):
    word: Annotated[str, StringConstraints(pattern=r"^[xyz]+$")]


def test_a_form_without_words_is_not_shown_as_a_regular_expression() -> None:
    with pytest.raises(ValidationError) as caught:
        _Unknown(word="abc")
    assert worded(caught.value.errors()[0]) == "is not of the form it must have"


def test_a_setting_says_its_form() -> None:
    with pytest.raises(BadRequest, match=r"setting host_id \(.*\): must be letters, digits, dot, hyphen and underscore alone"):
        load(environ={"SYNVIRT_HOST_ID": "a b"})


def test_a_source_says_its_form() -> None:
    form = next(one.form for one in PLATFORMS if one.kind == "prism_api")
    with pytest.raises(BadRequest) as caught:
        form.read_options({"initiator": "nonsense"})
    assert "an initiator's name: iqn." in str(caught.value)


class _Received(BaseModel):
    number: Annotated[int, Field(strict=True, ge=1, lt=9)] = 1
    size: Annotated[int, Field(ge=1, le=1 << 46)] = 1
    word: Literal["a", "b"] = "a"
    flag: Annotated[bool, Field(strict=True)] = False
    text: Annotated[str, StringConstraints(min_length=2, max_length=3)] = "xx"
    several: Annotated[tuple[int, ...], Field(min_length=1)] = (1,)
    when: datetime | None = None
    id: UUID | None = None


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("number", 0, "must be greater than or equal to 1"),
        ("number", 9, "must be less than 9"),
        ("number", "1", "must be a valid integer"),
        ("size", 1 << 50, "must be less than or equal to 70368744177664 (64 TiB)"),
        ("size", 0, "must be greater than or equal to 1"),
        ("word", "c", "must be 'a' or 'b'"),
        ("flag", "yes", "must be a valid boolean"),
        ("text", "x", "must have at least 2 characters"),
        ("text", "xxxx", "must have at most 3 characters"),
        ("several", (), "must have at least 1 item"),
        ("when", "soon", "must be a time: 2026-11-28T22:00:00+01:00, for example, or without the offset"),
        ("id", "x", "must be a valid UUID"),
    ],
)
def test_what_is_wrong_is_said_of_the_field(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        _Received.model_validate({field: value})
    assert worded(caught.value.errors()[0]).startswith(message)


def test_a_place_is_written_as_its_reader_would() -> None:
    assert place(("plan", "target", "network_map", 0, "source")) == "plan.target.network_map[0].source"
    assert place(()) == ""


def _branches(schema: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """The fields that have a union, or whose items have one, and the words that say which of it is meant."""
    if isinstance(schema, list):
        for inner in schema:
            yield from _branches(inner, field)
    elif isinstance(schema, dict):
        for word in schema.get("discriminator", {}).get("mapping", {}):
            yield field, word
        for name, inner in schema.items():
            if name == "properties":
                for one, its in inner.items():
                    yield from _branches(its, one)
            else:
                yield from _branches(inner, field)


def test_the_branch_of_a_union_is_not_named_as_a_field() -> None:
    known = {(field, word) for field, words in BRANCHES.items() for word in words}
    assert {*_branches(documents.openapi()), *_branches(Settings.model_json_schema())} == known
    for field, words in BRANCHES.items():
        between = ["x"] if field == "destinations" else [0] if field == "checks" else []
        for word in words:
            assert written([field, *between, word, "path"]) == [field, *between, "path"]
    assert place(("checks", 0, "port", "port")) == "checks[0].port"
    assert place(("members", 0, "checks", 0, "port")) == "members[0].checks[0].port"


def test_a_hint_of_the_service_names_no_command() -> None:
    """The API, the page and the command line show it alike. The doctor is on the page, too; accounts of the users file are the
    command line's alone, and so is what who runs another host has to do there."""
    root, found = Path(synvirt.__file__).parent, []
    rooms = {"cli", "main", "doctor", "accounts.py", "doctor.py"}
    for file in root.rglob("*.py"):
        if file.relative_to(root).parts[0] in rooms or file.name == "peer_offer.py":
            continue
        text = file.read_text()
        # Files without either are not parsed. A text may go on in another line.
        for node in ast.walk(ast.parse(text)) if "hint=" in text and re.search(r"\bsynvirt[ \"']", text) else ():
            if (
                isinstance(node, ast.keyword)
                and node.arg == "hint"
                and re.search(r"\bsynvirt (?!doctor\b)[a-z]", ast.unparse(node.value))
            ):
                found.append(f"{file.relative_to(root)}:{node.value.lineno}")
    assert found == []


@pytest.mark.parametrize(("value", "message"), [("x", "must be a whole number"), ("1.5", "must be a whole number")])
def test_a_number_of_a_query_is_reported_in_plain_words(value: str, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(int).validate_python(value)
    assert worded(caught.value.errors()[0]) == message


class _Chosen(BaseModel):
    mode: Literal["warm", "cold"]


@pytest.mark.parametrize(("value", "near"), [("wram", "; did you mean warm?"), ("x", ""), ("c" * 100_000, ""), (5, "")])
def test_a_word_that_may_not_be_is_answered_by_the_nearest_that_may(value: Any, near: str) -> None:
    with pytest.raises(ValidationError) as caught:
        _Chosen.model_validate({"mode": value})
    assert worded(caught.value.errors()[0]) == f"must be 'warm' or 'cold'{near}"
    assert worded(caught.value.errors(include_input=False)[0]) == "must be 'warm' or 'cold'"


# What an error of the system is caught as.
OF_THE_SYSTEM = {"OSError", "ConnectionError", "TimeoutError", "gaierror", "FileNotFoundError", "PermissionError"}


def test_no_error_of_the_system_is_said_in_pythons_words() -> None:
    """«[Errno 111] Connection refused» is a programmer's: `cause_of`, or its strerror."""
    root, found = Path(synvirt.__file__).parent, []
    caught_as = re.compile(rf"\bexcept\b[^:]*\b({'|'.join(OF_THE_SYSTEM)})\b[^:]*\bas\b")
    for file in root.rglob("*.py"):
        text = file.read_text()
        for handler in ast.walk(ast.parse(text)) if caught_as.search(text) else ():
            if isinstance(handler, ast.ExceptHandler) and handler.name and handler.type is not None:
                caught = {node.id if isinstance(node, ast.Name) else node.attr for node in ast.walk(handler.type)
                          if isinstance(node, ast.Name | ast.Attribute)}  # fmt: skip
                shown = [node for node in ast.walk(handler) if isinstance(node, ast.FormattedValue)]
                if caught & OF_THE_SYSTEM:
                    found += [
                        f"{file.relative_to(root)}:{node.lineno}"
                        for node in shown
                        if isinstance(node.value, ast.Name) and node.value.id == handler.name
                    ]
    assert found == []
