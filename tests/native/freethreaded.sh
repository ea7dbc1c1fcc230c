#!/usr/bin/env bash
# Builds a free-threaded CPython with NumPy into a folder, and installs this package there:
#
#     tests/native/freethreaded.sh .freethreaded
#     tests/native/freethreaded.sh .freethreaded-tsan --with-thread-sanitizer
#
# The words behind the folder go to CPython's configure. The source is that of Debian, from the
# mirror in this machine's settings of apt: the newest package of the list below that the mirror
# has. CPYTHON=FILE names another archive of the source. Building takes five minutes of two cores.
set -eu -o pipefail

prefix=$(mkdir -p "$1" && cd "$1" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
shift
source "$root/tests/native/debian_source.sh"
# A process under the thread sanitizer ends with an error if the sanitizer has found anything. Here
# only the build matters.
export TSAN_OPTIONS="report_bugs=0"

if [ ! -e "$prefix/bin/python3" ]; then
    rm -rf "$prefix/build"
    mkdir -p "$prefix/build/python"
    [ -n "${CPYTHON-}" ] || CPYTHON=$(fetch "$prefix/build/apt" \
        sid:python3.14 forky:python3.14 trixie:python3.13)
    tar xf "$CPYTHON" -C "$prefix/build/python" --strip-components 1
    cd "$prefix/build/python"
    ./configure --quiet --disable-gil --disable-test-modules --prefix="$prefix" "$@" > ../log
    make --silent -j "$(nproc)" >> ../log 2>&1
    make --silent install >> ../log 2>&1
    rm -rf "$prefix/build"
fi
pip="$prefix/bin/python3 -m pip install --quiet --disable-pip-version-check"
# The newest NumPy may have no wheel for this Python, and building one takes very long.
$pip --only-binary :all: numpy pytest pytest-timeout 'setuptools>=77'
$pip --no-deps --no-build-isolation --force-reinstall "$root"
