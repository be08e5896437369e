"""{base_url}/waves/new: a wave from a spreadsheet, from a query («all that are on in folder X»), or from the machines that were
chosen at /new/several. Each makes a draft: nothing is moved before an operator starts it."""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from pydantic import ValidationError
from starlette.responses import Response

from synvirt.api.multipart import FRAMING_BYTES, UploadForm
from synvirt.api.received import bounded
from synvirt.errors import BadRequest, SynvirtError
from synvirt.fleet.member_ids import ids
from synvirt.fleet.model import MEMBERS_MAX, WaveRequest
from synvirt.fleet.querying import VmQuery
from synvirt.fleet.sheets.importing import Importer, WaveImport
from synvirt.fleet.sheets.rows import CSV_BYTES_MAX, SheetProblem
from synvirt.fleet.waves import Waves
from synvirt.machines.texts import clean
from synvirt.mistakes import place, worded
from synvirt.model.plan import MigrationPlan
from synvirt.web.forms import Form, Sent
from synvirt.web.machine import planned
from synvirt.web.new import MACHINES_MAX
from synvirt.web.pages import Pages

# People do not read longer pages; a dry run of the command line lists all.
PROBLEMS_SHOWN = 500
# Enough to see whether the right VMs match.
MEANT_SHOWN = 200
QUERY_FIELDS = tuple(VmQuery.model_fields)


class Sheet:
    """A file of a form, in memory, as a confined child reads it whole anyway."""

    def __init__(self, filename: str) -> None:
        self.filename, self._content = filename, bytearray()

    def write(self, data: memoryview) -> None:
        self._content += data

    def finish(self, announced_sha256: str | None) -> tuple[str, bytes]:
        return self.filename, bytes(self._content)

    def discard(self) -> None:
        self._content.clear()


class NewWavePages:
    """The pages that make waves."""

    def __init__(self, pages: Pages, waves: Waves, importer: Importer) -> None:
        self._pages, self._waves, self._importer = pages, waves, importer

    def begin(self) -> Response:
        return self._page()

    async def of_query(self, form: Sent) -> Response:
        """The matching VMs for a check; or a draft with them."""
        typed = {name: form.text(name) for name in QUERY_FIELDS}
        try:
            meant = await self._importer.meant(query_of(typed))
            if form.text("act") == "make":
                made = await run_in_threadpool(self._waves.create, meant)
                return self._pages.see(f"/waves/{made.id}")
        except SynvirtError as error:
            return await run_in_threadpool(self._page, typed=typed, wrong=error)
        return await run_in_threadpool(self._page, typed=typed, meant=meant)

    async def of_file(self, request: Request) -> Response:
        """Lists all that is wrong with the rows, or makes a draft of each wave in the file."""
        body = await bounded(request, CSV_BYTES_MAX + FRAMING_BYTES)
        try:
            filename, content = await run_in_threadpool(_file, request.headers.get("content-type", ""), body)
        except BadRequest as error:  # no file was chosen, or an empty one
            if type(error) is not BadRequest:  # it is no form
                raise
            return await run_in_threadpool(self._page, "", [_of_all(error)])
        is_json = content.lstrip()[:1] == b"{"
        name = None if is_json else clean(PurePath(filename).stem) or None
        try:
            looked = await self._importer.take(content, name=name, into=None, dry_run=False)
        except SynvirtError as error:
            looked = WaveImport(problems=(_of_all(error),))
        if looked.problems:
            return await run_in_threadpool(self._page, filename, looked.problems)
        made = [str(one.id) for one in looked.waves]
        return self._pages.see(f"/waves/{made[0]}" if len(made) == 1 else "/waves")

    def of_selection(self, form: Sent) -> Response:
        """The plans that /new/several showed, as members of one wave. InvalidPlan, BadRequest."""
        plans = [planned(Form({"plan": (text,)})) for text in form.many("plan")]
        made = self._waves.create(wave_request(form, plans))
        return self._pages.see(f"/waves/{made.id}")

    def _page(
        self,
        filename: str = "",
        problems: Sequence[SheetProblem] = (),
        *,
        typed: Mapping[str, str] | None = None,
        wrong: SynvirtError | None = None,
        meant: WaveRequest | None = None,
    ) -> Response:
        status = BadRequest.status if problems else 200 if wrong is None else wrong.status
        members = () if meant is None else meant.members
        return self._pages.page(
            "waves/new.html",
            status=status,
            filename=filename,
            typed=typed or dict.fromkeys(QUERY_FIELDS, ""),
            wrong=wrong,
            sources=self._importer.sources(),
            meant=members[:MEANT_SHOWN],
            meant_count=None if meant is None else len(members),
            problems=problems[:PROBLEMS_SHOWN],
            more=max(0, len(problems) - PROBLEMS_SHOWN),
            most_bytes=CSV_BYTES_MAX,
            machines_max=MACHINES_MAX,
        )


def _file(content_type: str, body: bytes) -> tuple[str, bytes]:
    form = UploadForm(content_type, cap_bytes=CSV_BYTES_MAX, begin=Sheet)
    form.feed(body)
    return form.finish()


def _of_all(error: SynvirtError) -> SheetProblem:
    """A problem of the whole file."""
    return SheetProblem(row=0, column="", detail=error.detail[:500], hint=error.hint)


def wave_request(form: Form, plans: Sequence[MigrationPlan]) -> WaveRequest:
    """The request that the form makes. BadRequest names the wrong input."""
    if not 0 < len(plans) <= MEMBERS_MAX:
        raise BadRequest(f"{len(plans)} machines were chosen for the wave", hint="choose at least one")
    budget = form.text("wave_budget") or None
    document: dict[str, Any] = {
        "name": form.text("wave_name"),
        "members": [
            {"id": id_, "vm": plan.name or id_, "plan": plan, "outage_budget_s": budget}
            for id_, plan in zip(ids(plan.name or "vm" for plan in plans), plans, strict=True)
        ],
    }
    window = {name: form.text(f"window_{name}") for name in ("start", "end", "timezone", "rrule")}
    if any(window.values()):
        given = {name: value for name, value in window.items() if value}
        document["windows"] = [{"id": "window", "name": "The window", **given}]
    if form.text("wave_at_once"):
        document["limits"] = {"per_source_host": form.text("wave_at_once")}
    try:
        return WaveRequest.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        shown = _SHOWN.get(str(first["loc"][0])) or place(first["loc"])
        raise BadRequest(f"{shown}: {worded(first)}", hint="go back and correct it") from error


_SHOWN = {"name": "the wave's name", "windows": "the window", "limits": "copies at once", "members": "a member"}


def query_of(typed: Mapping[str, str]) -> VmQuery:
    """BadRequest, which names the field."""
    try:
        return VmQuery.model_validate({name: value for name, value in typed.items() if value})
    except ValidationError as error:
        mistakes = [f"{_QUERY_WORDS.get(str(one['loc'][0]), 'the query')}: {worded(one)}" for one in error.errors()]
        raise BadRequest("; ".join(mistakes)) from None


_QUERY_WORDS = {
    "source_id": "Source",
    "name": "Name of the wave",
    "vm": "VMs named",
    "folder": "Folder",
    "host": "Host",
    "power_state": "Power",
    "guest_os": "Guest system",
    "outage_budget_s": "Outage allowed",
}
