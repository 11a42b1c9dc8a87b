"""The text of ``--help`` alone; ``help`` has that of ``--help NAME``, for which it reads YAML."""

from __future__ import annotations

from pathlib import Path

from launcher.job.config_folders import ConfigFiles

HEAD = """\
launcher: one YAML file plans, trains and checkpoints a parallel model on torch.distributed.

usage: python -m launcher [recipe=NAME|FILE.yaml] [key=value ...] [flags]
       python -m launcher init FOLDER
       python -m launcher status|logs|cancel RUN
"""

EXAMPLES = """\
examples:
  python -m launcher init my_project                        write a model, data and a recipe for 2 ranks
  python -m launcher                                        the default recipe, on this machine
  python -m launcher recipe=lm_single train.steps=20        a recipe with one setting changed
  python -m launcher recipe=mlp_autoparallel show=plan      what would happen; no process is started
  python -m launcher 'steps=[train,save]' model=lm_tiny     other options
  python -m launcher -m parallel.pipeline.scheduler=1f1b,gpipe    \
a sweep; sweep_dir=DIR continues an earlier one
  python -m launcher.data.prepare --help                    convert text to files of tokens, without a run
  torchrun --nproc-per-node 4 -m launcher recipe=NAME       the same job under an outer launcher

flags:
  -h, --help [NAME]    this text; or the settings of a group, a section or an option, as --help parallel
  --version            the versions of launcher (with the commit, in a checkout) and of torch
  -m, --multirun       run every combination of a,b lists, range(1,4) and glob(*)
  -cd, --config-dir D  folder with options and recipes of your own (D/model/mine.yaml, D/recipes/mine.yaml)
  --completion SHELL   print the completion script for bash, zsh or fish
  show=config          print the composed settings, start nothing (also: --cfg job)
  show=plan            print the plan on one page, start nothing
  show=plan-full       print all of the plan, as in plan.txt of a run folder
  sweep.plan=true      with -m: plan all cells, print the predictions, the fastest first, start nothing
  show=timeline        draw when each rank computes and waits, start nothing
  show=search          search the values that are auto or a list below parallel; write plan/best.yaml

exit codes: 0 done, 2 the request is wrong (nothing was started), 1 it failed while running,
            75 stopped by a signal (130: by Ctrl-C): training is saved, and the same command resumes it
"""


def usage(config_dir: Path | None = None) -> str:
    """Returns the usage, the recipes with their titles, the options of each group, and examples."""
    configs = ConfigFiles.from_folders(config_dir)
    recipes = [(name, configs.title(f"recipe/{name}")) for name in configs.options("recipe")]
    width = max((len(name) for name, _ in recipes), default=0)
    lines = [f"  {name:<{width}}  {text}" for name, text in recipes]
    groups = [f"  {g + '=':<10} {', '.join(configs.options(g))}" for g in configs.groups() if g != "recipe"]
    named = ["recipes (recipe=NAME):", *lines, "", "options (group=NAME):", *groups, ""]
    return "\n".join([HEAD, *named, EXAMPLES.rstrip()])
