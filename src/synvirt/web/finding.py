"""Finds the machine of a plan: its manifest, and its name at its place.

Its place goes from page to page as a plan's `source_ref`. What opens a remote file (a password, a signed URL) goes with it
sealed: no page ever contains the content of a password field.
"""

import base64
import binascii
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi.concurrency import run_in_threadpool
from pydantic import TypeAdapter, ValidationError

from synvirt.destinations import Destination, free_bytes_shown
from synvirt.errors import BadRequest, Internal, SynvirtError
from synvirt.jobs.inspecting.looking import Looking
from synvirt.keyring import Keyring
from synvirt.machines.concerns import with_room
from synvirt.migrations.sources.registered import Sources
from synvirt.migrations.uploads import Uploads
from synvirt.model.machine import VmManifest
from synvirt.model.plan import HostPathRef, LiveVmRef, PlanSource, RemoteUrlRef, SourceRef, UploadRef
from synvirt.offline import browsing
from synvirt.offline.elsewhere import Rules, joined, place, separated

_REF: TypeAdapter[SourceRef] = TypeAdapter(SourceRef)


@dataclass(frozen=True, slots=True)
class Found:
    """`ref` and `sealed` find it again; `where` is for people."""

    ref: SourceRef
    sealed: str
    source: PlanSource
    manifest: VmManifest
    where: str


@dataclass(frozen=True, slots=True)
class Finder:
    """Finds machines for plans, by their references."""

    sources: Sources
    uploads: Uploads
    destinations: Mapping[str, Destination]
    rules: Rules
    keyring: Keyring
    looking: Looking = browsing

    async def find(self, ref: SourceRef, sealed: str = "", *, destination: str = "") -> Found:
        """Inspects the machine. `destination`: where it will go, to check the space; without one, the default."""
        if isinstance(ref, LiveVmRef):
            source = await run_in_threadpool(self.sources.get, ref.source_id)
            manifest = await self.sources.inspect(ref.source_id, ref.vm_id)
            manifest = await run_in_threadpool(self._with_room, manifest, destination)
            return Found(ref, "", PlanSource(Live=source.kind), manifest, source.name)
        return await run_in_threadpool(self._inspected, ref, sealed, destination)

    def _inspected(self, ref: HostPathRef | UploadRef | RemoteUrlRef, sealed: str, destination: str) -> Found:
        match ref:
            case HostPathRef():
                root, path, where = self.uploads.import_root, ref.path, ref.path
            case UploadRef():
                upload = self.uploads.get(ref.upload_id)
                root, path, where = self.uploads.import_root, upload.path, f"{upload.filename}, uploaded"
            case RemoteUrlRef():
                there, remote = place(self.opened(ref, sealed), self.rules)
                found = self.looking.inspect(remote, str(there), vm=ref.vm)
                manifest = self._with_room(found.manifest, destination)
                return Found(ref, sealed, PlanSource(Offline=found.offline_kind), manifest, ref.url)
        found = self.looking.inspect(root, path, vm=ref.vm)
        return Found(ref, "", PlanSource(Offline=found.offline_kind), self._with_room(found.manifest, destination), where)

    def _with_room(self, manifest: VmManifest, destination: str) -> VmManifest:
        """A destination that is away, or does not exist, is reported when the plan is submitted."""
        chosen = self.destinations.get(destination or next(iter(self.destinations)))
        with suppress(SynvirtError):
            return manifest if chosen is None else with_room(manifest, free_bytes_shown(chosen))
        return manifest

    # ── secrets of remote files ──────────────────────────────────────────────────────────────────────────────────────

    def closed(self, asked: RemoteUrlRef) -> tuple[RemoteUrlRef, str]:
        """The reference for a page, and its sealed secrets; "" if it has none."""
        public, secret = separated(asked)
        if secret is None:
            return public, ""
        return public, base64.b64encode(self.keyring.seal(secret, belongs_to=_belongs_to(public))).decode()

    def opened(self, ref: RemoteUrlRef, sealed: str) -> RemoteUrlRef:
        """BadRequest, if they were sealed for another URL, or by a key that is gone."""
        if not sealed:
            return ref
        try:
            return joined(ref, self.keyring.unseal(base64.b64decode(sealed, validate=True), belongs_to=_belongs_to(ref)))
        except (Internal, binascii.Error, ValueError) as error:
            raise BadRequest(
                f"the credentials for {ref.url} cannot be read any more", hint="start again, and enter them"
            ) from error


def reference(values: Mapping[str, Any]) -> SourceRef:
    """From an address's query or a form. BadRequest."""
    try:
        return _REF.validate_python(values)
    except ValidationError as error:
        raise BadRequest("the address does not say which machine is meant", hint="start again at New migration") from error


def _belongs_to(ref: RemoteUrlRef) -> bytes:
    """The whole URL: a password is sent only where it was typed for."""
    return b"a form " + ref.model_dump_json(exclude={"vm"}).encode()
