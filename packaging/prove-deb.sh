#!/bin/sh
# Prove the Debian package where nothing of ours is: packaging/prove-deb.sh PACKAGE. Needs root and mmdebstrap; takes some minutes.
# A bare Debian 12 is made in a folder, apt installs the package there with what it depends on, and the installed service imports
# an OVA, starts its guest and sees it boot.
set -eu
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
    # What vSphere needs is in the box.
    chroot "$root" /usr/lib/synvirt/bin/python3 -c "import pyVmomi"
    # This network belongs to the host: another demo may run on the usual port (CI runs both at once).
    SYNVIRT_LISTEN=127.0.0.1:8442 timeout 900 chroot "$root" synvirt demo </dev/null
' prove "$root"
