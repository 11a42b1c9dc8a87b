"""Applies overrides to a composed configuration and resolves the result to plain data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.errors import Problem
from launcher.job.cures.keys_of_other_programs import our_key, why_not
from launcher.job.overrides import GROUPS, OPEN, OPERATORS, STAGE_CONFIG, Override, paste, shell, written
from launcher.job.schema import keys as schema_keys
from launcher.job.schema.did_you_mean import did_you_mean, nearest
from launcher.job.schema.optim import groups_by_name
from launcher.job.schema.redact import HIDDEN, secret
from launcher.job.schema.redact import text as redacted
from launcher.job.schema.search import AUTO, PARALLEL, RECOMPUTE, every_axis

CHOSEN = ("model", "data", "loss", "optim", "schedule")
"""Sections that are one choice among several: another ``name`` replaces all their keys."""
SWITCHES = "parallel.transformer_opt"
AUTO_AS_KEYS: dict[str, dict[str, Any]] = {
    "parallel.grid": {"pp": AUTO, "dp_shard": AUTO, "tp": AUTO},
    "parallel.hsdp": {"shard_size": AUTO, "optimizer_level": AUTO},
    "parallel.comm_fusion": {"network": AUTO},
    "parallel.recompute": {"modules": AUTO},
}
"""The keys that ``auto`` stands for at settings that also accept keys."""
WORDS = (PARALLEL, *AUTO_AS_KEYS, SWITCHES)
"""Settings that are a word or keys; keys are merged with those that the word stands for."""


def put(cfg: DictConfig, override: Override) -> Problem | None:
    """Applies one override to ``cfg``, in place; returns the problem if there is one."""
    key = override.key
    value = override.value
    node = next((n for n in OPEN if key.startswith(n + ".")), None)
    try:
        if override.delete:
            return _delete(cfg, key, node)
        places = _beside_words(cfg, override)
        if isinstance(places, Problem):
            return places
        if node is not None:
            _put_open(cfg, node, key.removeprefix(f"{node}."), value)
        elif (key, value) == (PARALLEL, AUTO):
            OmegaConf.update(cfg, key, every_axis(), merge=True, force_add=True)
        else:
            # another choice replaces its section; any other mapping is merged into the section
            chooses = isinstance(value, Mapping) and bool({"_target_", "name"} & value.keys())
            another = key in CHOSEN and chooses
            merged = isinstance(value, Mapping) and not another  # a list of candidates replaces the value
            for place in places:
                OmegaConf.update(cfg, place, value, merge=merged, force_add=True)
    except OmegaConfBaseException as error:
        return Problem(key, f"{redacted(override.text)}: {_first_line(error)}")
    return None


def as_keys(key: str, word: Any) -> dict[str, Any] | None:
    """Returns the keys below ``key`` that ``word`` stands for, so that each of them can be changed.

    Returns ``None`` if ``word`` does not stand for keys.
    """
    if key == SWITCHES and isinstance(word, str) and word:
        return {"file": word}
    if word == AUTO:
        return every_axis() if key == PARALLEL else AUTO_AS_KEYS.get(key)
    note = schema_keys.any_annotation(key) if word is True else None
    switched_on = note is not None and schema_keys.settings(note, {}) and schema_keys.accepts(note, True)
    return {} if switched_on else None


def _beside_words(cfg: DictConfig, override: Override) -> Sequence[str] | Problem:
    """Returns the keys to set: the key of ``override``, or that key in each candidate of a list above it.

    A word above the key is replaced by the keys that it stands for. A word that stands for none would be
    lost: that is a problem.
    """
    parts = override.key.split(".")
    above = [".".join(parts[:n]) for n in range(1, len(parts))]
    if isinstance(override.value, Mapping) and override.value:  # an empty group replaces the word
        above.append(override.key)
    for key in above:
        below = override.key.removeprefix(key).lstrip(".")
        word = OmegaConf.select(cfg, key, throw_on_missing=False)
        if not isinstance(word, str | bool | ListConfig) or not (word or isinstance(word, ListConfig)):
            continue
        if (stands_for := as_keys(key, word)) is not None:
            OmegaConf.update(cfg, key, stands_for, merge=False)
        elif below and key in AUTO_AS_KEYS and isinstance(word, ListConfig):
            for n in (n for n, one in enumerate(word) if key == RECOMPUTE and one == AUTO):
                OmegaConf.update(cfg, f"{key}.{n}", AUTO_AS_KEYS[key])
            groups = [n for n, one in enumerate(word) if isinstance(one, DictConfig)]
            return [f"{key}.{n}.{below}" for n in groups] or _replaces(key, cfg, override, below)
        elif below and not _replaceable(key, word, below):
            return _replaces(key, cfg, override, below)
    return (override.key,)


def _replaceable(key: str, word: Any, below: str) -> bool:
    """Returns true if ``below`` can be set: it is an item of a list, or replacing the word loses nothing."""
    item = isinstance(word, ListConfig) and below.partition(".")[0].isdecimal()
    return item or word is True or (key, word) == (STAGE_CONFIG, AUTO)


def _replaces(key: str, cfg: DictConfig, override: Override, below: str) -> Problem:
    word = unresolved(cfg, key)
    value = OmegaConf.to_container(word) if isinstance(word, ListConfig) else word
    text = f"{redacted(override.text)} would replace {written(value)}, the value of {key}"
    if key == OPERATORS:
        strategies = {below: override.value}
        if not isinstance(override.value, Mapping) and "." in below:
            module, _, field = below.rpartition(".")
            strategies = {module: {field: override.value}}
        return Problem(override.key, f"{text}; give the strategies together", paste(key, strategies))
    meant = our_key(override.key.split("."), [*schema_keys.everywhere()])
    if meant is not None:
        return Problem(override.key, f"{text}{did_you_mean(meant)}", paste(meant, override.value))
    if why := why_not(override.key):
        return Problem(override.key, f"{text}: {why}")
    return Problem(
        override.key, f"{text}; set the key where {written(value)} is set, or give all keys of {key}"
    )


def words_first(overrides: Sequence[Override]) -> list[Override]:
    """Reorders ``overrides``: words that mean keys, and lists of candidates, precede the keys below them."""
    out: list[Override] = []
    for o in overrides:
        below = [n for n, before in enumerate(out) if before.key.startswith(f"{o.key}.")]
        candidates = o.key in AUTO_AS_KEYS and isinstance(o.value, list)
        first = below and not o.delete and (candidates or as_keys(o.key, o.value) is not None)
        out.insert(below[0] if first else len(out), o)
    return out


def replaced(overrides: Sequence[Override]) -> Iterator[Problem]:
    """Yields a problem for each key that a later word replaces together with its section."""
    for n, o in enumerate(overrides):
        words = isinstance(o.value, str | list) and not o.delete
        for before in overrides[:n] if words else ():
            if before.key.startswith(f"{o.key}."):
                text = f"{redacted(before.text)}: the later {redacted(o.text)} replaces all of {o.key}"
                yield Problem(before.key, f"{text}; leave one of them out")


def unresolved(cfg: DictConfig, key: str) -> Any:
    """Returns the value at ``key`` as it is written: an interpolation is text. ``None`` if there is none."""
    node: Any = cfg
    for part in key.split("."):
        if not isinstance(node, DictConfig) or node._is_none() or node._is_interpolation():
            return None
        node = node._get_node(part)
    if isinstance(node, DictConfig | ListConfig) and not (node._is_none() or node._is_interpolation()):
        return node
    return None if node is None else node._value()


class WordsOfFiles:
    """Words that files set at keys below which later files set more: both are merged."""

    def __init__(self) -> None:
        self._words: dict[str, Any] = {}

    def read(self, cfg: DictConfig) -> None:
        """Records the words in ``cfg``, the next file; merges its keys with those that earlier words mean."""
        for key in WORDS:
            value = unresolved(cfg, key)
            if key == PARALLEL and value == AUTO:
                OmegaConf.update(cfg, key, every_axis(), merge=False)
            elif isinstance(value, DictConfig) and value and key in self._words:
                keys = as_keys(key, self._words.pop(key)) or {}
                OmegaConf.update(cfg, key, OmegaConf.merge(keys, value), merge=False)
            elif value is not None:
                self._words[key] = value


def _delete(cfg: DictConfig, key: str, open_node: str | None) -> Problem | None:
    """Deletes a key. ``open_node``: the setting of module names above the key, if there is one."""
    above, _, name = key.rpartition(".")
    modules = OmegaConf.select(cfg, open_node) if open_node else None
    module = key.removeprefix(f"{open_node}.")
    if open_node is not None and isinstance(modules, DictConfig) and ("*" in module or module in modules):
        above, name = open_node, module
    node = OmegaConf.select(cfg, above) if above else cfg
    if not isinstance(node, DictConfig) or name not in node:
        known = [str(k) for k in node] if isinstance(node, DictConfig) else []
        hint = nearest(name, known)
        meant = f"{above}.{hint}" if above and hint else hint
        text = f"~{key}: nothing to delete{did_you_mean(meant)}"
        return Problem(key, text, shell(f"~{meant}") if meant else "")
    del node[name]
    return None


def _put_open(cfg: DictConfig, node: str, name: str, value: Any) -> None:
    """Sets module ``name`` below ``node``. Names keep their dots.

    Fields of a strategy or group may be set one by one: ``operators.layers.0.in=[[1,2]]``.
    """
    # the existing entries; stages may be nested in a file
    was = OmegaConf.select(cfg, node)
    entries: dict[str, Any] = {}
    if node == STAGE_CONFIG and isinstance(was, DictConfig):
        entries = _flat(OmegaConf.to_container(was))
    elif node == GROUPS and isinstance(was, DictConfig):
        entries = groups_by_name(OmegaConf.to_container(was))
    elif isinstance(was, Mapping | DictConfig):
        entries = dict(was)

    # the last part of the name is a field of the strategy or group, unless the value is a mapping
    if node in (OPERATORS, GROUPS) and "." in name and not isinstance(value, Mapping):
        name, _, field = name.rpartition(".")
        value = {**(entries.get(name) or {}), field: value}
    entries.pop(name, None)  # the last override of a name wins, so its entry moves to the end
    OmegaConf.update(cfg, node, {**entries, name: value}, merge=False, force_add=True)


def _flat(tree: Any, above: str = "") -> dict[str, Any]:
    """Flattens nested groups of keys to dotted names; of equal names the last wins and comes last."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{above}.{key}" if above else str(key)
        for k, v in _flat(value, name).items() if isinstance(value, Mapping) else [(name, value)]:
            out.pop(k, None)
            out[k] = v
    return out


