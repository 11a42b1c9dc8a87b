"""Restricts what files of a request may set: the user's files are trusted, files of others are not.

The user who types the command is trusted. A recipe in the working tree or in ``--config-dir`` is trusted as
the user's own. A recipe from elsewhere, or any recipe with ``security.recipe=untrusted``, may choose among
the launcher's options; it may not bring code, start a program, or read the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import Problem
from launcher.job.config_folders import CONF, RECIPES
from launcher.job.origins import Origin, Origins

SETTING = "security.recipe"
PROGRAMS = {
    "security.allow": "it makes Python import packages",
    "launch.slurm.setup": "its lines are run by bash",
    "launch.slurm.extra": "options of sbatch can run programs",
    "launch.slurm.container": "ranks run in this image",
    "launch.k8s.setup": "its lines are run by bash",
    "launch.k8s.image": "pods run this image",
    "launch.k8s.python": "it is the program that pods run",
    "launch.k8s.env": "it sets the environment of programs",
    "launch.k8s.env_from": "it sets the environment of programs",
}
"""Settings that bring code or start a program, and the reason."""
FROZEN = "request.yaml"
"""The frozen request in a run folder: it was checked when the run was requested."""
_RESOLVER = re.compile(r"\$\{[^{}]*(:|\$\{)")


def problems(
    data: Mapping[str, Any],
    origins: Origins,
    files: Sequence[tuple[Path, str]],
    own: Path | None,
    *,
    resolved: bool,
) -> Iterator[Problem]:
    """Yields a problem for each setting that ``files`` must not make; ``own``: the folder of --config-dir.

    Called twice: before interpolation, which would run resolvers, and after it (``resolved``), when it is
    known what ``security: ${x}`` sets.
    """
    trust = _value(data, SETTING)
    if trust not in (None, "auto") and _of_file(origins, SETTING) is not None:
        yield Problem(SETTING, f"{trust}: a file cannot declare itself trusted; set this on the command line")
        return
    run = origins.of("run_dir")  # typed only: a file that names a run folder is not the request in it
    here = _value(data, "run_dir") if run is not None and run.typed else None
    why = _why_untrusted(trust, [path for path, _ in files], own, here)
    if not why:
        return
    cure = "" if trust == "untrusted" else f"{SETTING}=trusted"
    for key, reason in PROGRAMS.items():
        value = _value(data, key)
        if value and _of_file(origins, key):
            yield Problem(key, f"{value}: {reason}, and {why}", cure)
    for key, text in () if resolved else texts(data):
        if _RESOLVER.search(text) and _of_file(origins, key):
            yield Problem(key, f"{text}: it may read the environment, and {why}", cure)


def forget(data: dict[str, Any]) -> None:
    """Resets trust to ``auto``: it applies to the files of this command, not to files written from it."""
    security = data.get("security")
    if isinstance(security, dict) and security.get("recipe") in ("trusted", "untrusted"):
        security["recipe"] = "auto"


def _why_untrusted(trust: Any, files: Sequence[Path], own: Path | None, run: Any) -> str:
    """Returns why the files are not trusted; "" if they are.

    Args:
        trust: ``security.recipe``, as the command line sets it.
        files: the files of the request.
        own: the folder of --config-dir.
        run: the ``run_dir`` that was typed; its frozen request is trusted.
    """
    if trust == "trusted":
        return ""
    if trust == "untrusted":
        return "the recipe is not trusted (security.recipe=untrusted)"
    trusted = [Path.cwd().resolve(), CONF.resolve(), RECIPES.resolve()]
    trusted += [own.resolve()] if own is not None else []
    for file in files:
        real = file.resolve()
        if not any(real.is_relative_to(folder) for folder in trusted) and not _frozen(run, real):
            return f"{file} is outside of the current folder"
    return ""


def _frozen(run: Any, file: Path) -> bool:
    here = file.name == FROZEN and isinstance(run, str) and file.parent == Path(run).resolve()
    return here and file.stat().st_uid == os.geteuid()


def code(data: Mapping[str, Any], origins: Origins) -> Iterator[str]:
    """Yields a line for each setting with which files bring code, and the place that sets it."""
    for key, _ in PROGRAMS.items():
        value = _value(data, key)
        origin = _of_file(origins, key)
        if value and origin is not None:
            where = origin.where.rpartition(":")[0]
            named = ", ".join(map(str, value)) if key == "security.allow" else key
            yield f"code: {named}, allowed by {where}"


def _of_file(origins: Origins, key: str) -> Origin | None:
    """The place in a user's file that set the key, or set a key above it to an interpolation ``${x}``."""
    parts = key.split(".")
    above = [origins.all(".".join(parts[:n]))[-1:] for n in range(1, len(parts))]
    named = [origin for (origin,) in filter(None, above) if "${" in str(origin.value)]
    places = [*named, *filter(None, [origins.of(key)])]
    return next((origin for origin in places if not origin.typed and not origin.shipped), None)


def texts(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, str):
        yield key, node
    elif isinstance(node, Mapping):
        for name, value in node.items():
            yield from texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list | tuple):
        for i, value in enumerate(node):
            yield from texts(value, f"{key}.{i}")


def _value(data: Mapping[str, Any], key: str) -> Any:
    node: Any = data
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node
