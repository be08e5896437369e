"""No title contradicts its detail: of all errors that the code raises, and of all concerns.

An error's title is its class's, and is the same for each cause. So it may claim only what holds for all of them. CLAIMS has,
for words in a title, what each detail under it must say or must not say. Details are read from the code, with the expressions
in braces where a name or a number comes in. A row may be of words that no title has now: they would be wrong again. The command
line shows no titles.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import synvirt
from synvirt.errors import SynvirtError
from synvirt.main import app
from synvirt.model.machine import Concern

SOURCE = Path(synvirt.__file__).parent
FILES = sorted(path for path in SOURCE.rglob("*.py") if not {"cli", "sample", "alembic"} & set(path.relative_to(SOURCE).parts))

# What has a text for a person.
MADE = (SynvirtError, Concern)

ABSENT = r"\bno\b|\bnot\b|\bnone\b|nothing|removed|answers \{"
# Words of a title: what a detail under it must say (or None), and what it must not say (or None).
CLAIMS: dict[str, tuple[str | None, str | None]] = {
    r"does not answer|did not answer": (None, r"\banswer(s|ed)\b(?! to be)"),
    r"runs cold": (r"runs? cold", None),
    r"no such|There is no": (ABSENT, None),
    r"could not make": (None, r"\bmade\b|has no|no longer exists|already"),
    r"cannot be reached\.$": (None, r"\b(refuses|offers|answers)\b"),
    r"^The guest runs": (None, r"memory (of \S+ )?is saved|is off|shut off"),
    r"refused the credentials": (None, r"certificate|container|ended our session"),
    r"refused the domain": (None, r"cannot be opened|cannot be kept|does not say"),
    r"credentials.*(missing|wrong)": (r"credential|token|log|account|user|password|provider", None),
    r"larger than": (r"larger|fit|bytes", None),
    r"SHA-256": (r"SHA-256", None),
    r"cancelled": (r"cancel|stop", None),
    r"did not boot": (None, r"\bhas booted\b|says that it is"),
    r"ended while": (r"\bended\b|is lost", None),
    r"could not be read\.$": (None, r"(cannot|could not) be written\b(?!.*read)"),
    r"could not be written|was not written": (None, r"(cannot|could not) be read\b(?!.*(writ|back))"),
    r"no room": (r"free|written|quota", None),
    r"freeze|frozen": (r"quiesc|freez|froz|thaw|held|ended|running|scratch|quiet", None),
    r"whole disk is read": (None, r"only .* (is|are) read"),
    r"import root": (r"import root|file|folder|import may", None),
    r"protected": (r"protect|kept|removed|needs?\b", None),
    r"passphrase": (r"key|passphrase", None),
    r"not well formed|malformed": (None, r"cannot be (reached|opened)"),
}


def _errors(cls: type[SynvirtError]) -> Iterator[type[SynvirtError]]:
    yield cls
    for child in cls.__subclasses__():
        if child.__module__.startswith("synvirt."):
            yield from _errors(child)


def _text(node: ast.expr | None) -> str:
    """A text as it is written, with its expressions in braces. Empty for what is no text."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(
                f"{{{ast.unparse(one.value)}}}" if isinstance(one, ast.FormattedValue) else _text(one) for one in parts
            )
    return ""


Calls = list[tuple[str, object, ast.Call]]


@pytest.fixture(scope="module")
def calls() -> Calls:
    """The place of each call that makes an error or a concern, what it calls, and the call."""
    assert app is not None  # all modules are loaded
    found = []
    for path in FILES:
        names = path.relative_to(SOURCE.parent).with_suffix("").parts
        module = importlib.import_module(".".join(names if names[-1] != "__init__" else names[:-1]))
        made = {name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, MADE)}
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if any(f"{name}(" in text for name in made) else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in made:
                found.append((f"{path.relative_to(SOURCE)}:{node.lineno}", getattr(module, node.func.id), node))
    return found


Raised = dict[type[SynvirtError], list[tuple[str, str]]]


@pytest.fixture(scope="module")
def raised(calls: Calls) -> Raised:
    found: Raised = {}
    for place, called, call in calls:
        if isinstance(called, type) and issubclass(called, SynvirtError) and call.args and (detail := _text(call.args[0])):
            found.setdefault(called, []).append((place, detail))
    assert sum(map(len, found.values())) > 1000, "the details are not found any more"
    return found


def contradiction(title: str, detail: str) -> str | None:
    """The words of the title that the detail contradicts."""
    if re.sub(r"\{[^}]*\}", "", detail).strip(" :;,") == "":
        return None  # all of it is another error's text
    for words, (must, must_not) in CLAIMS.items():
        if re.search(words, title) and (
            (must is not None and not re.search(must, detail)) or (must_not is not None and re.search(must_not, detail))
        ):
            return words
    return None


def test_no_title_of_an_error_contradicts_a_detail_that_is_raised_with_it(raised: Raised) -> None:
    wrong = [
        f"{place}: «{error.title()}» but «{detail}» ({words})"
        for error, details in raised.items()
        for place, detail in details
        if (words := contradiction(error.title(), detail)) is not None
    ]
    assert wrong == [], "\n".join(map(str, wrong))


@pytest.mark.parametrize("error", sorted(set(_errors(SynvirtError)), key=str))
def test_a_title_is_a_sentence_that_holds_for_all_numbers(error: type[SynvirtError]) -> None:
    """A detail has the numbers. A title with one of its own would be wrong for the next detail."""
    title = error.title()
    assert re.fullmatch(r"[A-Z].*\.", title), title
    assert not re.search(r"\d", title.replace("SHA-256", "")), title


@pytest.mark.parametrize(
    ("title", "detail"),
    [
        ("The source platform does not answer.", "{host} answered with 3 bytes"),
        ("The source cannot track changes, so the job runs cold.", "{name} cannot be copied warm: {reason}"),
        ("There is no such object.", "{method} is refused for {path}"),
        ("The source has no such virtual machine.", "{name} is there"),
        ("The repository cannot be reached.", "the peer {where} refuses its caller"),
        ("The guest runs, and its disks cannot be frozen.", "the memory of {name} is saved"),
        ("A source disk could not be read.", "{name} cannot be written: {why}"),
    ],
)
def test_what_contradicts_a_title_is_seen(title: str, detail: str) -> None:
    assert contradiction(title, detail) is not None


DENIAL = r"\b(no|not|cannot|without)\b"
DENIED = (
    r"\b(no|not|cannot|never|nothing|none|neither|without|only|lost|stay|stays|alone|missing|off|free|something else)\b|\{why"
)


def test_a_concern_whose_label_denies_something_denies_it_in_its_assessment(calls: Calls) -> None:
    found = []
    for place, called, call in calls:
        if called is Concern:
            given = {one.arg: _text(one.value) for one in call.keywords}
            found.append((place, given.get("label", ""), given.get("assessment", "")))
    assert len([one for one in found if all(one)]) > 30
    wrong = [one for one in found if all(one) and re.search(DENIAL, one[1], re.IGNORECASE) and not re.search(DENIED, one[2])]
    assert wrong == [], "\n".join(map(str, wrong))
