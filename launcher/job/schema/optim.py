"""Settings of the optimizer, its parameter groups and the learning rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from launcher.job.schema.base import BelowOne, Count, Flag, Fraction, Index, Number, Rate, Settings

Betas = tuple[BelowOne, BelowOne]
Epsilon = Annotated[Number, Field(gt=0)]
AtLeastOne = Annotated[Number, Field(ge=1, allow_inf_nan=False)]


class Group(Settings):
    """Settings of a parameter group; ``None`` means the optimizer's own."""

    lr: Rate | None = None
    weight_decay: Rate | None = None

    @model_serializer(mode="wrap")
    def _own(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in dump(self).items() if value is not None}


class LionGroup(Group):
    betas: Betas | None = None


class AdamWGroup(LionGroup):
    eps: Epsilon | None = None


class SGDGroup(Group):
    momentum: Fraction | None = None


class AdafactorGroup(Group):
    d: AtLeastOne | None = None


class MuonGroup(Group):
    """A group of Muon. ``use``: what updates its matrices; other parameters always use AdamW."""

    use: Literal["muon", "adamw"] | None = None
    momentum: Fraction | None = None
    betas: Betas | None = None
    eps: Epsilon | None = None


def groups_by_name(groups: Any) -> Any:
    """Returns settings by group name; dotted and nested keys are equivalent.

    If a name occurs twice, the later one determines the position.

    >>> groups_by_name({"layers": {"lr": 0.1, 0: {"lr": 0.2}}, "embed.lr": 0.3, "layers.0": {"eps": 1}})
    {'layers': {'lr': 0.1}, 'embed': {'lr': 0.3}, 'layers.0': {'lr': 0.2, 'eps': 1}}
    """
    if not isinstance(groups, Mapping):
        return groups
    out: dict[str, dict[str, Any]] = {}
    for name, settings in _below("", groups):
        out[name] = {**out.pop(name, {}), **settings}
    return out


def _below(name: str, groups: Mapping[Any, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in groups.items():
        path = f"{name}.{key}" if name else str(key)
        below = value.model_dump() if isinstance(value, Group) else value
        if isinstance(below, Mapping):
            yield from _below(path, below) if below else [(path, {})]  # a group may have no settings
            continue

        above, _, setting = path.rpartition(".")
        if not above:
            form = "a group is a name or a glob with settings, as {'*.bias': {weight_decay: 0}}"
            raise ValueError(f"{setting}: {value} is not a group; {form}")
        yield above, {setting: value}


def any_momentum(optim: SGD | Momentum) -> bool:
    """Returns true if the optimizer keeps a momentum buffer for any parameter."""
    return any((optim.momentum, *(g.momentum for g in optim.groups.values())))


class AdamW(Settings):
    name: Literal["adamw"]
    lr: Rate = 3e-4
    betas: Betas = (0.9, 0.95)
    eps: Epsilon = 1e-8
    weight_decay: Rate = 0.1
    groups: Annotated[dict[str, AdamWGroup], BeforeValidator(groups_by_name)] = {}


class SGD(Settings):
    name: Literal["sgd"]
    lr: Rate = 0.1
    momentum: Fraction = 0.0
    weight_decay: Rate = 0.0
    nesterov: Flag = False
    groups: Annotated[dict[str, SGDGroup], BeforeValidator(groups_by_name)] = {}

    @model_validator(mode="after")
    def _looks_ahead(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError("optim.nesterov=true needs momentum; use optim.momentum=0.9")
        return self


class Momentum(Settings):
    """MindSpore's name for SGD with momentum."""

    name: Literal["momentum"]
    lr: Rate = 0.1
    momentum: Fraction = 0.9
    weight_decay: Rate = 0.0
    groups: Annotated[dict[str, SGDGroup], BeforeValidator(groups_by_name)] = {}


class Lion(Settings):
    name: Literal["lion"]
    lr: Rate = 1e-4
    betas: Betas = (0.9, 0.99)
    weight_decay: Rate = 0.3
    groups: Annotated[dict[str, LionGroup], BeforeValidator(groups_by_name)] = {}


class Adafactor(Settings):
    """Adafactor, as ``torch.optim.Adafactor``.

    A step is relative to the size of the weights. ``eps`` has two values: the minimum variance (``null``: the
    epsilon of the weights' dtype), and the minimum of this size. ``d``: the maximum root mean square of an
    update.
    """

    name: Literal["adafactor"]
    lr: Rate = 1e-2
    beta2_decay: Annotated[Number, Field(le=0, allow_inf_nan=False)] = -0.8
    eps: tuple[Epsilon | None, Epsilon] = (None, 1e-3)
    d: AtLeastOne = 1.0
    weight_decay: Rate = 0.0
    groups: Annotated[dict[str, AdafactorGroup], BeforeValidator(groups_by_name)] = {}


class MuonFallback(Settings):
    """AdamW's settings for the parameters that Muon does not update."""

    lr: Rate = 3e-4
    betas: Betas = (0.9, 0.95)
    eps: Epsilon = 1e-8
    weight_decay: Rate = 0.1


class Muon(Settings):
    """Muon, as ``torch.optim.Muon``, with AdamW for embeddings, the head and all that is not a matrix."""

    name: Literal["muon"]
    lr: Rate = 1e-3
    weight_decay: Rate = 0.1
    momentum: Fraction = 0.95
    nesterov: Flag = True
    ns_coefficients: tuple[Number, Number, Number] = (3.4445, -4.775, 2.0315)
    ns_steps: Annotated[Count, Field(lt=100)] = 5
    eps: Epsilon = 1e-7
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    adamw: MuonFallback = MuonFallback()
    groups: Annotated[dict[str, MuonGroup], BeforeValidator(groups_by_name)] = {}


class Constant(Settings):
    name: Literal["constant"]
    warmup_steps: Index = 0


class Cosine(Settings):
    name: Literal["cosine"]
    warmup_steps: Index = 0
    final: Fraction = Field(0.1, description="share of optim.lr left at the last step")


class Linear(Settings):
    name: Literal["linear"]
    warmup_steps: Index = 0
    final: Fraction = 0.0


class Polynomial(Settings):
    name: Literal["polynomial"]
    warmup_steps: Index = 0
    power: Number = Field(2.0, gt=0)
    final: Fraction = 0.0


class CosineRestarts(Settings):
    """SGDR (Loshchilov and Hutter 2017)."""

    name: Literal["cosine_restarts"]
    warmup_steps: Index = 0
    period_steps: Count = Field(description="optimizer steps from the end of warmup to the first restart")
    period_multiplier: Count = 1
    final: Fraction = 0.0


class WSD(Settings):
    """Warm up, stay, decay (Hu et al. 2024, MiniCPM)."""

    name: Literal["wsd"]
    warmup_steps: Index = 0
    decay_share: Fraction = 0.2
    decay_steps: Index | None = None
    decay_shape: Literal["linear", "1-sqrt"] = "1-sqrt"
    final: Fraction = 0.0

    def decay(self, total: int) -> int:
        """Returns the number of steps out of ``total`` that decay.

        ``decay_steps`` overrides ``decay_share``.
        """
        return round(self.decay_share * total) if self.decay_steps is None else self.decay_steps


NamedSchedule = Constant | Cosine | Linear | Polynomial | CosineRestarts | WSD
