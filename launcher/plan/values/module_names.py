"""Names and globs in settings, matched against the modules of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from shlex import quote

from launcher.errors import Problem
from launcher.job.schema.did_you_mean import nearest
from launcher.plan.values.model_graph import ModelStructure

STAGE_CONFIG = "parallel.pipeline.stage_config"
"""The key of the setting that gives stages to names."""
StageNames = str | Sequence[str] | Mapping[str, str]
"""One name or glob, a sequence of them, or a mapping from each to its value."""


def is_glob(key: str) -> bool:
    """Returns true if ``key`` contains a wildcard."""
    return any(c in key for c in "*?[")


def prefixes(name: str) -> list[str]:
    """Returns the names of the modules around ``name``, outermost first, and ``name`` itself.

    >>> prefixes("layers.0.weight")
    ['layers', 'layers.0', 'layers.0.weight']
    """
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def matches(key: str, name: str) -> bool:
    """Returns true if ``key`` matches ``name`` or a module around it."""
    return any(fnmatchcase(p, key) for p in prefixes(name)) if is_glob(key) else key in prefixes(name)


def best_key(keys: Iterable[str], name: str) -> str | None:
    """Returns the key that takes precedence among those that match ``name``; ``None`` if none matches.

    An exact name beats a glob, then a deeper key a shallower one, then a later key an earlier one.

    >>> best_key(["layers.0.norm", "*.norm", "layers.*", "layers"], "layers.1.norm.weight")
    'layers'
    """
    matching = [(at, key) for at, key in enumerate(keys) if matches(key, name)]
    rank = [(not is_glob(key), key.count("."), at, key) for at, key in matching]
    return max(rank)[-1] if rank else None


def stage_of(keys: Mapping[str, int], name: str) -> int | None:
    """Returns the stage that ``keys`` give to ``name``, or ``None``."""
    key = best_key(keys, name)
    return None if key is None else keys[key]


def owner(param: str) -> str:
    """Returns the module that owns a parameter ("" for the root).

    >>> owner("layers.0.attn.wq.weight")
    'layers.0.attn.wq'
    """
    return param.rpartition(".")[0]


def globs(keys: Iterable[str]) -> tuple[str, ...]:
    """Returns the globs among ``keys``, last one first, because later keys beat earlier ones."""
    return tuple(key for key in reversed([*keys]) if is_glob(key))


def from_the_top(key: str, names: Iterable[str]) -> str | None:
    """Completes ``key`` with the modules around it; ``None`` unless there is exactly one way.

    >>> from_the_top("h.*", ["transformer.wte", "transformer.h.0", "transformer.h.1", "head"])
    'transformer.h.*'
    >>> from_the_top("attn", ["h.0.attn", "h.1.attn"])
    """
    each = [name.split(".") for name in names]
    tails = {(".".join(p[:n]), ".".join(p[n:])) for p in each for n in range(1, len(p))}
    heads = {head for head, tail in tails if matches(key, tail)}
    return f"{heads.pop()}.{key}" if len(heads) == 1 else None


def no_such_module(key: str, skeleton: ModelStructure) -> str | None:
    """Returns why ``key`` matches no module; ``None`` if it matches one."""
    if _matching(key, skeleton):
        return None
    tail = key.rpartition(".")[2]
    near = [m for m in skeleton.modules if m.rpartition(".")[2] == tail][:3]
    tops = list(dict.fromkeys(m.split(".")[0] for m in skeleton.modules))
    return f"no module has this name; modules are {', '.join(near or (_beside(key, skeleton) or tops)[:12])}"


def _beside(key: str, skeleton: ModelStructure) -> list[str]:
    """Returns the children of the innermost module on the path of ``key`` that exists.

    There are none if that is the model.
    """
    owner = key.rpartition(".")[0]
    while owner and owner not in skeleton.modules:
        owner = owner.rpartition(".")[0]
    return [m for m in skeleton.modules if owner and m.rpartition(".")[0] == owner]


def uncallable(setting: str, value: StageNames, skeleton: ModelStructure) -> Iterator[Problem]:
    """Yields problems for keys of ``value`` that match no module, or only lists of modules.

    ``value`` is the value of ``setting``.
    """
    for key in [value] if isinstance(value, str) else value:
        text = no_such_module(key, skeleton)
        if text is not None:
            name = _meant(key, skeleton)
        elif all(m in skeleton.lists for m in _matching(key, skeleton)):
            text, name = "a list of modules, which is not called itself; name modules inside it", f"{key}.*"
        if text is not None:
            cure = quote(f"{setting}={_written(value, key, name)}") if name else ""
            yield Problem(setting, f"{key}: {text}", cure)


def _matching(key: str, skeleton: ModelStructure) -> list[str]:
    """Returns the modules that ``key`` matches."""
    if not is_glob(key):
        return [key] if key in skeleton.modules else []
    return [m for m in skeleton.modules if fnmatchcase(m, key)]


def _meant(key: str, skeleton: ModelStructure) -> str | None:
    """Returns the module name, or the glob over a list of modules, that is most similar to ``key``."""
    if full := from_the_top(key, skeleton.modules):
        return full
    globs = (re.sub(r"\.\d+(?=\.|$)", ".*", m) for m in skeleton.modules)
    return nearest(key, dict.fromkeys([*skeleton.modules, *globs]), alike=0.8)


def _written(value: StageNames, key: str, name: str) -> str:
    """Returns ``value`` with ``name`` in place of ``key``, as the value of an override."""
    if isinstance(value, str):
        return name
    names = [name if k == key else k for k in value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{n}:{v}" for n, v in zip(names, value.values(), strict=True)) + "}"
    return f"[{','.join(names)}]"


def listed(names: Sequence[str]) -> str:
    """Lists module names, with consecutive numbers as a range and without the middle of a long list.

    >>> listed(("embed", "layers.0", "layers.1", "layers.2", "norm"))
    'embed, layers.0 .. layers.2, norm'
    """
    runs: list[tuple[str, str]] = []
    for name in names:
        if runs and _follows(runs[-1][1], name):
            runs[-1] = (runs[-1][0], name)
        else:
            runs.append((name, name))
    words = [a if a == b else f"{a} .. {b}" for a, b in runs]
    return ", ".join(words if len(words) <= 8 else [*words[:4], "..", *words[-3:]])


def _follows(name: str, other: str) -> bool:
    """Returns true if ``other`` is ``name`` with the next number at its end.

    >>> _follows("layers.9", "layers.10"), _follows("layer9", "layer10"), _follows("a.1", "b.2")
    (True, False, False)
    """
    (above, _, a), (around, _, b) = name.rpartition("."), other.rpartition(".")
    return above == around and a.isdecimal() and b.isdecimal() and int(b) == int(a) + 1
