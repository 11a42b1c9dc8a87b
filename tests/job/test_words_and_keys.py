"""Settings that take a word or keys: if both are typed, both count, or the request is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.errors import RequestError
from launcher.job.compose import Request, compose
from launcher.job.config_folders import ConfigFiles
from launcher.job.cures.paste import pasted
from launcher.job.overrides import paste
from launcher.job.schema import keys
from launcher.job.schema.search import AXES

AUTO = "auto"
BOTH: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "parallel": (
        AUTO, "pipeline.micro_batch_num=2",
        {"parallel.pipeline.micro_batch_num": 2, "search.over.parallel.pipeline.stages": AUTO},
    ),
    "parallel.grid": (
        AUTO, "tp=1",
        {"parallel.grid.tp": 1, "search.over.parallel.pipeline.stages": AUTO,
         "search.over.parallel.hsdp.shard_size": AUTO},
    ),
    "parallel.hsdp": (
        AUTO, "threshold=8",
        {"parallel.hsdp.threshold": 8, "search.over.parallel.hsdp.shard_size": AUTO,
         "search.over.parallel.hsdp.optimizer_level": AUTO},
    ),
    "parallel.comm_fusion": (
        AUTO, "openstate=false",
        {"parallel.comm_fusion.openstate": False, "search.over.parallel.comm_fusion": AUTO},
    ),
    "parallel.recompute": (
        AUTO, "comm=keep", {"parallel.recompute.comm": "keep", "parallel.recompute.modules": AUTO},
    ),
    "parallel.transformer_opt": (
        "some/s.json", "strict=true",
        {"parallel.transformer_opt.strict": True, "parallel.transformer_opt.file": "some/s.json"},
    ),
    "logger.wandb": (True, "project=mine", {"logger.wandb.project": "mine"}),
    "logger.mlflow": (True, "experiment=mine", {"logger.mlflow.experiment": "mine"}),
    "logger.trackio": (True, "project=mine", {"logger.trackio.project": "mine"}),
    "debug.profiler": (True, "memory=true", {"debug.profiler.memory": True}),
}  # fmt: skip
"""Settings, a word that each accepts, a key below it, and what the request has if both are typed."""

KEYS_DECIDE = {"parallel.pipeline.stage_config": (AUTO, "head=0")}
"""Settings whose default is the word, which means that no key is set."""

REFUSED = {
    "parallel.operators": (AUTO, "head.weight=[tp,null]"),
    "parallel.recompute.modules": ("layers.0", "head=full"),
    "parallel.dataset_strategy": ("full_batch", "matrix=[2]"),
}
"""Settings where a key would replace the word, so the request is refused."""


def request(*words: str) -> Request:
    return compose(("launch.nproc=4", *words))


def problems(*words: str) -> list[str]:
    with pytest.raises(RequestError) as caught:
        request(*words)
    return [str(p) for p in caught.value.problems]


def value(made: Request, key: str) -> Any:
    node: Any = made.job.model_dump(by_alias=True)
    if key.startswith("search.over."):
        return node["search"]["over"].get(key.removeprefix("search.over."))
    for part in key.split("."):
        node = node[part]
    return node


def file_of(path: Path, base: str, key: str, word: Any) -> str:
    """A recipe on top of ``base`` that sets ``key``."""
    *above, name = key.split(".")
    text = f"{{{name}: {str(word).lower() if isinstance(word, bool) else word}}}"
    for part in reversed(above):
        text = f"{{{part}: {text}}}"
    path.write_text(f"defaults: [{base}, _self_]\n{text[1:-1]}\n")
    return str(path)


def takes_words_and_keys() -> Iterator[str]:
    """Yield the settings that take both by the schema.

    ``parallel`` and keys that a search leaves open also take ``auto``.
    """
    yield "parallel"
    yield "parallel.grid"
    for key, note in keys.noted():
        group = keys.settings(note, {}) is not None or keys.accepts(note, {})
        words = [*keys.literals(note), "some/file.json", AUTO, True]
        if group and (key in AXES or any(keys.accepts(note, word) for word in words)):
            yield key


def test_the_tables_have_all_of_them() -> None:
    assert {*takes_words_and_keys()} == {*BOTH, *KEYS_DECIDE, *REFUSED}


@pytest.mark.parametrize("key", BOTH)
def test_a_word_in_a_file_and_a_key_that_is_typed_both_count(tmp_path: Path, key: str) -> None:
    word, below, expected = BOTH[key]
    made = request(f"recipe={file_of(tmp_path / 'mine.yaml', 'lm_single', key, word)}", f"{key}.{below}")
    assert {k: value(made, k) for k in expected} == expected


@pytest.mark.parametrize("key", BOTH)
def test_in_a_file_on_top_of_another_both_count(tmp_path: Path, key: str) -> None:
    word, below, expected = BOTH[key]
    file_of(tmp_path / "base.yaml", "lm_single", key, word)
    name, _, own = below.partition("=")
    made = request(f"recipe={file_of(tmp_path / 'mine.yaml', 'base', f'{key}.{name}', own)}")
    assert {k: value(made, k) for k in expected} == expected


@pytest.mark.parametrize("key", BOTH)
def test_typed_in_either_order_both_count(key: str) -> None:
    word, below, expected = BOTH[key]
    typed = [paste(key, word), f"{key}.{below}"]
    for words in (typed, typed[::-1]):
        made = request("recipe=lm_single", *words)
        assert {k: value(made, k) for k in expected} == expected


@pytest.mark.parametrize("key", KEYS_DECIDE)
def test_a_key_in_place_of_the_default_word_decides(key: str) -> None:
    _, below = KEYS_DECIDE[key]
    name, _, own = below.partition("=")
    assert value(request("recipe=lm_single", f"{key}.{below}"), key) == {name: int(own)}


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_would_replace_a_word_is_refused(tmp_path: Path, key: str) -> None:
    word, below = REFUSED[key]
    file = file_of(tmp_path / "mine.yaml", "lm_single", key, word)
    name = f"{key}.{below.split('=')[0]}"
    text = f"{name}: {key}.{below} would replace {word}, the value of {key}; "
    assert problems(f"recipe={file}", f"{key}.{below}")[0].startswith(text)


@pytest.mark.parametrize("key", REFUSED)
def test_a_word_behind_a_key_that_it_would_replace_is_refused(key: str) -> None:
    word, below = REFUSED[key]
    typed = paste(key, word)
    assert problems("recipe=lm_single", f"{key}.{below}", typed)[0] == (
        f"{key}.{below.split('=')[0]}: {key}.{below}: the later {typed} replaces all of {key}; leave one of them out"
    )


def test_the_cure_of_a_key_beside_operators_that_are_searched_for_passes(tmp_path: Path) -> None:
    words = ["launch.nproc=4", f"recipe={file_of(tmp_path / 'mine.yaml', 'lm_single', 'parallel.operators', AUTO)}"]
    words.append("parallel.operators.head.weight=[tp,null]")
    with pytest.raises(RequestError) as caught:
        compose(words)
    (problem,) = caught.value.problems
    assert problem.cure == "'parallel.operators={head:{weight:[tp,null]}}'"
    made = compose(pasted(words, problem, caught.value.origins))
    assert made.job.parallel.operators == {"head": {"weight": ["tp", None]}}
    assert made.job.search.over == {}


def test_a_key_beside_a_list_of_candidates_counts_in_each() -> None:
    words = ["parallel.hsdp=[null,{shard_size: 2},{shard_size: 4}]", "parallel.hsdp.threshold=8"]
    for typed in (words, words[::-1]):
        assert request("recipe=lm_single", *typed).job.search.over == {
            "parallel.hsdp": (None, {"shard_size": 2, "threshold": 8}, {"shard_size": 4, "threshold": 8})
        }


def test_a_key_beside_auto_among_candidates_counts_in_it_too() -> None:
    words = ["parallel.recompute=[null,auto]", "parallel.recompute.comm=keep"]
    for typed in (words, words[::-1]):
        assert request("recipe=lm_single", *typed).job.search.over == {
            "parallel.recompute": (None, {"modules": "auto", "comm": "keep"})
        }


def test_a_key_beside_candidates_that_have_no_keys_is_refused() -> None:
    words = ("parallel.recompute=[null]", "parallel.recompute.comm=keep")
    assert problems("recipe=lm_single", *words) == [
        "parallel.recompute.comm: parallel.recompute.comm=keep would replace [null], the value of parallel.recompute; "
        "set the key where [null] is set, or give all keys of parallel.recompute"
    ]


def test_parallel_auto_opens_the_same_settings_in_a_file_as_typed(tmp_path: Path) -> None:
    """Settings of the base recipe that are not axes of the search do not change."""
    (tmp_path / "base.yaml").write_text("defaults: [lm_single, _self_]\nparallel: {fp32_communication: true}\n")
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [base, _self_]\nparallel: auto\n")
    in_file = request(f"recipe={file}").job
    typed = request(f"recipe={tmp_path}/base.yaml", "parallel=auto").job
    assert in_file.search == typed.search
    assert in_file.parallel == typed.parallel
    assert in_file.parallel.fp32_communication is True


def test_the_file_of_switches_is_a_path() -> None:
    (problem,) = problems("recipe=lm_single", "parallel.transformer_opt={file: 's3://b/s.json'}")
    assert "a path of this machine: s3:// is not read or written" in problem
    (problem,) = problems("recipe=lm_single", "parallel.transformer_opt={file: 3}")
    assert "file should be the path of a parallel_speed_up.json" in problem


@pytest.mark.parametrize("key", ["parallel.comm_fusion", "parallel.hsdp"])
def test_an_empty_group_closes_what_a_word_leaves_open(key: str) -> None:
    open_keys = compose(["parallel=auto"]).job.search.over
    closed = compose(["parallel=auto", f"{key}={{}}"]).job.search.over
    assert {*open_keys} - {*closed} == {k for k in open_keys if f"{k}.".startswith(f"{key}.")}


WORDS = {
    "model": "lm_tiny", "data": "random_tokens", "loss": "mse", "optim": "lion", "schedule": "wsd", "launch": "cpu",
    "cluster": "a100_80g", "logger": "csv", "debug": "anomaly", "operators": "megatron", "steps": "train",
}  # fmt: skip


def test_the_words_are_of_every_group() -> None:
    assert {*WORDS, "recipe"} == {*ConfigFiles().groups()}


@pytest.mark.parametrize("group", WORDS)
def test_a_recipe_chooses_an_option_by_a_word_as_the_command_line_does(tmp_path: Path, group: str) -> None:
    mine, plain = tmp_path / "mine.yaml", tmp_path / "plain.yaml"
    plain.write_text("defaults: [lm_single, _self_]\nname: mine\n")
    mine.write_text(f"{plain.read_text()}{group}: {WORDS[group]}\n")
    made, typed = request(f"recipe={mine}"), request(f"recipe={plain}", f"{group}={WORDS[group]}")
    assert made.job.model_copy(update={"recipe": None}) == typed.job.model_copy(update={"recipe": None})
    assert made.job != request(f"recipe={plain}").job


def test_a_recipe_lists_steps_as_the_command_line_does(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: [lm_single, _self_]\nsteps: [train, save]\n")
    assert [step.kind for step in request(f"recipe={mine}").job.steps.values()] == ["train", "save"]


def test_the_command_line_and_a_recipe_above_replace_the_option_of_a_word(tmp_path: Path) -> None:
    below, above = tmp_path / "below.yaml", tmp_path / "above.yaml"
    below.write_text("defaults: [lm_single, _self_]\noptim: lion\n")
    above.write_text("defaults: [below, _self_]\noptim: muon\n")
    assert value(request(f"recipe={above}"), "optim.name") == "muon"
    assert value(request(f"recipe={above}", "optim=sgd"), "optim.name") == "sgd"


def test_a_word_in_the_request_of_a_run_chooses_an_option(tmp_path: Path) -> None:
    mine = tmp_path / "config.yaml"
    before = request("recipe=lm_single", "optim=lion", "train.steps=7").job
    mine.write_text(yaml.safe_dump(before.model_dump(mode="json", by_alias=True) | {"optim": "lion"}))
    made = request(f"recipe={mine}").job
    assert made.train == before.train
    assert made.optim.name == "lion"
