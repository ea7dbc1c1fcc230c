"""The shipped files, their names, and the modules that an import loads."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import sys
import sysconfig
import tarfile
import textwrap
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.interpreter import ROOT, printed, run

pytestmark = pytest.mark.whole

# The filter is the default of later Pythons; early releases of 3.10 and 3.11 do not have it.
FILTER: dict[str, str] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def shipped() -> list[str]:
    """Return all modules on disk as paths below the installed package's parent."""
    prefixes = {"collective": "collective", **_outside()}
    modules = [
        Path(prefix, file.relative_to(ROOT / folder)).as_posix()
        for prefix, folder in prefixes.items()
        for file in (ROOT / folder).glob("**/*.py")
        if folder != "collective" or not _behind_a_link(file)
    ]
    return sorted(modules)


def _outside() -> dict[str, str]:
    return {"collective/backends": "backends", "collective/adapters": "adapters"} | {
        "collective_autoload": "adapters/torch/autoload",
        "collective_pytest": "collective/testing/plugin",
    }


def _behind_a_link(file: Path) -> bool:
    # Whether ** enters links to folders depends on Python's version.
    return file.relative_to(ROOT).parts[1] in ("backends", "adapters")


def python(*arguments: str, cwd: Path = ROOT, path: Path | None = None) -> str:
    """Run this interpreter and return its output; if it fails, fail with the output."""
    environment = {**os.environ, "PYTHONPATH": str(path or "")}
    return printed(*arguments, cwd=cwd, env=environment, merged=True)


def test_settings_list_every_package_folder() -> None:
    folders = {file.rpartition("/")[0].replace("/", ".") for file in shipped()}
    assert sorted(SETTINGS["packages"]) == sorted(folders)


def test_folders_with_modules_are_packages() -> None:
    files = shipped()
    folders = {file.rpartition("/")[0] for file in files}
    assert [folder for folder in folders if f"{folder}/__init__.py" not in files] == []


@pytest.mark.parametrize("name", ["backends", "adapters"])
def test_link_in_package_is_relative_and_leads_to_folder(name: str) -> None:
    link = ROOT / "collective" / name
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name


@pytest.mark.parametrize("name", ["backends", "adapters"])
def test_import_of_bare_name_raises_and_names_the_module(name: str) -> None:
    output = python(
        "-c",
        f"try: import {name}\n"
        f"except ImportError as error: print(error.name, '|', error)\n"
        f"import collective.{name}",
    )
    assert output.startswith(f"{name} | import {name}: ")
    assert f"Import collective.{name} instead" in output


def test_import_and_use_load_only_numpy() -> None:
    program = """
import sys
before = set(sys.modules)
import collective, numpy
with collective.init() as comm:
    comm.all_reduce(numpy.ones(3))
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new - set(sys.stdlib_module_names)))
"""
    assert python("-c", program).strip() == "['collective', 'numpy']"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the files that are built, and of the other files of the sdist."""
    sources = tmp_path_factory.mktemp("build") / "a directory of another name"
    sources.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("adapters", "backends", "collective", "tests"):
        shutil.copytree(ROOT / name, sources / name, symlinks=True, ignore=unwanted)
    for name in ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, sources)
    return sources


@pytest.fixture(scope="module")
def wheel(sources: Path) -> Path:
    """Build an sdist, and a wheel from the sdist; return the wheel."""
    # Without isolation nothing is downloaded, because setuptools is already installed.
    python("-m", "build", "--no-isolation", "--outdir", "dist", cwd=sources)
    (wheel_file,) = (sources / "dist").glob("*.whl")
    return wheel_file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a separate directory, and return the directory."""
    target = tmp_path_factory.mktemp("installed")
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index")
    python("-m", "pip", "install", *options, "--target", str(target), str(wheel))
    return target


def test_wheel_contains_exactly_the_shipped_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    extensions = [name for name in names if name.endswith(".so")]
    # The native core, and the two libraries for XLA.
    assert len(extensions) == (3 if shutil.which("cc") is not None else 0)
    stubs = ["collective/native/_core.pyi", "collective/communicator/signatures.pyi"]
    # The plug-in compares the names in this header with those that jaxlib looks up.
    others = ["collective/py.typed", "collective/adapters/jax/xla/symbols.h", *stubs]
    assert sorted(names) == sorted([*shipped(), *others, *extensions])


