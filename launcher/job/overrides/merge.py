"""Overrides laid over a composed configuration, and the plain data that comes out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.errors import Problem
from launcher.job.overrides.grammar import OPEN, Override, paste, shell
from launcher.job.schema.redact import HIDDEN, secret
from launcher.job.schema.redact import text as redacted
from launcher.job.schema.similar_names import nearest

CHOSEN = ("model", "data", "optim", "schedule")
"""Nodes that are one choice out of several: another name brings its own keys."""


def put(cfg: DictConfig, override: Override) -> Problem | None:
    """Lay one override over ``cfg``, in place; what is wrong with it, if something is."""
    key, value = override.key, override.value
    try:
        if override.delete:
            return _delete(cfg, key)
        if node := next((n for n in OPEN if key.startswith(n + ".")), None):
            _put_open(cfg, node, key[len(node) + 1 :], value)
        else:
            merge = not (key in CHOSEN and isinstance(value, Mapping) and {"_target_", "name"} & value.keys())
            OmegaConf.update(cfg, key, value, merge=merge, force_add=True)
    except OmegaConfBaseException as error:
        return Problem(key, f"{redacted(override.text)}: {_first_line(error)}")
    return None


def _delete(cfg: DictConfig, key: str) -> Problem | None:
    above, _, name = key.rpartition(".")
    node = OmegaConf.select(cfg, above) if above else cfg
    if not isinstance(node, DictConfig) or name not in node:
        known = [str(k) for k in node] if isinstance(node, DictConfig) else []
        hint = nearest(name, known)
        meant = f"{above}.{hint}" if above else hint
        said = f", did you mean {meant!r}?" if hint else ""
        return Problem(key, f"~{key}: nothing to delete{said}", shell(f"~{meant}") if hint else "")
    del node[name]
    return None


def _put_open(cfg: DictConfig, node: str, name: str, value: Any) -> None:
    """Module names keep their dots. A strategy may be given field by field: ``operators.layers.0.in=[[1,2]]``."""
    was = OmegaConf.select(cfg, node)
    entries = _flat(OmegaConf.to_container(was)) if isinstance(was, DictConfig) and node == OPEN[0] else was
    entries = dict(entries) if isinstance(entries, Mapping | DictConfig) else {}
    if node == OPEN[1] and not isinstance(value, Mapping):
        name, _, field = name.rpartition(".")
        value = {**(entries.get(name) or {}), field: value}
    entries.pop(name, None)  # later wins, so it also comes last
    OmegaConf.update(cfg, node, {**entries, name: value}, merge=False, force_add=True)


def _flat(tree: Any, above: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{above}.{key}" if above else str(key)
        for k, v in _flat(value, name).items() if isinstance(value, Mapping) else [(name, value)]:
            out.pop(k, None)
            out[k] = v
    return out


def plain(cfg: DictConfig, found: list[Problem]) -> dict[str, Any]:
    """Dicts, lists and scalars with every interpolation resolved; a key that cannot be is reported, and left out.

    A key still at ``???`` is left out too, and reported without text: what it needs is known once all data is.
    """
    out: dict[str, Any] = _plain(cfg, "", found, tuple(keys(OmegaConf.to_container(cfg, resolve=False))))
    return out


_HOLE = object()


def _plain(node: Any, above: str, found: list[Problem], known: tuple[str, ...]) -> Any:
    if isinstance(node, ListConfig):
        items = [_value(node, i, above, found, known) for i in range(len(node))]
        return [v for v in items if v is not _HOLE]
    out = {}
    for name in node:
        value = _value(node, name, f"{above}.{name}" if above else str(name), found, known)
        if value is not _HOLE:
            out[str(name)] = value
    return out


def _value(node: Any, name: Any, key: str, found: list[Problem], known: tuple[str, ...]) -> Any:
    if OmegaConf.is_missing(node, name):
        found.append(Problem(key, ""))
        return _HOLE
    try:
        value = node[name]
    except (OmegaConfBaseException, RecursionError) as error:
        found.append(_unresolved(key, str(node._get_node(name)._value()), error, [k for k in known if k != key]))
        return _HOLE
    if isinstance(value, DictConfig | ListConfig):
        return None if value._is_none() else _plain(value, key, found, known)
    return value


def _unresolved(key: str, text: str, error: BaseException, known: list[str]) -> Problem:
    reason = _first_line(error)
    if isinstance(error, RecursionError) or reason.startswith("Recursive"):
        reason = "it refers to itself"
    if secret(key):
        return Problem(key, f"{HIDDEN}: cannot be resolved")
    wanted = reason.split("'")[1] if reason.startswith("Interpolation key") else None
    if wanted is None:
        return Problem(key, f"{redacted(text)}: cannot be resolved; {reason}")
    hint = nearest(wanted, known, 0.8)
    said = f", did you mean ${{{hint}}}?" if hint else ""
    fixed = paste(key, text.replace(wanted, hint)) if hint else ""
    section = wanted.partition(".")[0]
    if not hint and section in CHOSEN:
        said = f": this {section} has none"
    return Problem(key, f"{redacted(text)}: cannot be resolved; there is no key {wanted!r}{said}", fixed)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    first = next((line for line in lines if line), type(error).__name__)
    return re.sub(r'^\w+ raised while resolving interpolation: "?(.*?)"?$', r"\1", first)


def keys(tree: Any, above: str = "") -> list[str]:
    """Every dotted key of a group of keys, those above before those below."""
    if not isinstance(tree, Mapping):
        return []
    names = [(f"{above}.{k}" if above else str(k), v) for k, v in tree.items()]
    return [key for name, value in names for key in (name, *keys(value, name))]
