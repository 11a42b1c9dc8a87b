"""The parameter groups of an optimizer: ``optim.groups`` applied to a model's names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from shlex import quote
from typing import Any

from launcher.errors import Problem
from launcher.job.schema.components import Optim
from launcher.job.schema.optim import SGD, Adafactor, AdamW, Group, Lion, Momentum, Muon
from launcher.job.schema.user_class import Target
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.values.module_names import best_key, listed, matches, prefixes
from launcher.plan.values.note import Note
from launcher.plan.values.optimizer import OptimizerSettings, ParamGroup
from launcher.plan.values.setting import Setting
from launcher.plan.values.text import many

KEY = "optim.groups"
COMMON_KEYS = ("name", "groups", "nesterov")
"""Keys of an optimizer that are the same for all of its parameters."""
USE = ("lr", "weight_decay")
OF_MUON = (*USE, "momentum")
OF_ADAMW = (*USE, "betas", "eps")
"""Keys of the two optimizers that ``optim=muon`` consists of."""
APART = ("embedding", "head")
"""Roles of matrices that Muon leaves to AdamW."""
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""The distance from 1 to the next number in each dtype."""


def param_groups(optim: Optim, params: Sequence[Placed]) -> tuple[ParamGroup, ...]:
    """Returns groups with every trainable parameter in exactly one, in order of first appearance."""
    groups: dict[tuple[str, OptimizerSettings], list[str]] = {}
    for p in _trained(params):
        key = next(iter(_keys(optim, p)), "")
        groups.setdefault((key, _settings(optim, key, p)), []).append(p.name)
    return tuple(ParamGroup(key, settings, tuple(names)) for (key, settings), names in groups.items())


def _trained(params: Sequence[Placed]) -> list[Placed]:
    return [p for p in params if p.trainable and not p.buffer]


def _groups(optim: Optim) -> Mapping[str, Group]:
    return {} if isinstance(optim, Target) else optim.groups


def _keys(optim: Optim, p: Placed) -> dict[str, str]:
    """Returns the group keys that match names of a tensor, each with the first such name.

    Names that no key matches do not count.
    """
    out: dict[str, str] = {}
    for name in p.names:
        key = best_key(_groups(optim), name)
        if key is not None:
            out.setdefault(key, name)
    return out


def _settings(optim: Optim, key: str, p: Placed) -> OptimizerSettings:
    """Returns the settings of ``p`` in the group ``key``.

    Vectors, which are gains and biases, decay only if their group says so.
    """
    if isinstance(optim, Target):
        return ()
    usual = _usual(optim, key, p)
    if len(p.spec.shape) < 2:
        usual["weight_decay"] = 0.0
    own = optim.groups[key].model_dump(exclude={"use"}) if key else {}
    return tuple((usual | {k: v for k, v in own.items() if k in usual}).items())


def _usual(optim: AdamW | SGD | Momentum | Lion | Adafactor | Muon, key: str, p: Placed) -> dict[str, Any]:
    """Returns the settings of ``p`` that apply unless the group ``key`` changes them."""
    if isinstance(optim, Adafactor):
        least, size = optim.eps
        least = EPSILON.get(p.spec.dtype, 0.0) if least is None else least
        keys = {k: v for k, v in optim if k not in COMMON_KEYS}
        return keys | {"eps": (least, size)}
    if isinstance(optim, Muon) and _orthogonal(optim, key, p):
        own = {k: getattr(optim, k) for k in OF_MUON}
        return {"use": "muon", **own, "ns_dtype": _ns_dtype(p)}
    if isinstance(optim, Muon):
        return {"use": "adamw", **{k: getattr(optim.adamw, k) for k in OF_ADAMW}}
    return {k: v for k, v in optim if k not in COMMON_KEYS}


def orthogonal(optim: Muon, p: Placed) -> bool:
    """Returns true if Muon updates ``p``: a matrix, but an embedding or the head only if a group says so."""
    return _orthogonal(optim, next(iter(_keys(optim, p)), ""), p)


def _orthogonal(optim: Muon, key: str, p: Placed) -> bool:
    """Returns true if Muon updates ``p`` in the group ``key``."""
    use = optim.groups[key].use if key else None
    return len(p.spec.shape) == 2 and (p.role not in APART if use is None else use == "muon")


def _ns_dtype(p: Placed) -> str:
    """Returns the dtype of Newton-Schulz.

    torch uses bfloat16, in which layouts differ by roundings, so we use it only if forwards are in half
    precision too.
    """
    return p.spec.dtype if p.compute == p.spec.dtype else "bfloat16"


def param_problems(optim: Optim, params: Sequence[Placed]) -> Iterator[Problem]:
    """Yields groups without a parameter, and tensors that two groups would update differently."""
    names = [name for p in _trained(params) for name in p.names]
    for key, group in _groups(optim).items():
        if not any(matches(key, name) for name in names):
            yield _nobody(key, group, names, params)
    for p in _trained(params):
        yield from _torn(optim, p)
    if isinstance(optim, Muon):
        yield from _idle(optim, _trained(params))
    if isinstance(optim, Adafactor | Muon):
        yield from _complex(optim, _trained(params))


def _nobody(key: str, group: Group, names: Sequence[str], params: Sequence[Placed]) -> Problem:
    """Returns the problem of a group that names no trained parameter; ``names``: those of trained ones."""
    still = [(name, p.buffer) for p in params for name in p.names if matches(key, name)]
    if still:
        name, buffer = min(still, key=lambda one: one[1])
        kind = "a buffer" if buffer else "frozen"
        text = f"{_text(group)}: it matches no trained parameter; {name} is {kind}"
        return Problem(f"{KEY}.{key}", text)

    near = _near(key, names)
    tops = dict.fromkeys(name.split(".")[0] for name in names)
    alternatives = f"nearest: {', '.join(near)}" if near else f"these are in {listed([*tops])}"
    text = f"{_text(group)}: it names no trained parameter; {alternatives}"
    return Problem(f"{KEY}.{key}", text, _set(near[0], group) if near else "")


