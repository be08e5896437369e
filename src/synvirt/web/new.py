"""{base_url}/new: where the machine is now: on a platform, in a file on this host, in an uploaded file, or at a URL.

/new ─▶ /new/source/ID │ /new/files │ an upload │ a URL ─▶ /new/machine ─▶ /new/review ─▶ the job's page
"""

from pathlib import Path
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from synvirt.errors import SynvirtError
from synvirt.jobs.inspecting.looking import Looking
from synvirt.migrations.sources.registered import LISTING_KEPT_S, Sources
from synvirt.migrations.uploads import Uploads
from synvirt.web.forms import Form
from synvirt.web.pages import Pages

# As many as people look through; a search shows fewer.
VMS_ON_A_PAGE, FILES_ON_A_PAGE = 100, 200
# More than most sites have; the page of sources shows all.
SOURCES_SHOWN = 50
# Set up together: each is inspected, in a session with the platform of some seconds.
MACHINES_MAX = 50
UPLOADS_SHOWN = 5


class Beginning:
    """The first page. Others show it again with an error."""

    def __init__(self, pages: Pages, sources: Sources, uploads: Uploads) -> None:
        self._pages, self._sources, self._uploads = pages, sources, uploads

    def page(self, form: Form | None = None, failure: SynvirtError | None = None) -> Response:
        """`failure`: of the URL in `form`."""
        sources, more = self._sources.page(limit=SOURCES_SHOWN, cursor=None)
        uploads, _ = self._uploads.page(limit=UPLOADS_SHOWN)
        return self._pages.page(
            "new/choose.html",
            status=failure.status if failure else 200,
            sources=sources,
            more_sources=more is not None,
            uploads=uploads,
            cap_bytes=self._uploads.cap_bytes,
            form=form or Form(),
            failure=failure,
        )


def new_router(pages: Pages, beginning: Beginning, sources: Sources, *, import_root: Path, looking: Looking) -> APIRouter:
    """The pages on which a machine is chosen. `looking`: opens the files under `import_root`, which are strangers'."""
    router = pages.router()

    @router.get("/new")
    def choose() -> Response:
        return beginning.page()

    @router.get("/new/source/{source_id}")
    async def machines(
        source_id: UUID,
        *,
        search: Annotated[str, Query(max_length=255)] = "",
        cursor: str | None = None,
        kept: bool = False,
        ask_again: bool = False,
        vm_id: Annotated[list[str] | None, Query()] = None,
    ) -> Response:
        """`kept`: a list that is a minute old is good enough, as a search must not ask the platform at each letter.
        `ask_again`: ask the platform, even if it was asked just now. `vm_id`: the ticked VMs, which stay ticked during a
        search."""
        source = await run_in_threadpool(sources.get, source_id)
        vms, following = await sources.list_vms(
            source_id,
            limit=VMS_ON_A_PAGE,
            cursor=cursor,
            search=search.strip(),
            age_max_s=0.0 if ask_again else LISTING_KEPT_S if kept else None,
        )
        return pages.page(
            "new/vms.html",
            source=source,
            vms=vms,
            following=following,
            search=search,
            ticked=vm_id or (),
            elsewhere=sorted({*(vm_id or ())} - {vm.vm_id for vm in vms}),
            together_max=MACHINES_MAX,
        )

    @router.get("/new/files")
    def files(path: str = "", cursor: str | None = None) -> Response:
        folder = looking.browse(import_root, path, limit=FILES_ON_A_PAGE, cursor=cursor)
        return pages.page("new/files.html", folder=folder, root_path=str(import_root.resolve()), cursor=cursor)

    return router
