"""Optional parts of the launcher, reached by name through five tables, and optional packages.

The core imports nothing of ``launcher/extras``. It reaches a part with
``from launcher.optional import mindspore``; the part's module is imported when an attribute of it is first
used. An installation may lack a part: a request that needs the part is refused, all others work.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem, refuse

if TYPE_CHECKING:
    from launcher.extras.calibration import refit as calibration
    from launcher.extras.device_matrix import operator_sharding as matrices
    from launcher.extras.drill import fault_injection as drill
    from launcher.extras.drill import report as drill_report
    from launcher.extras.images import checks as image_files
    from launcher.extras.images import datasets as images
    from launcher.extras.k8s import k8s as kubernetes
    from launcher.extras.layout_search import choose as layout_search
    from launcher.extras.loggers import process as metric_loggers
    from launcher.extras.mindspore import interop as mindspore
    from launcher.extras.report import chart as charts
    from launcher.extras.report import page as run_page
    from launcher.extras.starter import new_project as starter
    from launcher.extras.sweep import run_sweep as sweeps
    from launcher.extras.sweep import status_and_cancel as sweep_commands

__all__ = [
    "COMMANDS",
    "ENGINES",
    "FORMATS",
    "HAND_OVERS",
    "LOGGERS",
    "calibration",
    "charts",
    "drill",
    "drill_report",
    "has",
    "image_files",
    "images",
    "import_part",
    "install_command",
    "kubernetes",
    "lacking",
    "layout_search",
    "matrices",
    "metric_loggers",
    "mindspore",
    "run_page",
    "starter",
    "sweep_commands",
    "sweeps",
]

ENGINES = {"matrices": "launcher.extras.device_matrix.operator_sharding"}
"""Ways to cut operators besides the axis ``tp``."""
FORMATS = {
    "image_files": "launcher.extras.images.checks",
    "images": "launcher.extras.images.datasets",
    "mindspore": "launcher.extras.mindspore.interop",
}
LOGGERS = {"metric_loggers": "launcher.extras.loggers.process"}
HAND_OVERS = {"kubernetes": "launcher.extras.k8s.k8s"}
"""Clusters that a run is handed to, besides Slurm."""
COMMANDS = {
    "calibration": "launcher.extras.calibration.refit",
    "charts": "launcher.extras.report.chart",
    "drill": "launcher.extras.drill.fault_injection",
    "drill_report": "launcher.extras.drill.report",
    "layout_search": "launcher.extras.layout_search.choose",
    "run_page": "launcher.extras.report.page",
    "starter": "launcher.extras.starter.new_project",
    "sweep_commands": "launcher.extras.sweep.status_and_cancel",
    "sweeps": "launcher.extras.sweep.run_sweep",
}
PARTS = ENGINES | FORMATS | LOGGERS | HAND_OVERS | COMMANDS

DISTRIBUTION = "autoparallel-launcher"


class _Part:
    """Stands for the module of a part, which is imported when an attribute is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(
            "__"
        ):  # tools that only inspect the object, such as doctest, do not import it
            raise AttributeError(attribute)
        return getattr(import_part(PARTS[self._name]), attribute)


if not TYPE_CHECKING:  # a type checker sees the modules themselves

    def __getattr__(name: str) -> Any:
        if name in PARTS:
            return _Part(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def has(name: str) -> bool:
    """Returns true if this installation has the part ``name`` of ``PARTS``."""
    return _is_there(PARTS[name])


def lacking(name: str, key: str = "") -> list[Problem]:
    """Returns a problem with the setting ``key`` if this installation lacks a part.

    ``name``: one of ``PARTS``, or a module of the part.
    """
    module = PARTS.get(name, name)
    if _is_there(module):
        return []
    folder = "/".join(module.split(".")[:3])
    text = f"needs {folder}, which this installation of the launcher lacks; install the full launcher"
    return [Problem(key, text if key else f"the request {text}")]


def import_part(module: str) -> Any:
    """Imports a module. Raises ``RequestError`` if it belongs to a part that this installation lacks."""
    refuse(lacking(module))
    return import_module(module)


@cache
def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its folder does not exist either
        return False


def install_command(extra: str) -> str:
    """Returns the shell command that installs the packages of ``extra`` in ``pyproject.toml``.

    It has the bounds of their versions. It names the packages, not the launcher: the launcher is not on PyPI,
    so ``pip install 'launcher[extra]'`` could not work. In a checkout that is not installed the command
    installs the checkout.

    >>> install_command("images").startswith("pip install ")
    True
    """
    from importlib.metadata import PackageNotFoundError, requires  # slow, and only a refusal needs it

    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return f"pip install -e '.[{extra}]'"
    pattern = re.compile(rf"(.*?)\s*;\s*extra == ['\"]{re.escape(extra)}['\"]")
    packages = [match[1] for line in lines if (match := pattern.fullmatch(line))]
    return " ".join(("pip install", *(f"'{package}'" for package in packages)))
