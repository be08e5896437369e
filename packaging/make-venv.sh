#!/bin/sh
# make-venv.sh VENV LOCKFILE: makes VENV by the lock file, with the project of this folder in it. It is made beside the present
# one and then takes its place: a service that runs from there finds a whole environment all the while, and a failure leaves the
# present one as it was.
# It sees Debian's packages for libvirt and libnbd; what is locked is installed all the same where Debian happens to have it too
# (--ignore-installed).
set -eu
venv=$(realpath -m "$1")
new=$venv.new old=$venv.old
rm -rf "$new" "$old"
/usr/bin/python3 -m venv --system-site-packages --prompt "$(basename "$venv")" "$new"
"$new/bin/pip" install -q --ignore-installed --require-hashes -r "$2"
packaging/install-project.sh "$new"
# Its programs name the folder that they were made in.
grep -rlIF "$new" "$new/bin" "$new/pyvenv.cfg" | xargs -r sed -i "s|$new|$venv|g"
touch "$new/.runtime" "$new/.project"
[ ! -e "$venv" ] || mv -T "$venv" "$old"
mv -T "$new" "$venv"
rm -rf "$old"