def _near(key: str, names: Sequence[str]) -> list[str]:
    """Returns similar names or globs that match a parameter; numbers must be equal to those in ``key``."""
    word = key.strip("*.")
    known = {part for name in names for part in (*name.split("."), *prefixes(name))}
    close = get_close_matches(word, sorted(known), 3, 0.6)
    numbers = re.findall(r"\d+", word)
    alike = [key.replace(word, c) for c in close if re.findall(r"\d+", c) == numbers]
    return [k for k in alike if any(matches(k, name) for name in names)]


def _torn(optim: Optim, p: Placed) -> Iterator[Problem]:
    """Yields a problem if the groups of a tied tensor's names differ: it is updated only once."""
    keys = _keys(optim, p)
    unlike: dict[OptimizerSettings, str] = {}
    for key in keys:
        unlike.setdefault(_settings(optim, key, p), key)
    if len(unlike) < 2:
        return

    # the cure puts the other names into the group of the first
    first, *others = unlike.values()
    memberships = ", ".join(f"{keys[k]} is in {k}={_text(_groups(optim)[k])}" for k in (first, *others))
    text = f"{' = '.join(p.names)} is one tensor, updated once, but {memberships}"
    cure = " ".join(_set(keys[k], _groups(optim)[first]) for k in others)
    yield Problem(f"{KEY}.{others[-1]}", text, cure)


def _idle(optim: Muon, trained: Sequence[Placed]) -> Iterator[Problem]:
    """Yields groups with keys of one optimizer whose parameters are all updated by the other."""
    for key, group in optim.groups.items():
        named = [p for p in trained if key in _keys(optim, p)]
        uses = {"muon" if orthogonal(optim, p) else "adamw": p for p in reversed(named)}
        if named and group.use == "muon" and "muon" not in uses:
            text = f"{_text(group)}: it names no matrix, but Muon updates only matrices"
            yield Problem(f"{KEY}.{key}", text, _set(key, group.model_copy(update={"use": "adamw"})))
            continue
        for use, keys in (("muon", OF_MUON), ("adamw", OF_ADAMW)):
            idle = [k for k in group.model_dump() if k in keys and k not in USE]
            if named and idle and use not in uses:
                other, p = next(iter(uses.items()))
                text = (
                    f"{_text(group)}: {idle[0]} is for {use}, but {other} updates all of this group: {p.name}"
                )
                rest = group.model_copy(update=dict.fromkeys(idle))
                yield Problem(f"{KEY}.{key}", text, _set(key, rest) if rest.model_dump() else "")


def _complex(optim: Adafactor | Muon, trained: Sequence[Placed]) -> Iterator[Problem]:
    params = [p for p in trained if p.spec.dtype.startswith("complex")]
    if params:
        text = f"{optim.name}: it updates only real numbers, but {params[0].name} is {params[0].spec.dtype}"
        yield Problem("optim.name", text, "optim=adamw")


def rows(optim: Optim, params: Sequence[Placed]) -> Iterator[Setting]:
    """Yields which parameters each group has, as the plan shows it."""
    for key, group in _groups(optim).items():
        names = [p.name for p in _trained(params) if key in _keys(optim, p)]
        if names:
            text = f"to {many(len(names), 'parameter')}: {listed(names)}"
            yield Setting(f"{KEY}.{key}", _text(group), "applied", text)
        else:
            text = "its parameters are in more specific or later groups"
            yield Setting(f"{KEY}.{key}", _text(group), "degraded", text)


def notes(optim: Optim, params: Sequence[Placed]) -> Iterator[Note]:
    """Yields notes on what Muon updates, and on tied tensors of which a group matches only some names."""
    if isinstance(optim, Muon):
        yield _parted(optim, _trained(params))
    for p in _trained(params):
        keys = _keys(optim, p)
        without = [name for name in p.names if best_key(_groups(optim), name) is None]
        if keys and without:
            key, name = next(iter(keys.items()))
            text = f"{name} is one tensor with {', '.join(without)}, so the group applies to all its names"
            yield Note(f"{KEY}.{key}", text)


def _parted(optim: Muon, trained: Sequence[Placed]) -> Note:
    """Returns a note on what Muon and AdamW update; tensors that are not matrices are only counted."""
    by_muon = [p.name for p in trained if orthogonal(optim, p)]
    matrices = [p.name for p in trained if len(p.spec.shape) == 2 and p.name not in {*by_muon}]
    others = len(trained) - len(by_muon) - len(matrices)
    dtypes = sorted({_ns_dtype(p) for p in trained if orthogonal(optim, p)})
    text = f"muon updates {many(len(by_muon), 'parameter')} of 2 dims"
    text += f", Newton-Schulz in {' and '.join(dtypes)}" if dtypes else ""
    rest = [*matrices, *([f"{others} of other dims"] if others else [])]
    return Note("optim.name", f"{text}; adamw the rest: {listed(rest) or 'none'}")


def _text(group: Group) -> str:
    return "{" + ", ".join(f"{k}: {_number(v)}" for k, v in group.model_dump().items()) + "}"


def _number(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"[{', '.join(map(_number, value))}]" if isinstance(value, tuple | list) else f"{value:g}"


def _set(name: str, group: Group) -> str:
    return quote(f"{KEY}.{name}={_text(group).replace(' ', '')}")
