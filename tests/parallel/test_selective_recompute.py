"""Results that are kept while a module runs again, call by call: equal numbers, and nothing runs twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.errors import RequestError
from launcher.job.schema.models import LanguageModel
from launcher.models.language_model import Block
from launcher.parallel.recompute import install
from launcher.parallel.selective_recompute import FUNCTIONS, KINDS
from launcher.parallel.tensor_parallel.collectives import Axis
from launcher.plan.values.recomputed_module import BY_OPERATION, Recomputed

PRODUCTS = ("matmul", "batched_matmul", "attention")


def test_a_kind_has_functions_or_is_kept_by_operation_as_the_plan_says() -> None:
    assert {*FUNCTIONS} | {*BY_OPERATION} == {*KINDS}
    assert not {*FUNCTIONS} & {*BY_OPERATION}


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    """Runs ``forward``, which may use its weights."""

    def __init__(self, forward: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = forward
        self.inner = nn.Linear(8, 24)
        self.outer = nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.randn(8))
        self.bank = nn.Parameter(torch.randn(3, 8, 8))
        self.heads = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def packed(net: Net, x: Tensor) -> Tensor:
    """Queries, keys and values are views of one result."""
    q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in net.inner(x * net.scale).chunk(3, -1))
    return net.outer(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)).sin()


def products(net: Net, x: Tensor) -> Tensor:
    h = torch.einsum("btd,bde->bte", x.sin(), net.bank[: len(x)]).cos()
    h = h @ net.outer.weight.t() + torch.bmm(x, net.bank[1:].exp()).exp()
    return torch.addmm(net.scale, h.flatten(0, 1).tanh(), net.outer.weight).tanh()


def frozen(net: Net, x: Tensor) -> Tensor:
    """A product with a gradient for only one of its arguments, and one with a gradient for neither."""
    const = torch.ones(8, 8, dtype=x.dtype)
    alone = F.linear(const.cos(), net.outer.weight).sin().sum(0)
    return alone + (x.detach().cos() @ const).sin() * (x.sin() @ const).sin()


NETS = {f.__name__: f for f in (packed, products, frozen)}


def module(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "block":
        sizes = {"dim": 8, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 16, "vocab_size": 11}
        return Block(LanguageModel.model_validate({"name": "lm", **sizes})).double()
    return Net(NETS[name]).double()


def again(plain: nn.Module, keep: tuple[str, ...] = PRODUCTS) -> nn.Module:
    model = nn.ModuleDict({"it": deepcopy(plain)})
    install(model, [Recomputed("it", keep, comm=True)], Axis(1))
    return model["it"]


def gradients(net: nn.Module, times: int = 1) -> tuple[list[Any], Counter[str]]:
    """Gradients after ``times`` forwards and backwards, and the operations of the last backward."""
    torch.manual_seed(1)
    for _ in range(times):
        x = torch.randn(2, 6, 8, dtype=torch.float64, requires_grad=True)
        out = net(x)
        counting = Counting()
        with counting:
            out.square().sum().backward()
    return [x.grad, *(p.grad for p in net.parameters())], counting.seen


def forward_count(net: nn.Module) -> Counter[str]:
    counting = Counting()
    with counting, torch.no_grad():
        net(torch.randn(2, 6, 8, dtype=torch.float64))
    return counting.seen


@pytest.mark.parametrize("name", ["block", *NETS])
def test_gradients_are_the_same_bits_and_nothing_kept_runs_again(name):
    plain = module(name)
    net = again(plain)
    wanted, ran = gradients(deepcopy(plain), 2)
    found, ran_again = gradients(net, 2)
    assert net.forward.calls.watched
    assert net.forward.calls.by_operation == ""
    for a, b in zip(found, wanted, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    for op in ("mm", "bmm", "addmm", "_scaled_dot_product_flash_attention_for_cpu"):
        assert ran_again[op] == ran[op]
    assert ran_again.total() > ran.total()  # the operations between them run again


def test_operations_that_are_not_kept_run_again():
    plain = module("block")
    _, ran = gradients(deepcopy(plain), 2)
    _, again_but_attention = gradients(again(plain, ("attention",)), 2)
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    assert again_but_attention[flash] == ran[flash] == 0
    assert again_but_attention["mm"] == ran["mm"] + forward_count(plain)["mm"] - 1  # none needs the last


def test_no_mode_looks_at_operations_after_the_first_forward():
    class Depth(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            depths.append(torch._C._len_torch_dispatch_stack())
            return (x @ x.mT).sin() @ x

    depths: list[int] = []
    net = again(Depth())
    for _ in range(2):
        net(torch.randn(1, 3, 8, dtype=torch.float64, requires_grad=True)).sum().backward()
    assert depths == [1, 0, 0, 0]


def test_a_product_that_copies_its_argument_is_kept_operation_by_operation():
    """Its backward needs a copy, which is neither an argument nor a result."""
    plain = Net(
        lambda net, x: (x.sin().unsqueeze(0) @ net.bank.exp().unsqueeze(1)).sin()[0] @ net.outer.weight
    ).double()
    net = again(plain)
    wanted, _ = gradients(deepcopy(plain))
    for _ in range(2):
        net.zero_grad()
        found, _ = gradients(net)
        assert net.forward.calls.by_operation == "bmm"
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_function_that_torch_hides_is_kept_operation_by_operation():
    """multi_head_attention_forward calls linear and attention where no mode sees it."""
    net = again(Net(lambda net, x: net.heads(x.sin(), x, x.cos(), need_weights=False)[0]).double())
    wanted, _ = gradients(deepcopy(net), 1)
    assert "addmm" in net.forward.calls.by_operation or not net.forward.calls.watched
    found, _ = gradients(net, 1)
    assert "addmm" in net.forward.calls.by_operation
    for p in net.parameters():
        p.grad = None
    found, ran_again = gradients(net, 1)
    assert ran_again["addmm"] == 0  # its results are kept now
    for a, b in zip(found, wanted, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_a_kept_result_may_not_be_changed_in_place():
    net = again(Net(lambda net, x: net.outer(net.outer(x.sin()).mul_(2)).sin()).double())
    out = net(torch.randn(2, 6, 8, dtype=torch.float64, requires_grad=True))
    with pytest.raises(RequestError, match="changes the result of linear in place, which must be kept"):
        out.sum().backward()


def test_a_second_backward_has_the_same_numbers():
    net = again(module("packed"))
    x = torch.randn(2, 6, 8, dtype=torch.float64, requires_grad=True)
    loss = net(x).square().sum()
    first, second = (torch.autograd.grad(loss, (x, net.inner.weight), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_dropout_in_attention_is_kept_operation_by_operation():
    def drops(net: Net, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, 4)).transpose(1, 2).sin()
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).transpose(1, 2).flatten(2) @ net.outer.weight

    plain = Net(drops).double()
    wanted, _ = gradients(deepcopy(plain))
    found, _ = gradients(again(plain, ("attention", "batched_matmul", "matmul")))
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def mapped(net: Net, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: net.outer(row.sin()).tanh() @ net.outer.weight)(x)


def pushed(net: Net, x: Tensor) -> Tensor:
    return torch.func.jvp(lambda h: net.outer(h.sin()).tanh(), (x,), (x.cos(),))[1].sin() @ net.outer.weight


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, in jvp
@pytest.mark.parametrize("forward", [mapped, pushed])
def test_products_within_torch_func_have_the_same_gradients(forward: Callable[[Net, Tensor], Tensor]) -> None:
    """Their tensors have no storage by which a result is recognized."""
    plain = Net(forward).double()
    wanted, _ = gradients(deepcopy(plain))
    net = again(plain)
    for _ in range(2):
        net.zero_grad()
        found, _ = gradients(net)
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def halved(net: Net, x: Tensor) -> Tensor:
    """Calls its module on both halves."""
    if x.shape[1] == 1:
        return x
    first, second = (net(part).sum(1, keepdim=True) for part in x.tensor_split(2, dim=1))
    return net.outer((first * second).sin()).tanh()


@pytest.mark.parametrize("keep", [(), PRODUCTS], ids=["in full", "products kept"])
def test_a_module_that_calls_itself_has_the_same_gradients(keep: tuple[str, ...]) -> None:
    plain = Net(halved).double()
    wanted, _ = gradients(deepcopy(plain))
    net = again(plain, keep)
    for _ in range(2):
        net.zero_grad()
        found, _ = gradients(net)
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


class Borrowing(nn.Module):
    """Runs a module from elsewhere in the model once, within its own forward."""

    def __init__(self, lent: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)
        self.borrowed = (lent,)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.own(self.borrowed[0](self.own(x).sin()).cos())
        return out


@pytest.mark.parametrize("keep", [(), PRODUCTS], ids=["in full", "products kept"])
def test_a_module_that_another_one_calls_has_the_same_gradients(keep: tuple[str, ...]) -> None:
    def gradients_of(model: nn.Module) -> list[Any]:
        torch.manual_seed(1)
        x = torch.randn(2, 6, 8, dtype=torch.float64)
        model.zero_grad()
        model["borrowing"](model["lent"](x)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    torch.manual_seed(0)
    lent = Net(packed)
    plain = nn.ModuleDict({"lent": lent, "borrowing": Borrowing(lent)}).double()
    model = deepcopy(plain)
    install(model, [Recomputed(name, keep, comm=True) for name in ("lent", "borrowing")], Axis(1))
    wanted = gradients_of(plain)
    for _ in range(2):
        found = gradients_of(model)
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
