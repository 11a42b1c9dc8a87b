"""The weights of a stage over device matrices: gathered from shards, with gradients reduced to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from launcher.parallel.sharding.process_groups import StageGroups
from launcher.parallel.sharding.redistribute import carry_out, redistribute
from launcher.parallel.sharding.regather import Regather
from launcher.parallel.trace.model_facts import dtype_of
from launcher.plan.sharding.moves import gathered, reduced
from launcher.plan.sharding.parameters import ShardedParam


class Weights(Mapping[str, Tensor]):
    """The weights that operators take, by first name, in the layouts that they take.

    Args:
        level: for weights sharded over replicas. level1 and level2 gather them once per step; level2 also
            reduces the gradient of each micro batch at once. level3 gathers for each forward, and again for
            its backward (``Regather``).
        names: the names of tensors in ``module`` that are not their first names.
        several: weights that another stage of this rank has too; their terms of a gradient must not be added
            to ours before they are reduced.
    """

    def __init__(
        self,
        module: nn.Module,
        params: tuple[ShardedParam, ...],
        level: str | None,
        groups: StageGroups,
        names: Mapping[str, str],
        several: frozenset[str] = frozenset(),
    ) -> None:
        self.params = {p.name: p for p in params}
        self.level = level
        self.groups = groups
        self.places = {p.name: _place(module, names.get(p.name, p.name)) for p in params}
        self.leaves = [n for n, p in self.params.items() if _leaf(p, level, n in several)]
        self.whole: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        self.regather = Regather(groups)

    def __iter__(self) -> Iterator[str]:
        return iter(self.params)

    def __len__(self) -> int:
        return len(self.params)

    def __getitem__(self, name: str) -> Tensor:
        if name in self.leaves:
            return self.whole[name]
        p, kept = self.params[name], self.kept(name)
        if not p.shared:
            return kept
        whole = redistribute(kept, gathered(p), reduced(p), self.groups)
        self.regather.enter(name, whole, kept, gathered(p))
        return whole

    def kept(self, name: str) -> Tensor:
        """Return the tensor as it is stored."""
        module, attr = self.places[name]
        t: Tensor = getattr(module, attr)
        return t

    def replace(self, name: str, t: Tensor) -> None:
        """Replace a buffer by another tensor, as a backward may need the old one."""
        module, attr = self.places[name]
        setattr(module, attr, t.detach())

    def gather(self) -> None:
        """Gather before the first forward of a step or of an evaluation, in the dtype of the computation."""
        for name in self.leaves:
            p, shard = self.params[name], self.kept(name)
            computed = shard.detach().to(dtype_of(p.spec.dtype))
            whole = carry_out(computed, gathered(p), self.groups)
            if shard.requires_grad and torch.is_grad_enabled():
                whole.requires_grad_()
                if self._at_once(p) or whole.dtype != shard.dtype:
                    whole.register_post_accumulate_grad_hook(partial(self._after_backward, name, shard))
            self.whole[name] = whole

    def drop(self) -> None:
        """Free the gathered weights, after the last forward of an evaluation."""
        self.whole.clear()

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce the gradients, after the last backward of a step."""
        for name, p in self.params.items():
            shard = self.kept(name)
            if name in self.whole:
                grad = self.sums.pop(name, self.whole[name].grad)
                if grad is not None:
                    self._bring_back(p, shard, grad)
            elif not p.shared and p.terms and shard.grad is not None:
                shard.grad = carry_out(shard.grad, reduced(p), self.groups)
        self.drop()

    @torch.no_grad()
    def _after_backward(self, name: str, shard: Tensor, whole: Tensor) -> None:
        """Reduce (level2) or add up (level1) the gradient of a micro batch, in the dtype of the weight."""
        assert whole.grad is not None
        grad, whole.grad = whole.grad.to(shard.dtype), None
        if self._at_once(self.params[name]):
            self._bring_back(self.params[name], shard, grad)
        else:
            self.sums[name] = self.sums[name].add_(grad) if name in self.sums else grad

    def _at_once(self, p: ShardedParam) -> bool:
        return p.shared and self.level == "level2"

    def _bring_back(self, p: ShardedParam, shard: Tensor, grad: Tensor) -> None:
        """Reduce the gradient of a gathered weight to the shard."""
        mine = carry_out(grad, reduced(p), self.groups)
        shard.grad = mine if shard.grad is None else shard.grad.add_(mine)


def _leaf(p: ShardedParam, level: str | None, several: bool) -> bool:
    """Whether a step computes with a separate tensor beside the stored one."""
    return (p.shared and level != "level3") or (several and bool(p.terms))


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module and attribute of a tensor; a forward may replace the tensor there."""
    owner, _, attr = name.rpartition(".")
    return module.get_submodule(owner), attr
