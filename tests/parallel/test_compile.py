"""Law 6 for compiled modules: loss, gradients and buffers are those of eager code in one process."""

from __future__ import annotations

import logging
import shutil
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launcher.errors import RequestError, RunError
from launcher.job.schema.job import Job
from launcher.job.schema.train import Compile
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.faults import RanksFailed
from tests.parallel.counting import assert_as_planned
from tests.parallel.test_recompute import FULL as RERUN
from tests.parallel.test_recompute import WAYS, both, tied
from tests.parity import LM, Step, assert_same, build, job, outcome, own, rank_step, step, together
from tests.ranks import on_ranks
from tests.test_parity import SCHEDULES, hsdp
from tests.test_parity_tp import MEGATRON, SEQUENCE
from tests.tiers import ALL, exhaustive, some_of
from tests.tracing import TRACING

pytestmark = pytest.mark.filterwarnings(*TRACING)

AOT = {"backend": "aot_eager"}
FULL, SELECTIVE = {"modules": "layers.*"}, {"modules": "layers.*", "policy": "selective"}
TP = {"grid": {"tp": 2}, "operators": MEGATRON}


def compiled(precision: str = "fp64", model: dict[str, Any] | None = None, **parallel: Any) -> Any:
    how = AOT | parallel.pop("compile", {})
    changes = {"model": LM | model} if model else {}
    return job(train__precision=precision, train__compile=how, train__batch_size=16, parallel=parallel, **changes)


CELLS = {
    "1f1b": compiled(pipeline=SCHEDULES["1f1b"]),
    "fp32": compiled("fp32", pipeline=SCHEDULES["1f1b"], hsdp=hsdp(2, "level3")),
    "tied over stages": compiled(pipeline=SCHEDULES["interleaved"], model={"tied": True}, hsdp=hsdp(2)),
    "every stage": compiled(pipeline=SCHEDULES["1f1b"], compile={"modules": "stages"}),
    "a part of a block": compiled(compile={"modules": "layers.*.attn"}, recompute=FULL),
    "blocks that run again": compiled(pipeline=SCHEDULES["1f1b"], recompute=FULL, hsdp=hsdp(2, "level3")),
    "blocks of which a part runs again": compiled(recompute={"modules": "layers.*.mlp"}),
    "operators over tp": compiled(**TP),
    "the same, with eager gaps": compiled(**TP, compile={"fullgraph": False}),
    "the same, in stages": compiled(**TP, pipeline=SCHEDULES["1f1b"], model={"tied": True}),
    "the same, some kept": compiled(**TP, recompute=SELECTIVE),
    "norms on a part of the time": compiled(grid={"tp": 2}, operators=SEQUENCE, hsdp=hsdp(2, "level3")),
    **{f"gpipe {level}": compiled(pipeline=SCHEDULES["gpipe"], hsdp=hsdp(2, level)) for level in ("level1", "level2")},
    **{f"some kept, {level}": compiled(pipeline=SCHEDULES["less memory"], hsdp=hsdp(2, level), recompute=SELECTIVE)
       for level in ("level1", "level2", "level3")},
}  # fmt: skip


@pytest.mark.parametrize("cell", some_of(CELLS, 6))
def test_a_compiled_layout_has_the_numbers_of_one_eager_process(cell: str) -> None:
    together({cell: CELLS[cell]})[cell].assert_same()


def here(net: str, **changes: Any) -> Any:
    model = {"_target_": f"tests.parallel.compile_nets.{net}"}
    return own(net, [8], stages=1, **{"model": model} | changes)


def seeded(world: World, j: Any, plan: Any) -> Step:
    torch.manual_seed(3)
    return rank_step(world, j, plan)


@pytest.mark.parametrize("policy", [None, pytest.param("full", marks=exhaustive), "selective"])
def test_dropout_draws_what_it_draws_in_eager_code(policy: str | None) -> None:
    again = {"parallel__recompute": {"modules": "layers.*", "policy": policy}} if policy else {}
    eager, graph = here("Dropping"), here("Dropping", train__compile=AOT, **again)
    want, got = (outcome(p, on_ranks(1, seeded, j, p)) for j in (eager, graph) for p in [plan_job(j)])
    assert_same(got, want, 0.0)


