from __future__ import annotations

import json
from dataclasses import replace

import pytest

from launcher.plan.plan import Plan
from launcher.plan.show.text import LEAST_LINES, SHORT, short, text
from launcher.plan.values.model_graph import Graph, ModelStructure
from launcher.plan.values.note import Note
from launcher.plan.values.recomputed_module import Recomputed
from tests.plan.made import chain, graph, job, planned, skeleton

ONE = graph("x: input x", "model: module . < x", "output: output output < model")


def decoder(layers: int, dim: int = 64) -> tuple[ModelStructure, Graph]:
    """An embedding, ``layers`` equal layers, a norm, and a head tied to the embedding."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (256, dim)}
    for i in range(layers):
        shapes |= {f"layers.{i}.{w}.weight": (dim, dim) for w in ("attn", "mlp")} | {f"layers.{i}.norm": (dim,)}
    shapes |= {"norm.weight": (dim,), "head.weight": (256, dim)}
    model = skeleton(shapes, same={"head.weight": "embed.weight"}, containers=["layers"])
    return model, chain("embed", *(f"layers.{i}" for i in range(layers)), "norm", "head")


def hundred() -> Plan:
    """100 layers on 4 stages x 2 replicas x 8 shards."""
    j = job(
        "name=hundred", "launch.nproc=64", "parallel.pipeline.stages=4", "parallel.pipeline.micro_batch_num=8",
        "parallel.hsdp={shard_size: 8, threshold: 1, optimizer_level: level2}", "train.batch_size=512",
    )  # fmt: skip
    return planned(j, *decoder(100))


HUNDRED = """\
plan of hundred
  grid      pp 4 x dp_replicate 2 x dp_shard 8 x tp 1 = 64 ranks
  model     842.0k parameters, fp32, seed 0
  batch     512 samples = 16 data-parallel ranks x 8 micro batches x 4 samples; 200 steps
  data      text: 102,400 samples in 200 steps
  optimizer adamw: lr 0.003, betas [0.9, 0.95], weight_decay 0.1
  lr        cosine: 20 steps of warm-up, then from lr down to 0.1 of it at step 200
  clipping  a gradient with a norm above 1 is scaled down to it (train.clip_norm)
  schedule  1f1b: bubble 27.7%, 48 messages a step; micro batches in flight: 4, 3, 2, 1
            ranks 0-15  |0011223............AAAA44BBBB55CCCC66DDDD77EEE...FFF..GGGG..HHHH|
            ranks 16-31 |..001122.......AAAA33BBBB44CCCC55DDDD66EEEE77FFFF..GGG..HHHH....|
            ranks 32-47 |....0011....AAA22BBBB33CCCC44DDDD55EEEE66FFFF77GGGG.HHHH........|
            ranks 48-63 |......00AAAA11BBB22CCCC33DDDD44EEEE55FFFF66GGGG77HHH............|
  stages    0 on ranks 0-15: embed, layers.0 .. layers.23; 214.5k parameters, 250 FLOP forward a micro batch
            1-2 on ranks 16-47: layers.24 .. layers.75, 26 modules each; 214.7k parameters, 260 FLOP forward a micro
              batch each
            3 on ranks 48-63: layers.76 .. layers.99, norm, head; 214.6k parameters, 260 FLOP forward a micro batch
  sends     0 -> 1 .. 2 -> 3: float32[2, 4], 32 B a micro batch each
  tied      embed.weight = head.weight on stages 0, 3: gradients summed, counted and saved once
  hsdp      level2: 201 parameters over 8 ranks, gathered in 102 groups
            stage 0: embed, 1 parameter, 64.0 KB
            stages 0-3: layers.0 .. layers.99, 2 parameters, 32.0 KB each
            stage 3: head, 1 parameter, 64.0 KB
  reduce    stage 0: 24 unsharded parameters, 6.0 KB, one all-reduce a step
            stages 1-2: 26 unsharded parameters, 6.5 KB, one all-reduce a step each
            stage 3: 25 unsharded parameters, 6.2 KB, one all-reduce a step
  overlap   weights are gathered once a step, ahead of use, and waited for where a group is used first; FSDP2 reduces
              each group during backward where launch.device=auto finds an accelerator; on CPUs ranks wait
  traffic   ranks      all-gather  reduce-scatter      all-reduce            send         receive
            0-15     25: 832.0 KB     200: 6.5 MB    29: 118.2 KB        8: 256 B        8: 256 B
            16-47    26: 832.0 KB     208: 6.5 MB    29: 110.7 KB       16: 512 B       16: 512 B
            48-63    25: 832.0 KB     200: 6.5 MB    30: 118.4 KB        8: 256 B        8: 256 B
  memory    ranks      params       grads   optimizer    gathered activations       total
            0-15     110.0 KB    110.0 KB    220.0 KB    968.0 KB      1.1 KB      1.4 MB
            16-31    110.5 KB    110.5 KB    221.0 KB    900.0 KB      1.5 KB      1.3 MB
            32-47    110.5 KB    110.5 KB    221.0 KB    900.0 KB      1.4 KB      1.3 MB
            48-63    110.2 KB    110.2 KB    220.5 KB    968.0 KB       744 B      1.4 MB
  steps     on 64 ranks: train, evaluate, save
            in one process: export, sample
  settings  parallel.hsdp.optimizer_level=level2: applied, gradients are sharded too and reduced after every micro batch
  notes     parallel.pipeline.stage_config auto -> the stages above: balanced by flops and bytes written, the slowest
              rank 1.0% above the mean
            parallel.hsdp.threshold 1 KB: 101 smaller parameters stay unsharded; gradients are all-reduced together
