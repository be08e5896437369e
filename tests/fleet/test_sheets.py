"""Waves from spreadsheets: the examples of the documentation, each mistake by row and column, and back without a loss."""

import difflib
import io
import sys
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synvirt.errors import BadRequest
from synvirt.fleet.model import Group, MemberRequest
from synvirt.fleet.sheets import xlsx
from synvirt.fleet.sheets.rows import PROBLEMS_MAX, KnownVm, TakenIn, from_json, guarded, take_in, to_csv, to_json, unguarded
from synvirt.model.checks import Check
from synvirt.sizes import MIB
from tests.fleet.made import member, plan, wave

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
VCENTER = "4f9a6c1e-0d8e-4b57-9a51-1f2d3c4b5a60"


def vm(name: str, vm_id: str, vcenter: str = VCENTER, source: int = 1) -> KnownVm:
    return KnownVm(str(UUID(int=source)), f"vc{source}", vcenter, vm_id, name, plan(vm_id, UUID(int=source)))


KNOWN = [vm("shop-db-01", "vm-101"), vm("shop-web-01", "vm-102"), vm("wiki", "vm-103"), vm("twin", "vm-1"), vm("twin", "vm-2")]


def problems_of(content: str | bytes, known: list[KnownVm] = KNOWN) -> list[tuple[int, str, str, str | None]]:
    found = take_in(content.encode() if isinstance(content, str) else content, known)
    assert not found.members or not found.problems
    return [(one.row, one.column, one.detail, one.hint) for one in found.problems]


def vms(found: TakenIn) -> list[str]:
    assert found.problems == ()
    return [one.plan.source_ref.vm_id for one in found.members]  # type: ignore[union-attr]


def test_our_own_csv_of_the_documentation() -> None:
    found = take_in((EXAMPLES / "wave.csv").read_bytes(), KNOWN)
    assert vms(found) == ["vm-101", "vm-102", "vm-103"]
    database, web, wiki = found.members
    assert (database.id, database.group, database.outage_budget_s, database.priority) == ("shop-db", "shop", 900, 1)
    assert database.approvers == ("Alice", "Bob")
    assert (web.after, web.window_id) == (("shop-db",), "saturday")
    assert wiki.group is None
    assert found.groups == (Group(name="shop"),)
    assert found.waves == {"spring": ("shop-db", "shop-web", "wiki")}


def test_rvtools_of_the_documentation() -> None:
    found = take_in((EXAMPLES / "rvtools.xlsx").read_bytes(), KNOWN)
    assert vms(found) == ["vm-101", "vm-102", "vm-103"]
    assert [one.id for one in found.members] == ["shop-db-01", "shop-web-01", "wiki"]
    assert found.left_out == ("golden",)


def test_csv_like_mgns_of_the_documentation() -> None:
    found = take_in((EXAMPLES / "mgn.csv").read_bytes(), KNOWN)
    assert vms(found) == ["vm-101", "vm-102", "vm-103"]
    assert found.waves == {"spring": ("srv-1", "srv-2"), "autumn": ("srv-3",)}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_a_csv_as_others_save_it(encoding: str) -> None:
    text = f"VM;VM ID;vCenter UUID;In Use MB;Powerstate\nBüro;vm-7;{VCENTER.upper()};1.024;poweredOn\n"
    found = take_in(text.encode(encoding), [vm("Büro", "vm-7")])
    assert vms(found) == ["vm-7"]
    assert found.members[0].id == "B-ro"


@pytest.mark.parametrize("first", ["sep=;\r\n", '"sep=;"\n', "sep=;;;\n", "SEP=;\n"])
def test_the_line_by_which_excel_names_the_separator(first: str) -> None:
    """Of a heading with more commas than semicolons, too. Excel does not count it as a row."""
    text = f"{first}VM;VM ID;vCenter UUID;In Use, MB, all;Powerstate\nwiki;vm-7;{VCENTER};1;on\nwik;;;;\n"
    assert problems_of(text, [vm("wiki", "vm-7")])[0][:2] == (3, "VM")
    assert vms(take_in(text.replace("wik;;;;\n", "").encode(), [vm("wiki", "vm-7")])) == ["vm-7"]


