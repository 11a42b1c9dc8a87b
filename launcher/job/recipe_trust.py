"""Restricts what files of a request may set: the user's files are trusted, files of others are not.

The user who types the command is trusted. A recipe in the working tree or in ``--config-dir`` is trusted as
the user's own. A recipe from elsewhere, or any recipe with ``security.recipe=untrusted``, may choose among
the launcher's options; it may not bring code, start a program, or read the environment.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from launcher.errors import Problem
from launcher.job.config_folders import CONF, RECIPES, ConfigFiles, shipped, short
from launcher.job.cures.keeps_meaning import overlap, settings
from launcher.job.hydra_compose import Layer
from launcher.job.merge import RESOLVER, put
from launcher.job.origins import Origin, Origins
from launcher.job.overrides import Override, paste
from launcher.job.schema.redact import addresses

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
SENDS = {
    "logger.mlflow.tracking_uri": "the run and the credentials of MLflow in the environment are sent there",
    "logger.wandb.entity": "the run is sent to its account",
    "logger.wandb.mode": "the run is sent during training",
    "logger.trackio.space_id": "the run is sent there",
}
"""Settings that choose where a run is sent, and the reason."""
OF_THE_COMMAND = {
    SETTING: "it decides which files are trusted",
    "run_dir": "the request in that folder would be trusted",
}
"""Further settings that no axis of a sweep may have: an axis counts as typed in each cell."""
OVER = "sweep.over"
STAYS = {"logger.wandb.mode": "offline"}
"""The values of ``SENDS`` with which nothing is sent."""
FROZEN = "request.yaml"
"""The frozen request in a run folder: it was checked when the run was requested."""


class Trust:
    """Compares a request with the part of it that the user has set, and reports what untrusted files set.

    A setting of ``PROGRAMS`` or ``SENDS`` is the user's if it has the value that the shipped files and the
    command line alone give it. Any other value comes from a file, in whatever way: a merge key, an
    interpolation, the package of an included file.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        typed: Sequence[Override],
        raw: Mapping[str, Any],
        own: Path | None,
    ) -> None:
        """Compares ``raw``, the merged layers and overrides before interpolation, with the user's part of it.

        ``own``: the folder of --config-dir.
        """
        self._raw = raw
        self._files = [layer for layer in layers if not shipped(layer.path)]
        self._users = _users([layer.data for layer in layers if _as_shipped(layer)], typed)
        self._recipe = _value(self._users, SETTING)
        here = next((o.value for o in reversed(typed) if o.key == "run_dir" and not o.delete), None)
        self._why = _why_untrusted(self._recipe, [layer.path for layer in layers], own, here)
        self._cure = "" if self._recipe == "untrusted" else f"{SETTING}=trusted"

    def problems(self, data: Mapping[str, Any]) -> Iterator[Problem]:
        """Yields a problem for each setting that the files must not make.

        ``data``: the configuration before interpolation, which would run resolvers, or after it, when it is
        known what ``security: ${x}`` sets.
        """
        declared = _value(data, SETTING)
        if declared not in (None, "auto", self._recipe):
            text = f"{declared}: a file cannot declare itself trusted; set this on the command line"
            yield Problem(SETTING, text)
        elif self._why:
            for key, reason in PROGRAMS.items():
                if self._of_file(data, key):
                    yield Problem(key, f"{_value(data, key)}: {reason}, and {self._why}", self._cure)
            for key, reason in SENDS.items():
                value = _value(data, key)
                if self._of_file(data, key) and value != STAYS.get(key):
                    cure = paste(key, value) if isinstance(value, str) and "${" not in value else self._cure
                    yield Problem(key, f"{addresses(str(value))}: {reason}, and {self._why}", cure)
            yield from self._of_axes(data)

    def without_moves(self, problem: Problem, origins: Origins) -> Problem:
        """Returns ``problem``, without a cure that moves a value of the files to a setting they must not set.

        The user would type such a value without having chosen it.
        """
        origin = origins.of(problem.key) if problem.key else None
        words = shlex.split(problem.cure)
        if not self._why or origin is None or origin.typed or f"~{problem.key}" not in words:
            return problem
        for key, _ in settings(words):
            for setting, reason in (PROGRAMS | SENDS | OF_THE_COMMAND).items():
                if key != problem.key and overlap(key, setting):
                    end = "" if problem.text.endswith("?") else ";"
                    text = f"{problem.text}{end} {setting} cannot be set there: {reason}, and {self._why}"
                    return Problem(problem.key, text)
        return problem

    def _of_axes(self, data: Mapping[str, Any]) -> Iterator[Problem]:
        """Yields a problem for each axis of a sweep by which a file would set what it must not set."""
        typed = dict(_axes(_value(self._users, OVER)))
        for key, values in _axes(_value(data, OVER)):
            axis = key.lstrip("+~")
            if typed.get(key) == values or _chooses_options(axis, values):
                continue
            for setting, reason in (PROGRAMS | SENDS | OF_THE_COMMAND).items():
                if overlap(axis, setting):
                    shown = addresses(str(values))
                    yield Problem(f"{OVER}.{key}", f"{shown}: {reason}, and {self._why}", self._cure)
                    break

    def unsafe_interpolations(self) -> Iterator[Problem]:
        """Yields a problem for each text of the files that may read the environment."""
        for layer in self._files if self._why else ():
            for key, text in texts(layer.data):
                if RESOLVER.search(text):
                    yield Problem(key, f"{text}: it may read the environment, and {self._why}", self._cure)

    def code(self, data: Mapping[str, Any], origins: Origins) -> Iterator[str]:
        """Yields a line for each setting with which files bring code, and the place that sets it."""
        for key in PROGRAMS:
            if self._of_file(data, key):
                value = _value(data, key)
                named = ", ".join(map(str, value)) if key == "security.allow" else key
                origin = _origin(origins, key)
                files = ", ".join(short(layer.path) for layer in self._files)
                yield f"code: {named}, allowed by {origin.where.rpartition(':')[0] if origin else files}"

    def _of_file(self, data: Mapping[str, Any], key: str) -> bool:
        """Returns true if the value of ``data`` at ``key`` is neither typed nor the shipped one."""
        value = _value(data, key)
        same = _written(self._raw, key) == _written(self._users, key)  # a typed interpolation is the user's
        return bool(value) and not same and value != _value(self._users, key)


