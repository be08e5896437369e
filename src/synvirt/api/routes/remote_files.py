"""{base_url}/api/v1/migrator/remote-files: inspects a remote file, by its URL."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from synvirt.api.document import problem_described
from synvirt.api.received import documented, json_body
from synvirt.api.routing import Routes
from synvirt.jobs.inspecting.looking import Looking
from synvirt.model.access import RemoteFileRequest
from synvirt.model.files import Inspection
from synvirt.offline import browsing
from synvirt.offline.elsewhere import Rules, place

_ELSEWHERE: dict[int | str, dict[str, Any]] = {
    502: problem_described(
        "E_MIG_SOURCE_UNREACHABLE, E_MIG_AUTH_FAILED: the server does not answer, or refuses the credentials"
    )
}


def remote_files_router(rules: Rules, *, free_bytes: Callable[[], int] | None = None, looking: Looking = browsing) -> APIRouter:
    """`free_bytes`: the destination's, to check whether a VM fits. `looking`: inspects files."""
    router = Routes(prefix="/remote-files", tags=["remote files"])

    @router.post("/inspect", response_model=Inspection, responses=_ELSEWHERE, openapi_extra=documented(RemoteFileRequest))
    def inspect_remote_file(file: Annotated[RemoteFileRequest, Depends(json_body(RemoteFileRequest))]) -> Inspection:
        """Inspect a remote file: its kind, and the VM in it. Only ranges of it are read; nothing is kept."""
        path, root = place(file, rules)
        return looking.inspect(root, str(path), vm=file.vm, free_bytes=free_bytes)

    return router
