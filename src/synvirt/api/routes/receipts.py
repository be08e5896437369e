"""GET /migrations/:id/receipt, and the key that receipts are signed with."""

from uuid import UUID

from fastapi import APIRouter
from starlette.responses import Response

from synvirt.api.download import Download
from synvirt.api.routing import Routes
from synvirt.errors import NotFound
from synvirt.proof.keeping import ReceiptKey, Receipts
from synvirt.store import Store

TAR = "application/x-tar"


def receipts_router(store: Store, receipts: Receipts | None) -> APIRouter:
    """`receipts`: None, if the settings switch them off."""
    router = Routes(tags=["receipts"])

    @router.get("/migrations/{migration_id}/receipt", response_class=Response, responses={200: {"content": {TAR: {}}}})
    def receipt(migration_id: UUID) -> Response:
        """The receipt of a job that completed: a tar of a folder, which `sha256sum` and `ssh-keygen` can check. A job without
        one: 404."""
        job = store.get(migration_id)
        headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
        return Download(_kept(receipts).path_of(job.id), media_type=TAR, filename=f"receipt-{job.id}.tar", headers=headers)

    @router.get("/receipts/key", response_model=ReceiptKey)
    def receipt_key() -> ReceiptKey:
        """The public key that this host signs its receipts with, and the newest of them."""
        return _kept(receipts).published()

    return router


def _kept(receipts: Receipts | None) -> Receipts:
    if receipts is None:
        raise NotFound("this host makes no receipts", hint="the setting receipts is off")
    return receipts