RESOLVER = re.compile(r"\$\{[^{}]*(:|\$\{)")
"""Matches an interpolation that calls a resolver, such as ``${oc.env:HOME}``, or that may do so."""
EXPANDED = 50_000
"""The most values, or thousands of characters, that a request may have once it is resolved."""
_REFERENCE = re.compile(r"\$\{\s*(\.*)([^${}:]*?)\s*\}")


def expansion(raw: Mapping[str, Any]) -> Problem | None:
    """Returns the problem of interpolations in ``raw`` that stand for more than ``EXPANDED`` values.

    Counts the values without resolving any. An interpolation with a resolver, such as ``${oc.env:HOME}``,
    counts as the text that is written.
    """
    nodes = dict(_every_node(raw))
    sizes: dict[str, int] = {}
    try:
        large = [key for key in nodes if _size(key, nodes, sizes, set()) > EXPANDED]
    except RecursionError:
        text = "the interpolations of this request refer to one another in too long a chain"
        return Problem("", f"{text}; write values in place of some ${{...}}")
    if not large:
        return None
    key = max(large, key=len)  # the deepest one, which the others contain
    text = f"its interpolations stand for more than {EXPANDED} values; write values in place of some ${{...}}"
    return Problem("", f"{key or 'this request'}: {text}")


