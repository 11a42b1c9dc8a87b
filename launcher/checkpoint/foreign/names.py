"""Renames tensors between the names of two programs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from launcher.checkpoint.layout.strategy import Kind

Table = Mapping[str, str | None]

OPTIMIZER = (
    "accu_grads", "accum", "adam_m", "adam_v", "exp_avg", "exp_avg_sq", "lamb_m", "lamb_v", "linear",
    "max_exp_avg_sq", "mean_grad", "mean_square", "moment", "moment1", "moment2", "moments", "rms", "stat",
    "vhat",
)  # fmt: skip
"""Prefixes of optimizer states: MindSpore names a state ``<prefix>.<parameter>``."""


@dataclass(frozen=True)
class Renamed:
    """The result of renaming.

    ``names`` maps old names to new ones. The table leaves out the names ``dropped``; no row matches the names
    ``unmatched``. ``rows`` maps each old name to the key of the row that it matched.
    """

    names: Mapping[str, str]
    dropped: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    rows: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def doubled(self) -> dict[str, tuple[str, ...]]:
        """Maps each new name that several old names get to these old names."""
        if len({*self.names.values()}) == len(self.names):
            return {}
        olds: dict[str, list[str]] = {}
        for old, new in self.names.items():
            olds.setdefault(new, []).append(old)
        return {new: tuple(names) for new, names in olds.items() if len(names) > 1}


def renamed(names: Iterable[str], table: Table | None, *, strict: bool = True) -> Renamed:
    """Renames each tensor by the first row of ``table`` that matches it. Without a table, every name stays.

    A key that starts with ``^`` is a regular expression for the full name; its value may use ``\\1``. Any
    other key is a module's name, which is replaced at the start of a name: the key ``""`` matches all
    modules, the value ``""`` removes the key. A value of ``None`` leaves the tensor out.

    Raises ``ValueError`` for a bad table or for two names that become one. With ``strict``, unmatched names
    raise it too.

    >>> table = {"rotary": None, r"^model\\.layers\\.(\\d+)\\.(.+)": r"layers.\\1.\\2", "model": ""}
    >>> new = renamed(["model.layers.3.w", "model.norm.w", "rotary.freq", "lm_head.w"], table, strict=False)
    >>> new.names
    {'model.layers.3.w': 'layers.3.w', 'model.norm.w': 'norm.w'}
    >>> new.dropped, new.unmatched
    (('rotary.freq',), ('lm_head.w',))
    """
    new = attempted(names, table)
    problems = [f"names: {clash}" for clash in map(both, new.doubled.values(), new.doubled)]
    if strict and new.unmatched:
        text = f"no row of the table matches {', '.join(new.unmatched)}"
        problems.append(f"names: {text}; add rows, with null to leave a tensor out, or strict: false")
    if problems:
        raise ValueError("\n".join(problems))
    return new


def attempted(names: Iterable[str], table: Table | None) -> Renamed:
    """Renames as ``renamed`` does, but raises only for a bad table: the caller checks the result."""
    if table is None:
        kept = {name: name for name in names}
        unnamed = ("",) if kept.pop("", None) is not None else ()
        return Renamed(kept, (), unnamed, dict.fromkeys(kept, ""))

    patterns = {key: _pattern(key) for key in table}

    out: dict[str, str] = {}
    dropped: list[str] = []
    unmatched: list[str] = []
    decided: dict[str, str] = {}
    for name in names:
        key = next((key for key, pattern in patterns.items() if pattern.fullmatch(name)), None)
        if key is None:
            unmatched.append(name)
            continue
        decided[name] = key
        value = table[key]
        if value is None:
            dropped.append(name)
        else:
            out[name] = _replaced(name, key, patterns[key], value)
    return Renamed(out, tuple(dropped), tuple(unmatched), decided)


def both(olds: Sequence[str], new: str) -> str:
    """Returns a message for several names that become one."""
    word = "both" if len(olds) == 2 else "all"
    return f"{', '.join(olds[:-1])} and {olds[-1]} would {word} become {new}"


def _pattern(key: str) -> re.Pattern[str]:
    if not key:
        return re.compile("(?P<rest>.+)", re.DOTALL)
    if not key.startswith("^"):
        return re.compile(rf"{re.escape(key)}(\.(?P<rest>.+))?", re.DOTALL)
    try:
        return re.compile(key)
    except re.error as error:
        raise ValueError(f"names: {key} is not a regular expression: {error}") from error


def _replaced(name: str, key: str, pattern: re.Pattern[str], value: str) -> str:
    match = pattern.fullmatch(name)
    assert match is not None
    if not key.startswith("^"):
        new = ".".join(filter(None, (value, match["rest"])))
    else:
        try:
            new = match.expand(value)
        except (re.error, IndexError) as error:
            raise ValueError(f"names: {key}: {value} does not fit this expression: {error}") from error
    if not new:
        raise ValueError(f"names: {key}: it gives {name} an empty name")
    return new


NameTable = Literal["llama"] | Mapping[str, str | None] | None

FROM_LLAMA: Table = {
    "model.embed_tokens": "embed",
    r"^model\.layers\.(\d+)\.self_attn\.([qkvo])_proj\.(.+)": r"layers.\1.attn.\2.\3",
    r"^model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.(.+)": r"layers.\1.mlp.\2.\3",
    r"^model\.layers\.(\d+)\.input_layernorm\.(.+)": r"layers.\1.attn_norm.\2",
    r"^model\.layers\.(\d+)\.post_attention_layernorm\.(.+)": r"layers.\1.mlp_norm.\2",
    r"^model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": None,  # in old folders; our model computes it
    "model.norm": "norm",
    "lm_head": "head",
}
TO_LLAMA: Table = {
    "embed": "model.embed_tokens",
    r"^layers\.(\d+)\.attn\.([qkvo])\.(.+)": r"model.layers.\1.self_attn.\2_proj.\3",
    r"^layers\.(\d+)\.mlp\.(gate|up|down)\.(.+)": r"model.layers.\1.mlp.\2_proj.\3",
    r"^layers\.(\d+)\.attn_norm\.(.+)": r"model.layers.\1.input_layernorm.\2",
    r"^layers\.(\d+)\.mlp_norm\.(.+)": r"model.layers.\1.post_attention_layernorm.\2",
    "norm": "model.norm",
    "head": "lm_head",
}


def to_ours(names: NameTable) -> Table | None:
    """Returns the table that ``names`` selects, from another program's names to ours."""
    return FROM_LLAMA if names == "llama" else names


def from_ours(names: NameTable) -> Table | None:
    return TO_LLAMA if names == "llama" else names


def kind_of(name: str, names: Mapping[str, object]) -> Kind:
    """Returns ``optim`` for the optimizer state of a parameter in ``names``, else ``param``.

    >>> kind_of("adam_m.net.w", {"net.w": 0}), kind_of("moments.w", {"net.w": 0})
    ('optim', 'param')
    """
    prefix, _, rest = name.partition(".")
    return "optim" if prefix in OPTIMIZER and rest in names else "param"
