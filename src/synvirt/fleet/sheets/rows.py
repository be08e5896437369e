"""Waves from spreadsheets, and back: RVTools' XLSX and CSV, CSV like that of AWS MGN, our own CSV and JSON.

    content ─▶ tables ─▶ rows, each with what is wrong by row and column ─▶ joined to VMs of the sources ─▶ members, or problems

A sheet is imported whole or not at all: if one row is wrong, there are no members. A VM is identified by its vCenter's id and
its own id (`VI SDK UUID`, `VM ID`), else by its name, if exactly one VM has it.

Our columns are `_OURS`: depends_on has ids and apps with spaces between them, approver names with semicolons, checks and plan
JSON. Those of other programs are in `_COLUMNS`. Further columns of a foreign sheet are ignored; an unknown column in our own
format is a mistake.
"""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from synvirt.errors import BadRequest
from synvirt.fleet.member_ids import LONGEST, NOT_IN_IDS, MemberIds
from synvirt.fleet.model import MEMBERS_MAX, SETTINGS, Group, MemberRequest, Wave, WaveRequest
from synvirt.fleet.sheets import xlsx
from synvirt.mistakes import place, worded
from synvirt.model.checks import Check
from synvirt.model.plan import MigrationPlan
from synvirt.model.values import Model, Name
from synvirt.nearest import did_you_mean
from synvirt.sizes import MIB
from synvirt.texts.json_once import ONE_COUNTS, Doubled, refuse_doubled

CSV_BYTES_MAX = 64 * MIB
# Longer than fifteen of the longest cells that the csv module reads.
ROW_CHARS_MAX = 2 * MIB
PROBLEMS_MAX = 200
# Programs that open a CSV run a cell with such a beginning as a formula (OWASP, «CSV injection»).
# Excel in East Asia takes full-width signs, too.
_FORMULA = (*"=+-@＝＋－＠", "\t", "\r", "\n", "'")
_FORM = "WaveRequest in /openapi.json describes it, and an export is one"
_NAME: TypeAdapter[str] = TypeAdapter(Name)
# A saved CSV has the words of Excel's language: English, German, French, Spanish, Portuguese, Italian, Dutch, Polish.
_YES = frozenset({"true", "1", "yes", "wahr", "vrai", "verdadero", "verdadeiro", "vero", "waar", "prawda"})
_NO = frozenset({"", "false", "0", "no", "falsch", "faux", "falso", "onwaar", "fałsz"})
# Excel's own first line, which it does not show as a row.
_SEPARATOR = re.compile(r'"?sep=([,;\t])"?[,;\t]*\r?\n', re.IGNORECASE)

# Our column ─▶ the names in other programs, in lower case. RVTools before 4.0 has vCenter UUID.
_COLUMNS: dict[str, tuple[str, ...]] = {
    "id": ("id", "mgn:server:user-provided-id"),
    "vm": ("vm", "name", "vm name", "mgn:server:name"),
    "vcenter": ("vcenter", "vi sdk uuid", "vcenter uuid"),
    "vm_id": ("vm_id", "vm id", "moref"),
    "wave": ("wave", "mgn:wave:name"),
    "app": ("app", "group", "mgn:app:name"),
    "rule": ("rule",),
    "depends_on": ("depends_on", "after"),
    "window": ("window", "window_id"),
    "priority": ("priority",),
    "outage_budget_min": ("outage_budget_min",),
    "outage_budget_s": ("outage_budget_s",),
    "approver": ("approver", "approvers"),
    "checks": ("checks",),
    "plan": ("plan",),
    "template": ("template",),
}
_OURS = (
    *("id", "vm", "vcenter", "vm_id", "wave", "app", "rule", "depends_on", "window", "priority"),
    *("outage_budget_min", "outage_budget_s", "approver", "checks", "plan"),
)
_BY_NAME = {name: ours for ours, names in _COLUMNS.items() for name in names}
# A sheet with one of these comes from another program.
_FOREIGN = ("powerstate", "vi sdk uuid", "vcenter uuid", "mgn:server:user-provided-id", "mgn:wave:name", "mgn:app:name")


