"""{base_url}/backups/offers: what this host stores for other SynVirts."""

from uuid import UUID

from fastapi import APIRouter
from starlette.responses import Response

from synvirt.backups.offers import Offers
from synvirt.web.pages import Pages


class OfferPages:
    """The pages of offers; `offers_router` has their paths."""

    def __init__(self, pages: Pages, offers: Offers) -> None:
        self._pages, self._offers = pages, offers

    def offers(self) -> Response:
        return self._pages.page("backups/offers.html", offers=self._offers.all())

    def release_asked(self, offer: str, point_id: UUID) -> Response:
        """Asks whether to take the protection off a restore point."""
        return self._pages.ask(
            "Take the protection off this restore point?",
            str(point_id),
            "Its owner may then remove it, once it is old enough. So may an attacker who controls the owner.",
            action=f"/backups/offers/{self._offers.get(offer).name}/points/{point_id}/release",
            back="/backups/offers",
            yes="take it off",
            here="/backups",
            danger=True,
        )

    def release(self, offer: str, point_id: UUID) -> Response:
        """Takes the protection off a restore point."""
        self._offers.release(offer, point_id)
        return self._pages.see("/backups/offers")


def offers_router(pages: Pages, offers: Offers) -> APIRouter:
    """The pages of what this host stores for others."""
    made = OfferPages(pages, offers)
    return pages.router(
        {
            "GET /backups/offers": made.offers,
            "GET /backups/offers/{offer}/points/{point_id}/release": made.release_asked,
            "POST /backups/offers/{offer}/points/{point_id}/release": made.release,
        }
    )