def counted(world: World, j: Any, plan: Any) -> tuple[list[int], str]:
    from torch._dynamo.utils import counters

    par, pipe = build(world, j, plan)
    counters.clear()  # drop the counts of the plan's own trials
    seen = []
    for _ in range(2):
        step(j, par, pipe)
        seen.append(int(counters["stats"]["unique_graphs"]))
    pipe.predict([torch.zeros(s.shape, dtype=torch.int64) for s in plan.inputs])
    seen.append(int(counters["stats"]["unique_graphs"]))
    assert par.compiled is not None
    return seen, par.compiled.summary()


def test_equal_blocks_are_compiled_once_and_a_validation_compiles_nothing() -> None:
    j = compiled(pipeline={"micro_batch_num": 1})
    ((graphs, told),) = on_ranks(1, counted, j, plan_job(j))
    assert graphs == [2, 2, 2]  # a graph of a block, and one of the loss
    assert told.startswith("2 graphs in ")
    assert told.endswith(" s; shared by 3 more modules")


def sent(world: World, j: Any, plan: Any) -> list[tuple[str, int]]:
    """Each collective of a step, and the number of elements that this rank passes, also inside graphs."""
    calls = []
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        real = getattr(dist, name)

        def count(*args: Any, real: Any = real, name: str = name, **kwargs: Any) -> Any:
            given = args[0] if isinstance(args[0], torch.Tensor) else args[1]
            calls.append((name, given.numel()))
            return real(*args, **kwargs)

        setattr(dist, name, count)
    step(j, *build(world, j, plan))
    return sorted(calls)


KEPT = {"comm": "keep", "policy": "selective"}
OVER_TP: dict[str, tuple[Any, Any]] = {
    "": (SEQUENCE, None),
    "run again": (SEQUENCE, SELECTIVE),
    "run again, what was sent kept": (SEQUENCE, {"modules": "layers.*"} | KEPT),
    "parts run again, what was sent kept": (MEGATRON, {"modules": ["layers.*.attn", "layers.*.mlp"]} | KEPT),
}


@pytest.mark.parametrize("case", list(OVER_TP) if ALL else [*OVER_TP][-1:])
def test_a_graph_sends_over_tp_what_eager_code_sends(case: str) -> None:
    operators, recompute = OVER_TP[case]
    parallel = {"grid": {"tp": 2}, "operators": operators, "recompute": recompute}
    eager, graph = (job(parallel=parallel, train__compile=how, model__layers=2) for how in (None, AOT))
    want, got = (on_ranks(2, sent, j, plan_job(j)) for j in (eager, graph))
    assert got == want
    assert len(got[0]) >= 10


AGAIN: dict[str, tuple[int, dict[str, Any]]] = {
    "one stage": (1, {"pipeline": {"micro_batch_num": 2}}),
    **{level: (2, {"hsdp": hsdp(2, level)}) for level in ("level1", "level2", "level3")},
    "1f1b, level3": (4, {"pipeline": SCHEDULES["1f1b"], "hsdp": hsdp(2, "level3")}),
}  # fmt: skip


def compiled_blocks(j: Job, modules: str) -> Job:
    how = Compile(backend="aot_eager", modules=modules)
    return j.model_copy(update={"train": j.train.model_copy(update={"compile": how})})


@exhaustive
@pytest.mark.parametrize("level", ["level1", "level3"])
def test_a_step_with_graphs_sends_what_is_planned(level: str) -> None:
    parallel = {"pipeline": SCHEDULES["1f1b"], "hsdp": hsdp(2, level), "recompute": RERUN}
    assert_as_planned(compiled_blocks(tied(parallel), "blocks.*"))


