"""The one module that knows devices. Tests on an accelerator: ``tests/fake_accelerator/on_devices``."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
import torch

from launcher.runtime import device
from tests.test_imports import files, trees

CPU = torch.device("cpu")
NAMED = ("cuda", "nccl")
MAY_NAME = {
    "launcher.runtime.device": "it knows devices",
    "launcher.job.schema.launch": "words that launch.device and launch.backend are known to take",
    "launcher.job.schema.train": "words that train.compile.mode is known to take",
    "launcher.job.intended_value": "what people call a GPU",
    "launcher.job.cures.keys_of_other_programs": "a variable that users of other programs set",
    "launcher.plan.resolve.compile": "torch's name of a mode of compilation, which records CUDA graphs",
    "launcher.models.language_model": "which kernels of attention read groups of heads",
    "launcher.planner.device_kernels": "whose kernels a plan counts",
    "launcher.runtime.faults": "texts of NCCL's own errors",
    "launcher.runtime.cluster.flight_recorder": "variables and files of NCCL's watchdog",
    "launcher.runtime.processes.supervise": "the file of NCCL's watchdog",
    "launcher.runtime.cluster.world": "torch's name of a default timeout",
    "launcher.runtime.torch_private.selftest": "torch's name of a default timeout",
    "launcher.runtime.cluster.network": "NCCL's variable for the interface",
    "launcher.run.external_ranks.joining": "NCCL's variable for the interface",
}


def words(tree: ast.Module) -> Iterator[str]:
    """The names in code: strings that are not docstrings, attributes, variables, imported modules."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.name


def test_only_listed_modules_name_a_kind_of_device() -> None:
    found = {
        module: sorted({w for w in words(trees()[module]) if any(name in w.lower() for name in NAMED)})
        for module in files()
    }
    assert {module: named for module, named in found.items() if named and module not in MAY_NAME} == {}
    assert sorted(module for module in MAY_NAME if not found[module]) == []


def test_a_name_is_found_wherever_it_stands() -> None:
    code = "'''cuda'''\nimport torch.cuda\nx.is_cuda\ncuda_count = 'nccl'\nf'{kind}:nccl'"
    named = [w for w in words(ast.parse(code)) if any(name in w for name in NAMED)]
    assert sorted(named) == [":nccl", "cuda_count", "is_cuda", "nccl", "torch.cuda"]


def test_the_cpu_is_no_accelerator() -> None:
    assert not device.is_accelerator(CPU)
    assert device.is_accelerator(torch.device("meta"))
    assert device.name(CPU) == "cpu"
    assert list(device.rng_states(CPU)) == ["cpu"]
    device.synchronize(CPU)


def test_unknown_kinds_of_devices_have_a_count_of_zero() -> None:
    assert [device.count(kind) for kind in ("cpu", "npu", "no_such")] == [0, 0, 0]
    assert device.own_backend("no_such") is None


@pytest.mark.parametrize(("kind", "want"), [("cuda", "nccl"), ("xpu", "xccl")])
def test_collectives_are_those_of_the_table_of_torch(kind: str, want: str) -> None:
    assert device.own_backend(kind) == want
    assert device.backends(kind) == f"cpu:gloo,{kind}:{want}"
    assert [device.takes(want, "cpu"), device.takes(want, kind), device.takes("gloo", "cpu")] == [False, True, True]


def test_collectives_from_outside_are_taken_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch-npu registers its own collectives in this way."""
    monkeypatch.setitem(torch.distributed.Backend.default_device_backend_map, "npu", "hccl")
    assert device.backends("npu") == "cpu:gloo,npu:hccl"


def test_a_stream_goes_on_where_it_was_and_others_are_left_out() -> None:
    before = device.rng_states(CPU)
    want = torch.rand(3)
    device.set_rng_states({**before, "npu": torch.zeros(1)}, CPU)
    assert torch.equal(torch.rand(3), want)


def test_draws_in_forked_streams_do_not_change_the_streams_outside() -> None:
    before = torch.get_rng_state()
    with device.forked_streams(CPU):
        torch.rand(7)
    assert torch.equal(torch.get_rng_state(), before)
