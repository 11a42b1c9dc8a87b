"""A command that only asks is answered at once, without torch, by the first rank alone."""

from __future__ import annotations

import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from launcher import __version__
from launcher.__main__ import main
from launcher.runtime import git


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["--help", "train", "parallel.hsdp.shard_size"], ["--version"], ["show=config"], ["--cfg", "job"]],
    ids=" ".join,
)
def test_asking_needs_no_torch(argv):
    script = f"import sys; from launcher.__main__ import main; code = main({argv}); print(code, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    assert done.stdout.endswith("\n0 False\n")


@pytest.mark.parametrize(
    "argv",
    [
        ["train.steps=1k", "show=plan"],
        ["parallel.pipeline.stages=3"],
        ["recipe=mlp_autoparallel", "parallel.pipeline.stages=3"],
        ["model=null", "model._target_=nowhere.Net", "security.allow=[nowhere]"],
        ["-m", "seed=1,two"],
        ["optim.lr=fast", "parallel.hsdp.shard_size=3", "data.path=missing.txt", "train.batch_size=7"],
    ],
    ids=" ".join,
)
def test_a_cure_of_what_needs_no_plan_is_tried_without_torch(argv, tmp_path):
    script = f"import sys; from launcher.__main__ import main; code = main({argv}); print(code, 'torch' in sys.modules)"
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path, env=where
    )
    assert done.stdout == "2 False\n"


HEAVY = ("torch._dynamo", "torch.distributed.fsdp", "launcher.steps.on_ranks", "jinja2.sandbox", "rich")
"""They cost half a second and 100 MB, and neither a plan nor the process that starts ranks needs them."""


@pytest.mark.parametrize("act", [["show=plan"], ["train.steps=1", "steps=[train]"]], ids=["show=plan", "a run"])
def test_the_process_that_plans_and_starts_ranks_imports_no_training_engine(act, tmp_path):
    argv = ["model.dim=16", "model.layers=2", "train.batch_size=16", f"runs={tmp_path}", *act]
    script = (
        f"import sys; from launcher.__main__ import main; code = main({argv}); "
        f"print(code, [m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    assert done.stdout.endswith("\n0 []\n")


HELP = {
    "",
    "__main__",
    "console",
    "errors",
    "job",
    "job.args",
    "job.config_folders",
    "job.schema",
    "job.schema.redact",
    "job.usage",
    "optional",
    "runtime",
    "runtime.cluster",
    "runtime.cluster.launch_env",
    "runtime.console_log",
    "runtime.gc_thresholds",
    "requirements",
    "runtime.stdio",
}
"""Modules of the launcher that ``--help`` may import."""
JUDGES = ("job", "job.*", "run", "run.try_cures", "user_errors")
"""The modules that a misspelled request may import in addition: those that compose it and try the cures."""
LIBRARIES = {"_cython_*", "annotated_types", "antlr4", "cython_runtime", "hydra", "omegaconf", "packaging", "pydantic"}
LIBRARIES |= {"pydantic_core", "typing_extensions", "typing_inspection", "yaml"}
ALWAYS = {"__main__", "__mp_main__", "_distutils_hack", "launcher", "_sysconfigdata_*", "sitecustomize", "_virtualenv"}


def imported(argv):
    """Return the modules of ``launcher`` and the libraries that a command imports."""
    script = (
        f"import sys; from launcher.__main__ import main; main({argv})\n"
        "own = {m.split('.')[0] for m in sys.modules}\n"
        "print(*{m.partition('.')[2] for m in sys.modules if m.split('.')[0] == 'launcher'}, sep=','); "
        "print(*own - set(sys.stdlib_module_names), sep=',')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    ours, theirs = done.stdout.splitlines()[-2:]
    libraries = {n for n in theirs.split(",") if not any(fnmatch(n, a) for a in ALWAYS)}
    return set(ours.split(",")), libraries


def test_help_imports_next_to_nothing():
    ours, libraries = imported(["--help"])
    assert ours <= HELP
    assert libraries == set()


@pytest.mark.skipif(not (Path(__file__).parents[1] / ".git").exists(), reason="this is no checkout")
@pytest.mark.parametrize("dirty", [True, False])
def test_the_version_has_the_commit_of_a_checkout(dirty, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(git, "commit", lambda folder: asked.append(folder) or ("12345678abcdef", dirty))
    monkeypatch.setattr("importlib.metadata.version", {"torch": "2.99"}.get)
    assert main(["--version"]) == 0
    changed = " with changes" if dirty else ""
    assert capsys.readouterr().out == f"launcher {__version__} (12345678ab{changed}), torch 2.99\n"
    assert asked == [Path(__file__).parents[1]]


def test_the_version_imports_next_to_nothing():
    ours, libraries = imported(["--version"])
    assert (ours - HELP, libraries) == ({"runtime.git"}, set())


def test_help_of_a_group_only_reads_the_files_of_options():
    ours, libraries = imported(["--help", "model", "parallel.pipeline.stages"])
    assert ours - HELP == {"job.help", "job.yaml_limits"}
    assert {name for name in libraries if "cython" not in name} == {"yaml"}


@pytest.mark.parametrize(
    "argv",
    [
        ["train.stepz=3"],
        ["train.stepz=3", "parallel.pipeline.scheduler=1f2b"],
        ["recipe=lm_singel"],
        ["recipe=lm_single", "model=lm_tiny", "optim=adam", "show=plan"],
        ["--hlep"],
    ],
    ids=" ".join,
)
def test_a_misspelled_request_is_refused_by_what_composes_it(argv):
    ours, libraries = imported(argv)
    assert {n for n in ours - HELP if not any(fnmatch(n, j) for j in JUDGES)} == set()
    assert {n for n in libraries if not any(fnmatch(n, a) for a in LIBRARIES)} == set()


@pytest.mark.parametrize(
    "argv", [["--help"], ["--help", "data"], ["show=config"], ["seed=1", "show=plan"]], ids=" ".join
)
def test_ranks_after_the_first_do_not_wait_for_a_run_that_only_prints(argv, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(argv) == 0
    assert capsys.readouterr().out == ""


def test_help_lists_recipes_options_and_examples(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "  lm_single             The default language model on one rank: every layout must match it.\n" in out
    assert "  optim=     adafactor, adamw, lion, momentum, muon, sgd\n" in out
    assert "  python -m launcher recipe=lm_single train.steps=20 " in out
