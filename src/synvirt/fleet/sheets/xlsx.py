"""The cells of a spreadsheet in XLSX (ECMA-376: a zip of XML), read by a caged child. `read(content)` starts the child, which
runs this module.

Only the text of cells: formulas are not calculated and styles are ignored, so that a date is its stored number. No library is
used: the needed part of the format is a hundred lines, and a hostile file meets our own limits.
"""

import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from synvirt.cage import Cage, Network, enter
from synvirt.errors import BadRequest
from synvirt.jobs.process import ENVIRONMENT
from synvirt.programs import inherited
from synvirt.sizes import MIB

# RVTools' file of ten thousand VMs has about 10 MiB packed and 150 MiB of XML.
FILE_BYTES_MAX = 64 * MIB
PART_BYTES_MAX = 512 * MIB
CELLS_MAX = 2_000_000
ROWS_MAX = 100_000
COLUMNS_MAX = 1_000
PARTS_MAX = 2_000
TEXT_MAX = 32_767  # of a cell, by Excel itself
ANSWER_BYTES_MAX = 64 * MIB
WITHIN_S = 60.0
_CAGE = Cage(network=Network.NONE, memory_bytes=1024 * MIB, cpu_s=40, written_bytes=ANSWER_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class Sheet:
    """`rows`: (number as the program shows it, from 1; cells by column, from 0)."""

    name: str
    rows: tuple[tuple[int, dict[int, str]], ...]


def read(content: bytes, *wanted: str) -> tuple[Sheet, ...]:
    """The sheets with these names, in any case; if there are none, the first sheet. BadRequest."""
    if len(content) > FILE_BYTES_MAX:
        raise BadRequest(f"the spreadsheet has {len(content) // MIB} MiB; {FILE_BYTES_MAX // MIB} MiB are the most")
    # Files in memory: the kernel bounds what the child writes, and neither waits for the other.
    with os.fdopen(os.memfd_create("sheet"), "w+b") as given, os.fdopen(os.memfd_create("cells"), "w+b") as written:
        given.write(content)
        given.seek(0)
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "synvirt.fleet.sheets.xlsx", *wanted],
            stdin=given,
            stdout=written,
            stderr=subprocess.DEVNULL,
            env=inherited(ENVIRONMENT),
            start_new_session=True,
        ) as child:
            try:
                child.wait(WITHIN_S)
            except subprocess.TimeoutExpired:
                raise _broken(f"it was not read within {WITHIN_S:.0f} s") from None
            finally:
                child.kill()
        written.seek(0)
        output = written.read()
    try:
        answer = json.loads(output)
        if "error" in answer:
            raise _broken(str(answer["error"])[:300])
        return tuple(_sheet(one) for one in answer["sheets"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise _broken("it takes more memory or time than a list of VMs does, or is damaged") from None


def _sheet(fields: Any) -> Sheet:
    """A hostile file may control the child: its answer may contain only text and numbers."""
    rows = tuple((int(number), {int(column): str(text) for column, text in cells.items()}) for number, cells in fields["rows"])
    return Sheet(str(fields["name"]), rows)


def _broken(why: str) -> BadRequest:
    return BadRequest(f"the spreadsheet cannot be read: {why}", hint="save it again as .xlsx, or as CSV")


# ── the child ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Unreadable(Exception):
    pass


def main() -> None:
    """The caged child: the file on stdin, the columns to read as arguments, the cells as JSON on stdout."""
    import encodings.cp437  # noqa: F401 - names within a zip; nothing is loaded once the cage is entered

    from defusedxml.ElementTree import iterparse  # noqa: F401

    enter(_CAGE)
    content = sys.stdin.buffer.read(FILE_BYTES_MAX + 1)
    sys.stdout.write(json.dumps(answered(content, [name.lower() for name in sys.argv[1:]])))


def answered(content: bytes, wanted: list[str]) -> dict[str, Any]:
    """The sheets, or what is wrong with the file."""
    try:
        return {"sheets": list(_sheets(content, wanted))}
    except _Unreadable as error:
        return {"error": str(error)}
    except MemoryError:
        raise
    except zipfile.BadZipFile:
        return {"error": "it is not a whole .xlsx file, which is a zip"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _sheets(content: bytes, wanted: list[str]) -> Iterator[dict[str, Any]]:
    with zipfile.ZipFile(io.BytesIO(content)) as package:
        if len(package.infolist()) > PARTS_MAX:
            raise _Unreadable(f"it has more than {PARTS_MAX} parts")
        names = _parts_of_sheets(package)
        if not names:
            raise _Unreadable("it has no sheets")
        strings = _strings(package)
        left = [CELLS_MAX]
        for name, part in [one for one in names if one[0].lower() in wanted] or names[:1]:
            yield {"name": name, "rows": list(_rows(package, part, strings, left))}


def _open(package: zipfile.ZipFile, part: str) -> IO[bytes]:
    if package.getinfo(part).file_size > PART_BYTES_MAX:
        raise _Unreadable(f"its part {part} has more than {PART_BYTES_MAX // MIB} MiB")
    return package.open(part)


def _elements(package: zipfile.ZipFile, part: str) -> Iterator[tuple[str, Any]]:
    """The ends of elements, by their names; entities and DTDs are refused. A part may not be larger than its zip says."""
    from defusedxml.ElementTree import iterparse

    with _open(package, part) as stream:
        for _, element in iterparse(stream, ("end",), forbid_dtd=True):
            yield _name(element), element


def _name(element: Any) -> str:
    """The name without its namespace: there are two, of the transitional and of the strict standard."""
    return str(element.tag).rpartition("}")[2]


def _parts_of_sheets(package: zipfile.ZipFile) -> list[tuple[str, str]]:
    targets = {
        element.get("Id"): str(element.get("Target"))
        for name, element in _elements(package, "xl/_rels/workbook.xml.rels")
        if name == "Relationship"
    }
    found = []
    for name, element in _elements(package, "xl/workbook.xml"):
        if name == "sheet":
            relation = next((value for key, value in element.items() if key.endswith("}id")), None)
            target = targets.get(relation, "")
            found.append((str(element.get("name", "")), target.removeprefix("/") if target.startswith("/") else f"xl/{target}"))
    return found


def _strings(package: zipfile.ZipFile) -> list[str]:
    found: list[str] = []
    if "xl/sharedStrings.xml" not in package.namelist():
        return found
    for name, element in _elements(package, "xl/sharedStrings.xml"):
        if name == "si":
            found.append(_text(element))
            element.clear()
            if len(found) > CELLS_MAX:
                raise _Unreadable(f"it has more than {CELLS_MAX} texts")
    return found


def _text(element: Any) -> str:
    """The text of its runs, without phonetic readings."""
    parts = [one.text or "" for run in element if _name(run) != "rPh" for one in run.iter() if _name(one) == "t"]
    return "".join(parts)[:TEXT_MAX]


def _rows(package: zipfile.ZipFile, part: str, strings: list[str], left: list[int]) -> Iterator[tuple[int, dict[int, str]]]:
    number = 0
    for name, element in _elements(package, part):
        if name != "row":
            continue
        number = int(element.get("r") or number + 1)
        cells: dict[int, str] = {}
        column = -1
        for cell in element:
            column = _column(cell.get("r")) if cell.get("r") else column + 1
            text = _cell(cell, strings)
            if text and column < COLUMNS_MAX:
                cells[column] = text
                left[0] -= 1
        element.clear()
        if left[0] < 0 or number > ROWS_MAX:
            raise _Unreadable(f"it has more than {ROWS_MAX} rows or {CELLS_MAX} cells")
        if cells:
            yield number, cells


def _column(reference: str) -> int:
    """A is 0, AB is 27."""
    number = 0
    for letter in reference.rstrip("0123456789")[:4].upper():
        number = number * 26 + ord(letter) - ord("A") + 1
    return number - 1


def _cell(cell: Any, strings: list[str]) -> str:
    kind = cell.get("t")
    if kind == "inlineStr":
        return "".join(_text(one) for one in cell if _name(one) == "is").strip()
    value = next((one.text or "" for one in cell if _name(one) == "v"), "")
    if kind == "s":
        return strings[int(value)].strip()
    if kind == "b":
        return "True" if value == "1" else "False"
    return value[:TEXT_MAX].strip()


if __name__ == "__main__":
    main()
