"""{base_url}/api/v1/migrator/remote-files: what is in a file elsewhere, by its URL."""

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Depends

from synvirt.api.received import documented, json_body
from synvirt.model import Inspection, RemoteFileRequest
from synvirt.offline import browsing
from synvirt.offline.elsewhere import Rules, place


def remote_files_router(rules: Rules, *, free_bytes: Callable[[], int] | None = None) -> APIRouter:
    """`free_bytes`: the destination's, to say of a VM whether it fits."""
    router = APIRouter(prefix="/remote-files", tags=["remote files"])

    @router.post("/inspect", response_model=Inspection, openapi_extra=documented(RemoteFileRequest))
    def inspect_remote_file(asked: Annotated[RemoteFileRequest, Depends(json_body(RemoteFileRequest))]) -> Inspection:
        """Say of which kind a file elsewhere is, and which VM is in it. Ranges of it are read; nothing is kept."""
        path, root = place(asked, rules)
        return browsing.inspect(root, str(path), free_bytes=free_bytes)

    return router
