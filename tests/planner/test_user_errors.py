"""Errors of torch in a user's code.

The refusal names the class or module, the line, torch's sentence and a cure.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.mistakes.answers import answer

ALONE = ("recipe=lm_single", "data=mnist5k", "steps=[train]", "model=mlp", "optim=sgd", "security.allow=[mine]")
SEARCH = ("show=search", "cluster=h100_sxm", "parallel=auto")
IMPORTS = "import numpy as np\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
BLOCK = (
    "class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.fc = nn.Linear(16, 16)\n    def forward(self, h):\n"
)
NET = (
    "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.a, self.block, self.b = nn.Linear(784, 16), Block(), nn.Linear(16, 10)\n"
    "    def forward(self, x):\n        return self.b(self.block(self.a(x.flatten(1))))\n"
)
ITEM = (
    "class Data(torch.utils.data.Dataset):\n    def __init__(self, split):\n        self.x = torch.ones(64, 784)\n"
    "    def __len__(self):\n        return 64\n    def __getitem__(self, i):\n"
)
OPT = (
    "class Opt(torch.optim.SGD):\n    @torch.no_grad()\n    def step(self):\n"
    "        for p in self.param_groups[0]['params']:\n"
)
LOSS = (
    "class Loss(nn.Module):\n    def count(self, target):\n        return torch.tensor(len(target))\n"
    "    def forward(self, output, target):\n"
)
FORWARD = "model: the forward of Net fails in {} for inputs of shape (32, 1, 28, 28) float32: "
CALLED = "loss._target_ = mine.Loss: it cannot be called with an output of shape (4, 10) float32 and targets of "
DENSE = "optim._target_ = mine.Opt: its step() without a closure fails on dense gradients: "
TORN = "data._target_ = mine.Data: "
LONG = "of the kernel\nC++ CapturedTraceback:\n#4 c10::Error from /usr/lib/site-packages/torch\n"
DTYPE = "; create tensors with the dtype of another one, as in w.to(x.dtype)"

MODEL = {
    "shapes that do not fit": (
        "return self.fc(torch.cat([h, h], 1))",
        FORWARD.format("block.fc (Linear)")
        + "RuntimeError: a and b must have same reduction dim, but got [32, 32] X [16, 16]. (mine.py:10, in forward: "
        "return self.fc(torch.cat([h, h], 1))); the last dim of a layer's input is its in_features",
    ),
    "a tensor as a condition": (
        "return self.fc(h if h > 0 else -h)",
        FORWARD.format("block (Block)")
        + "RuntimeError: Boolean value of Tensor with more than one value is ambiguous (mine.py:10, in forward: return "
        "self.fc(h if h > 0 else -h)); decide by its .any() or .all(), or choose by element with torch.where",
    ),
    "a parameter changed in place": (
        "return self.fc(h + self.fc.bias.mul_(2))",
        FORWARD.format("block (Block)")
        + "RuntimeError: a leaf Variable that requires grad is being used in an in-place operation. (mine.py:10, in "
        "forward: return self.fc(h + self.fc.bias.mul_(2))); compute a new tensor, or change it in torch.no_grad()",
    ),
    "a view of strides": (
        "return self.fc(h.t().view(-1, 16))",
        FORWARD.format("block (Block)")
        + "RuntimeError: view size is not compatible with input tensor's size and stride (at least one dimension "
        "spans across two contiguous subspaces). Use .reshape(...) instead. (mine.py:10, in forward: return ",
    ),
    "an accelerator by name": (
        "return self.fc(h.cuda())",
        FORWARD.format("block (Block)") + "AssertionError: Torch not compiled with CUDA enabled (mine.py:10, in "
        "forward: return self.fc(h.cuda())); create tensors on the device of another one, as with device=x.device",
    ),
    "a gradient of what has none": (
        "return self.fc(torch.autograd.grad(h.sum(), torch.ones(1))[0])",
        FORWARD.format("block (Block)")
        + "RuntimeError: One of the differentiated Tensors does not require grad (mine.py:10, in forward: return "
        "self.fc(torch.autograd.grad(h.sum(), torch.ones(1))[0])); detach(), .data and torch.no_grad() cut a tensor",
    ),
    "an id outside of a table, seen in memory only": (
        "return self.fc(h * h.sum().item() + F.embedding(torch.full((len(h),), 9), torch.ones(4, 16)))",
        FORWARD.format("block (Block)") + "IndexError: index out of range in self (mine.py:10, in forward: return",
    ),
    "an integer where numbers are": (
        "return self.fc(F.embedding(h, self.fc.weight))",
        FORWARD.format("block (Block)") + "RuntimeError: Expected tensor for argument #1 'indices' to have one of the "
        "following scalar types: Long, Int; but got torch.float32 instead (mine.py:10, in forward: return self.fc("
        "F.embedding(h, self.fc.weight))); weights and inputs have the dtype of train.precision",
    ),
    "numbers taken by numpy": (
        "return self.fc(h * float(np.sum(h.detach().numpy())))",
        "model: the forward of Net cannot be planned in block (Block) (mine.py:10): it passes a tensor to "
        "numpy, to read or change its values (can't convert meta device type tensor to numpy. "
        "Use Tensor.cpu() to copy the tensor to host memory first); a "
        "plan has shapes and no values, so compute this with operations of torch on tensors",
    ),
    "no gradient": (
        "return self.fc(h)\nclass Net(Net):\n    def forward(self, x):\n        return super().forward(x).detach()",
        "model: the output of its forward does not require a gradient, so nothing would be trained; compute it without "
        "torch.no_grad(), detach() and .data",
    ),
}  # fmt: skip
OTHERS = {
    "optim, a leaf": (
        "optim", "Opt", OPT.replace("    @torch.no_grad()\n", "") + "            p.sub_(p.grad)\n",
        DENSE + "RuntimeError: a leaf Variable that requires grad is being used in an in-place operation. (mine.py:8, "
        "in step: p.sub_(p.grad)); compute a new tensor, or change it in torch.no_grad()",
    ),
    "optim, shapes": (
        "optim", "Opt", OPT + "            p.add_(p.grad @ torch.ones(3, 3))\n",
        DENSE + "RuntimeError: mat1 and mat2 shapes cannot be multiplied (136x136 and 3x3) (mine.py:9, in step: "
        "p.add_(p.grad @ torch.ones(3, 3))); the last dim of a layer's input is its in_features",
    ),
    "optim, several lines": (
        "optim", "Opt", OPT + f"            raise RuntimeError(LONG)\nLONG = {LONG!r}\n",
        DENSE + "RuntimeError: of the kernel (mine.py:9, in step: raise RuntimeError(LONG))",
    ),
    "loss, dtypes": (
        "loss", "Loss", LOSS + "        return (output @ torch.ones(10, 2).double()).sum(), self.count(target)\n",
        CALLED + "shape (4,) int64: RuntimeError: expected m1 and m2 to have the same dtype, but got: float != double "
        "(mine.py:9, in forward: return (output @ torch.ones(10, 2).double()).sum(), self.count(target))" + DTYPE,
    ),
    "loss, devices": (
        "loss", "Loss", LOSS + "        return (output * torch.ones(10, device='meta')).sum(), self.count(target)\n",
        CALLED + "shape (4,) int64: RuntimeError: Tensor on device meta is not on the expected device cpu! (mine.py:9, "
        "in forward: return (output * torch.ones(10, device='meta')).sum(), self.count(target)); create tensors on",
    ),
    "data, shapes": (
        "data", "Data", ITEM + "        return self.x[i] @ torch.ones(3, 3), 1\n",
        TORN + "item 0 cannot be read: RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x784 and 3x3) "
        "(mine.py:11, in __getitem__: return self.x[i] @ torch.ones(3, 3), 1)",
    ),
    "data, meta": (
        "data", "Data", ITEM + "        return self.x[i].to('meta'), 1\n",
        TORN + "input 0 of item 0 is on the meta device, without values; make it on the CPU",
    ),
    "data, nothing": (
        "data", "Data", ITEM + "        return self.x[i], None\n",
        TORN + "the target of item 0 has type NoneType, which cannot become a tensor; return a tensor, an array or a",
    ),
    "data, sparse": (
        "data", "Data", ITEM + "        return self.x[i].to_sparse(), 1\n",
        TORN + "input 0 of item 0 is a sparse_coo tensor; convert it with .to_dense()",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "mine", None)
    del sys.modules["mine"]  # after the test, the module is removed from sys.modules


def refusal(section: str, name: str, code: str, *words: str) -> str:
    """Return the message for ``code``.

    Checks that it has no frames of other code, and that no file was left.
    """
    Path("mine.py").write_text(IMPORTS + code)
    target = f"{section}={{_target_: mine.{name}}}"
    rc, said = answer((*ALONE, f"{section}=null", target, *words))
    assert rc == 2, said
    for never in ("Traceback", "C++", "site-packages", "c10::"):
        assert never not in said
    assert sorted(p.name for p in Path().iterdir() if p.name != "__pycache__") == ["mine.py"]
    return said


@pytest.mark.parametrize("case", MODEL)
def test_a_forward_that_fails_is_told_by_module_line_and_cure(case):
    body, says = MODEL[case]
    assert says in refusal("model", "Net", f"{BLOCK}        {body}\n{NET}" if "class" not in body else _below(body))


def _below(body: str) -> str:
    """Return a class ``Net`` with this body above that of the plain class."""
    forward, _, after = body.partition("\n")
    return f"{BLOCK}        {forward}\n{NET}{after}\n"


@pytest.mark.parametrize("case", OTHERS)
def test_a_loss_an_optimizer_or_a_data_set_that_fails_is_told_by_class_and_line(case):
    section, name, code, says = OTHERS[case]
    assert says in refusal(section, name, code)


def test_code_that_torch_export_cannot_trace_is_named_by_module_and_line():
    code = f"{BLOCK}        return self.fc(h * h.sum().item())\n{NET}"
    said = refusal("model", "Net", code, "launch.nproc=2", "parallel.mode=sharding_propagation")
    assert "torch.export cannot follow block (Block): its Python looks at data (mine.py:10); leave" in said


def test_torch_prints_no_graph_of_a_model_that_chooses_by_data():
    body = "for n in (h > 0).sum(1).nonzero():\n            h = h + self.fc.weight[n]\n        return self.fc(h)"
    words = ("launch.nproc=2", "parallel.mode=sharding_propagation")
    said = refusal("model", "Net", f"{BLOCK}        {body}\n{NET}", *words)
    assert "torch.export cannot follow block (Block): its Python looks at data (mine.py:1" in said
    assert "torch.ops" not in said


def test_a_search_for_a_model_that_selects_by_values_is_refused_by_what_is_wrong():
    """On the meta device its tensors have no rows: products take no time, which once caused a division by zero."""
    code = f"{BLOCK}        return self.fc(h[h[:, 0] > 0])\n{NET}"
    said = refusal("model", "Net", code, "launch.nproc=2", *SEARCH)
    assert "data: for 1 samples targets are int64 (1,) and the model's output is float32 (0, 10); " in said
    assert "; none of 88 layouts can be planned" in said


SEARCHED = {
    "it reads values by numpy": (
        "return self.fc(h * float(h.detach().numpy().sum()))",
        "the forward of Net cannot be planned in block (Block) (mine.py:10): it passes a tensor to numpy, to read or "
        "change its values (can't convert ",
    ),
    "it raises": (
        "raise KeyError('x')",
        "the forward of Net fails in block (Block) for inputs of shape (1, 1, 28, 28) float32: KeyError: 'x' (mine",
    ),
    "it leaves": (
        "raise SystemExit(3)",
        "the forward of Net fails in block (Block) for inputs of shape (1, 1, 28, 28) float32: SystemExit: 3 (mine",
    ),
}


@pytest.mark.parametrize("case", SEARCHED)
def test_a_search_over_a_model_that_cannot_be_traced_names_module_and_line(case):
    body, says = SEARCHED[case]
    said = refusal("model", "Net", f"{BLOCK}        {body}\n{NET}", "launch.nproc=2", *SEARCH)
    assert f"  model: {says}" in said
    assert "; none of 88 layouts can be planned" in said
