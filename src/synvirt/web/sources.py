"""{base_url}/sources: the platforms of the machines: added, tested, changed, removed. Their machines are listed where a
migration begins (`/new/source/ID`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Header
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from synvirt.api.paging import Cursor, number_of
from synvirt.errors import SynvirtError
from synvirt.live.form import Form as Takes
from synvirt.migrations.sources.registered import Sources
from synvirt.model.access import SourceOptions
from synvirt.model.kinds import LiveKind
from synvirt.model.sources import Source, SourceChange, SourceRequest, SourceTest
from synvirt.web.fields import Field, explained, fields, judged, label, mark_of, refuse_overtaken, typed, values
from synvirt.web.forms import Form, Sent
from synvirt.web.pages import Pages
from synvirt.web.words import kind_words

ON_A_PAGE = 100
EXAMPLES: Mapping[LiveKind, str] = {
    LiveKind.VIM_API: "https://vcenter.example",
    LiveKind.WMI_API: "https://hyperv.example:5986",
    LiveKind.PVE_API: "https://pve.example:8006",
    LiveKind.LIBVIRT_REMOTE: "qemu+ssh://root@host.example/system",
    LiveKind.XEN_API: "https://xen.example",
    LiveKind.PRISM_API: "https://prism.example:9440",
}
# On every platform's form, above the options that only some have.
_TRUST = frozenset(SourceOptions.model_fields)


@dataclass(frozen=True, slots=True)
class _Filled:
    """The content of a source's form: the endpoint, the credentials, the options."""

    first: list[Field]
    credentials: list[Field]
    options: list[Field]

    @classmethod
    def of(cls, takes: Takes[Any, Any], source: Source | None) -> "_Filled":
        known = source.model_dump() if source else None
        first = [one for one in fields(SourceRequest, values=known) if one.key in ("name", "endpoint")]
        credentials = fields(takes.credentials, "credentials.")
        if source:  # none of them has to be typed again
            credentials = [Field(one.name, one.key, one.label, one.look, False) for one in credentials]
        return cls(first, credentials, fields(takes.options, "options.", source.options if source else None))

    def typed(self, form: Form, error: SynvirtError) -> "_Filled":
        return _Filled(*(typed(known, form, error) for known in (self.first, self.credentials, self.options)))

    @property
    def seen(self) -> list[Field]:
        """What a form shows of a source."""
        return [*self.first, *self.options]

    def values(self, form: Form) -> dict[str, Any]:
        credentials, options = values(self.credentials, form), values(self.options, form)
        return values(self.first, form) | {"credentials": credentials, "options": options}


