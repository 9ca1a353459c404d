#!/bin/sh
# usage: apt.sh FILE
# Installs the Debian packages that FILE names, one a line, where they are missing and we are root; elsewhere
# it says what is missing, and the tests that need it skip. A file that is not there names none.
set -eu

[ -f "$1" ] || exit 0
missing=
for package in $(sed 's/#.*//' "$1"); do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "apt-get install$missing"
    export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 # level 1: a server is not started just because it is there
    apt-get -qq update && apt-get -qq install -y --no-install-recommends $missing >/dev/null && exit 0
fi
echo "some tests will skip; as root: apt-get install$missing" >&2