@pytest.mark.parametrize(
    ("yes", "no"), [("TRUE", "FALSE"), ("WAHR", "FALSCH"), ("VRAI", "FAUX"), ("PRAWDA", "FAŁSZ"), ("1", "")]
)
def test_templates_are_left_out_in_the_language_of_excel(yes: str, no: str) -> None:
    found = take_in(f"VM;Template;Powerstate\nwiki;{no};on\nshop-db-01;{yes};off\n".encode(), KNOWN)
    assert (vms(found), found.left_out) == (["vm-103"], ("shop-db-01",))


def test_a_word_that_may_mean_a_template_is_asked_about() -> None:
    """Taken for «no», it would move the template as a VM."""
    assert problems_of("VM;Template;Powerstate\nwiki;Sand;on\n") == [
        (2, "Template", "'Sand' is not right", "true or false is right")
    ]


def test_every_mistake_is_reported_by_row_and_column() -> None:
    found = problems_of(
        "id,vm,vcenter,vm_id,app,depends_on,window,priority,outage_budget_min,rule,checks\n"
        "a,wikki,,,,,,,,,\n"
        'b,twin,,,,,,high,,,"[{}]"\n'
        f"c,x,{VCENTER},vm-999,,,,,,,\n"
        "d,wiki,,,my app,,,,-3,,\n"
        "e,wiki,,,g,,,,,apart,\n"
        "f,wiki,,,g,,,,,together,\n"
        "g g,wiki,,,,,,,,,\n"
        ",,,,,,w,,,,\n"
    )
    assert [(row, column) for row, column, _, _ in found] == [
        (2, "vm"),
        (3, "vm"),
        (3, "checks"),
        (3, "priority"),
        (4, "vm_id"),
        (5, "app"),
        (5, "outage_budget_min"),
        (7, "rule"),
        (8, "id"),
        (9, "vm"),
    ]
    by_place = {(row, column): (detail, hint) for row, column, detail, hint in found}
    assert by_place[2, "vm"] == ("no source has a VM 'wikki'", "did you mean wiki?")
    assert by_place[3, "vm"] == ("2 VMs are 'twin', of vc1", "say which by the columns VI SDK UUID and VM ID")
    assert by_place[3, "priority"] == ("'high' is not right", "a number from 1 to 5, 1 first is right")


def test_ids_and_dependencies_are_checked_over_all_rows() -> None:
    assert problems_of("id,vm,depends_on\na,wiki,\na,shop-db-01,\n") == [(3, "id", "'a' is the id of row 2", "give it its own")]
    mixed = "id,vm,depends_on,priority\nalpha,wiki,bets gamma,9\nbeta,shop-db-01,alpha delta,3\n"
    assert [(row, column, detail) for row, column, detail, _ in problems_of(mixed)] == [
        (2, "priority", "'9' is not right"),
        (2, "depends_on", "no row or app is called 'bets'"),
        (2, "depends_on", "no row or app is called 'gamma'"),
        (3, "depends_on", "no row or app is called 'delta'"),
    ], "all at once; what depends on a row with a mistake has none itself"
    assert problems_of("id,vm,depends_on\nalpha,wiki,alfa\nbeta,shop-db-01,alpha\n") == [
        (2, "depends_on", "no row or app is called 'alfa'", "did you mean alpha?")
    ]


def test_a_column_that_is_none_of_ours_is_a_mistake_and_of_rvtools_is_passed_over() -> None:
    [(row, column, _, hint)] = problems_of("id,vm,dependson\na,wiki,\n")
    assert (row, column, hint) == (1, "dependson", "did you mean depends_on?")
    assert vms(take_in(b"VM,Powerstate,Annotation,Memory\nwiki,poweredOn,x,n/a\n", KNOWN)) == ["vm-103"]
    assert problems_of("window\nw\n")[0][2] == "no column says which VM is meant"
    assert problems_of("vm,VM\nwiki,wiki\n")[0][2] == "the column occurs twice"


def test_the_name_of_a_wave_is_checked_where_it_stands() -> None:
    [(row, column, _, hint)] = problems_of(f"vm,wave\nwiki,spring\nshop-db-01,{'x' * 300}\n")
    assert (row, column) == (3, "wave")
    assert "255 characters" in str(hint)


