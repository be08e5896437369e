"""What this host stores for other SynVirts, for its operator: how much there is, what is protected. Blocking code."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import UUID

from synvirt.errors import BackupNotFound, SynvirtError
from synvirt.model.values import Bytes, Model
from synvirt.repository.manifest import HERE, Reading
from synvirt.repository.peer_offer import DAY_S, Offer
from synvirt.repository.repository import is_id
from synvirt.settings import Settings


class BackupOffer(Model):
    """A folder of the setting backup_offers. `used_bytes`: of what its account sent; `capacity_bytes`: what there may be, by
    the quota or by the file system. `protected`: the points that their owner cannot remove, nor who took it over."""

    name: str
    user: str
    keep_days: float
    quota_bytes: Bytes | None = None
    capacity_bytes: Bytes | None = None
    used_bytes: Bytes | None = None
    points_count: int = 0
    protected: tuple[UUID, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Offers:
    """`by_name`: one object for each folder, as each counts the bytes that are being sent to it."""

    by_name: Mapping[str, Offer] = field(default_factory=dict)
    users: Mapping[str, str] = field(default_factory=dict)

    def names(self) -> list[str]:
        """The names of all offers, sorted."""
        return sorted(self.by_name)

    def all(self) -> list[BackupOffer]:
        return [self.get(name) for name in self.names()]

    def get(self, name: str) -> BackupOffer:
        """The offer. BackupNotFound. If its folder is away, the offer says so."""
        offer = self._named(name)
        shown = BackupOffer(name=name, user=self.users[name], keep_days=offer.keep_s / DAY_S, quota_bytes=offer.quota_bytes)
        try:
            held, (capacity, _) = offer.held(), offer.room()
        except SynvirtError as error:
            return shown.model_copy(update={"problem": error.detail})
        return shown.model_copy(
            update={
                "capacity_bytes": capacity,
                "used_bytes": held.used_bytes,
                "points_count": len(held.points),
                "protected": tuple(UUID(point) for point in held.protected if is_id(point)),
            }
        )

    def release(self, name: str, point_id: UUID) -> None:
        """BackupNotFound."""
        self._named(name).release(point_id)

    def _named(self, name: str) -> Offer:
        if name not in self.by_name:
            raise BackupNotFound(
                f"no folder {name[:100]!r} is offered here", hint="the setting backup_offers names those there are"
            )
        return self.by_name[name]


def offers_of(settings: Settings, reading: Reading = HERE) -> Offers:
    """The offers of the settings, by name. Nothing is opened yet. `reading`: parses the content of manifests."""
    return Offers(
        {
            name: Offer(
                one.path,
                keep_s=one.keep_days * DAY_S,
                cache=settings.data_dir / "backups" / f"offer-{name}.footers",
                quota_bytes=one.quota_bytes,
                reading=reading,
            )
            for name, one in settings.backup_offers.items()
        },
        {name: one.user for name, one in settings.backup_offers.items()},
    )
