from __future__ import annotations

import pytest

from launcher.job.schema.data import apart
from launcher.job.schema.steps import Certify
from launcher.plan.certify_copy import copies, notes, reduced
from launcher.plan.plan import ask
from launcher.plan.resolve.grid import sizes
from launcher.plan.sizes import Sizes
from tests.plan.made import job

LM = ("model=lm_tiny", "model.layers=6", "train.batch_size=64")


SHIPPED = ("data.tokenizer", "file -> bytes, on conversations that ship with the launcher")


def of(*words: str) -> tuple[Sizes, tuple[tuple[str, str], ...]]:
    asked = job(*words)
    found, wrong = sizes(asked)
    assert found is not None, wrong
    return found, reduced(asked, Certify(), found).changes


def test_a_copy_has_a_layer_a_virtual_stage_and_two_samples_a_micro_batch() -> None:
    found, changes = of(*LM, "parallel.pipeline.stages=2", "parallel.pipeline.micro_batch_num=4", "parallel.hsdp=null",
                        "launch.nproc=4", "train.steps=50")  # fmt: skip
    assert found.micro_batch == 8
    assert dict(changes) == {
        "model.layers": "6 -> 2", "train.batch_size": "64 -> 16", "train.steps": "50 -> 5",
        "train.precision": "fp32 -> fp64", "schedule.warmup_steps": "20 -> 2",
    }  # fmt: skip


def test_layers_that_a_setting_names_one_by_one_all_stay() -> None:
    _, changes = of(
        *LM,
        "parallel.pipeline.stages=2",
        "launch.nproc=2",
        "parallel.pipeline.stage_config={embed: 0, layers.0: 0, layers: 0, norm: 1, head: 1}",
    )
    assert "model.layers" not in dict(changes)


@pytest.mark.parametrize(("key", "all_stay"), [
    ("layers.5.*", True), ("layers.[35]", True), ("layers.?", True), ("*norm", False), ("layers.*.mlp.*", False),
])  # fmt: skip
def test_layers_that_a_group_of_parameters_may_name_all_stay(key: str, all_stay: bool) -> None:
    _, changes = of(*LM, f"optim.groups.{key}.lr=1")
    assert ("model.layers" not in dict(changes)) == all_stay


@pytest.mark.parametrize(("modules", "all_stay"), [
    ("layers.5.attn", True), ("'layers.?'", True), ("[layers, layers.2]", True), ("layers", False),
])  # fmt: skip
def test_layers_that_adapters_may_name_all_stay(modules: str, all_stay: bool) -> None:
    _, changes = of(*LM, f"model.lora={{rank: 2, alpha: 2, modules: {modules}}}")
    assert ("model.layers" not in dict(changes)) == all_stay


@pytest.mark.parametrize(("more", "change"), [
    (("vocab_size: 300", "seq_len: 512"), SHIPPED),
    (("vocab_size: 300", "seq_len: 512", "packing: best_fit"), SHIPPED),
    (("vocab_size: 300", "seq_len: 64"), ("data", "chat -> random_tokens")),
    (("vocab_size: 200", "seq_len: 512"), ("data", "chat -> random_tokens")),
], ids=["as usual", "packed", "short samples", "few tokens"])  # fmt: skip
def test_conversations_have_targets_that_do_not_count_in_the_copy_too(
    more: tuple[str, ...], change: tuple[str, str]
) -> None:
    data = f"data={{name: chat, tokenizer: file, tokenizer_file: a.json, path: a.jsonl, {', '.join(more)}}}"
    found, changes = of(*LM, data)
    assert change in changes
    copy = reduced(job(*LM, data), Certify(), found).job
    assert copy.data.name == ("chat" if change[0] == "data.tokenizer" else "random_tokens")
    assert apart(copy.data) == apart(job(*LM, data).data)