def test_a_sheet_of_another_site_is_given_up_with_the_last_problem_that_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest name of each unknown one is looked for: of ten thousand that takes minutes."""
    looked_for: list[str] = []

    def get_close_matches(text: str, _alike: list[str], n: int) -> list[str]:
        looked_for.append(text)
        return []

    monkeypatch.setattr(difflib, "get_close_matches", get_close_matches)
    assert len(problems_of("vm\n" + "".join(f"other-{number}\n" for number in range(5000)))) == PROBLEMS_MAX
    assert len(looked_for) == PROBLEMS_MAX


def test_blank_rows_are_no_vms() -> None:
    assert vms(take_in(b"\n,\nvm,id\n" + b",\n" * 20_000 + b"wiki,a\n", KNOWN)) == ["vm-103"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"vm\n" + b"\n" * 400_000, "more than 100000 rows"),
        (b"vm\n" + (b"," * 999 + b"\n") * 500, "no VMs"),
        (b"vm\n" + b"," * 3_000_000, "row 2 has more than 2097152 characters"),
        (b"vm\n" + b'"\n",' * 600_000, "row 2 has more than 2097152 characters"),
        (b"vm\n" + (b"x," * 999 + b"\n") * 60, "or 50000 cells"),
    ],
)
def test_a_csv_that_is_small_as_a_file_is_small_in_memory(content: bytes, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xlsx, "CELLS_MAX", 50_000)
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest, match=why):
            take_in(content, KNOWN)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 64 * MIB


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (b"vm\n", "no VMs"),
        (b"%PDF-1.7", "neither XLSX nor CSV"),
        (b'vm,id\n"wiki,a\n', "cannot be read in row 2"),
        (b"vm\n" + b"wiki\n" * 10_001, "10001 rows"),
        (b"vm," + b"," * 2000 + b"\n", "columns"),
        (b"PK\x03\x04 and no zip", "cannot be read"),
    ],
)
def test_what_is_no_list_of_vms_is_refused(content: bytes, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        take_in(content, KNOWN)


def repacked(**parts: bytes) -> bytes:
    """The example with other parts."""
    out = io.BytesIO()
    with zipfile.ZipFile(EXAMPLES / "rvtools.xlsx") as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, parts.get(Path(name).stem, old.read(name)))
        if "sharedStrings" in parts:
            new.writestr("xl/sharedStrings.xml", parts["sharedStrings"])
    return out.getvalue()


BOMB = b'<?xml version="1.0"?><!DOCTYPE l [<!ENTITY a "' + b"x" * 1000 + b'">]><worksheet><sheetData/></worksheet>'


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"sheet1": BOMB}, "DTDForbidden"),
        ({"sheet1": b'<worksheet><sheetData><row r="100001"><c><v>1</v></c></row></sheetData></worksheet>'}, "100000 rows"),
        (
            {"sheet1": b'<worksheet><sheetData><row r="1"><c t="s"><v>99999999</v></c></row></sheetData></worksheet>'},
            "IndexError",
        ),
        ({"sheet1": b"<worksheet><sheetData>"}, "ParseError"),
        ({"workbook.xml": b"<Relationships/>"}, "xl/"),
        ({"sheet1": b" " * 2 * MIB}, "has more than 1 MiB"),
    ],
)
def test_a_hostile_spreadsheet_ends_as_an_error(parts: dict[str, bytes], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's work, without its cage, which would hold this process."""
    monkeypatch.setattr(xlsx, "PART_BYTES_MAX", MIB)
    answer = xlsx.answered(repacked(**parts), ["vinfo"])
    assert why in answer["error"]


def test_texts_that_cells_share_as_excel_writes_them() -> None:
    strings = (
        b'<sst xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><si><t>VM</t></si>'
        b"<si><r><t>wi</t></r><r><t>ki</t></r><rPh><t>no</t></rPh></si></sst>"
    )
    rows = (
        b'<row r="3"><c r="B3" t="s"><v>0</v></c></row>'
        b'<row r="5"><c r="B5" t="s"><v>1</v></c><c r="C5" t="b"><v>1</v></c></row>'
    )
    sheet = b"<worksheet><sheetData>" + rows + b"</sheetData></worksheet>"
    answer = xlsx.answered(repacked(sheet1=sheet, sharedStrings=strings), ["vinfo"])
    assert answer["sheets"] == [{"name": "vInfo", "rows": [(3, {1: "VM"}), (5, {1: "wiki", 2: "True"})]}]


