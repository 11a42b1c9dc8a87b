"""Settings made in Python raise TypeError, ValueError or KeyError where AutoParallel's documents say so."""

from __future__ import annotations

from typing import Any

import pytest

from launcher import Job, plan_job
from launcher.errors import RequestError, RequestTypeError
from launcher.job.compose import compose
from launcher.job.schema.parallel import CommFusion, Hsdp, Parallel, Pipeline
from tests.parity import job

ALL = "'gpipe', '1f1b', 'zero_bubble_h1', 'zero_bubble_v', 'dualpipe_v', 'seqpipe', 'seqvpp', 'seqsmartvpp' or 'auto'"
MODES = "'semi_auto', 'sharding_propagation' or 'recursive_programming'"
WORDS = "should be 'data_parallel' or 'full_batch' or a list or a group of keys"

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "shard_size 0": ({"hsdp": {"shard_size": 0}}, ValueError,
        "parallel.hsdp.shard_size: 0: must be -1 (all data-parallel ranks) or a positive integer"),
    "shard_size text": ({"hsdp": {"shard_size": "2"}}, TypeError,
        "parallel.hsdp.shard_size: '2': should be a whole number"),
    "threshold text": ({"hsdp": {"threshold": "64"}}, TypeError,
        "parallel.hsdp.threshold: '64': should be a whole number"),
    "threshold -1": ({"hsdp": {"threshold": -1}}, ValueError, "parallel.hsdp.threshold: -1: should be at least 0"),
    "level4": ({"hsdp": {"optimizer_level": "level4"}}, ValueError,
        "parallel.hsdp.optimizer_level: 'level4': should be 'level1', 'level2' or 'level3'"),
    "level no text": ({"hsdp": {"optimizer_level": 1}}, TypeError,
        "parallel.hsdp.optimizer_level: 1: should be 'level1', 'level2' or 'level3'"),
    "stages 0": ({"pipeline": {"stages": 0}}, ValueError, "parallel.pipeline.stages: 0: should be at least 1"),
    "stages text": ({"pipeline": {"stages": "2"}}, TypeError,
        "parallel.pipeline.stages: '2': should be a whole number"),
    "stages true": ({"pipeline": {"stages": True}}, TypeError,
        "parallel.pipeline.stages: True: should be a whole number"),
    "output_broadcast 1": ({"pipeline": {"output_broadcast": 1}}, TypeError,
        "parallel.pipeline.output_broadcast: 1: should be true or false"),
    "interleave text": ({"pipeline": {"interleave": "yes"}}, TypeError,
        "parallel.pipeline.interleave: 'yes': should be true or false"),
    "unknown scheduler": ({"pipeline": {"scheduler": "1F1B"}}, ValueError,
        f"parallel.pipeline.scheduler: '1F1B': should be {ALL}"),
    "scheduler no text": ({"pipeline": {"scheduler": 3}}, TypeError,
        f"parallel.pipeline.scheduler: 3: should be {ALL}"),
    "micro_batch_num 0": ({"pipeline": {"micro_batch_num": 0}}, ValueError,
        "parallel.pipeline.micro_batch_num: 0: should be at least 1"),
    "micro_batch_num text": ({"pipeline": {"micro_batch_num": "2"}}, TypeError,
        "parallel.pipeline.micro_batch_num: '2': should be a whole number"),
    "unknown mode": ({"mode": "data_parallel"}, ValueError, f"parallel.mode: 'data_parallel': should be {MODES}"),
    "comm_fusion no group": ({"comm_fusion": 64}, TypeError, "parallel.comm_fusion: 64: should be a group of keys"),
    "comm_fusion unknown key": ({"comm_fusion": {"all": {}}}, ValueError, "parallel.comm_fusion.all: unknown key"),
    "comm_fusion of the wrong form": ({"comm_fusion": {"allreduce": {"mode": "index", "config": [35, 20]}}}, ValueError,
        "parallel.comm_fusion.allreduce: {'mode': 'index', 'config': [35, 20]}: mode index needs config: a list of "
        "ascending, distinct parameter indices"),
    "comm_fusion unknown mode": ({"comm_fusion": {"allgather": {"mode": "index"}}}, ValueError,
        "parallel.comm_fusion.allgather.mode: 'index': should be 'auto' or 'size'"),
    "comm_fusion of 0 MB": ({"comm_fusion": {"allgather": {"mode": "size", "config": 0}}}, ValueError,
        "parallel.comm_fusion.allgather.config: 0: should be more than 0"),
    "comm_fusion openstate 1": ({"comm_fusion": {"openstate": 1}}, TypeError,
        "parallel.comm_fusion.openstate: 1: should be true or false"),
    "dataset_strategy None": ({"dataset_strategy": None}, ValueError, f"parallel.dataset_strategy: None: {WORDS}"),
    "dataset_strategy no list": ({"dataset_strategy": 8}, TypeError, f"parallel.dataset_strategy: 8: {WORDS}"),
    "dataset_strategy no such word": ({"dataset_strategy": "half"}, ValueError,
        f"parallel.dataset_strategy: 'half': {WORDS}"),
    "dataset_strategy not nested": ({"dataset_strategy": (8, 1)}, TypeError,
        "parallel.dataset_strategy: item [0] = 8: should be a list"),
    "dataset_strategy no numbers": ({"dataset_strategy": ((8, "1"), (8,))}, TypeError,
        "parallel.dataset_strategy: item [0][1] = '1': should be a whole number"),
    "gradients_mean 1": ({"gradients_mean": 1}, TypeError, "parallel.gradients_mean: 1: should be true or false"),
    "operator strategy not absolute": ({"operator_strategy": {"save": "o.json"}}, KeyError,
        "parallel.operator_strategy.save: 'o.json': should be an absolute path"),
    "operator strategy not .json": ({"operator_strategy": {"load": "/o.txt"}}, KeyError,
        "parallel.operator_strategy.load: '/o.txt': should end in .json"),
    "operator strategy no text": ({"operator_strategy": {"save": 5}}, TypeError,
        "parallel.operator_strategy.save: 5: should be text"),
    "parameter strategy to save no text": ({"param_strategy": {"save": 5}}, TypeError,
        "parallel.param_strategy.save: 5: should be text"),
    "parameter strategy no text": ({"param_strategy": {"load": 5}}, TypeError,
        "parallel.param_strategy.load: 5: should be text"),
    "group file no text": ({"group_file": ["g.json"]}, TypeError,
        "parallel.group_file: ['g.json']: should be text"),
    "dump no text": ({"local_norm": {"dump": 3}}, TypeError, "parallel.local_norm.dump: 3: should be text"),
    "transformer_opt no text": ({"transformer_opt": 5}, TypeError,
        "parallel.transformer_opt: 5: should be text or a group of keys"),
}  # fmt: skip


