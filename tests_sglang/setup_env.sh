#!/bin/sh
# usage: setup_env.sh VERSION
# Makes .venv-sglang-VERSION at the repository root: the real sglang of that version, CPU torch,
# the clients that our plugins need, and this repository's distributions in editable form. Does
# nothing when all of it is there.
set -eu

version=${1:?"usage: setup_env.sh VERSION"}
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
requirements=$here/requirements-$version.txt
venv=$root/.venv-sglang-$version
torch=2.13.0

[ -f "$requirements" ] || { echo "no $requirements" >&2; exit 2; }

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

dependencies="$torch $(cksum <"$requirements")"
if [ "$(cat "$venv/.dependencies" 2>/dev/null)" != "$dependencies" ]; then
    echo "setting up $venv (once)"
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv"
    pip install "torch==$torch"
    pip install --no-deps -r "$requirements"
    echo "$dependencies" >"$venv/.dependencies"
fi

clients=$(cat "$root"/plugins/*/requirements.txt)
if [ "$(cat "$venv/.clients" 2>/dev/null)" != "$clients" ]; then
    for plugin in "$root"/plugins/*/requirements.txt; do
        pip install --no-deps -r "$plugin"
    done
    echo "$clients" >"$venv/.clients"
fi

set -- "$root" "$root"/plugins/* "$root/conformance"
editable=$(for project; do echo "$project" && cat "$project/pyproject.toml"; done | cksum)
if [ "$(cat "$venv/.editable" 2>/dev/null)" != "$editable" ]; then
    for project; do
        pip install --no-deps --no-build-isolation -e "$project"
    done
    echo "$editable" >"$venv/.editable"
fi