def test_wheel_with_core_serves_all_later_pythons(wheel: Path) -> None:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("a free-threaded Python has no limited API")
    assert "-cp311-abi3-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        extensions = [name for name in archive.namelist() if name.endswith(".so")]
    libraries = ["adapters/jax/libcollective_ffi.so", "adapters/jax/xla/libcollective_xla.so"]
    built = [f"collective/{name}" for name in (*libraries, "native/_core.abi3.so")]
    assert sorted(extensions) in ([], built)


@pytest.mark.parametrize("most", [2**31 - 1, 2**63 - 1])
def test_setup_builds_core_only_on_64_bits(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", settings.update)
    monkeypatch.setattr(sys, "maxsize", most)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    names = [module.name for module in settings["ext_modules"]]
    assert ("collective.native._core" in names) == (most > 2**32)


def test_build_of_core_removes_one_for_this_version_alone(sources: Path) -> None:
    if sysconfig.get_config_var("Py_GIL_DISABLED") or shutil.which("cc") is None:
        pytest.skip("needs the limited API and a C compiler")
    native = sources / "collective" / "native"
    (native / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}").touch()
    python("setup.py", "--quiet", "build_ext", "--inplace", cwd=sources)
    names = [file.name for file in native.glob("*.so")]
    for name in names:
        (native / name).unlink()
    assert names == ["_core.abi3.so"]


def test_wheel_without_core_is_for_every_platform(
    sources: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLLECTIVE_DISABLE", "native")
    python("-m", "build", "--no-isolation", "--wheel", "--outdir", "pure", cwd=sources)
    (pure,) = (sources / "pure").iterdir()
    assert pure.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as full_archive, zipfile.ZipFile(pure) as pure_archive:
        names = {name for name in full_archive.namelist() if not name.endswith(".so")}
        assert set(pure_archive.namelist()) == names


def test_description_passes_strict_twine_check(wheel: Path) -> None:
    pytest.importorskip("twine")
    files = map(str, wheel.parent.iterdir())
    assert python("-m", "twine", "--no-color", "check", "--strict", *files).count("PASSED") == 2


def test_description_has_only_absolute_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        # The package also holds the metadata of the name mpi4py, in a folder of its own.
        pattern = r"[^/]+\.dist-info/METADATA"
        (name,) = (name for name in archive.namelist() if re.fullmatch(pattern, name))
        description = archive.read(name).decode().partition("\n\n")[2]
    assert "collective run -n 4 examples/hello.py" in description
    targets = re.findall(r"\]\(([^)]*)\)", description)
    assert [target for target in targets if not target.startswith("https://")] == []


def test_metadata_have_no_placeholder_for_the_owner(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
        metadata = archive.read(name).decode()
    assert "__OWNER__" not in metadata
    owned = "__OWNER__" not in (ROOT / "pyproject.toml").read_text()
    assert metadata.count("\nProject-URL: ") == (4 if owned else 0)


def test_wheel_passes_check_wheel_contents(wheel: Path) -> None:
    pytest.importorskip("check_wheel_contents")
    settings = ("--config", str(ROOT / "pyproject.toml"))
    assert ": OK" in python("-m", "check_wheel_contents", *settings, str(wheel))


def test_sdist_tests_run(wheel: Path, tmp_path: Path) -> None:
    (archive,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, **FILTER)
    root = tmp_path / archive.name.removesuffix(".tar.gz")
    output = python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/package/test_ops.py", cwd=root
    )
    assert " passed" in output
    assert (root / "collective" / "backends").readlink() == Path("../backends")


def test_installed_modules_can_be_imported(installed: Path, tmp_path: Path) -> None:
    program = """
import importlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
count = 0
for file in sorted((root / "collective").glob("**/*.py")):
    name = ".".join(file.relative_to(root).with_suffix("").parts)
    name = name.removesuffix(".__init__")
    if name.endswith("__main__"):
        continue
    try:
        module = importlib.import_module(name)
    except ImportError as error:  # ours, with an install command, has no name
        if (error.name or "").partition(".")[0] == "collective":
            raise
        continue  # an extra that is not installed here
    assert pathlib.Path(module.__file__).is_relative_to(root), module.__file__
    count += 1
print(count)
"""
    output = python("-c", program, str(installed), cwd=tmp_path, path=installed)
    assert int(output) > 0.8 * len(shipped())


def test_installed_plugin_runs_a_test_on_ranks(installed: Path, tmp_path: Path) -> None:
    test = """
import pytest

@pytest.mark.ranks(2)
def test_it(comm):
    assert comm.all_reduce(1) == 2
"""
    (tmp_path / "test_it.py").write_text(test)
    output = python(
        "-m", "pytest", "-q", "--strict-markers", "-Werror", "--rootdir=.", cwd=tmp_path,
        path=installed,
    )  # fmt: skip
    assert "1 passed" in output


def test_installed_command_runs(installed: Path, tmp_path: Path) -> None:
    output = python("-m", "collective", "config", cwd=tmp_path, path=installed)
    assert "backend" in output


def test_installed_package_is_named_by_distribution_in_hints(
    installed: Path, tmp_path: Path
) -> None:
    program = "from collective.install import hint; print(hint('mpi'))"
    output = python("-c", program, cwd=tmp_path, path=installed)
    assert output == "pip install 'collective-comm[mpi]'\n"


def test_pip_accepts_installed_package_without_index(installed: Path, tmp_path: Path) -> None:
    # So the command in the hint works even before the package is published.
    options = ("--disable-pip-version-check", "--no-deps", "--no-index", "--dry-run")
    output = python(
        "-m", "pip", "install", *options, "collective-comm[mpi]", cwd=tmp_path, path=installed
    )
    assert "Requirement already satisfied: collective-comm[mpi]" in output


# -- an editable installation ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def editable(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment into which the sources are installed by ``pip -e``."""
    environment = tmp_path_factory.mktemp("editable") / "environment"
    python("-m", "venv", "--without-pip", str(environment))
    interpreter = environment / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'), end='')"
    packages = Path(printed("-c", where, python=interpreter))
    # NumPy and setuptools are those of the tests. Python reads no .pth file in that folder, so the
    # tests' own installation of this package is not seen.
    (packages / "tests.pth").write_text(sysconfig.get_path("purelib"))
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLLECTIVE_DISABLE", "native")
        python(
            "-m", "pip", "--python", str(interpreter), "install", *options, "--no-build-isolation",
            "--editable", str(sources),
        )  # fmt: skip
    return interpreter


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Write a user's program, whose last line a type checker has to refuse."""
    text = """
        import numpy as np
        import collective
        from collective.backends import threads

        print(threads.__name__)
        comm = collective.init()
        comm.all_reduce(np.ones(3), order="size")
        """
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(text).lstrip())
    return path


@pytest.mark.parametrize(
    "name",
    [
        "collective",
        "collective.backends.shm",
        "collective.adapters",
        "collective_autoload",
        "collective_pytest",
    ],
)
def test_editable_installation_imports_the_sources(
    editable: Path, sources: Path, tmp_path: Path, name: str
) -> None:
    program = f"import {name}, pathlib; print(pathlib.Path({name}.__file__).resolve(), end='')"
    file = Path(printed("-c", program, python=editable, cwd=tmp_path, PYTHONPATH=""))
    assert file.is_relative_to(sources)


@pytest.mark.parametrize("name", ["adapters", "backends", "tests", "setup"])
def test_editable_installation_adds_no_other_name(
    editable: Path, tmp_path: Path, name: str
) -> None:
    program = f"import importlib.util as u; print(u.find_spec({name!r}))"
    assert printed("-c", program, python=editable, cwd=tmp_path, PYTHONPATH="") == "None\n"


def test_mypy_finds_the_types_of_an_editable_installation(editable: Path, program: Path) -> None:
    options = ("--strict", "--no-error-summary", "--python-executable", str(editable))
    command = (sys.executable, "-m", "mypy", *options, program.name)
    done = run(*command, cwd=program.parent, PYTHONPATH="")
    errors = re.findall(r"^program\.py:(\d+): error: ", done.stdout, re.MULTILINE)
    assert errors == ["7"], done.stdout + done.stderr


def test_pyright_finds_the_types_of_an_editable_installation(editable: Path, program: Path) -> None:
    command = shutil.which("basedpyright", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("basedpyright is not installed")
    options = ("--pythonpath", str(editable), "--level", "error", "--outputjson")
    done = run(command, *options, program.name, cwd=program.parent, PYTHONPATH="")
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert [each["range"]["start"]["line"] + 1 for each in found] == [7], found
