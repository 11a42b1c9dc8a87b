"""The text of ``--help``."""

from __future__ import annotations

from pathlib import Path

from launcher.job.yaml.config_files import ConfigFiles

HEAD = """\
launcher: one YAML file plans, trains and checkpoints a parallel model on torch.distributed.

usage: python -m launcher [recipe=NAME|FILE.yaml] [key=value ...] [flags]
       python -m launcher init FOLDER
       python -m launcher status|logs|cancel RUN
"""

EXAMPLES = """\
examples:
  python -m launcher init my_project                        a model, data, a recipe for 2 ranks to begin with
  python -m launcher                                        the default recipe, on this machine
  python -m launcher recipe=lm_single train.steps=20        a recipe with one setting changed
  python -m launcher recipe=mlp_autoparallel show=plan      what would happen; no process is started
  python -m launcher 'steps=[train,save]' model=lm_tiny     other options
  python -m launcher -m parallel.pipeline.scheduler=1f1b,gpipe    \
a sweep; sweep_dir=DIR goes on with an old one
  torchrun --nproc-per-node 4 -m launcher recipe=NAME       the same job under an outer launcher

flags:
  -h, --help           this text
  --version            the version
  -m, --multirun       run every combination of a,b lists, range(1,4) and glob(*)
  -cd, --config-dir D  folder with options and recipes of your own (D/model/mine.yaml, D/recipes/mine.yaml)
  --completion SHELL   print what bash, zsh or fish completes the words of launcher with
  show=config          print the composed settings, start nothing (also: --cfg job)
  show=plan            print the plan on one page, start nothing
  show=plan-full       print all of the plan, as in plan.txt of a run folder
  sweep.plan=true      with -m: plan all cells, print what is predicted, the fastest first, start nothing
  show=search          of what is auto, or a list, below parallel: print the best, write plan/best.yaml

exit codes: 0 done, 2 the request is wrong (nothing was started), 1 it failed while running,
            75 a signal stopped it (130: Ctrl-C): saved where something was trained, the same command goes on
"""


def usage(config_dir: Path | None = None) -> str:
    """The usage, the recipes with what each shows, the options of each group, and examples."""
    configs = ConfigFiles.of(config_dir)
    recipes = [(name, _shows(configs, name)) for name in configs.options("recipe")]
    width = max((len(name) for name, _ in recipes), default=0)
    lines = [f"  {name:<{width}}  {text}" for name, text in recipes]
    groups = [f"  {g + '=':<10} {', '.join(configs.options(g))}" for g in configs.groups() if g != "recipe"]
    named = ["recipes (recipe=NAME):", *lines, "", "options (group=NAME):", *groups, ""]
    return "\n".join([HEAD, *named, EXAMPLES.rstrip()])


def _shows(configs: ConfigFiles, recipe: str) -> str:
    """The comment in the first line of a recipe; "" if there is none."""
    path = configs.file(f"recipe/{recipe}")
    first = path.read_text(encoding="utf-8").partition("\n")[0] if path else ""
    return first.removeprefix("#").strip() if first.startswith("#") else ""
