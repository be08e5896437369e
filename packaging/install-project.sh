#!/bin/sh
# install-project.sh VENV: puts the project of this folder in the environment VENV, in place, with its program and its byte code
# (a user who may not write here would compile it at each start).
set -eu
"$1/bin/pip" install -q --no-deps -e .
"$1/bin/python3" -P packaging/launcher.py > "$1/bin/synvirt.new"
chmod 755 "$1/bin/synvirt.new"
mv "$1/bin/synvirt.new" "$1/bin/synvirt"
"$1/bin/python3" -m compileall -q src
