"""{base_url}/backups/repositories: where backups are stored. A recovery key is shown only on request."""

from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from fastapi import APIRouter
from starlette.responses import Response

from synvirt.api.paging import Cursor, number_of
from synvirt.backups.model import (
    BackupRepository,
    BackupRepositoryChange,
    BackupRepositoryRequest,
    PeerRequest,
    SealedKeyRequest,
)
from synvirt.backups.service import Backups
from synvirt.errors import BackupConflict, SynvirtError
from synvirt.web.backups.jobs import ON_A_PAGE
from synvirt.web.fields import Field, fields, judged, mark_of, refuse_overtaken, typed, values
from synvirt.web.forms import Form, Sent
from synvirt.web.pages import Pages


@dataclass(frozen=True, slots=True)
class Kind:
    """`fields`: the fields for the place of such a repository."""

    name: str
    words: str
    meaning: str
    fields: list[Field]


_REQUEST = {one.key: one for one in fields(BackupRepositoryRequest)}
_COMMON = [_REQUEST["name"], _REQUEST["recovery_key"], _REQUEST["passphrase"]]
# Its credentials are a dict on the wire: PeerRequest lists them.
_ACCOUNT = [
    Field("peer.username", "username", "User", "text", required=False),
    Field("peer.password", "password", "Password", "secret", required=False),
]
KINDS = (
    Kind("local", "A folder of this host", "Best on another disk.", [replace(_REQUEST["path"], name="local.path")]),
    Kind("nfs", "A folder on NFS", "It has to be mounted already.", [replace(_REQUEST["path"], name="nfs.path")]),
    Kind(
        "peer",
        "Another SynVirt",
        "A folder that it offers, by HTTPS. What is kept there is encrypted before it leaves this host.",
        [*(replace(one, required=False) for one in fields(PeerRequest, "peer.")), *_ACCOUNT],
    ),
)


def _place_of(known: BackupRepository) -> list[Field]:
    """The fields for a repository's name and place, with what they are now."""
    name = replace(_REQUEST["name"], value=known.name)
    if known.peer is None:
        return [name, replace(_REQUEST["path"], value=known.path or "", required=True)]
    username, password = _ACCOUNT
    place = fields(PeerRequest, "peer.", known.peer.model_dump())
    return [name, *place, replace(username, value=known.peer.username, required=True), password]


