"""What the documents say is so."""

import re
import tomllib
from pathlib import Path

from synvirt.settings import Settings
from tests.api.callers import test_oidc
from tests.cases import TIMES
from tests.repository import test_faults

ROOT = Path(__file__).parents[2]


def test_every_setting_is_described_once() -> None:
    described = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/settings.md").read_text(), re.MULTILINE)
    assert sorted(described) == sorted(Settings.model_fields)


def test_every_link_within_the_documents_leads_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target, section in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", document.read_text()):
            if "://" not in target:
                leads_to = document.parent / target if target else document
                assert leads_to.exists(), f"{document.name}: {target}"
                assert not section or section in _sections(leads_to), f"{document.name}: {target}#{section}"


def _sections(document: Path) -> set[str]:
    """The addresses of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_every_dependency_is_justified() -> None:
    wanted = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert wanted is not None
    names = {re.split(r"[\[<>=]", name)[0] for name in re.findall(r'^ +"([^"]+)"', wanted[1], re.MULTILINE)}
    described = re.findall(r"^\| (\w[\w.-]*) \|", (ROOT / "docs/dependencies.md").read_text(), re.MULTILINE)
    assert names <= set(described), names - set(described)


def test_every_dependency_is_locked() -> None:
    """What `make setup` and the package install are the lock file's; pyvmomi was in none, and vSphere did not work."""
    wanted = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert wanted is not None
    names = {re.split(r"[\[<>=]", name)[0].lower() for name in re.findall(r'^ +"([^"]+)"', wanted[1], re.MULTILINE)}
    assert "pyvmomi" in names
    for lock in ("requirements.txt", "requirements-dev.txt"):
        locked = re.findall(r"^([\w.-]+)(?:\[[\w,]+\])?==", (ROOT / lock).read_text(), re.MULTILINE)
        assert names <= {name.lower() for name in locked}, lock


def test_an_extra_that_a_hint_names_is_there() -> None:
    """Three hints named `synvirt[vmware]` long after pyvmomi had become a dependency like the others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project.get("optional-dependencies", {}))
    texts = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("src/**/*.py"),
        *ROOT.glob("packaging/*"),
        ROOT / "Makefile",
    ]
    named = {
        f"{text.relative_to(ROOT)}: {extra}"
        for text in texts
        if text.is_file() and text.name != "CHANGELOG.md"  # what was so at its time
        for extra in re.findall(r"synvirt\[([\w-]+)\]", text.read_text(errors="replace"))
        if extra not in extras
    }
    assert named == set()


def test_every_file_that_a_document_names_in_its_text_is_there() -> None:
    """Not as a link, but as code: `tests/recordings/`, which recordings.md told people to use, was no folder of ours."""
    found = 0
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        if document.name == "CHANGELOG.md":  # what was so at its time
            continue
        for named in re.findall(r"`((?:tests|src|packaging|bench|scripts|lab|docs)/[\w./-]+)`", document.read_text()):
            assert (ROOT / named).exists(), f"{document.relative_to(ROOT)}: {named}"
            found += 1
    assert found > 8


def test_every_claim_of_what_works_names_its_tests() -> None:
    rows = re.findall(r"^\| (.+) \| ((?:proven|simulated)[^|]*) \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) > 20
    for what, _, tests in rows:
        named = re.findall(r"\]\((tests/[^)]+)\)", tests)
        assert named, what
        for one in named:
            files = [ROOT / one] if one.endswith(".py") else [*(ROOT / one).glob("*.py")]
            assert any(re.search(r"^ *def test_", file.read_text(), re.MULTILINE) for file in files), one


def test_the_figures_of_what_is_proven_are_those_of_its_tests() -> None:
    """CI tried 2,000 damages of a repository where the README said 10,000, in a row that did not name the test."""
    readme = (ROOT / "README.md").read_text()
    damages = test_faults.PARTS * test_faults.DAMAGES // TIMES
    for figure, tests in (
        (f"{damages:,} damaged repositories", "tests/repository/test_faults.py"),
        (f"{len(test_oidc.BENT)} kinds of forged token", "tests/api/callers/test_oidc.py"),
    ):
        row = [line for line in readme.splitlines() if line.startswith("| ") and figure in line]
        assert len(row) == 1, figure
        assert tests in row[0], figure


def test_every_section_about_what_is_proven_names_its_tests() -> None:
    found = 0
    for document in sorted((ROOT / "docs").rglob("*.md")):
        if document.parent.name == "decisions":
            continue
        text = document.read_text()
        for heading in re.finditer(r"^(#+) .*[Pp]roven.*$", text, re.MULTILINE):
            section = re.split(rf"^#{{1,{len(heading[1])}}} ", text[heading.end() :], maxsplit=1, flags=re.MULTILINE)[0]
            named = re.findall(r"\]\(([./]*tests/[^)]+\.py)\)", section)
            assert named, f"{document.name}: {heading[0]}"
            for one in named:
                assert re.search(r"^ *def test_", (document.parent / one).read_text(), re.MULTILINE), f"{document.name}: {one}"
            found += 1
    assert found > 8