def _every_node(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    yield key, node
    below = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for name, child in below:
        yield from _every_node(child, f"{key}.{name}" if key else str(name))


def _size(key: str, nodes: Mapping[str, Any], sizes: dict[str, int], above: set[str]) -> int:
    """Returns the number of values, and thousands of characters, of a resolved node.

    It is 0 if it refers to itself.
    """
    if key in sizes:
        return sizes[key]
    if key in above or key not in nodes:
        return 0
    node, size = nodes[key], 1
    if isinstance(node, str):
        size += len(node) // 1000
        for dots, name in _REFERENCE.findall(node):
            parents = key.split(".")[: -len(dots)] if dots else []
            named = ".".join([*parents, *re.split(r"[.\[\]]+", name.strip("[]"))])
            size += _size(named, nodes, sizes, above | {key})
    elif isinstance(node, Mapping | list):
        names = node if isinstance(node, Mapping) else range(len(node))
        size += sum(_size(f"{key}.{n}" if key else str(n), nodes, sizes, above | {key}) for n in names)
    sizes[key] = size
    return size


def plain(cfg: DictConfig, problems: list[Problem]) -> dict[str, Any]:
    """Resolves every interpolation; returns dicts, lists and scalars.

    Reports and drops a key that cannot be resolved. Also drops a key that is still ``???``, and reports it
    without a text: the caller writes that from the complete data.
    """
    known = tuple(keys(OmegaConf.to_container(cfg, resolve=False)))
    out: dict[str, Any] = _plain(cfg, "", problems, known)
    return out


_HOLE = object()
_SUGGESTED = 50
"""Problems after this number suggest no similar key: each search compares all keys."""


def _plain(node: Any, above: str, problems: list[Problem], known: tuple[str, ...]) -> Any:
    if isinstance(node, ListConfig):
        items = [_value(node, i, above, problems, known=known) for i in range(len(node))]
        return [v for v in items if v is not _HOLE]
    out = {}
    for name in node:
        key = f"{above}.{name}" if above else str(name)
        value = _value(node, name, key, problems, known=known)
        if value is not _HOLE:
            out[str(name)] = value
    return out


def _value(node: Any, name: Any, key: str, problems: list[Problem], *, known: tuple[str, ...]) -> Any:
    if OmegaConf.is_missing(node, name):
        problems.append(Problem(key, ""))
        return _HOLE
    try:
        value = node[name]
    except (OmegaConfBaseException, RecursionError) as error:
        text = str(node._get_node(name)._value())
        searched = known if len(problems) < _SUGGESTED else ()
        problems.append(_unresolved(key, text, error, [k for k in searched if k != key]))
        return _HOLE
    if isinstance(value, DictConfig | ListConfig):
        return None if value._is_none() else _plain(value, key, problems, known)
    return value


def _unresolved(key: str, text: str, error: BaseException, known: list[str]) -> Problem:
    reason = _first_line(error)
    if isinstance(error, RecursionError) or reason.startswith("Recursive"):
        reason = "it refers to itself"

    # hide a secret value; give only the reason if it names no other key
    if secret(key):
        return Problem(key, f"{HIDDEN}: cannot be resolved")
    missing = reason.split("'")[1] if reason.startswith("Interpolation key") else None
    if missing is None:
        return Problem(key, f"{redacted(text)}: cannot be resolved; {reason}")

    # suggest a similar key; block_size is no misspelled vocab_size, although both are in one section
    hint = nearest(missing, known, 0.8)
    section, _, leaf = missing.partition(".")
    if hint and hint.startswith(f"{section}.") and nearest(leaf, [hint.partition(".")[2]], 0.8) is None:
        hint = None
    fixed = paste(key, text.replace(missing, hint)) if hint else ""
    advice = did_you_mean(hint, shown=lambda name: f"${{{name}}}")
    if not hint and section in CHOSEN:
        advice = f": this {section} has none"
    return Problem(key, f"{redacted(text)}: cannot be resolved; there is no key {missing!r}{advice}", fixed)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    first = next((line for line in lines if line), type(error).__name__)
    return re.sub(r'^\w+ raised while resolving interpolation: "?(.*?)"?$', r"\1", first)


def keys(tree: Any, above: str = "") -> list[str]:
    """Returns all dotted keys of a group of keys; a key comes before the keys below it."""
    if not isinstance(tree, Mapping):
        return []
    names = [(f"{above}.{k}" if above else str(k), v) for k, v in tree.items()]
    return [key for name, value in names for key in (name, *keys(value, name))]