@pytest.mark.parametrize(
    ("precision", "layout"), [*product(["fp64", "fp32", "bf16", "fp16"], AGAIN)] if ALL else [("fp16", "level3")]
)
def test_recomputation_in_a_graph_has_the_bits_of_eager_code(precision: str, layout: str) -> None:
    """With a dropout rate other than 0.5, eager code in half precision rounds the scale once more."""
    ranks, parallel = AGAIN[layout]
    p = 0.5 if precision in ("bf16", "fp16") else 0.25

    def graph(modules: str, recompute: Any) -> Job:
        return compiled_blocks(tied({**parallel, "recompute": recompute}, precision, p), modules)

    ways = {way: graph("blocks.*", recompute) for way, recompute in WAYS.items()}
    ways |= {"nothing again": graph("blocks.*", None), "graphs in what runs again": graph("blocks.*.attn", RERUN)}
    both(ranks, tied(parallel, precision, p), some_of(ways))


def many_steps(world: World, j: Any, plan: Any) -> tuple[list[float], list[str]]:
    heard: list[str] = []

    class Hear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logging.getLogger("launcher").addHandler(Hear())
    par, pipe = build(world, j, plan)
    return [float(step(j, par, pipe)) for _ in range(14)], heard


def test_a_module_that_takes_a_graph_a_call_goes_on_eagerly() -> None:
    eager, graph = here("Counted"), here("Counted", train__compile=AOT)
    ((want, _),), ((got, heard),) = (on_ranks(1, many_steps, j, plan_job(j)) for j in (eager, graph))
    assert got == pytest.approx(want, rel=1e-12)
    text = "train.compile: layers.0 needs a new graph in each call, so it runs eagerly from now on"
    assert heard == [text]


def test_a_copy_of_a_compiled_module_runs_with_its_own_weights() -> None:
    together({"": here("Copied", train__compile=AOT | {"modules": "layers.0"})})[""].assert_same()


def test_a_gradient_through_a_graph_is_refused() -> None:
    with pytest.raises(RequestError) as refused:
        plan_job(here("Sloped", train__compile=AOT))
    text = (
        "layers.0.0: the forward computes a gradient itself, but a compiled graph does not support double backward; "
        "name other "
        "modules"
    )
    assert str(refused.value) == f"train.compile.modules: {text} (try: train.compile=null)"


NO_GRAPH = {
    "Broken": "Call to `torch._dynamo.graph_break()`",
    "Hooked": "Attempted to inline function marked as skipped",
}


@pytest.mark.parametrize("net", NO_GRAPH)
def test_code_with_graph_breaks_is_refused_and_runs_without_fullgraph(net: str) -> None:
    with pytest.raises(RequestError) as refused:
        plan_job(here(net, train__compile=AOT))
    text = f"layers.0: torch cannot make one graph of it: {NO_GRAPH[net]}"
    assert str(refused.value) == f"train.compile.fullgraph: true: {text} (try: train.compile.fullgraph=false)"
    together({"": here(net, train__compile=AOT | {"fullgraph": False})})[""].assert_same()


def test_code_that_only_the_run_finds_uncompilable_ends_it_with_a_cure() -> None:
    j = here("LateBroken", train__compile=AOT)
    with pytest.raises(RanksFailed) as caught:
        on_ranks(1, rank_step, j, plan_job(j))
    said = str(caught.value)
    assert said.startswith("rank 0: train.compile: aot_eager cannot compile layers.0: ")
    assert said.endswith("(try: train.compile.fullgraph=false, which runs uncompilable code eagerly)")
    assert caught.value.fault.type == RunError.__name__


@pytest.fixture
def cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ for the CPU: there is no g++")
def test_inductor_has_the_numbers_of_eager_code(cache: None) -> None:
    j = here("Dropping", train__compile={"backend": "inductor"})
    eager = here("Dropping")
    plan = plan_job(j)
    got, want = outcome(plan, on_ranks(1, seeded, j, plan)), outcome(plan, on_ranks(1, seeded, eager, plan_job(eager)))
    assert_same(got, want, 1e-12)
