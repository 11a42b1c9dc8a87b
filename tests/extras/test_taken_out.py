"""Each part of ``launcher/extras`` can be removed, and nothing else stops working."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.errors import REFUSED
from launcher.optional import PARTS

ROOT = Path(__file__).parents[2]
EXTRAS = sorted(p.name for p in (ROOT / "launcher/extras").iterdir() if (p / "__init__.py").exists())
IMPORT_ALL = """
import importlib, importlib.abc, os, pkgutil, sys
import torch, torch.distributed, torch.fx, torch.export, numpy, pydantic, yaml

class Gone(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == gone or name.startswith(gone + "."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for extra in sys.argv[1:]:
    if os.fork():
        _, status = os.wait()
        if status:
            sys.exit(f"without {extra}: {status}")
        continue
    gone = "launcher.extras." + extra
    sys.meta_path.insert(0, Gone())
    import launcher
    for module in pkgutil.walk_packages(launcher.__path__, "launcher.", onerror=lambda name: None):
        if not module.name.startswith(gone) and not module.name.endswith("__main__") and ".project." not in module.name:
            importlib.import_module(module.name)
    sys.stdout.flush()
    os._exit(0)
"""


def test_all_other_modules_can_be_imported_without_each_extra() -> None:
    """Each extra is removed in a forked child of one process that has imported torch."""
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL, *EXTRAS], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """A copy of the launcher without ``extras``."""
    home = tmp_path_factory.mktemp("bare")
    for name in ("launcher", "conf", "recipes"):
        shutil.copytree(ROOT / name, home / name, ignore=shutil.ignore_patterns("extras", "__pycache__"))
    return home


def ran(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launcher", *words]
    environment = {**os.environ, "PYTHONPATH": str(home), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)


def test_the_default_recipe_runs_without_extras(bare: Path) -> None:
    done = ran(bare, "train.steps=2", "run_dir=run")
    assert done.returncode == 0, done.stderr
    assert "done in" in done.stdout
    assert ran(bare, "status", "run").stdout.startswith("run: done")


REFUSALS = {
    "init": (("init", "mine"), "launcher/extras/starter"),
    "sweep": (("-m", "seed=1,2"), "launcher/extras/sweep"),
    "search": (("parallel=auto",), "launcher/extras/layout_search"),
    "device matrices": (("parallel.mode=recursive_programming",), "launcher/extras/device_matrix"),
    "calibration": (("steps=[calibrate]",), "launcher/extras/calibration"),
    "images": (("data=cifar10", "model=resnet18"), "data: needs launcher/extras/images"),
    "MindSpore": (("steps.transform.format=ckpt",), "steps.transform.format: needs launcher/extras/mindspore"),
    "Kubernetes": (
        ("launch=k8s", "launch.k8s.mount=/x", "launch.k8s.image=i", "launch.k8s.claim=c"),
        "launch.k8s: needs launcher/extras/k8s",
    ),
    "loggers": (("logger.csv=true", "logger.tensorboard=true"), "logger: needs launcher/extras/loggers"),
    "drill": (("debug.drill={kill_rank: {rank: 0, step: 1}}",), "debug.drill: needs launcher/extras/drill"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_request_that_needs_a_missing_extra_is_refused_by_its_name(bare: Path, case: str) -> None:
    words, text = REFUSALS[case]
    done = ran(bare, *words, *(() if case in ("init", "sweep") else ("run_dir=refused",)))
    assert done.returncode == REFUSED
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (bare / "refused").exists()


def test_every_part_is_in_a_folder_of_its_own() -> None:
    assert {path.split(".")[2] for path in PARTS.values()} == {*EXTRAS}
