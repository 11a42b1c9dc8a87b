"""Explains what to write in place of Hydra's own settings, such as ``hydra.run.dir``."""

from __future__ import annotations

import re
from typing import Any

from launcher.job.schema.redact import text as redacted

NO_EFFECT = "Hydra's own settings have no effect here"
_LOGS = "what every rank says is in logs/ of the run folder"
_CELLS = "sweep.parallel says how many runs of a sweep there are at a time"
_SAMPLER = "sweep.sampler says which values a sweep tries, sweep.sampler=tpe by what it has seen"

_INSTEAD = {
    "hydra.run.dir": "run_dir sets the folder of a run",
    "hydra.sweep.dir": "sweep_dir sets the folder of a sweep",
    "hydra.sweep.subdir": "runs of a sweep are numbered, and named by what differs",
    "hydra.job.name": "name is the name of a run",
    "hydra.job.chdir": "a run stays in the folder that it is started in",
    "hydra.mode": "-m asks for a sweep",
    "hydra.searchpath": "--config-dir adds a folder of options and recipes",
    "hydra.output_subdir": "config.yaml and command.txt are in the run folder itself",
    "hydra.verbose": _LOGS,
    "hydra/job_logging": _LOGS,
    "hydra/hydra_logging": _LOGS,
    "hydra.job_logging": _LOGS,
    "hydra.hydra_logging": _LOGS,
    "hydra/launcher": f"launch=slurm submits a run to Slurm, {_CELLS}",
    "hydra.launcher": f"launch.slurm says what is asked of Slurm, {_CELLS}",
    "hydra/sweeper": _SAMPLER,
    "hydra.sweeper": f"values to try are written at their own key, as -m optim.lr=0.1,0.01; {_SAMPLER}",
}
_OTHERWISE = "run_dir sets the folder, --config-dir adds options"

_ONE_WORD = {"hydra.run.dir": "run_dir={}", "hydra.sweep.dir": "-m sweep_dir={}", "hydra.job.name": "name={}"}
_PLAIN = r"[\w./-]+"
_PATHS = re.compile(rf"(?:file://)?({_PLAIN})", re.ASCII)


def instead(key: str, value: Any) -> tuple[str, str]:
    """A sentence about ``key``, and the override to type in its place if it means the same."""
    known = (k for k in (*_INSTEAD, "") if not k or key == k or key.startswith((f"{k}.", f"{k}/")))
    return f"{NO_EFFECT}; {_INSTEAD.get(next(known), _OTHERWISE)}", _cure(key, value)


def _cure(key: str, value: Any) -> str:
    if isinstance(value, list) and len(value) == 1 and key == "hydra.searchpath":
        path = _PATHS.fullmatch(str(value[0]))
        return f"--config-dir {path[1]}" if path else ""
    if not isinstance(value, str) or redacted(f"{key}={value}") != f"{key}={value}":
        return ""
    if key == "hydra/launcher" and value == "submitit_slurm":
        return "launch=slurm"
    if key == "hydra.mode" and value == "MULTIRUN":
        return "-m"
    good = key in _ONE_WORD and re.fullmatch(_PLAIN, value, re.ASCII)
    return _ONE_WORD[key].format(value) if good else ""  # ${now:%Y} has no counterpart here