def test_half_precision_allows_roundings_where_the_layout_has_another_order_of_them() -> None:
    two = ("parallel.pipeline.stages=2", "launch.nproc=2")
    cases = {
        (): 1e-6, ("launch.nproc=2",): 1e-6, two: 2.0**-5,
        ("launch.nproc=2", "parallel.gradient_fp32_sync=false"): 2.0**-5,
    }  # fmt: skip
    for words, want in cases.items():
        asked = job(*LM, *words)
        found, _ = sizes(asked)
        assert found is not None
        assert reduced(asked, Certify(precision="bf16"), found).tolerance == want, words
    assert reduced(asked, Certify(precision="bf16", tolerance=0.5), found).tolerance == 0.5


def test_a_request_is_certified_in_its_own_precision_too() -> None:
    asked = job(*LM, "train.precision=bf16")
    found, _ = sizes(asked)
    assert found is not None
    own = [(c.job.train.precision, c.tolerance) for c in copies(asked, Certify(), found)]
    assert own == [("fp64", 1e-12), ("bf16", 1e-6)]
    assert [c.tolerance for c in copies(asked, Certify(tolerance=1e-3), found)] == [1e-3, 1e-3]
    assert [c.job.train.precision for c in copies(asked, Certify(precision="bf16"), found)] == ["bf16"]


def test_the_last_step_of_a_copy_still_moves_weights() -> None:
    asked = job(*LM, "schedule=linear", "schedule.final=0")
    found, _ = sizes(asked)
    assert found is not None
    copy = reduced(asked, Certify(), found)
    assert dict(copy.changes)["schedule.final"] == "0.0 -> 0.1"
    assert copy.job.schedule.name == "linear"


@pytest.mark.parametrize(("words", "changes"), [
    (["schedule=wsd"], {"decay_steps": "null -> 2", "final": "0.0 -> 0.1", "warmup_steps": "20 -> 2"}),
    (["schedule=wsd", "schedule.warmup_steps=0", "schedule.final=0.5", "schedule.decay_steps=9"],
     {"decay_steps": "9 -> 4"}),
    (["schedule=cosine_restarts", "schedule.period_steps=50"],
     {"period_steps": "50 -> 2", "final": "0.0 -> 0.1", "warmup_steps": "20 -> 2"}),
    (["schedule=polynomial"], {"final": "0.0 -> 0.1", "warmup_steps": "20 -> 2"}),
    (["schedule={_target_: tests.optim.own_schedules.InverseRoot}", "security.allow=[tests]"], {}),
], ids=["decay", "decay alone", "restarts", "polynomial", "own"])  # fmt: skip
def test_all_of_a_schedule_is_seen_in_the_few_steps_of_a_copy(words: list[str], changes: dict[str, str]) -> None:
    asked = job(*LM, *words)
    found, _ = sizes(asked)
    assert found is not None
    copy = reduced(asked, Certify(), found)
    assert {key[9:]: said for key, said in copy.changes if key.startswith("schedule.")} == changes
    ask(copy.job)


def test_fp16_is_certified_at_a_loss_scale_that_stays() -> None:
    asked = job(*LM, "train.precision=fp16")
    found, _ = sizes(asked)
    assert found is not None
    assert ("train.loss_scale", "null -> 1024.0") in reduced(asked, Certify(precision="fp16"), found).changes


def test_the_plan_says_what_a_certificate_is_made_of() -> None:
    asked = job(*LM, "steps=[certify]", "parallel.pipeline.stages=3", "launch.nproc=3", "parallel.hsdp=null",
                "parallel.pipeline.micro_batch_num=4", "train.steps=2")  # fmt: skip
    found, _ = sizes(asked)
    assert found is not None
    assert [str(n) for n in notes(asked, found)] == [
        "steps.certify trains a copy first: model.layers 6 -> 3, train.batch_size 64 -> 8, "
        "train.steps 2 -> 5, train.precision fp32 -> fp64, schedule.warmup_steps 20 -> 2; "
        "errors up to 1e-12 are allowed; then one in fp32, errors up to 1e-06"
    ]