class SheetProblem(Model):
    """`row`: as the program shows it, from 1; 0: of the whole file. `column`: its heading. `hint`: what would be right."""

    row: int
    column: str
    detail: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class KnownVm:
    """A VM of a source, as it was listed. `vcenter`: the source's own id, empty where it has none."""

    source_id: str
    source_name: str
    vcenter: str
    vm_id: str
    name: str
    plan: MigrationPlan


@dataclass(frozen=True, slots=True)
class TakenIn:
    """Members, or problems, never both. `left_out`: templates."""

    members: tuple[MemberRequest, ...] = ()
    groups: tuple[Group, ...] = ()
    waves: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    problems: tuple[SheetProblem, ...] = ()


def take_in(content: bytes, known: Sequence[KnownVm]) -> TakenIn:
    """A spreadsheet of any kind. `known`: all VMs that a row may mean. BadRequest, if it cannot be read at all."""
    table = _table(content)
    reader = _Reader(table, known)
    rows = list(reader.rows())
    reader.check(rows)
    if reader.problems:
        return TakenIn(problems=tuple(reader.problems[:PROBLEMS_MAX]), left_out=tuple(reader.left_out))
    if not rows:
        raise BadRequest("the spreadsheet has no VMs", hint="the first row has the columns' names, each other one a VM")
    waves: dict[str, list[str]] = {}
    for row in rows:
        waves.setdefault(row.wave, []).append(row.member.id)
    return TakenIn(
        members=tuple(row.member for row in rows),
        groups=tuple(Group(name=name, rule=rule) for name, rule in reader.rules.items()),
        waves={name: tuple(ids) for name, ids in waves.items()},
        left_out=tuple(reader.left_out),
    )


def from_json(content: bytes) -> WaveRequest:
    """A wave in our own JSON, as written by `to_json`. BadRequest names the place."""
    try:
        read = WaveRequest.model_validate_json(content)
        refuse_doubled(content)
    except Doubled as doubled:
        raise BadRequest(f"{str(doubled)[:100]}: is given more than once", hint=ONE_COUNTS) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = place(first["loc"])
        raise BadRequest(f"{where}: {worded(first)}" if where else f"the wave {worded(first)}", hint=_FORM) from None
    return read


def to_json(wave: WaveRequest | Wave, members: Iterable[MemberRequest] | None = None, *, etag: str | None = None) -> bytes:
    """All that `from_json` needs to make the same wave, a member a line. Webhooks are left out, as their secrets are never
    shown. `members`: replaces the wave's own, read one at a time, as holding thousands takes a second."""
    head = wave.model_dump_json(include=set(SETTINGS - {"hooks"}), indent=1)
    tag = f' "etag": {json.dumps(etag)},\n' if etag is not None else ""
    ours = set(MemberRequest.model_fields)
    lines = ",\n  ".join(one.model_dump_json(include=ours) for one in (wave.members if members is None else members))
    return f'{{\n{tag}{head[2:-2]},\n "members": [\n  {lines}\n ]\n}}\n'.encode()


def to_csv(wave: WaveRequest | Wave, members: Iterable[MemberRequest] | None = None) -> bytes:
    """Its members in the form that `take_in` reads: UTF-8 with a byte order mark, for programs that would guess the encoding.
    `members`: as above."""
    rules = {group.name: group.rule for group in wave.groups}
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(_OURS)
    for member in wave.members if members is None else members:
        cells = {
            "id": member.id,
            "vm": member.vm,
            "wave": wave.name,
            "app": member.group or "",
            "rule": rules.get(member.group or "", ""),
            "depends_on": " ".join(member.after),
            "window": member.window_id or "",
            "priority": str(member.priority),
            # Seconds, as a third of a minute has no exact decimal form.
            "outage_budget_s": "" if member.outage_budget_s is None else repr(member.outage_budget_s),
            "approver": json.dumps(member.approvers, ensure_ascii=False) if member.approvers else "",
            "checks": json.dumps([check.model_dump(mode="json") for check in member.checks]) if member.checks else "",
            "plan": member.plan.model_dump_json(),
        }
        writer.writerow([guarded(cells.get(name, "")) for name in _OURS])
    return b"\xef\xbb\xbf" + out.getvalue().encode()


def guarded(cell: str) -> str:
    """A text that is no formula. A leading apostrophe is doubled, so that `unguarded` restores the original."""
    return f"'{cell}" if cell.startswith(_FORMULA) else cell


