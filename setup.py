"""Settings that pyproject.toml cannot express.

These are the index description, the native core with its headers, a build without C, and folders
that are links in an editable installation.
"""

import os
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent

#: Folder of each package, for wheels. In the repository the folders are side by side; once
#: installed they are below one package.
FOLDERS = {
    "collective": "collective",
    "collective.adapters": "adapters",
    "collective.backends": "backends",
    # PyTorch loads this package at its own import, which must not import collective.
    "collective_autoload": "adapters/torch/autoload",
    # The same for pytest.
    "collective_pytest": "collective/testing/plugin",
}
#: Links, and where they lead. The last two are committed, but no sdist has them.
LINKS = {
    ".editable/collective": "../collective",
    ".editable/collective_autoload": "../adapters/torch/autoload",
    ".editable/collective_pytest": "../collective/testing/plugin",
    "collective/adapters": "../adapters",
    "collective/backends": "../backends",
}


def description(readme: str) -> str:
    """Return the README without links to the repository's files, for package indexes.

    A package index does not have these files. A link to one of them becomes the link's text, and a
    picture becomes its alternative text; other text does not change.
    """
    return re.sub(r"!?\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", readme)


def linked() -> dict[str, str]:
    """Make the links, and return the folders of an editable installation.

    With all packages below one folder, setuptools puts this folder on the path of the environment.
    mypy, pyright and editors follow such a path. They do not follow the import hook that setuptools
    installs for FOLDERS. The root of the repository is not on the path, since it has folders whose
    names programs may use.
    """
    for name, target in LINKS.items():
        link = ROOT / name
        link.parent.mkdir(exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(target)
    return {"": ".editable"}


class Build(build_ext):
    """Build of the core, which no earlier core for this version of Python alone may hide.

    The libraries for XLA are not linked with Python, and have one name for every Python.
    """

    def run(self) -> None:
        """Build the core; beside its sources, remove a core that Python would prefer to it."""
        super().run()
        folder = ROOT / "collective" / "native"
        if LIMITED and (self.inplace or self.editable_mode) and (folder / "_core.abi3.so").exists():
            (folder / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}").unlink(missing_ok=True)

    def get_ext_filename(self, fullname: str) -> str:
        """Return the file of an extension module, below the folder of the build."""
        if fullname.rpartition(".")[2].startswith("libcollective_"):
            return f"{fullname.replace('.', '/')}.so"
        return str(super().get_ext_filename(fullname))


_WITH_CORE = "native" not in os.environ.get("COLLECTIVE_DISABLE", "").split(",")


class Package(Distribution):
    """Distribution without the addresses of a repository that has no owner yet."""

    def parse_config_files(self, *args: Any, **kwargs: Any) -> None:
        """Read the settings, and leave out addresses with the placeholder for the owner."""
        super().parse_config_files(*args, **kwargs)
        urls = self.metadata.project_urls or {}
        self.metadata.project_urls = {
            name: url for name, url in urls.items() if "__OWNER__" not in url
        }


class Pure(Package):
    """Distribution without the native core, whose wheel is for every platform."""

    def has_ext_modules(self) -> bool:
        """Return False: there is nothing to compile."""
        return False


#: Whether one build of the core serves Python 3.11 and all later versions, by the limited API. A
#: free-threaded Python has no limited API.
LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")

# On a 32-bit platform the package has no core. Without a C compiler the installation succeeds, but
# without the core. With -ffp-contract=off, a product and a sum are each rounded, as in NumPy.
CORE = Extension(
    "collective.native._core",
    sources=sorted(f"collective/native/{file.name}" for file in ROOT.glob("collective/native/*.c")),
    depends=sorted(f"collective/native/{file.name}" for file in ROOT.glob("collective/native/*.h")),
    extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=off", "-fvisibility=hidden"],
    optional=True,
    py_limited_api=LIMITED,
)
# A library for XLA, which is not linked with Python: see adapters/jax/xla.
XLA_PLUGIN = Extension(
    "collective.adapters.jax.xla.libcollective_xla",
    sources=["adapters/jax/xla/plugin.c"],
    depends=["adapters/jax/xla/symbols.h"],
    extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden"],
    libraries=["dl"],
    optional=True,
)
# The handler of calls inside jit, which is not linked with Python either: see adapters/jax.
XLA_HANDLER = Extension(
    "collective.adapters.jax.libcollective_ffi",
    sources=["adapters/jax/handler.c"],
    extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden"],
    optional=True,
)

setup(
    package_dir=linked() if "editable_wheel" in sys.argv else FOLDERS,
    ext_modules=[CORE, XLA_PLUGIN, XLA_HANDLER] if sys.maxsize > 2**32 else [],
    cmdclass={"build_ext": Build},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED else {},
    long_description=description((ROOT / "README.md").read_text()),
    long_description_content_type="text/markdown",
    # If COLLECTIVE_DISABLE names `native` during the build, the package has no native core. Set
    # later, the same variable keeps the package from using the core.
    distclass=Package if _WITH_CORE else Pure,
)
