"""`synvirt`, and `python -m synvirt`."""

import sys


def main() -> None:
    # What only looks at disks needs nothing of the service's, and does not wait for it to load.
    if sys.argv[1:2] == ["disk"]:
        from synvirt.cli import disk

        sys.exit(disk.main(sys.argv[2:]))
    from synvirt.main import main as every_command

    every_command()


if __name__ == "__main__":
    main()
