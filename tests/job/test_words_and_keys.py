"""Settings that take a word or keys: where both are given, both count, or the request is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import RequestError
from launcher.job.compose import compose
from launcher.job.schema import schema_keys

STRICT = "parallel.transformer_opt.strict=true"


def problems(*words: str) -> list[str]:
    with pytest.raises(RequestError) as caught:
        compose(words)
    return [str(p) for p in caught.value.problems]


def test_a_key_beside_auto_in_a_file_closes_that_key_alone(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [lm_single, _self_]\nparallel: auto\n")
    words = ("launch.nproc=4", "parallel.pipeline.micro_batch_num=2")
    in_file = compose([f"recipe={file}", *words]).job
    typed = compose(["recipe=lm_single", "parallel=auto", *words]).job
    assert in_file.search.over == typed.search.over
    assert "parallel.pipeline.micro_batch_num" not in in_file.search.over
    assert in_file.parallel.pipeline.micro_batch_num == 2


def test_a_key_below_a_file_of_switches_is_refused_in_both_orders(tmp_path: Path) -> None:
    word = f"parallel.transformer_opt={tmp_path}/s.json"
    assert problems("recipe=lm_tp2", word, STRICT) == [
        f"parallel.transformer_opt.strict: {STRICT}: parallel.transformer_opt is {tmp_path}/s.json, which it would "
        f"replace; write the key there, or give all keys in place of {tmp_path}/s.json"
    ]
    assert problems("recipe=lm_tp2", STRICT, word) == [
        f"parallel.transformer_opt.strict: {STRICT}: {word} behind it takes the place of all of "
        "parallel.transformer_opt; leave one of them out"
    ]


def test_one_in_a_recipe_counts_as_typed(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"defaults: [lm_tp2, _self_]\nparallel: {{transformer_opt: {tmp_path}/s.json}}\n")
    assert problems(f"recipe={file}", STRICT)[0].startswith(f"parallel.transformer_opt.strict: {STRICT}: ")


def takes_words_and_keys():
    for key, note in schema_keys.noted():
        if schema_keys.accepts(note, "some/file.json") and schema_keys.accepts(note, {}):
            yield key


def test_there_are_two_of_them():
    assert {*takes_words_and_keys()} == {"parallel.transformer_opt", "parallel.recompute.modules"}