def least(parallel: Any) -> dict[str, Any]:
    return job().model_dump(by_alias=True) | {"parallel": parallel}


@pytest.mark.parametrize("name", WRONG)
def test_a_job_made_in_python_raises_what_is_documented(name: str) -> None:
    parallel, kind, text = WRONG[name]
    for make in (lambda: Job(**least(parallel)), lambda: Job.model_validate(least(parallel))):
        with pytest.raises(kind) as caught:
            make()
        assert isinstance(caught.value, RequestError)
        assert str(caught.value) == text
        assert isinstance(caught.value, TypeError) == (kind is TypeError or "None" in name)


def test_errors_of_a_section_made_in_python_name_its_own_keys() -> None:
    with pytest.raises(TypeError, match=r"^stages: '2': should be a whole number$"):
        Pipeline(stages="2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^threshold: -1: should be at least 0$"):
        Parallel(hsdp=Hsdp(threshold=-1))
    with pytest.raises(ValueError, match=r"^allgather.index: unknown key$"):
        CommFusion(allgather={"index": 1})  # type: ignore[arg-type]


def test_everything_wrong_is_said_at_once_and_a_secret_never() -> None:
    data = least({"pipeline": {"stages": "2"}, "hsdp": {"threshold": -1}})
    data["checkpoint"]["encrypt"] = 5
    with pytest.raises(RequestTypeError) as caught:
        Job(**data)
    assert str(caught.value).splitlines() == [
        "parallel.pipeline.stages: '2': should be a whole number",
        "parallel.hsdp.threshold: -1: should be at least 0",
        "checkpoint.encrypt: ***: should be text",
    ]


def test_names_of_files_are_a_key_error_only_where_nothing_else_is_wrong() -> None:
    data = least({"operator_strategy": {"save": "o.json"}, "hsdp": {"threshold": -1}})
    with pytest.raises(RequestError) as caught:
        Job(**data)
    assert not isinstance(caught.value, KeyError)


def test_problems_that_only_the_plan_finds_are_value_errors() -> None:
    with pytest.raises(ValueError, match=r"^parallel.transformer_opt: nowhere.json: cannot be read: No such file"):
        plan_job(job(parallel__transformer_opt="nowhere.json"))
    with pytest.raises(ValueError, match=r"^parallel.transformer_opt.x: unknown switch"):
        plan_job(job(parallel__transformer_opt={"x": 1}))
    with pytest.raises(ValueError, match=r"^parallel.dataset_strategy: \[\[3,1\],\[3,1\]\]: dim 0 is cut into 3"):
        plan_job(job(parallel__dataset_strategy=[[3, 1], [3, 1]]))


@pytest.mark.parametrize(
    ("key", "given", "text"),
    [
        ("comm_fusion", [1], "parallel.comm_fusion: [1]: 1 is not a valid value of this key"),
        ("hsdp", [1, 2], "parallel.hsdp: [1, 2]: 1 is not a valid value of this key"),
        ("hsdp", [], "parallel.hsdp: []: the list is empty"),
    ],
)
def test_a_list_where_a_group_of_keys_is_meant_is_no_list_of_candidates(key, given, text):
    data = compose(["recipe=lm_single"]).job.model_dump(mode="json", by_alias=True)
    data["parallel"][key] = given
    with pytest.raises(RequestTypeError) as caught:
        Job.model_validate(data)
    assert str(caught.value) == text
    data["parallel"][key] = [{}]
    assert Job.model_validate(data).search.over == {f"parallel.{key}": ({},)}


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("data", None, "data: None: should be a group of keys with a name, or with _target_"),
        ("loss", {"name": "focal"}, "loss: {'name': 'focal'}: unknown choice 'focal'; should be one of "
                                    "cross_entropy, mse, bce"),
        ("metrics", ["f1"], "metrics: item [0] = {'name': 'f1'}: unknown choice 'f1'; should be one of accuracy, "
                            "top_k, perplexity, bits_per_byte"),
    ],
)  # fmt: skip
def test_an_option_that_does_not_exist_is_named_with_those_that_do(key: str, value: Any, text: str) -> None:
    """In words of a recipe, not in those of the library that checks it."""
    data = compose(["recipe=lm_single"]).job.model_dump(mode="json", by_alias=True)
    with pytest.raises(RequestError) as caught:
        Job.model_validate(data | {key: value})
    assert str(caught.value) == text
