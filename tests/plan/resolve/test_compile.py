"""``train.compile``: which modules are compiled, and the full text of each refusal."""

from __future__ import annotations

import shlex

import pytest

from launcher.errors import RequestError
from launcher.job.compose import compose
from launcher.planner.plan_job import plan_job
from tests.plan.made import job, refusal
from tests.tiers import some

ON = "train.compile={}"
PP2 = "parallel.pipeline.stages=2 launch.nproc=2"
PP2_DEEP = f"{PP2} model.layers=4"
SHARD2 = "'parallel.hsdp={threshold: 0}' launch.nproc=2"
TP2 = "operators=megatron parallel.grid.tp=2 launch.nproc=2"


def override_words(text: str) -> list[str]:
    return shlex.split(text)


CHOSEN = {
    "": "layers.0 .. layers.1 and the loss by inductor: one graph each, for the planned shapes; the first step may "
        "take 3600 s",
    "train.compile.modules=stages train.compile.fullgraph=false train.compile.dynamic=null":
        "each stage and the loss by inductor: eager where it cannot be compiled, for shapes that torch chooses; the "
        "first "
        "step may take 3600 s",
    "train.compile.modules=layers.* train.compile.mode=max-autotune-no-cudagraphs train.compile.timeout_s=60":
        "layers.0 .. layers.1 and the loss by inductor (max-autotune-no-cudagraphs): one graph each, for the planned "
        "shapes; the first step may take 60 s",
    "train.compile.modules=[layers.1.mlp,layers.1.attn,head] train.compile.backend=aot_eager "
    "train.compile.dynamic=true":
        "layers.1.attn, layers.1.mlp, head and the loss by aot_eager: one graph each, for any shape; the first step "
        "may take 3600 s",
}  # fmt: skip


@pytest.mark.parametrize("words", some(CHOSEN), ids=some(["default", "stages", "a glob", "a list"]))
def test_the_plan_says_what_is_compiled(words: str) -> None:
    from launcher.plan.resolve.compile import line

    plan = plan_job(job("model.layers=2", ON, *override_words(words)))
    assert plan.compilation is not None
    assert line(plan.compilation) == CHOSEN[words]


def test_without_it_a_plan_compiles_nothing() -> None:
    assert plan_job(job("model.layers=1")).compilation is None


EARLY = {
    "train.compile={backend: aot_eager, mode: max-autotune-no-cudagraphs}":
        "train.compile.mode: max-autotune-no-cudagraphs: is a mode of inductor, but train.compile.backend is aot_eager "
        "(try: train.compile.mode=default)",
    "train.compile={mode: reduce-overhead}":
        "train.compile.mode: reduce-overhead: records CUDA graphs, which support one call at a time, but a step has "
        "several micro batches in flight (try: train.compile.mode=max-autotune-no-cudagraphs)",
}  # fmt: skip


@pytest.mark.parametrize("word", EARLY, ids=["a mode of another backend", "CUDA graphs"])
def test_compile_settings_that_no_model_can_have_are_refused_without_a_model(word: str) -> None:
    assert str(refusal(word)) == EARLY[word]


