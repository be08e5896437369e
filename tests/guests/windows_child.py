"""A service in the middle of a conversion, for a test to kill: `windows_child.py FOLDER ISO CLONE VOLUME`."""

import sys
from pathlib import Path

from synvirt.guests.virt_v2v import VirtV2vInPlace
from tests.guests.conversions import KVM, NAME, manifest


def main() -> None:
    folder, iso, clone, volume = sys.argv[1:]
    preparer = VirtV2vInPlace(Path(folder), Path(iso), kvm=KVM)
    backing = {clone: volume}
    preparer.convert(
        NAME, manifest(), [clone], lambda kind, text: print(kind, text, flush=True), lambda: False, backing=backing
    )


if __name__ == "__main__":
    main()
