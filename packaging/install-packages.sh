#!/bin/sh
# Install the Debian packages that the given lists name and this machine lacks.
# As root, or by sudo; otherwise say the one line that an administrator must run, and stop.
set -eu
wanted=$(cat "$@" | sed 's/#.*//' | tr -s ' \n' ' ')
missing=""
for package in $wanted; do
    case "$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null || true)" in
        "install ok installed") ;;
        *) missing="$missing $package" ;;
    esac
done
[ -n "$missing" ] || exit 0
command="apt-get install -y --no-install-recommends$missing"
if [ "$(id -u)" = 0 ]; then
    as_root=""
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    as_root="sudo"
elif command -v sudo >/dev/null && [ -t 0 ]; then
    as_root="sudo"
else
    echo "These packages are missing, and only root can install them. Run this line, then call make again:" >&2
    echo "    apt-get update && $command" >&2
    exit 1
fi
# Where another installs meanwhile (`make lab` beside `make setup`) apt would fail: it is waited for, by a lock on this file.
# What apt starts does not hold the lock (9<&-): a daemon would keep it.
exec 9<"$0"
flock 9
echo "Installing:$missing"
# DEBIAN_FRONTEND: a question on a machine without a terminal would wait for ever.
$as_root apt-get update -q=2 9<&-
$as_root env DEBIAN_FRONTEND=noninteractive $command -q=2 9<&-