def test_what_the_caged_child_says_is_reported() -> None:
    with pytest.raises(BadRequest, match="the spreadsheet cannot be read: DTDForbidden"):
        take_in(repacked(sheet1=BOMB), KNOWN)


def test_a_child_that_a_file_has_taken_over_fills_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cage bounds what it writes; it is killed when its time is over."""
    endless = tmp_path / "python"
    lines = (
        "from synvirt.fleet.sheets.xlsx import _CAGE, enter",
        "import os",
        "enter(_CAGE)",
        "while True: os.write(1, bytes(1 << 20))",
    )
    endless.write_text(f"#!{sys.executable}\n" + "\n".join(lines))
    endless.chmod(0o755)
    monkeypatch.setattr(xlsx, "WITHIN_S", 15.0)
    monkeypatch.setattr(sys, "executable", str(endless))
    with pytest.raises(BadRequest, match="more memory or time than"):
        xlsx.read(b"PK")


def test_a_cell_is_no_formula_when_it_comes_out() -> None:
    made = wave(member("a", plan=plan("=cmd|' /C calc'!A0")).model_copy(update={"vm": "=HYPERLINK(1)"}))
    text = to_csv(made).decode("utf-8-sig")
    assert "'=HYPERLINK(1)" in text
    assert take_in(text.encode(), []).members == made.members


@settings(max_examples=50)
@given(st.text(max_size=12) | st.text("=＝@＠\n'x", max_size=3))
def test_guarding_a_cell_loses_nothing(cell: str) -> None:
    assert unguarded(guarded(cell)) == cell
    assert not guarded(cell).startswith((*"=+-@＝＋－＠", "\t", "\r", "\n"))


NAMES = st.text(st.characters(min_codepoint=32, exclude_categories=("Cs", "Cc")), min_size=1, max_size=20)


@st.composite
def members(draw: st.DrawFn) -> tuple[MemberRequest, ...]:
    found: list[MemberRequest] = []
    for n in range(draw(st.integers(1, 5))):
        fields: dict[str, Any] = {
            "group": draw(st.sampled_from((None, "g1", "g2"))),
            "priority": draw(st.integers(1, 5)),
            "window_id": draw(st.sampled_from((None, "sat"))),
            "outage_budget_s": draw(st.none() | st.floats(0.001, 86400)),
            "approvers": tuple(draw(st.lists(NAMES, max_size=3))),
            "checks": draw(st.sampled_from(((), (Check(kind="port", port=22), Check(kind="command", argv=("a;b", "'=1")))))),
        }
        after = draw(st.lists(st.sampled_from([one.id for one in found] or ["m0"]), max_size=2, unique=True)) if found else []
        found.append(member(f"m{n}", *after, **fields).model_copy(update={"vm": draw(NAMES)}))
    return tuple(found)


@settings(max_examples=30)
@given(members(), NAMES)
def test_out_and_in_again_loses_nothing(made: tuple[MemberRequest, ...], name: str) -> None:
    whole = wave(*made, groups=[Group(name="g1", rule="apart"), Group(name="g2")]).model_copy(update={"name": name})
    assert from_json(to_json(whole)) == whole
    found = take_in(to_csv(whole), [])
    assert found.problems == ()
    assert found.members == made
    used = {one.group for one in made}
    assert {group.name: group.rule for group in found.groups} == {
        group.name: group.rule for group in whole.groups if group.name in used
    }


def test_json_that_is_none_of_ours_names_the_place() -> None:
    with pytest.raises(BadRequest, match=r"^members\[0\]\.plan: is required"):
        from_json(b'{"name": "x", "members": [{"id": "a", "vm": "a"}]}')
    with pytest.raises(BadRequest, match="the wave is not JSON"):
        from_json(b"{")
    with pytest.raises(BadRequest, match=r"on_failure: is given more than once"):
        from_json(b'{"name": "x", "on_failure": "stop", "on_failure": "continue", "members": []}')