"""


def test_a_hundred_layers_are_a_page() -> None:
    assert text(hundred()) + "\n" == HUNDRED


SMALL = """\
plan of small
  grid      pp 1 x dp_replicate 1 x dp_shard 1 x tp 1 = 1 rank
  model     8 parameters, 4 of them frozen, fp32, seed 0
  batch     1 sample = 1 data-parallel rank x 1 micro batch x 1 sample; 1 step
  data      text: 1 sample in 1 step
  optimizer adamw: lr 0.003, betas [0.9, 0.95], weight_decay 0.1
  lr        cosine: warm-up takes 20 steps, and the training has only 1
  clipping  a gradient with a norm above 1 is scaled down to it (train.clip_norm)
  schedule  one stage, 1 micro batch a step
  stages    0 on rank 0: the full model; 8 parameters, 10 FLOP forward a micro batch
  memory    ranks      params       grads   optimizer    gathered activations       total
            0            48 B         0 B        32 B         0 B       136 B       216 B
  steps     on 1 rank: train
  notes     parallel.pipeline.micro_batch_num null -> 1: as many as stages
            schedule.warmup_steps 20: the training, 1 step, is all warm-up
"""


def test_one_is_not_written_as_many() -> None:
    model = skeleton({"a.weight": (4,), "b.weight": (4,), "b.mean": (4,)}, frozen=["b.weight"], buffers=["b.mean"])
    j = job("name=small", "train.steps=1", "train.batch_size=1", "steps=[train]")
    assert text(planned(j, model, ONE)) + "\n" == SMALL


def lines(plan: Plan, label: str) -> list[str]:
    """Return the text beside ``label``."""
    rows = [(row[2:12].strip(), row[12:]) for row in text(plan).splitlines()[1:]]
    out, last = [], ""
    for name, row in rows:
        last = name or last
        out += [row] if last == label else []
    return out


def test_a_frozen_tie_has_no_gradients_to_sum() -> None:
    model = skeleton(
        {"a.weight": (4,), "b.weight": (4,)}, same={"b.weight": "a.weight"}, frozen=["a.weight", "b.weight"]
    )
    j = job("launch.nproc=2", "parallel.pipeline={stages: 2, stage_config: {a: 0, b: 1}}")
    assert lines(planned(j, model, chain("a", "b")), "tied") == [
        "a.weight = b.weight on stages 0, 1: frozen, counted and saved once"
    ]


def test_a_deep_pipeline_shows_its_ends() -> None:
    model, glue = decoder(30)
    j = job("launch.nproc=20", "parallel.pipeline.stages=20", "train.batch_size=20", "steps=[train]")
    _, *rows = lines(planned(j, model, glue), "schedule")
    assert [row.partition(" |")[0] for row in rows] == [
        *(f"rank {r} " for r in range(8)), "... 4 rows more ...", *(f"rank {r}" for r in range(12, 20)),
    ]  # fmt: skip


def test_equal_neighbors_among_virtual_stages_are_one_line() -> None:
    model, glue = decoder(14)
    j = job(
        "launch.nproc=8", "parallel.pipeline={stages: 4, chunks: 4, interleave: true, micro_batch_num: 4}",
        "train.batch_size=8", "steps=[train]",
    )  # fmt: skip
    assert lines(planned(j, model, glue), "stages") == [
        "0 on ranks 0-1: embed; 16.4k parameters, 10 FLOP forward a micro batch",
        "1-12 on ranks 0-7: layers.0 .. layers.11, 1 module each; 8.3k parameters, 10 FLOP forward a micro batch each",
        "13 on ranks 2-3: layers.12 .. layers.13; 16.5k parameters, 20 FLOP forward a micro batch",
        "14 on ranks 4-5: norm; 64 parameters, 10 FLOP forward a micro batch",
        "15 on ranks 6-7: head; 16.4k parameters, 10 FLOP forward a micro batch",
    ]


def stage_rows(config: dict[str, int], costly: str = "") -> list[str]:
    """Return the rows of stages whose modules have one weight each; ``costly`` takes twice the flops.

    There are as many ranks as stages.
    """
    model = skeleton({f"{m}.weight": (4,) for m in config})
    glue = chain(*config)
    nodes = [replace(n, flops=2 * n.flops) if n.target == costly else n for n in glue.nodes]
    ranks = max(config.values()) + 1
    stages = json.dumps(config).replace('"', "")
    pipeline = f"{{stages: {ranks}, micro_batch_num: {ranks}, stage_config: {stages}}}"
    j = job(f"launch.nproc={ranks}", f"parallel.pipeline={pipeline}", f"train.batch_size={ranks}", "steps=[train]")
    return lines(planned(j, model, Graph(tuple(nodes))), "stages")


COST = "4 parameters, 10 FLOP forward a micro batch"


@pytest.mark.parametrize(
    ("config", "costly", "rows"),
    [
        ({"b.0": 0, "b.1": 1, "b.2": 2}, "", [f"0-2 on ranks 0-2: b.0 .. b.2, 1 module each; {COST} each"]),
        (
            {"b.0": 0, "b.1": 1, "b.2": 2}, "b.2",
            [
                f"0-1 on ranks 0-1: b.0 .. b.1, 1 module each; {COST} each",
                "2 on rank 2: b.2; 4 parameters, 20 FLOP forward a micro batch",
            ],
        ),
        (
            {"b.0": 0, "c.0": 1, "b.1": 2},
            "", [f"0 on rank 0: b.0; {COST}", f"1 on rank 1: c.0; {COST}", f"2 on rank 2: b.1; {COST}"],
        ),
    ],
    ids=["alike", "one costs more", "other modules between"],
)  # fmt: skip
def test_only_equal_neighbors_are_one_line(config: dict[str, int], costly: str, rows: list[str]) -> None:
    assert stage_rows(config, costly) == rows


def test_results_that_dispatch_modes_keep_are_named() -> None:
    """Keeping random numbers needs dispatch modes, which are slower; keeping only matmuls does not."""
    plan = planned(job("name=kept", "launch.nproc=1", "parallel.pipeline.stages=1"), *decoder(2))

    def kept(*kinds: str) -> str:
        shown = text(replace(plan, recomputed=(Recomputed("layers.0", kinds),)))
        return next(line for line in shown.splitlines() if "recompute" in line)

    assert "layers.0, keeping matmul, random (by dispatch modes, slower: random): " in kept("matmul", "random")
    assert "layers.0, keeping matmul: " in kept("matmul")


def test_stages_that_send_different_things_are_not_drawn_together() -> None:
    model = skeleton({f"{m}.weight": (4,) for m in "abcd"})
    glue = graph(
        "x: input x",
        "a: module a < x",
        "b: module b < a",
        "c: module c < b a",
        "d: module d < c",
        "output: output output < d",
    )
    j = job("launch.nproc=4", "parallel.pipeline.stages=4", "steps=[train]")
    assert lines(planned(j, model, glue), "sends") == [
        "0 -> 1: a float32[2, 4], 32 B a micro batch",
        "1 -> 2: a, b float32[2, 4], float32[2, 4], 64 B a micro batch",
        "2 -> 3: c float32[2, 4], 32 B a micro batch",
    ]


def deep() -> Plan:
    """A plan of 64 stages, no two of which hold the same modules."""
    j = job(
        "name=deep", "launch.nproc=64", "parallel.pipeline={stages: 64, micro_batch_num: 64}",
        "train.batch_size=64", "steps=[train]", "cluster.memory_gb=1",
    )  # fmt: skip
    plan = planned(j, *decoder(150))
    rows = tuple(replace(m, activations=(m.rank + 1) << 20) for m in plan.estimate.memory)
    return replace(plan, estimate=replace(plan.estimate, memory=rows))


def section(page: str, label: str) -> list[str]:
    """Return the lines from ``label`` to the next label, without the label."""
    rows = page.splitlines()[1:]
    start = next(i for i, row in enumerate(rows) if row.startswith(f"  {label} "))
    rest = [i for i, row in enumerate(rows) if i > start and row[2] != " "]
    return [row[12:] for row in rows[start : min(rest, default=None)]]


def test_of_many_rows_a_short_text_has_the_ends() -> None:
    assert len(section(text(deep()), "memory")) == 66
    assert section(short(deep()), "memory") == [
        "ranks      params       grads   optimizer    gathered activations       total",
        "0        128.5 KB    128.5 KB    257.0 KB         0 B      1.0 MB      1.5 MB",
        "1         96.8 KB     96.8 KB    193.5 KB         0 B      2.0 MB      2.4 MB",
        "2         96.8 KB     96.8 KB    193.5 KB         0 B      3.0 MB      3.4 MB",
        "3         96.8 KB     96.8 KB    193.5 KB         0 B      4.0 MB      4.4 MB",
        "... 56 rows more: show=plan-full",
        "60        64.5 KB     64.5 KB    129.0 KB         0 B     61.0 MB     61.3 MB",
        "61        64.5 KB     64.5 KB    129.0 KB         0 B     62.0 MB     62.3 MB",
        "62        64.5 KB     64.5 KB    129.0 KB         0 B     63.0 MB     63.3 MB",
        "63        64.2 KB     64.2 KB    128.5 KB         0 B     64.0 MB     64.3 MB",
        "fits: 64.3 MB of 1.0 GB on rank 63",
    ]


def test_a_text_that_is_a_page_is_the_short_one_too() -> None:
    assert short(hundred()) == text(hundred())


@pytest.mark.parametrize("most", [38, 39, SHORT, 60])
def test_a_short_text_is_a_page(most: int) -> None:
    assert len(short(deep(), most).splitlines()) == most
    assert len(short(hundred(), most).splitlines()) <= most
    assert max(map(len, short(deep(), most).splitlines())) <= 120


def test_every_section_has_its_least_on_a_page() -> None:
    assert sum(LEAST_LINES.values()) + 1 <= SHORT


def test_a_short_text_has_what_nobody_asked_for_rather_than_defaults() -> None:
    plan = deep()
    defaults = [Note(f"key{i}", f"null -> {i}: because") for i in range(30)]
    warning = Note("parallel.hsdp", "has no effect: the shard axis has one rank")
    noted = replace(plan, notes=(*defaults[:15], warning, *defaults[15:]))
    assert section(short(noted), "notes") == [
        "key0 null -> 0: because",
        "key1 null -> 1: because",
        "key2 null -> 2: because",
        "... 24 rows more: show=plan-full",
        "parallel.hsdp has no effect: the shard axis has one rank",
        "key27 null -> 27: because",
        "key28 null -> 28: because",
        "key29 null -> 29: because",
    ]


def test_long_lines_are_wrapped_under_themselves() -> None:
    rows = text(hundred()).splitlines()
    assert max(map(len, rows)) <= 120
