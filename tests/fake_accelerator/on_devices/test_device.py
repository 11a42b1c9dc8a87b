"""The fake device itself: errors of a real accelerator also occur here, and its figures are counted."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from launcher.runtime import device, free_memory
from launcher.runtime.cluster.world import World
from launcher.runtime.training.save_thread import Saver
from tests.fake_accelerator.on_devices.processes import KIND, apart, on_devices

FAKE: Any = torch.get_device_module(KIND)
FIRST = torch.device(KIND, 0)


def test_torch_and_the_launcher_are_imported_and_nothing_is_initialized() -> None:
    """Therefore ranks that use devices can be forked from a process that has imported both."""
    import launcher.run.run
    import launcher.steps.certify
    import launcher.steps.on_ranks  # noqa: F401

    assert (device.accelerator(), device.count(KIND), device.count("cpu")) == (KIND, 4, 0)
    assert device.backends(KIND) == "cpu:gloo,fake:fakeccl"
    assert free_memory.available_memory(2, KIND) is not None
    assert not FAKE.is_initialized()


def used_and_forked() -> tuple[str, bool]:
    """The error of a child that uses a device after its parent has, and whether the parent had used one."""
    torch.ones(2, device=KIND)
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            torch.ones(2, device=KIND)
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as said:
        return said.read().partition("\n")[0], FAKE.is_initialized()


def test_a_process_forked_from_one_that_has_used_a_device_cannot_use_one() -> None:
    assert apart(used_and_forked) == ("Cannot re-initialize fake devices in a forked subprocess", True)


def meets_the_cpu() -> list[str]:
    there, here = torch.ones(3, device=KIND), torch.ones(3)
    said = []
    for act in (
        lambda: there + here,
        lambda: torch.cat([there, here]),
        lambda: nn.functional.linear(there, torch.ones(2, 3)),
        lambda: there.to("fake:1") + there,
        lambda: torch.ones(3, device="fake:4"),
    ):
        try:
            act()
            said.append("nothing")
        except RuntimeError as error:
            said.append(str(error).partition("\n")[0])
    return said


def test_tensors_of_two_devices_do_not_meet() -> None:
    said = apart(meets_the_cpu)
    assert "nothing" not in said
    assert "Expected all tensors to be on the same device" in said[0]
    assert said[-1] == "fake:4 does not exist, there are 4"


def sends(world: World) -> tuple[float, str, list[str]]:
    """A sum over all ranks on their devices, and the error of the same collectives for a CPU tensor."""
    group: Any = dist.group.WORLD
    there = torch.full((2,), float(world.rank + 1), device=world.device)
    dist.all_reduce(there)
    try:
        group._get_backend(torch.device(world.device)).allreduce([torch.ones(2)])
        said = "nothing"
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
    here = torch.ones(2)
    dist.all_reduce(here)  # gloo's, in the same group
    return there[0].item(), said, [str(there.device), str(here.tolist())]


def test_collectives_refuse_what_is_not_on_the_device() -> None:
    found = on_devices(2, sends)
    assert [f[0] for f in found] == [3.0, 3.0]
    assert {f[1] for f in found} == {"fakeccl was given a tensor on cpu"}
    assert [f[2] for f in found] == [["fake:0", "[2.0, 2.0]"], ["fake:1", "[2.0, 2.0]"]]


def memory() -> tuple[list[int], str]:
    figures = [FAKE.memory_allocated()]
    big = torch.ones(1 << 20, device=KIND)
    figures.append(FAKE.memory_allocated())
    del big
    figures += [FAKE.memory_allocated(), *device.peak_memory(FIRST), device.total_memory(FIRST)]
    try:
        torch.empty(1 << 40, device=KIND, dtype=torch.uint8)
        said = "nothing"
    except torch.OutOfMemoryError as error:
        said = str(error).partition("\n")[0]
    return figures, said


def test_memory_is_counted_and_runs_out() -> None:
    mb4 = 4 << 20
    figures, said = apart(memory)
    assert figures == [0, mb4, 0, mb4, mb4, 16 << 30]
    assert said == f"fake out of memory. Tried to allocate {1 << 40} bytes on fake:0, of which {16 << 30} are free"


def streams() -> list[bool]:
    torch.manual_seed(1)
    first, host = torch.rand(4, device=KIND).cpu(), torch.rand(4)
    torch.manual_seed(1)
    alike = [torch.equal(torch.rand(4), host), torch.equal(torch.rand(4, device=KIND).cpu(), first)]

    states = device.rng_states(FIRST)
    want = [torch.rand(3), nn.functional.dropout(torch.ones(64, device=KIND)).cpu()]
    device.set_rng_states(states, FIRST)
    got = [torch.rand(3), nn.functional.dropout(torch.ones(64, device=KIND)).cpu()]
    alike += [torch.equal(a, b) for a, b in zip(want, got, strict=True)]

    before = FAKE.get_rng_state(0)
    with device.forked_streams(FIRST):
        torch.rand(5, device=KIND)
    return [*alike, torch.equal(FAKE.get_rng_state(0), before), sorted(states) == ["cpu", KIND]]


def test_a_device_draws_from_a_stream_of_its_own() -> None:
    assert apart(streams) == [True] * 6


def convolved() -> list[float]:
    """The largest difference between device and CPU of outputs and gradients, also transposed."""
    torch.manual_seed(0)
    off = []
    for make in (
        lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, bias=False),
    ):
        plain = make().double()
        x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
        sides = []
        for kind in ("cpu", KIND):
            there, at = make().double().to(kind), x.clone().to(kind).requires_grad_()
            there.load_state_dict(plain.state_dict())
            out = there(at)
            out.square().sum().backward()
            sides.append([out, at.grad, *(p.grad for p in there.parameters())])
        off += [(a - b.cpu()).abs().max().item() for a, b in zip(*sides, strict=True)]
    return off


def test_a_convolution_and_its_gradients_are_those_of_the_cpu() -> None:
    assert max(apart(convolved)) == 0.0


def cast() -> list[str]:
    x = torch.randn(4, 4, device=KIND)
    out = []
    for low in (torch.bfloat16, torch.float16):
        with torch.autocast(KIND, low):
            y = x @ x
            out += [
                str(y.dtype),
                str(torch.softmax(y, -1).dtype),
                str(nn.functional.conv1d(x[None], x[:, :, None]).dtype),
            ]
    return out


def test_autocast_has_the_lists_of_other_devices() -> None:
    lower, wide = ("torch.bfloat16", "torch.float16"), "torch.float32"
    assert apart(cast) == [lower[0], wide, lower[0], lower[1], wide, lower[1]]


def copied(world: World) -> tuple[bool, bool, list[float]]:
    """A copy in pinned memory, which later training does not change, written by the thread."""
    t = torch.ones(3, device=world.device)
    saver, seen = Saver(), list[float]()
    kept = saver.host("t", t)
    t.zero_()
    saver.start(lambda: seen.extend(kept.tolist()))
    saver.wait()
    return kept.is_pinned(), torch.ones(3).is_pinned(), seen


def test_what_is_saved_beside_training_is_copied_to_pinned_memory() -> None:
    assert on_devices(1, copied) == [(True, False, [1.0, 1.0, 1.0])]


def timed() -> float:
    before, after = torch.Event(FIRST, enable_timing=True), torch.Event(FIRST, enable_timing=True)
    stream = torch.accelerator.current_stream(FIRST)
    before.record(stream)
    big = torch.ones(256, 256, device=KIND)
    for _ in range(20):
        big = big @ big
    after.record(stream)
    return float(before.elapsed_time(after))


def test_events_tell_time() -> None:
    assert 0 < apart(timed) < 60_000


@pytest.mark.parametrize("kind", ["cpu", KIND])
def test_an_optimizer_is_tried_without_a_device(kind: str) -> None:
    """The planner does this in a process from which ranks are forked later."""

    def tried() -> bool:
        from launcher.optim.dry_run import probe

        probe(lambda params: torch.optim.Adam(params), "Adam", [(4, 4), (3,)], device=kind)
        return bool(FAKE.is_initialized())

    assert apart(tried) is False
