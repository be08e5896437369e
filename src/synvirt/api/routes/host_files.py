"""{base_url}/api/v1/migrator/host-files: lists the import root, and inspects a file of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Query

from synvirt.api.received import documented, json_body
from synvirt.api.routing import Routes
from synvirt.jobs.inspecting.looking import Looking
from synvirt.model.files import HostFileRequest, HostFolder, Inspection
from synvirt.offline import browsing

# Each entry of a page is opened to find its kind: the largest page takes a second on a slow share.
PAGE_LIMIT, PAGE_DEFAULT = 1000, 200


def host_files_router(
    import_root: Path, *, free_bytes: Callable[[], int] | None = None, looking: Looking = browsing
) -> APIRouter:
    """`free_bytes`: the destination's, to check whether a VM fits. `looking`: inspects files."""
    router = Routes(prefix="/host-files", tags=["host files"])

    @router.get("", response_model=HostFolder)
    def browse(
        path: Annotated[str, Query(description="A folder inside the import root; none: the import root")] = "",
        limit: Annotated[int, Query(ge=1, le=PAGE_LIMIT)] = PAGE_DEFAULT,
        cursor: Annotated[str | None, Query(description="`next_cursor` of a page")] = None,
    ) -> HostFolder:
        """Browse inside the import root: folders first, then files, each by name."""
        return looking.browse(import_root, path, limit=limit, cursor=cursor)

    @router.post("/inspect", response_model=Inspection, openapi_extra=documented(HostFileRequest))
    def inspect_host_file(file: Annotated[HostFileRequest, Depends(json_body(HostFileRequest))]) -> Inspection:
        """Inspect a file or folder of the import root: its kind, and the VM in it."""
        return looking.inspect(import_root, file.path, vm=file.vm, free_bytes=free_bytes)

    return router