SPLIT = "splits each backward in two, but a compiled backward cannot be split; 1f1b does not split backwards"
REFUSED = {
    f"{PP2} {ON} parallel.pipeline.scheduler=zero_bubble_h1":
        f"train.compile: zero_bubble_h1 {SPLIT} (try: parallel.pipeline.scheduler=1f1b)",
    f"{PP2_DEEP} {ON} parallel.pipeline.scheduler=zero_bubble_v parallel.pipeline.micro_batch_num=4":
        f"train.compile: zero_bubble_v {SPLIT} (try: parallel.pipeline.scheduler=1f1b "
        "parallel.pipeline.interleave=true parallel.pipeline.chunks=2)",
    f"{PP2_DEEP} {ON} parallel.pipeline.scheduler=dualpipe_v parallel.pipeline.micro_batch_num=4":
        f"train.compile: dualpipe_v {SPLIT} (try: parallel.pipeline.scheduler=1f1b "
        "parallel.pipeline.interleave=true parallel.pipeline.chunks=2)",
    f"{PP2} {ON} parallel.pipeline.scheduler=seqpipe parallel.pipeline.seq_chunks=2":
        "train.compile: parallel.pipeline.seq_chunks is 2: modules keep state from one piece of a sequence to the "
        "next, which a compiled graph does not see; use only one of the two (try: train.compile=null)",
    "train.compile.backend=inducter":
        "train.compile.backend: inducter: torch has no such backend; it has {} (try: train.compile.backend=inductor)",
    "train.compile.backend=aoteager":
        "train.compile.backend: aoteager: torch has no such backend; it has {} (try: train.compile.backend=aot_eager)",
    "train.compile.modules=layer.*":
        "train.compile.modules: layer.*: no module has this name; modules are embed, layers, norm, head "
        "(try: 'train.compile.modules=layers.*')",
    "train.compile.modules=[head,layer.0]":
        "train.compile.modules: layer.0: no module has this name; modules are layers.0 "
        "(try: 'train.compile.modules=[head,layers.0]')",
    "train.compile.modules=layers":
        "train.compile.modules: layers: a list of modules, which is not called itself; name modules inside it "
        "(try: 'train.compile.modules=layers.*')",
    f"{SHARD2} train.compile.modules=stages":
        "train.compile.modules: stages: a stage is one graph, but the weights of layers.0, layers.1, norm are "
        "gathered inside it; auto compiles only modules that are gathered at once (try: train.compile.modules=auto)",
    f"{SHARD2} train.compile.modules=layers.0 parallel.comm_fusion.openstate=false":
        "train.compile.modules: layers.0 is one graph, but the weights of layers.0.attn.q, layers.0.attn.k, "
        "layers.0.attn.v and 6 more are gathered inside it; with fusion, a block is gathered at once "
        "(try: parallel.comm_fusion.openstate=true)",
    f"{TP2} train.compile.modules=layers.0.attn.q":
        "train.compile.modules: layers.0.attn.q: an operator over tp shares its input with neighboring operators; "
        "compile the module around it (try: train.compile.modules=auto)",
    f"{TP2} {ON} 'parallel.recompute={{modules: layers.*.attn}}'":
        "train.compile.modules: layers.0.attn, layers.1.attn: a graph cannot recompute all of a module that "
        "is cut over tp; use policy selective (try: parallel.recompute.policy=selective parallel.recompute.comm=keep)",
    f"{TP2} {ON} 'parallel.recompute={{modules: layers.*.attn, policy: selective}}'":
        "parallel.recompute.comm: recompute: a partial graph would also send its last result over tp again, for "
        "nothing (try: parallel.recompute.comm=keep)",
    f"{TP2} train.compile.modules=layers.*.attn 'parallel.recompute={{modules: layers.*}}'":
        "train.compile.modules: layers.0 is recomputed and cut over tp, and a module inside it is compiled: the graph "
        "would repeat collectives needlessly; compile layers.0 or recompute it, not both (try: train.compile=null)",
    "train.compile.modules=layers.0.attn 'parallel.recompute={modules: layers.0, policy: selective}'":
        "train.compile.modules: layers.0.attn: inside layers.0, where parallel.recompute keeps results of single "
        "operations, which a graph hides; compile layers.0 (try: train.compile.modules=auto)",
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_impossible_compile_settings_are_refused_with_a_cure_that_works(words: str) -> None:
    from launcher.parallel.compile import backends

    typed = [ON, "model.layers=2", *override_words(words.replace(ON, ""))]
    with pytest.raises(RequestError) as caught:
        plan_job(compose(["recipe=lm_single", *typed]).job)
    known = ", ".join(sorted(b for b in backends() if "TESTING" not in b))
    assert str(caught.value) == REFUSED[words].format(known)
    cures = [w for p in caught.value.problems for w in shlex.split(p.cure)]
    if cures:
        assert plan_job(compose(["recipe=lm_single", *typed, *cures]).job)


def test_auto_takes_a_scheduler_that_leaves_backwards_whole() -> None:
    auto = [*override_words(PP2_DEEP), "parallel.pipeline.scheduler=auto", "parallel.pipeline.micro_batch_num=4"]
    assert plan_job(job(*auto)).scheduler == "zero_bubble_h1"
    assert plan_job(job(*auto, ON)).scheduler in ("1f1b", "gpipe")