class RepositoryPages:
    """The pages of repositories; `repositories_router` has their paths."""

    def __init__(self, pages: Pages, backups: Backups) -> None:
        self._pages, self._backups = pages, backups

    def repositories(self, cursor: Cursor = None) -> Response:
        """The repositories, newest first."""
        items, following = self._backups.repositories.page(limit=ON_A_PAGE, cursor=number_of(cursor))
        return self._pages.page("backups/repositories.html", repositories=items, following=following, cursor=cursor)

    def repository(self, repository_id: UUID, is_new: bool = False) -> Response:
        return self._shown(repository_id, is_new=is_new)

    def _shown(
        self, repository_id: UUID, *, is_new: bool = False, key: str | None = None, sealed: str | None = None
    ) -> Response:
        known = self._backups.repositories
        shown = known.shown(known.get(repository_id))
        return self._pages.page("backups/repository.html", repository=shown, is_new=is_new, key=key, sealed=sealed)

    def key(self, repository_id: UUID) -> Response:
        return self._shown(repository_id, key=self._backups.repositories.recovery_key(repository_id))

    def change_asked(self, repository_id: UUID) -> Response:
        """Asks whether to change the key."""
        return self._ask(
            repository_id,
            "Give this repository a new key?",
            "What is written from then on opens with the new recovery key alone, which is shown next. Older restore points "
            "stay as they are: anyone who has the older key can read those. Other hosts that use the repository need the "
            "new key.",
            asked="change-key",
            yes="change it",
        )

    def change(self, repository_id: UUID) -> Response:
        return self._shown(repository_id, key=self._backups.change_key(repository_id))

    def seal(self, repository_id: UUID, form: Sent) -> Response:
        """Shows a sealed copy of the key."""
        asked = judged(SealedKeyRequest, {"passphrase": next(iter(form.many("passphrase")), "")})
        return self._shown(repository_id, sealed=self._backups.repositories.sealed_copy(repository_id, asked))

    def empty_form(self) -> Response:
        return self._form()

    def _form(self, form: Form | None = None, error: SynvirtError | None = None) -> Response:
        known = typed(_COMMON, form, error) if form else _COMMON
        return self._pages.page(
            "backups/repository_form.html",
            status=error.status if error else 200,
            error=error,
            first=[one for one in known if one.key == "name"],
            again=[one for one in known if one.key in ("recovery_key", "passphrase")],
            kinds=[(one, typed(one.fields, form, error) if form else one.fields) for one in KINDS],
            chosen=form.text("kind") if form else KINDS[0].name,
        )

    def add(self, form: Sent) -> Response:
        """Adds a repository; a form with mistakes comes back with them."""
        kind = next((one for one in KINDS if one.name == form.text("kind")), KINDS[0])
        asked = values(_COMMON, form) | {"kind": kind.name}
        place = values(kind.fields, form)
        if kind.name == "peer":
            account = {name: place.pop(name) for name in ("username", "password") if name in place}
            asked["peer"] = place | {"credentials": account}
        else:
            asked |= place
        try:
            made = self._backups.add_repository(judged(BackupRepositoryRequest, asked))
        except SynvirtError as error:
            return self._form(form, error)
        return self._pages.see(f"/backups/repositories/{made.id}{'' if 'recovery_key' in asked else '?is_new=true'}")

    def change_form(self, repository_id: UUID) -> Response:
        """The form that says where a repository lies now. Its password is not shown."""
        return self._change_form(self._backups.repositories.get(repository_id))

    def _change_form(self, known: BackupRepository, form: Form | None = None, error: SynvirtError | None = None) -> Response:
        shown = _place_of(known)
        return self._pages.page(
            "backups/repository_change.html",
            status=error.status if error else 200,
            error=error,
            repository=known,
            mark=mark_of(shown),
            fields=typed(shown, form, error) if form else shown,
        )

    def change_place(self, repository_id: UUID, form: Sent) -> Response:
        """Changes a repository; a form with mistakes, or of a repository that was changed since, comes back."""
        known = self._backups.repositories.get(repository_id)
        asked = values(_place_of(known), form)
        if known.peer is not None:
            account = {name: asked.pop(name) for name in ("username", "password") if name in asked}
            place: dict[str, Any] = {name: asked.pop(name) for name in ("url", "fingerprint_sha256") if name in asked}
            # An unchanged address is left out, as a changed one would need the password.
            if place.get("url") == known.peer.url:
                del place["url"]
            if account != {"username": known.peer.username}:
                place["credentials"] = account
            asked["peer"] = place
        try:
            refuse_overtaken(_place_of(known), form, BackupConflict)
            self._backups.change_repository(repository_id, judged(BackupRepositoryChange, asked))
        except SynvirtError as error:
            return self._change_form(known, form, error)
        return self._pages.see(f"/backups/repositories/{repository_id}")

    def verify_asked(self, repository_id: UUID) -> Response:
        """Asks whether to verify the whole repository."""
        return self._ask(
            repository_id,
            "Verify all of this repository?",
            "All of it is read once and compared with what was written. The run's end says which restore points are damaged.",
            asked="verify",
            yes="verify it",
        )

    def verify(self, repository_id: UUID) -> Response:
        return self._pages.see(f"/backups/runs/{self._backups.verify_repository(repository_id).id}")

    def collect_asked(self, repository_id: UUID) -> Response:
        """Asks whether to remove what no point needs."""
        return self._ask(
            repository_id,
            "Collect what nothing needs?",
            "What only removed restore points needed is deleted, a day after it was found. Runs do this by themselves.",
            asked="collect",
            yes="collect it",
        )

    def collect(self, repository_id: UUID) -> Response:
        return self._pages.see(f"/backups/runs/{self._backups.collect(repository_id, dry_run=False).id}")

    def forget_asked(self, repository_id: UUID) -> Response:
        """Asks whether to forget a repository."""
        return self._ask(
            repository_id,
            "Forget this repository?",
            "Its restore points are no longer listed here. The content of its folder stays: its recovery key opens it again.",
            asked="forget",
            yes="forget it",
            danger=True,
        )

    def forget(self, repository_id: UUID) -> Response:
        """Forgets a repository; its files stay."""
        self._backups.forget_repository(repository_id)
        return self._pages.see("/backups/repositories")

    def _ask(self, repository_id: UUID, question: str, meaning: str, *, asked: str, yes: str, danger: bool = False) -> Response:
        here = f"/backups/repositories/{repository_id}"
        name = self._backups.repositories.get(repository_id).name
        return self._pages.ask(
            question, name, meaning, action=f"{here}/{asked}", back=here, yes=yes, here="/backups", danger=danger
        )


def repositories_router(pages: Pages, backups: Backups) -> APIRouter:
    """The pages of repositories."""
    made = RepositoryPages(pages, backups)
    here = "/backups/repositories/{repository_id}"
    return pages.router(
        {
            "GET /backups/repositories": made.repositories,
            "GET /backups/repositories/new": made.empty_form,
            "POST /backups/repositories/new": made.add,
            f"GET {here}": made.repository,
            # By POST, so that no history, log or prefetching contains an address that shows it.
            f"POST {here}/key": made.key,
            f"GET {here}/change": made.change_form,
            f"POST {here}/change": made.change_place,
            f"GET {here}/change-key": made.change_asked,
            f"POST {here}/change-key": made.change,
            f"POST {here}/sealed-key": made.seal,
            f"GET {here}/verify": made.verify_asked,
            f"POST {here}/verify": made.verify,
            f"GET {here}/collect": made.collect_asked,
            f"POST {here}/collect": made.collect,
            f"GET {here}/forget": made.forget_asked,
            f"POST {here}/forget": made.forget,
        }
    )