def unguarded(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(_FORMULA) else cell


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Table:
    """`rows`: the row's number from 1, and its cells by heading."""

    headings: tuple[str, ...]
    rows: tuple[tuple[int, dict[str, str]], ...]


def _table(content: bytes) -> _Table:
    if content.startswith(b"PK\x03\x04"):
        [first, *_] = xlsx.read(content, "vInfo")
        numbered = list(first.rows)
    elif content.startswith((b"\xd0\xcf\x11\xe0", b"%PDF", b"{\\rtf")):
        raise BadRequest("the file is neither XLSX nor CSV", hint="save the sheet as .xlsx or .csv")
    else:
        numbered = list(_of_csv(content))
    if not numbered:
        raise BadRequest("the spreadsheet is empty", hint="the first row has the columns' names, each other one a VM")
    (_, heading), *rest = numbered
    names = {column: name.strip() for column, name in heading.items() if name.strip()}
    if len(rest) > MEMBERS_MAX:
        raise BadRequest(f"the spreadsheet has {len(rest)} rows; {MEMBERS_MAX} are the most", hint="take it in by parts")
    rows = tuple((number, {names[column]: text for column, text in cells.items() if column in names}) for number, cells in rest)
    return _Table(tuple(names.values()), tuple((number, cells) for number, cells in rows if any(cells.values())))


def _of_csv(content: bytes) -> Iterator[tuple[int, dict[int, str]]]:
    if len(content) > CSV_BYTES_MAX:
        raise BadRequest(f"the spreadsheet has {len(content) // MIB} MiB; {CSV_BYTES_MAX // MIB} MiB are the most")
    text = _decoded(content)
    if separator := _SEPARATOR.match(text):
        text = text[separator.end() :]
    heading = text.partition("\n")[0]
    delimiter = separator[1] if separator else max(",;\t", key=heading.count)
    number, row_chars, cells_left = 1, 0, xlsx.CELLS_MAX

    def lines() -> Iterator[str]:
        nonlocal row_chars
        for line in io.StringIO(text, newline=""):
            row_chars += len(line)
            if row_chars > ROW_CHARS_MAX:
                raise BadRequest(
                    f"row {number} has more than {ROW_CHARS_MAX} characters", hint="is a quotation mark not closed?"
                )
            yield line

    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    try:
        for count, row in enumerate(reader, 1):
            if len(row) > xlsx.COLUMNS_MAX:
                raise BadRequest(f"row {number} has {len(row)} columns; {xlsx.COLUMNS_MAX} are the most")
            cells = {column: unguarded(cell) for column, cell in enumerate(row) if cell}
            cells_left -= len(cells)
            if cells_left < 0 or count > xlsx.ROWS_MAX:
                raise BadRequest(f"the spreadsheet has more than {xlsx.ROWS_MAX} rows or {xlsx.CELLS_MAX} cells")
            if cells:
                yield number, cells
            number, row_chars = reader.line_num + 1, 0
    except csv.Error as error:
        raise BadRequest(f"the CSV cannot be read in row {number}: {error}", hint="is a quotation mark not closed?") from None


def _decoded(content: bytes) -> str:
    """Excel saves UTF-16 as «Unicode text», and the code page of western Windows as plain CSV."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        encodings: tuple[str, ...] = ("utf-16",)
    else:
        encodings = ("utf-8-sig", "cp1252")
    for encoding in encodings:
        try:
            return content.decode(encoding)
        except UnicodeDecodeError:
            continue
    raise BadRequest("the CSV is neither UTF-8 nor UTF-16 nor of Windows' western code page", hint="save it as CSV UTF-8")


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Row:
    number: int
    member: MemberRequest
    wave: str


class _Reader:
    def __init__(self, table: _Table, known: Sequence[KnownVm]) -> None:
        self._table = table
        self.problems: list[SheetProblem] = []
        self.left_out: list[str] = []
        self.rules: dict[str, Any] = {}
        # The ids, and what depends on which names, of all rows: also of those with a mistake.
        self._ids: set[str] = set()
        self._after: list[tuple[int, tuple[str, ...]]] = []
        self._heading: dict[str, str] = {}
        self._by_ids = {(vm.vcenter.lower(), vm.vm_id): vm for vm in known if vm.vcenter}
        self._by_vm_id: dict[str, list[KnownVm]] = {}
        self._by_vm_name: dict[str, list[KnownVm]] = {}
        for vm in known:
            self._by_vm_id.setdefault(vm.vm_id, []).append(vm)
            self._by_vm_name.setdefault(vm.name, []).append(vm)
        self._headings()

    def _headings(self) -> None:
        lower = [name.lower() for name in self._table.headings]
        foreign = any(name in _FOREIGN for name in lower)
        for name, seen in Counter(lower).items():
            if seen > 1 and name in _BY_NAME:
                self._wrong(1, name, "the column occurs twice", "take one of them out")
        for name in self._table.headings:
            ours = _BY_NAME.get(name.lower())
            if ours is not None:
                self._heading.setdefault(ours, name)
            elif not foreign:
                hint = did_you_mean(name.lower(), _OURS) or f"known: {', '.join(_OURS)}"
                self._wrong(1, name, "there is no such column", hint)
        if not {"vm", "vm_id", "plan"} & set(self._heading):
            self._wrong(1, "vm", "no column says which VM is meant", "use a column vm, or VM ID with VI SDK UUID")

    def _wrong(self, row: int, column: str, detail: str, hint: str | None = None) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(SheetProblem(row=row, column=column[:100], detail=detail[:500], hint=hint))

    def rows(self) -> Iterator[_Row]:
        if self.problems:
            return
        member_ids = MemberIds()
        for number, cells in self._table.rows:
            if len(self.problems) >= PROBLEMS_MAX:
                return  # a sheet of another site: to look for the nearest name of each of its VMs takes minutes
            by_ours = {
                ours: cells.get(heading, "") if ours == "vm" else cells.get(heading, "").strip()
                for ours, heading in self._heading.items()
            }
            template = by_ours.get("template", "")
            if template.lower() not in _YES | _NO:
                self._wrong(number, self._heading["template"], f"{template[:80]!r} is not right", "true or false is right")
            if template.lower() in _YES:
                self.left_out.append(by_ours.get("vm", "") or f"row {number}")
                continue
            row = self._row(number, by_ours, member_ids)
            if row is not None:
                yield row

    def _row(self, number: int, cells: Mapping[str, str], member_ids: MemberIds) -> _Row | None:
        before = len(self.problems)

        def read(column: str, right: str, convert: Callable[[str], Any], default: Any = None) -> Any:
            text = cells.get(column, "")
            if not text:
                return default
            try:
                return convert(text)
            except (ValueError, ValidationError):
                self._wrong(number, self._heading[column], f"{text[:80]!r} is not right", f"{right} is right")
                return default

        plan = read("plan", "a plan in JSON, as a wave's own CSV has it", MigrationPlan.model_validate_json)
        name = cells.get("vm", "")
        if plan is None and len(self.problems) == before:
            vm = self._vm(number, cells)
            plan, name = (vm.plan, name or vm.name) if vm is not None else (None, name)
        checks = read("checks", "a list of checks in JSON", TypeAdapter(tuple[Check, ...]).validate_json, ())
        id_ = cells.get("id") or member_ids.fresh(name or cells.get("vm_id", ""))
        after = _names(cells.get("depends_on", ""))
        self._ids.add(id_)
        self._after.append((number, after))
        fields = {
            "id": id_,
            "vm": name or cells.get("vm_id") or f"row {number}",
            "plan": plan,
            "after": after,
            "group": read("app", "a name of letters, digits, '.', '_' and '-'", _identifier),
            "priority": read("priority", "a number from 1 to 5, 1 first", _one_to_five, 3),
            "window_id": read("window", "a window's id", _identifier),
            "outage_budget_s": read("outage_budget_s", "a number of seconds above 0", _seconds)
            or read("outage_budget_min", "a number of minutes above 0", lambda text: 60 * _seconds(text)),
            "approvers": read("approver", "names with semicolons between them", _approvers, ()),
            "checks": checks,
        }
        wave = read("wave", "a name of at most 255 characters, without control characters", _NAME.validate_python, "")
        group = fields["group"]
        if group is not None:
            self._rule(number, group, cells.get("rule", ""))
        if len(self.problems) > before:
            return None
        try:
            member = MemberRequest.model_validate(fields)
        except ValidationError as error:
            for one in error.errors():
                self._wrong(number, self._heading.get(_OF_FIELD.get(str(one["loc"][0]), ""), str(one["loc"][0])), worded(one))
            return None
        member_ids.take(member.id)
        return _Row(number, member, wave)

    def _vm(self, number: int, cells: Mapping[str, str]) -> KnownVm | None:
        name, vm_id, vcenter = cells.get("vm", ""), cells.get("vm_id", ""), cells.get("vcenter", "").lower()
        if vm_id and vcenter:
            found = self._by_ids.get((vcenter, vm_id))
            if found is None:
                hint = "is that vCenter a source here, and was the sheet made lately?"
                self._wrong(number, self._heading["vm_id"], f"no source has the VM {vm_id} of vCenter {vcenter}", hint)
            return found
        column, text, found_by = ("vm_id", vm_id, self._by_vm_id) if vm_id else ("vm", name, self._by_vm_name)
        if not text:
            self._wrong(number, self._heading.get("vm", "vm"), "the row says no VM", "give a name, or VM ID with VI SDK UUID")
            return None
        several = found_by.get(text, [])
        if len(several) == 1:
            return several[0]
        if several:
            where = ", ".join(sorted({vm.source_name for vm in several})[:5])
            hint = "say which by the columns VI SDK UUID and VM ID"
            self._wrong(number, self._heading[column], f"{len(several)} VMs are {text!r}, of {where}", hint)
            return None
        alike = sorted(one for one in found_by if one[:1].lower() == text[:1].lower())[:300]
        self._wrong(number, self._heading[column], f"no source has a VM {text!r}", did_you_mean(text, alike))
        return None

    def _rule(self, number: int, group: str, rule: str) -> None:
        if rule not in ("", "together", "apart"):
            self._wrong(number, self._heading["rule"], f"{rule!r} is not a rule", "use together or apart")
            return
        known = self.rules.setdefault(group, rule or "together")
        if rule and rule != known:
            detail = f"{group} is {known} in a row before, and {rule} here"
            self._wrong(number, self._heading["rule"], detail, "give the same in each of its rows")

    def check(self, rows: Sequence[_Row]) -> None:
        """Checks that need all rows together."""
        first: dict[str, int] = {}
        for row in rows:
            other = first.setdefault(row.member.id, row.number)
            if other != row.number:
                self._wrong(
                    row.number, self._heading.get("id", "id"), f"{row.member.id!r} is the id of row {other}", "give it its own"
                )
        known = self._ids | set(self.rules)
        for number, name in ((number, name) for number, names in self._after for name in names if name not in known):
            if len(self.problems) >= PROBLEMS_MAX:
                return
            alike = sorted(one for one in known if one[:1] == name[:1])[:300]
            hint = did_you_mean(name, alike) or "give the id of another row, or an app"
            self._wrong(number, self._heading["depends_on"], f"no row or app is called {name!r}", hint)


# Fields of a member ─▶ columns.
_OF_FIELD = {
    "after": "depends_on",
    "group": "app",
    "window_id": "window",
    "outage_budget_s": "outage_budget_min",
    "approvers": "approver",
    "id": "id",
    "vm": "vm",
    "plan": "plan",
    "checks": "checks",
    "priority": "priority",
}


def _identifier(text: str) -> str:
    if len(text) > LONGEST or NOT_IN_IDS.search(text) or not text[:1].isalnum():
        raise ValueError
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part for part in re.split(r"[\s;,]+", text) if part))


def _one_to_five(text: str) -> int:
    if text not in ("1", "2", "3", "4", "5"):
        raise ValueError
    return int(text)


def _seconds(text: str) -> float:
    number = float(text.replace(",", "."))
    if not 0 < number < float("inf"):
        raise ValueError
    return number


def _approvers(text: str) -> tuple[str, ...]:
    """`Alice; Bob`, or a list in JSON."""
    if text.startswith("["):
        return TypeAdapter(tuple[str, ...]).validate_json(text)
    return tuple(name for part in text.split(";") if (name := part.strip()))
