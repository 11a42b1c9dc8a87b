"""An installed wheel runs exactly as a checkout does."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
import yaml

import launcher
from launcher import optional
from launcher.optional import install_command
from tests.test_imports import imports

ROOT = Path(__file__).parents[1]
BUILD = ("-m", "pip", "--quiet", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
INSTALL = ("-m", "pip", "--quiet", "install", "--no-deps", "--no-index")
COMES_WITH = {"yaml": "omegaconf", "pydantic_core": "pydantic", "mlflow": "mlflow-skinny"}
"""Packages that are made for another package and follow its version."""


def python(*words: str | Path, cwd: Path, path: Path | None = None) -> str:
    """Return the output of this interpreter, with ``path`` ahead of its installed packages."""
    env = {**os.environ, "PYTHONPATH": str(path or "")}
    done = subprocess.run([sys.executable, *map(str, words)], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    python(*BUILD, "-w", folder, ROOT, cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    folder = wheel.parent / "site"
    python(*INSTALL, "--target", folder, wheel, cwd=wheel.parent)
    return folder


def shipped(*patterns: str) -> set[str]:
    return {p.relative_to(ROOT).as_posix() for pattern in patterns for p in ROOT.glob(pattern) if p.is_file()}


def test_the_wheel_has_the_package_with_its_settings_and_text_and_nothing_else(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    beside = {f"launcher/{name}" for name in shipped("conf/**/*.yaml", "recipes/**/*.yaml")}
    assert (
        inside
        == shipped(
            "launcher/**/*.py",
            "launcher/py.typed",
            "launcher/data/text/*.*",
            "launcher/extras/starter/project/*.*",
            "launcher/job/shells/*.*",
        )
        | beside
    )


def test_the_source_archive_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    python("-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=ROOT)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 has it
        tar.extractall(tmp_path)
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    assert {
        "README.md",
        "CHANGELOG.md",
        "CITATION.cff",
        "LICENSE",
        "Makefile",
        "SECURITY.md",
        "tests",
        "benchmarks",
    } <= {p.name for p in source.iterdir()}
    assert not {".venv", "runs"} & {p.name for p in source.iterdir()}
    python(*BUILD, "-w", tmp_path, source, cwd=tmp_path)
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def test_an_installed_launcher_makes_the_same_plan_from_any_folder(site: Path, tmp_path: Path) -> None:
    plan = ("-m", "launcher", "show=plan")
    assert python("-c", "import launcher; print(launcher.__file__)", cwd=tmp_path, path=site) == (
        f"{site / 'launcher/__init__.py'}\n"
    )
    assert python(*plan, cwd=tmp_path, path=site) == python(*plan, cwd=ROOT)
    asked = ("-m", "launcher", "--help", "model", "parallel")
    assert python(*asked, cwd=tmp_path, path=site) == python(*asked, cwd=ROOT)
    assert list(tmp_path.iterdir()) == []


def test_the_console_script_is_the_module(site: Path, tmp_path: Path) -> None:
    """The current folder is another repository, whose commit must not be shown."""
    (tmp_path / ".git").mkdir()
    told = f"launcher {launcher.__version__}, torch {version('torch')}\n"
    for words in (["-m", "launcher"], [site / "bin/launcher"]):
        assert python(*words, "--version", cwd=tmp_path, path=site) == told


def test_the_console_script_looks_in_the_current_folder_last(site: Path, tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("raise SystemExit('yaml.py of the current folder')")
    (tmp_path / "mine.py").write_text("print('imported from', __file__)\n\n\nclass Net: ...\n")
    words = ("show=config", "model={_target_: mine.Net}", "security.allow=[mine]")
    assert "_target_: mine.Net" in python(site / "bin/launcher", *words, cwd=tmp_path, path=site)


def test_a_wheel_says_its_version_its_license_and_that_it_is_typed(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        lines = archive.read(metadata).decode().splitlines()
        assert "launcher/py.typed" in archive.namelist()
        assert any(n.endswith("/licenses/LICENSE") for n in archive.namelist())
    assert f"Version: {launcher.__version__}" in lines
    assert "License-Expression: Apache-2.0" in lines
    assert "Classifier: Typing :: Typed" in lines


def test_a_citation_names_the_version_that_is_released() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (launcher.__version__, "Apache-2.0")


def bounds(requirement: str) -> frozenset[str]:
    """Return the name and each bound, independent of their order."""
    return frozenset(re.split(r"(?<=\w)(?=[<>=])|,", requirement))


@pytest.mark.parametrize("extra", ["crypto", "hf", "images", "wandb", "mlflow", "optuna", "data"])
def test_an_optional_package_is_installed_by_its_own_name_and_bounds(
    extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    program, verb, *packages = shlex.split(install_command(extra))
    assert (program, verb) == ("pip", "install")
    assert {bounds(p) for p in packages} == {bounds(d) for d in declared}
    monkeypatch.setattr(optional, "DISTRIBUTION", "not-installed")
    assert install_command(extra) == f"pip install -e '.[{extra}]'"


def test_every_package_that_is_imported_is_declared_as_a_dependency_or_an_extra_for_users() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [r for name, rs in project["optional-dependencies"].items() if name != "dev" for r in rs]
    declared = {requirement.partition(">")[0] for requirement in (*project["dependencies"], *extras)}
    ours = {"launcher", "open()", *sys.stdlib_module_names}
    tops = {i.what.partition(".")[0] for i in imports()} - ours
    homes = {top: {COMES_WITH.get(top, top), *packages_distributions().get(top, ())} for top in tops}
    assert {top: homes[top] for top in tops if not homes[top] & declared} == {}
