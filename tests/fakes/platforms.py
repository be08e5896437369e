"""A registry in which one kind is the fake platform, for services whose sources are tested."""

from collections.abc import Mapping
from dataclasses import replace

from synvirt.live import SourceAccess
from synvirt.live.registry import BY_KIND, Platform
from synvirt.model.kinds import LiveKind
from tests.fakes.live import FakeAdapter, FakePlatform


def with_fake(platform: FakePlatform, opened: list[SourceAccess] | None = None) -> Mapping[LiveKind, Platform]:
    """libvirt_remote is `platform`; every other kind is the product's own. `opened` gets what each session is made of."""

    def open_fake(access: SourceAccess) -> FakeAdapter:
        if opened is not None:
            opened.append(access)
        return FakeAdapter(platform)

    return {**BY_KIND, LiveKind.LIBVIRT_REMOTE: replace(BY_KIND[LiveKind.LIBVIRT_REMOTE], open=open_fake)}
