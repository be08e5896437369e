"""What this host stores for other SynVirts: synvirt backup offers, show-offer, release-point."""

from typing import Annotated, Any

import typer

from synvirt.cli.listing import Cursor, Limit, print_list, print_one, print_table, segment
from synvirt.cli.options import Options, with_options
from synvirt.cli.program import print_sheet, shown
from synvirt.sizes import sized

PATH = "/backup/offers"
Offer = Annotated[str, typer.Argument(metavar="OFFER", help="Its name in the setting backup_offers")]


@with_options
def offers(options: Options, limit: Limit = 1000, cursor: Cursor = None) -> None:
    """List the folders that this host keeps for other SynVirts, and how full they are.

    Example: synvirt backup offers
    """
    none = "This host offers no folder to others: see the setting backup_offers"
    print_list(options, PATH, limit, cursor, none=none, show=_table)


@with_options
def show_offer(options: Options, offer: Offer) -> None:
    """Show one offer, and the points that are protected there.

    Example: synvirt backup show-offer office
    """
    print_one(
        options,
        f"{PATH}/{segment(offer)}",
        lambda found: print_sheet((name, _text(value)) for name, value in found.items()),
    )


def _text(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else "" if value is None else str(value)


@with_options
def release_point(
    options: Options, offer: Offer, point: Annotated[str, typer.Argument(metavar="POINT", help="Its full id")]
) -> None:
    """Take the protection off a restore point that this host keeps for another, whose own account cannot.

    Example: synvirt backup release-point office 0b7e6f0a-6a0e-4f2e-9d6f-1c1f5f0b2b9e
    """
    with options.connect() as client:
        client.ask("DELETE", f"{PATH}/{segment(offer)}/protections/{segment(point)}")
    if not options.json:
        print(f"Restore point {point} is not protected any more")


def _table(items: list[dict[str, Any]]) -> None:
    print_table(
        ("NAME", "ACCOUNT", "USED", "QUOTA", "POINTS", "PROTECTED", "KEPT"),
        [
            (
                shown(one["name"]),
                shown(one["user"]),
                shown(one["problem"]) if one["problem"] else sized(one["used_bytes"]),
                sized(one["quota_bytes"]) if one["quota_bytes"] else "none",
                str(one["points_count"]),
                str(len(one["protected"])),
                f"{one['keep_days']:g} days",
            )
            for one in items
        ],
    )
