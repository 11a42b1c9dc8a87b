"""Words that users of Hydra are used to: the full text that says what to type here, and a cure that passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.__main__ import check_words, main
from launcher.job import overrides
from launcher.job.compose import Depth, compose
from tests.mistakes.answers import next_command
from tests.test_cli_bad_input import RECIPES, head

NO_EFFECT = "Hydra's own settings have no effect here"
SAMPLER = "sweep.sampler chooses the values that a sweep tries; sweep.sampler=tpe uses earlier results"
CELLS = "sweep.parallel sets how many cells of a sweep run at a time"
LOGS = "the output of every rank is in logs/ of the run folder"


def typed(word: str, key: str, sentence: str, cure: str = "") -> str:
    told = f"\n  {key}: {NO_EFFECT}; {sentence}\n    set by: {word} (command line)\n"
    return told + (f"    try:    {cure}\n" if cure else "")


def flag(words: str, sentence: str, cure: str = "") -> str:
    return f"\n  {words}: unknown flag; {sentence}\n" + (f"    try:    {cure}\n" if cure else "")


SETTINGS = {
    "hydra.run.dir=x": ("run_dir sets the folder of a run", "run_dir=x"),
    "hydra.run.dir=outputs/${now:%Y-%m-%d}": ("run_dir sets the folder of a run", ""),
    "hydra.sweep.dir=x/y": ("sweep_dir sets the folder of a sweep", "-m sweep_dir=x/y"),
    "hydra.sweep.subdir=x": ("runs of a sweep are numbered, and named by their differences", ""),
    "hydra.job.name=mine": ("name is the name of a run", "name=mine"),
    "hydra.job.chdir=true": ("a run stays in the folder that it is started in", ""),
    "hydra.mode=MULTIRUN": ("-m starts a sweep", "-m"),
    "hydra.mode=RUN": ("-m starts a sweep", ""),
    "hydra.searchpath=[file://own]": ("--config-dir adds a folder of options and recipes", "--config-dir own"),
    "hydra.searchpath=[pkg://own]": ("--config-dir adds a folder of options and recipes", ""),
    "hydra.verbose=true": (LOGS, ""),
    "hydra.job_logging.root.level=DEBUG": (LOGS, ""),
    "hydra/job_logging=none": (LOGS, ""),
    "hydra.output_subdir=null": ("config.yaml and command.txt are in the run folder itself", ""),
    "hydra/launcher=joblib": (f"launch=slurm submits a run to Slurm; {CELLS}", ""),
    "hydra.launcher.n_jobs=2": (f"launch.slurm contains the options of the Slurm job; {CELLS}", ""),
    "hydra/sweeper=optuna": (SAMPLER, ""),
    "hydra.sweeper.n_trials=20": (
        f"values to try are written at their own key, as -m optim.lr=0.1,0.01; {SAMPLER}",
        "",
    ),
    "hydra.help.app_name=x": ("run_dir sets the folder, --config-dir adds options", ""),
    "~hydra.run": ("run_dir sets the folder, --config-dir adds options", ""),
}

RECIPE = "recipe=NAME or recipe=FILE.yaml chooses the run"
OPTIONS = "--config-dir adds a folder of options and recipes"
PRINTED = "show=config prints all sections of the settings"
GO_ON = "command.txt in a run folder contains the command to paste; with the same run_dir the run resumes"
ANOTHER = f"; and then recipe: unknown option 'foo' (options: {RECIPES})"
FLAGS = {
    "--config-name=lm_single": (RECIPE, "recipe=lm_single"),
    "--config-name lm_single": (RECIPE, "recipe=lm_single"),
    "-cn lm_single": (RECIPE, "recipe=lm_single"),
    "-cn foo": (RECIPE + ANOTHER, ""),
    "--config-name": (RECIPE, ""),
    "--config-path=own": (OPTIONS, "--config-dir own"),
    "-cp own": (OPTIONS, "--config-dir own"),
    "-cp nowhere": (OPTIONS, ""),
    "--info": ("show=config prints the composed settings", "show=config"),
    "--info defaults-tree": ("show=config prints the composed settings", "show=config"),
    "--resolve": ("show=config prints the settings, always resolved", "show=config"),
    "--package model": (PRINTED, "show=config"),
    "-p model": (PRINTED, "show=config"),
    "--experimental-rerun config.pickle": (GO_ON, ""),
    "--run": ("without -m there is always one run", ""),
    "-r": ("without -m there is always one run", ""),
    "--shell-completion install=zsh": ("--completion prints the completion script of a shell", "--completion zsh"),
    "-sc install=bash": ("--completion prints the completion script of a shell", "--completion bash"),
    "--hydra-help": ("--help prints the complete help", "--help"),
}
CASES = {
    **{word: typed(word, word.strip("~").partition("=")[0], *said) for word, said in SETTINGS.items()},
    **{words: flag(words, *said) for words, said in FLAGS.items()},
    "+experiment=lm_single": """
  experiment: unknown key, did you mean 'recipe'?
    set by: +experiment=lm_single (command line)
    try:    recipe=lm_single
""",
    "+experiment=foo": f"""
  experiment: unknown key, did you mean 'recipe'? And then recipe: unknown option 'foo' (options: {RECIPES})
    set by: +experiment=foo (command line)
""",
    "recipe=lm_tp2 +experiment=lm_single": """
  experiment: unknown key, did you mean 'recipe'?
    set by: +experiment=lm_single (command line)
""",
}


@pytest.mark.parametrize(("line", "text"), CASES.items(), ids=CASES)
def test_a_word_of_hydra_is_answered_with_the_word_to_type_here(line, text, tmp_path, monkeypatch, capsys):
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", head(1) + text)
    assert [p.name for p in tmp_path.iterdir()] == ["own"]
    if "try:" in text:
        check_words(next_command(line.split(), err), Depth.SETTLED)


KEPT = {
    "-m hydra.sweep.dir=x seed=1,2": "-m -m sweep_dir=x seed=1,2",
    "recipe=lm_single hydra.run.dir=x seed=3": "recipe=lm_single run_dir=x seed=3",
    "hydra.mode=MULTIRUN seed=1,2": "-m -m seed=1,2",
    "--cfg job --resolve seed=3": "--cfg job show=config seed=3",
    "--cfg job -p model seed=3": "--cfg job show=config seed=3",
    "-cn lm_single hydra.job.name=a -cp own": "recipe=lm_single name=a --config-dir own",
}


@pytest.mark.parametrize(("line", "meant"), KEPT.items(), ids=KEPT)
def test_the_pasted_cure_keeps_all_other_words(line, meant, tmp_path, monkeypatch, capsys):
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    command = next_command(line.split(), capsys.readouterr().err)
    assert command == tuple(meant.split())
    check_words(command, Depth.SETTLED)


def test_a_launcher_of_slurm_is_an_option_of_launch() -> None:
    """The printed text depends on whether Slurm is installed."""
    text, cure = overrides.hydra_hint("hydra/launcher", "submitit_slurm")
    assert (text, cure) == (f"{NO_EFFECT}; launch=slurm submits a run to Slurm; {CELLS}", "launch=slurm")
    assert compose([cure]).job.launch.slurm is not None


def test_a_secret_is_in_no_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["hydra.job.name=" + "5ec2e7" * 10 + "5ec2"]) == 2
    text = typed("hydra.job.name=***", "hydra.job.name", "name is the name of a run")
    assert capsys.readouterr().err == head(1) + text
