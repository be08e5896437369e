"""Every kind of destination that the settings know keeps the laws of destinations."""

from importlib import import_module
from typing import get_args

from synvirt.settings import DestinationSetting
from tests.contracts.destinations import DestinationContract

# A new kind is a line here, and a file beside this one: test_KIND.py.
JOINED = ("directory", "rbd", "zfs")


def test_every_kind_has_joined_the_contract() -> None:
    union, _ = get_args(DestinationSetting)
    kinds = [get_args(one.model_fields["kind"].annotation)[0] for one in get_args(union)]
    assert sorted(kinds) == sorted(JOINED)
    for kind in JOINED:
        module = import_module(f"tests.destinations.test_{kind}")
        suites = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, DestinationContract)]
        assert any(one is not DestinationContract for one in suites)
