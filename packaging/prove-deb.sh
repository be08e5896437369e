#!/bin/sh
# Prove the Debian package where nothing of ours is: packaging/prove-deb.sh PACKAGE. Needs root and mmdebstrap; takes some minutes.
# A bare Debian 12 is made in a folder, apt installs the package there with what it depends on, and the installed service imports
# an OVA, starts its guest and sees it boot; then every kind of file that is served, which the checkout of `make setup-test` writes.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
package=$(readlink -f "$1")
root=$(mktemp -d /var/tmp/synvirt-deb.XXXXXX)
# The mounts are this process's own (unshare), so nothing is mounted there any more when the folder goes.
trap 'rm -rf --one-file-system "$root"' EXIT
trap 'exit 130' INT TERM
set -- bookworm "$root"
for sources in /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list; do
    [ -s "$sources" ] && set -- "$@" "$sources" && break # the host's own mirror is near
done
mmdebstrap --quiet --variant=apt "$@"
cp "$package" "$root/tmp/synvirt.deb"
mkdir "$root/tmp/wrapped"
(cd "$here" && .venv/bin/python -m tests.real.wrapped "$root/tmp/wrapped") > "$root/tmp/kinds"
cp "$here/tests/real/in_package.py" "$root/tmp"
# No init runs there, so no unit can be started.
printf '#!/bin/sh\nexit 101\n' > "$root/usr/sbin/policy-rc.d"
chmod 755 "$root/usr/sbin/policy-rc.d"
unshare --mount --propagation private sh -eu -c '
    root=$1
    mount --rbind /dev "$root/dev"
    mount -t proc proc "$root/proc"
    mount -t sysfs sysfs "$root/sys"
    mount -t tmpfs tmpfs "$root/run"
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 HOME=/root
    chroot "$root" apt-get update -q=2
    chroot "$root" apt-get install -y -q=2 --no-install-recommends /tmp/synvirt.deb
    chroot "$root" synvirt --version
    # This network belongs to the host: another demo may run on the usual port (CI runs both at once).
    SYNVIRT_LISTEN=127.0.0.1:8442 timeout 900 chroot "$root" synvirt demo </dev/null
    mv "$root"/tmp/wrapped/* "$root/var/lib/synvirt/imports"
    chroot "$root" /usr/lib/synvirt/bin/python3 -P /tmp/in_package.py /tmp/kinds /var/lib/synvirt/imports
' prove "$root"