def _axes(over: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the key and the values of each axis, also if keys are nested."""
    for key, values in over.items() if isinstance(over, Mapping) else ():
        if isinstance(values, Mapping):
            yield from _axes(values, f"{above}{key}.")
        else:
            yield f"{above}{key}", values


def _chooses_options(key: str, values: Any) -> bool:
    """Returns true if the axis only chooses shipped options of a group."""
    options = ConfigFiles().options(key) if "." not in key else ()
    names = [word.strip() for word in values.split(",")] if isinstance(values, str) else values
    return isinstance(names, list | tuple) and bool(names) and all(name in options for name in names)


def _as_shipped(layer: Layer) -> bool:
    """Returns true for a shipped file in its own package: a defaults list can place it in another one."""
    folder = Path(os.path.realpath(layer.path)).parent
    return shipped(layer.path) and layer.package == (folder.name if folder.parent == CONF else "")


def _users(layers: Sequence[Mapping[str, Any]], typed: Sequence[Override]) -> dict[str, Any]:
    """Returns what the shipped ``layers`` and ``typed`` overrides set in the sections that are compared."""
    sections = {key.partition(".")[0] for key in (*PROGRAMS, *SENDS, SETTING, OVER)}
    merged = OmegaConf.create({})
    for layer in layers:
        merged.merge_with({name: layer[name] for name in sections if name in layer})
    for override in typed:
        if override.key.partition(".")[0] in sections:
            put(merged, override)  # its problem is reported where the override is put into the request
    return cast(dict[str, Any], OmegaConf.to_container(merged, resolve=False))


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


def _origin(origins: Origins, key: str) -> Origin | None:
    """Returns the place in a user's file that set the key.

    It may also have set a key above it to an interpolation ``${x}``.
    """
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


def _written(data: Mapping[str, Any], key: str) -> Any:
    """Returns the value at ``key``, or the text above it that stands for it."""
    node: Any = data
    for part in key.split("."):
        if isinstance(node, str):
            return node
        node = node.get(part) if isinstance(node, Mapping) else None
    return node