class SourcePages:
    """The pages of sources; `sources_router` has their paths."""

    def __init__(self, pages: Pages, sources: Sources) -> None:
        self._pages, self._sources = pages, sources

    def listed(self, cursor: Cursor = None) -> Response:
        """The sources, newest first."""
        items, following = self._sources.page(limit=ON_A_PAGE, cursor=number_of(cursor))
        return self._pages.page("sources/list.html", sources=items, following=following, cursor=cursor)

    def kinds(self) -> Response:
        return self._pages.page("sources/kinds.html", kinds=EXAMPLES.items())

    def empty_form(self, kind: LiveKind) -> Response:
        return self._form(kind, None)

    def _form(
        self, kind: LiveKind, source: Source | None, filled: _Filled | None = None, error: SynvirtError | None = None
    ) -> Response:
        takes = self._sources.form(kind)
        filled = filled or _Filled.of(takes, source)
        return self._pages.page(
            "sources/form.html",
            status=error.status if error else 200,
            heading=f"Change {source.name}" if source else f"Add {kind_words(kind)}",
            action=f"/sources/{source.id}/change" if source else f"/sources/new/{kind}",
            back=f"/sources/{source.id}" if source else "/sources/new",
            example=EXAMPLES[kind],
            source=source,
            mark=mark_of(_Filled.of(takes, source).seen),
            first=filled.first,
            credentials=filled.credentials,
            trust=[one for one in filled.options if one.key in _TRUST],
            options=[one for one in filled.options if one.key not in _TRUST],
            credentials_explained=explained(takes.credentials),
            options_explained="" if takes.options is SourceOptions else explained(takes.options),
            error=error,
        )

    def add(self, kind: LiveKind, form: Sent) -> Response:
        """Registers a source; a form with mistakes comes back with them."""
        takes = self._sources.form(kind)
        filled = _Filled.of(takes, None)
        wanted = filled.values(form)
        try:
            request = judged(SourceRequest, {"kind": kind} | wanted)
            judged(takes.credentials, wanted["credentials"], "credentials.")
            judged(takes.options, wanted["options"], "options.")
            source = self._sources.add(request)
        except SynvirtError as error:
            return self._form(kind, None, filled.typed(form, error), error)
        return self._pages.see(f"/sources/{source.id}")

    def change_form(self, source_id: UUID) -> Response:
        """The form that changes a source. Secrets are not shown."""
        source = self._sources.get(source_id)
        return self._form(source.kind, source)

    def change(self, source_id: UUID, form: Sent) -> Response:
        """Changes a source; a form with mistakes, or of a source that was changed since, comes back."""
        source = self._sources.get(source_id)
        takes = self._sources.form(source.kind)
        filled = _Filled.of(takes, source)
        wanted = filled.values(form)
        if not wanted["credentials"]:
            del wanted["credentials"]
        # An unchanged address is left out, as a changed one would need the credentials.
        if wanted.get("endpoint") == source.endpoint:
            del wanted["endpoint"]

        def check(found: Source, _sealed: bytes) -> None:
            refuse_overtaken(_Filled.of(takes, found).seen, form)

        try:
            refuse_overtaken(filled.seen, form)
            change = judged(SourceChange, wanted)
            if "credentials" in wanted:
                judged(takes.credentials, wanted["credentials"], "credentials.")
            judged(takes.options, wanted["options"], "options.")
            self._sources.change(source_id, change, check=check)
        except SynvirtError as error:
            return self._form(source.kind, source, filled.typed(form, error), error)
        return self._pages.see(f"/sources/{source_id}")

    def source(self, source_id: UUID) -> Response:
        """One source, with the result of its last test."""
        source = self._sources.get(source_id)
        options = [(label(key), _text(value)) for key, value in source.options.items() if value is not None and value != ""]
        return self._pages.page(
            "sources/source.html", source=source, options=options, **self._tested(source, source.last_test, begin=True)
        )

    async def test(self, source_id: UUID, part: Annotated[str, Header(alias="HX-Request")] = "") -> Response:
        """Answers htmx with a part of the page, a form with the page."""
        result = await self._sources.test(source_id)
        if not part:
            return self._pages.see(f"/sources/{source_id}")
        source = await run_in_threadpool(self._sources.get, source_id)
        return self._pages.page("sources/test.html", source=source, **self._tested(source, result, begin=False))

    async def deep(self, source_id: UUID) -> Response:
        """Tests a source with a snapshot, and leads back to it."""
        await self._sources.test(source_id, deep=True)
        return self._pages.see(f"/sources/{source_id}")

    def _tested(self, source: Source, test: SourceTest | None, *, begin: bool) -> dict[str, Any]:
        """`begin`: a source without a test is tested as soon as its page is opened."""
        reach = self._sources.form(source.kind).place(source.endpoint).reach
        return {"test": test, "can_pin": reach is not None and reach.tls, "begin": begin and test is None}

    def certificate(self, source_id: UUID, form: Sent) -> Response:
        """Fetches and shows the certificate, so it is no GET; the answer to the page pins it."""
        return self._pin(source_id, form) if form.text("fingerprint_sha256") else self._look(source_id)

    def _look(self, source_id: UUID) -> Response:
        source, shown = self._sources.get(source_id), self._sources.certificate(source_id)
        pinned = source.options.get("fingerprint_sha256")
        meaning = [
            f"It shows the certificate with the SHA-256 {shown.fingerprint}.",
            f"This host does not trust it: {shown.refused}." if shown.refused else "This host trusts its issuer.",
            *([f"Pinned is now {pinned}."] if pinned else []),
            "Compare it with the one on the platform itself: an attacker may be in between.",
            "Once it is pinned, no other certificate is accepted.",
        ]
        return self._ask(
            source,
            "Pin this certificate?",
            *meaning,
            asked="certificate",
            yes="pin it",
            hidden=(("fingerprint_sha256", shown.fingerprint),),
        )

    def _pin(self, source_id: UUID, form: Sent) -> Response:
        """Pins the certificate that was shown, not the present one."""
        options = self._sources.get(source_id).options | {"fingerprint_sha256": form.text("fingerprint_sha256")}
        self._sources.change(source_id, judged(SourceChange, {"options": options}))
        return self._pages.see(f"/sources/{source_id}")

    def remove_asked(self, source_id: UUID) -> Response:
        """Asks whether to remove a source."""
        meaning = "Its credentials are deleted here. What was migrated from it stays, and the platform itself is not changed."
        return self._ask(
            self._sources.get(source_id), "Remove this source?", meaning, asked="remove", yes="remove it", danger=True
        )

    def deep_asked(self, source_id: UUID) -> Response:
        """Asks whether to test a source with a snapshot."""
        meaning = (
            "A snapshot is taken of a machine that runs, the first MiB of its first disk is read, and the snapshot is removed."
        )
        return self._ask(self._sources.get(source_id), "Test with a snapshot?", meaning, asked="deep", yes="test it")

    def remove(self, source_id: UUID) -> Response:
        """Removes a source."""
        self._sources.remove(source_id)
        return self._pages.see("/sources")

    def _ask(
        self,
        source: Source,
        question: str,
        *meaning: str,
        asked: str,
        yes: str,
        danger: bool = False,
        hidden: tuple[tuple[str, str], ...] = (),
    ) -> Response:
        return self._pages.ask(
            question,
            source.name,
            *meaning,
            action=f"/sources/{source.id}/{asked}",
            back=f"/sources/{source.id}",
            yes=yes,
            here="/sources",
            danger=danger,
            hidden=hidden,
        )


def sources_router(pages: Pages, sources: Sources) -> APIRouter:
    """The pages of sources."""
    made = SourcePages(pages, sources)
    return pages.router(
        {
            "GET /sources": made.listed,
            "GET /sources/new": made.kinds,
            "GET /sources/new/{kind}": made.empty_form,
            "POST /sources/new/{kind}": made.add,
            "GET /sources/{source_id}": made.source,
            "GET /sources/{source_id}/change": made.change_form,
            "POST /sources/{source_id}/change": made.change,
            "POST /sources/{source_id}/test": made.test,
            "GET /sources/{source_id}/deep": made.deep_asked,
            "POST /sources/{source_id}/deep": made.deep,
            "POST /sources/{source_id}/certificate": made.certificate,
            "GET /sources/{source_id}/remove": made.remove_asked,
            "POST /sources/{source_id}/remove": made.remove,
        }
    )


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
