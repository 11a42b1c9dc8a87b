"""The weights of a stage over device matrices: gathered from shards of replicas, gradients brought back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from launcher.parallel.sharding.process_groups import StageGroups
from launcher.parallel.sharding.redistribute import carry_out, redistribute
from launcher.plan.sharding.moves import gathered, reduced
from launcher.plan.sharding.parameters import ShardedParam


class Weights(Mapping[str, Tensor]):
    """What operators take, by first name, in the layouts that they take.

    ``level``: where replicas share weights out, level1 and level2 gather them once a step, level2 brings the
    gradient of each micro batch back at once, level3 gathers for each forward. ``names``: what a tensor goes
    by in ``module``, where that is not its first name.
    """

    def __init__(
        self,
        module: nn.Module,
        params: tuple[ShardedParam, ...],
        level: str | None,
        groups: StageGroups,
        names: Mapping[str, str],
    ) -> None:
        self.params = {p.name: p for p in params}
        self.level = level
        self.groups = groups
        self.places = {p.name: _place(module, names.get(p.name, p.name)) for p in params}
        self.whole: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self.params)

    def __len__(self) -> int:
        return len(self.params)

    def __getitem__(self, name: str) -> Tensor:
        p = self.params[name]
        kept = self.kept(name)
        if not p.shared:
            return kept
        if self.level == "level3":
            return redistribute(kept, gathered(p), reduced(p), self.groups)
        return self.whole[name]

    def kept(self, name: str) -> Tensor:
        """As it rests."""
        module, attr = self.places[name]
        t: Tensor = getattr(module, attr)
        return t

    def replace(self, name: str, t: Tensor) -> None:
        """A buffer is another tensor from now on: a backward may need what it was."""
        module, attr = self.places[name]
        setattr(module, attr, t.detach())

    def gather(self) -> None:
        """Before the first forward of a step or of an evaluation."""
        if self.level == "level3":
            return
        for name, p in self.params.items():
            if not p.shared:
                continue
            kept = self.kept(name)
            self.whole[name] = carry_out(kept.detach(), gathered(p), self.groups)
            if kept.requires_grad and torch.is_grad_enabled():
                self.whole[name].requires_grad_()
                if self.level == "level2":
                    self.whole[name].register_post_accumulate_grad_hook(partial(self._bring_back, name))

    def drop(self) -> None:
        """After the last forward of an evaluation."""
        self.whole.clear()

    @torch.no_grad()
    def reduce(self) -> None:
        """After the last backward of a step."""
        for name, p in self.params.items():
            if name in self.whole:
                self._bring_back(name, self.whole[name])
                continue
            kept = self.kept(name)
            if not p.shared and p.terms and kept.grad is not None:
                kept.grad = carry_out(kept.grad, reduced(p), self.groups)
        self.drop()

    @torch.no_grad()
    def _bring_back(self, name: str, whole: Tensor) -> None:
        """The gradient of what was gathered, to the shards."""
        if whole.grad is None:
            return
        kept = self.kept(name)
        grad = carry_out(whole.grad, reduced(self.params[name]), self.groups)
        whole.grad = None
        kept.grad = grad if kept.grad is None else kept.grad.add_(grad)


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Where a tensor hangs; a forward may put a new one there."""
    owner, _, attr = name.rpartition(".")
    return module.get_submodule(owner), attr
