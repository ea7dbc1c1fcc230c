"""Files of a release, and whether they agree with the package."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import collective
from collective.tools.cli.main import main
from tests.support.interpreter import ROOT

yaml = pytest.importorskip("yaml", reason="is installed with the site generator")

SETTINGS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, GROUPS = SETTINGS["project"], SETTINGS["dependency-groups"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(p for p in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if p.stem != "config")


@pytest.mark.parametrize("name", ["pyproject.toml", "recipe/meta.yaml", "setup.py"])
def test_version_is_not_repeated_in_other_files(name: str) -> None:
    assert collective.__version__ not in (ROOT / name).read_text()


def test_changelog_begins_with_this_version() -> None:
    sections = re.findall(r"^## \[(.+?)\] - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == collective.__version__


def test_citation_matches_package_metadata() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == collective.__version__
    assert citation["repository-code"] == PROJECT["urls"]["Source"]
    assert citation["license"] == PROJECT["license"]
    assert [author["name"] for author in citation["authors"]] == [
        author["name"] for author in PROJECT["authors"]
    ]


@pytest.mark.parametrize("name", ["Documentation", "Source", "Issues", "Changelog"])
def test_project_has_an_address_for_each_of_its_pages(name: str) -> None:
    owner = re.fullmatch(r"https://github\.com/([\w-]+)/collective", PROJECT["urls"]["Source"])
    assert owner
    assert owner[1] in PROJECT["urls"][name]


def test_changelog_and_issues_are_in_the_repository() -> None:
    source = PROJECT["urls"]["Source"]
    assert PROJECT["urls"]["Changelog"] == f"{source}/blob/main/CHANGELOG.md"
    assert PROJECT["urls"]["Issues"] == f"{source}/issues"


@pytest.mark.parametrize("group", ["docs", "dev", "release", "abi"])
def test_group_of_developers_names_no_extra_of_the_package(group: str) -> None:
    assert group not in PROJECT["optional-dependencies"]
    named = [each for each in GROUPS[group] if isinstance(each, str)]
    assert named
    assert [each for each in named if each.startswith(PROJECT["name"])] == []


@pytest.mark.parametrize("group", ["release", "abi"])
def test_make_installs_each_group(group: str) -> None:
    assert f" --group {group} " in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_issue_form_asks_for_doctor_report(form: Path) -> None:
    body = yaml.safe_load(form.read_text())["body"]
    asked = {field["id"]: field["attributes"]["label"] for field in body if "id" in field}
    assert asked["doctor"].endswith("`collective doctor --json`")


def test_doctor_has_options_named_in_forms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert {"--json", "--test"} <= set(re.findall(r"--\w+", capsys.readouterr().out))


@pytest.mark.parametrize("requirement", ["numpy>=1.24", "setuptools>=77"])
def test_recipe_has_requirements_of_package(requirement: str) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    recipe = (ROOT / "recipe" / "meta.yaml").read_text()
    assert f'"{requirement}"' in text
    assert f"- {requirement.replace('>=', ' >=')}\n" in recipe


def test_recipe_installs_commands_of_package() -> None:
    recipe = (ROOT / "recipe" / "meta.yaml").read_text()
    for name, function in PROJECT["scripts"].items():
        assert f"- {name} = {function}\n" in recipe
        module, _, called = function.partition(":")
        assert callable(getattr(importlib.import_module(module), called))


# -- workflows -------------------------------------------------------------------------------------


#: Permissions of the jobs that upload, by workflow.
UPLOADS = {
    "release": {"upload": {"id-token": "write"}},
    "site": {"deploy": {"id-token": "write", "pages": "write"}},
}


def _jobs(workflow: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(workflow.read_text())["jobs"])


def _lines(workflow: Path) -> list[str]:
    """Return the command lines of all steps of a workflow, one for each value of a matrix."""
    lines = []
    for job in _jobs(workflow).values():
        matrix = job.get("strategy", {}).get("matrix", {"": [""]})
        ((name, values),) = matrix.items()
        for line in (line for step in job["steps"] for line in step.get("run", "").splitlines()):
            lines += [line.replace(f"${{{{ matrix.{name} }}}}", value) for value in values]
    return list(dict.fromkeys(lines))


def test_workflows_run_on_expected_events() -> None:
    # YAML 1.1 reads the key "on" as true.
    occasions = {path.stem: yaml.safe_load(path.read_text())[True] for path in WORKFLOWS}
    assert occasions["test"] == {"push": {"branches": ["main"]}, "pull_request": None}
    assert occasions["release"] == {"push": {"tags": ["v*"]}}
    assert set(occasions["nightly"]) == {"schedule", "workflow_dispatch"}
    assert occasions["site"] == {"push": {"branches": ["main"]}, "workflow_dispatch": None}


def test_nightly_workflow_runs_sanitizers() -> None:
    workflow = ROOT / ".github/workflows/nightly.yml"
    assert "make sanitize PYTHON=python" in _lines(workflow)
    assert all(job["timeout-minutes"] <= 60 for job in _jobs(workflow).values())


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_runs_existing_targets(workflow: Path) -> None:
    lines = _lines(workflow)
    targets = [line.split()[1] for line in lines if line.startswith("make ")]
    assert targets
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    assert set(targets) <= set(phony[1].split())
    others = {line.split()[0] for line in lines if not line.startswith("make ")}
    assert others <= {".venv/bin/python", "python", "test"}


def test_workflows_run_every_target_that_needs_no_gpu_and_takes_no_hour() -> None:
    lines = [line for workflow in WORKFLOWS for line in _lines(workflow)]
    run = {line.split()[1] for line in lines if line.startswith("make ")}
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    # `make check` runs `make lint` and `make test`. The demo is an example, which a test runs.
    assert set(phony[1].split()) - run == {"demo", "lint", "test-gpu", "bench", "clean"}


def test_nightly_workflow_runs_the_tests_of_every_environment() -> None:
    lines = _lines(ROOT / ".github/workflows/nightly.yml")
    run = {found[1] for line in lines if (found := re.search(r"make test-in ENV=(\S+)", line))}
    groups = {name for name in GROUPS if f"test-in ENV={name}" in _environments()}
    assert run == groups


def _environments() -> set[str]:
    """Return the values of ENV in the table of CONTRIBUTING.md, as commands."""
    table = re.findall(
        r"^\| (`.*) \| `tests/", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    return {f"test-in ENV={name}" for cell in table for name in re.findall(r"`([\w-]+)`", cell)}


@pytest.mark.parametrize("workflow", ["nightly", "test"])
def test_workflow_has_a_runner_with_arm(workflow: str) -> None:
    jobs = _jobs(ROOT / f".github/workflows/{workflow}.yml")
    assert "ubuntu-24.04-arm" in {job["runs-on"] for job in jobs.values()}


def test_refusal_that_the_runner_with_macos_expects_is_the_text_of_the_error() -> None:
    jobs = _jobs(ROOT / ".github/workflows/test.yml")
    assert jobs["macos"]["runs-on"] == "macos-latest"
    (line,) = [step["run"] for step in jobs["macos"]["steps"] if "grep" in step.get("run", "")]
    program = 'import sys; sys.platform = "darwin"; import collective'
    line = line.replace("import collective", program)
    python = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    assert subprocess.run(["bash", "-c", line], env=python).returncode == 0
    line = line.replace('"darwin"', '"linux"')
    assert subprocess.run(["bash", "-c", line], env=python).returncode == 1


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_has_only_read_permission_except_for_upload(workflow: Path) -> None:
    assert yaml.safe_load(workflow.read_text())["permissions"] == {"contents": "read"}
    granted = {name: job.get("permissions") for name, job in _jobs(workflow).items()}
    uploads = UPLOADS.get(workflow.stem, {})
    assert {name: permissions for name, permissions in granted.items() if permissions} == uploads


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_pins_actions_by_commit_and_names_versions(workflow: Path) -> None:
    used = re.findall(r"uses: (.*)", workflow.read_text())
    assert used
    pinned = re.compile(r"(actions|pypa)/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    assert [action for action in used if not pinned.fullmatch(action)] == []


def test_workflows_use_one_commit_of_each_action() -> None:
    used = [action for path in WORKFLOWS for action in re.findall(r"uses: (.*)", path.read_text())]
    assert len({action.partition("@")[0] for action in used}) == len(set(used))


def test_site_workflow_uploads_the_folder_that_make_builds() -> None:
    jobs = _jobs(ROOT / ".github/workflows/site.yml")
    (upload,) = [step["with"] for step in jobs["build"]["steps"] if "pages" in step.get("uses", "")]
    assert upload == {
        "path": yaml.safe_load((ROOT / "mkdocs.yml").read_text().split("plugins:")[0])["site_dir"]
    }
    assert jobs["deploy"]["needs"] == "build"


def test_supported_pythons_are_tested_and_have_wheels() -> None:
    named = {
        entry.rpartition(" ")[2]
        for entry in PROJECT["classifiers"]
        if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", entry)
    }
    jobs = _jobs(ROOT / ".github/workflows/test.yml")
    fully_tested = [step["with"]["python-version"] for step in jobs["check"]["steps"]
             if "python-version" in step.get("with", {})]  # fmt: skip
    assert {*fully_tested, *jobs["quick"]["strategy"]["matrix"]["python"]} == named
    wheels = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["build"]
    assert wheels.split() == [
        f"cp{entry.replace('.', '')}-*" for entry in sorted(named, key=_minor)
    ]


def _minor(version: str) -> int:
    return int(version.partition(".")[2])


def test_release_uploads_only_sdist_and_portable_wheels() -> None:
    """The release has the sdist, the pure wheel and the wheelhouse, but no wheel of one machine."""
    jobs = _jobs(ROOT / ".github/workflows/release.yml")
    artifacts = {
        name: step["with"]["path"].split()
        for name, job in jobs.items()
        for step in job["steps"]
        if step.get("uses", "").startswith("actions/upload-artifact")
    }
    assert artifacts == {"sources": ["dist/*.tar.gz", "dist/*-none-any.whl"],
                    "wheels": ["wheelhouse/*.whl"]}  # fmt: skip
    assert sorted(jobs["upload"]["needs"]) == sorted(artifacts)
    assert "python -m cibuildwheel --platform linux --output-dir wheelhouse" in _lines(
        ROOT / ".github/workflows/release.yml"
    )


def test_release_tag_is_compared_with_version() -> None:
    (line,) = [
        line for line in _lines(ROOT / ".github/workflows/release.yml") if "GITHUB_REF" in line
    ]
    for tag, code in ((f"v{collective.__version__}", 0), ("v0.0.0", 1)):
        done = subprocess.run(["bash", "-c", line], cwd=ROOT,
                              env={"PATH": os.environ["PATH"], "GITHUB_REF_NAME": tag})  # fmt: skip
        assert done.returncode == code


def test_no_release_is_made_without_the_owner(tmp_path: Path) -> None:
    (line,) = [
        line for line in _lines(ROOT / ".github/workflows/release.yml") if "__OWNER__" in line
    ]
    for name in ("pyproject.toml", "CITATION.cff"):
        text = (ROOT / name).read_text()
        (tmp_path / name).write_text(text.replace("__OWNER__", "somebody"))
    assert subprocess.run(["bash", "-c", line], cwd=tmp_path).returncode == 0
    (tmp_path / "CITATION.cff").write_text("repository-code: https://github.com/__OWNER__/x")
    assert subprocess.run(["bash", "-c", line], cwd=tmp_path).returncode == 1


# -- the recipe ------------------------------------------------------------------------------------


def _recipe() -> dict[str, Any]:
    """Return the recipe as conda-build reads it, except for the names of compilers."""
    jinja2 = pytest.importorskip("jinja2", reason="is installed with the site generator")

    def load_file_regex(load_file: str, regex_pattern: str, from_recipe_dir: bool) -> Any:
        folder = ROOT / "recipe" if from_recipe_dir else ROOT
        return re.search(regex_pattern, (folder / load_file).read_text())

    text = jinja2.Template((ROOT / "recipe/meta.yaml").read_text()).render(
        PYTHON="python",
        compiler=lambda language: f"{language}-compiler",
        load_file_regex=load_file_regex,
        stdlib=lambda language: f"{language}-stdlib",
    )
    return dict(yaml.safe_load(text))


def test_recipe_has_this_version() -> None:
    assert _recipe()["package"] == {"name": PROJECT["name"], "version": collective.__version__}


def test_recipe_has_sections_of_conda_build() -> None:
    recipe = _recipe()
    assert list(recipe) == ["package", "source", "build", "requirements", "test", "about"]
    assert set(recipe["requirements"]) == {"build", "host", "run"}
    assert (ROOT / "recipe" / recipe["source"]["path"]).resolve() == ROOT
    assert (ROOT / recipe["about"]["license_file"]).is_file()
    assert recipe["about"]["license"] == PROJECT["license"]
    assert recipe["about"]["summary"] == PROJECT["description"]


def test_recipe_tests_existing_modules_and_commands() -> None:
    recipe = _recipe()
    for name in recipe["test"]["imports"]:
        assert importlib.util.find_spec(name.removesuffix("._core"))
    commands = [shlex.split(line) for line in recipe["test"]["commands"]]
    assert [words[0] for words in commands] == ["collective", "python"]
    assert commands[1][1:3] == ["-m", "collective.testing"]
