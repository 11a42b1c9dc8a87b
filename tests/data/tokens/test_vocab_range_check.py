"""Ids without a row in the vocabulary are detected before anything starts, in bounded time."""

from __future__ import annotations

import numpy as np
import pytest

from launcher.data.checks import check
from launcher.data.tokens import vocab_range_check
from launcher.job.schema.data import Tokens
from launcher.planner.plan_job import plan_job
from tests.data.token_bytes import little, llm_c, megatron, own
from tests.plan.made import job


def problems(*paths, **settings) -> list[str]:
    asked = Tokens(name="tokens", path=[str(path) for path in paths], seq_len=4, **{"vocab_size": 300, **settings})
    return [str(problem).replace(f"{paths[0].parent}/", "") for problem in check(asked)]


def ids(large: int, at: int = 50, count: int = 100) -> list[int]:
    return [large if k == at else k % 300 for k in range(count)]


WAY = "ids must be below data.vocab_size, the number of tokens of the tokenizer that wrote the file"


@pytest.mark.parametrize("form", ["nanogpt", "llm.c", "megatron"])
def test_an_id_beyond_the_vocabulary_is_refused_with_its_file_and_a_cure(tmp_path, form):
    path = tmp_path / "a.bin"
    if form == "megatron":
        megatron(path, [ids(301)], letter="i")
    else:
        path.write_bytes(little("H", ids(301)) if form == "nanogpt" else llm_c(ids(301)))
    text = f"data.vocab_size: 300: token 50 of a.bin is 301, and {WAY}"
    assert problems(path) == [f"{text} (try: data.vocab_size=302)"]
    assert problems(path, vocab_size=302) == []


def test_all_files_count_for_the_cure_and_held_out_ones_too(tmp_path):
    for name, large in {"a": 7, "b": 310, "c": 500}.items():
        (tmp_path / f"{name}.bin").write_bytes(little("H", ids(large)))
    a, b, c = (tmp_path / f"{name}.bin" for name in "abc")
    assert problems(a) == []
    assert problems(a, b, val=str(c))[0].endswith(f"token 50 of b.bin is 310, and {WAY} (try: data.vocab_size=501)")
    assert problems(a, val=str(c))[0].endswith("(try: data.vocab_size=501)")


def test_negative_ids_have_no_cure(tmp_path):
    path = megatron(tmp_path / "a.bin", [ids(-1)], letter="i")
    assert problems(path) == [
        "data.vocab_size: 300: token 50 of a.bin is -1; ids count from 0, so the file has another dtype or "
        "another format"
    ]


def test_ids_that_a_header_or_a_dtype_bounds_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(vocab_range_check, "opened", None)
    (tmp_path / "a.tokens").write_bytes(own(ids(7), 300))
    (tmp_path / "b.bin").write_bytes(little("H", ids(7)))
    assert problems(tmp_path / "a.tokens", vocab_size=None) == []
    assert problems(tmp_path / "b.bin", vocab_size=65536) == []


def test_of_large_files_a_part_is_read_and_the_plan_says_which(tmp_path, monkeypatch):
    monkeypatch.setattr(vocab_range_check, "READ", 4000)
    monkeypatch.setattr(vocab_range_check, "BLOCK", 400)
    path, tokens = tmp_path / "a.bin", np.arange(20_000, dtype="<u2") % 300
    path.write_bytes(tokens.tobytes())
    assert problems(path) == []
    request = ("data=tokens", f"data.path={path}", "data.vocab_size=300", "data.seq_len=16", "model=lm_tiny")
    noted = [f"{note.key} {note.text}" for note in plan_job(job(*request, "steps=[train]")).notes]
    assert (
        "data.vocab_size 300: no header guarantees that ids are below it; 10.0% of 0.0 GB were read, evenly spread, "
        "and have no larger id; the ranks check the rest as they read it"
    ) in noted

    # the first and last blocks are always read; more rows may not be enough, so the message offers no cure
    for at in (0, 19_999):
        tokens[at] = 400
        path.write_bytes(tokens.tobytes())
        assert problems(path) == [f"data.vocab_size: 300: token {at} of a.bin is 400, and {WAY}"]
        tokens[at] = 0


def test_a_file_is_read_in_blocks_and_read_again_only_if_it_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(vocab_range_check, "BLOCK", 64)
    path = tmp_path / "a.bin"
    path.write_bytes(little("H", ids(7, count=1000)))
    assert problems(path) == []
    before = vocab_range_check._range.cache_info().misses
    assert problems(path) == []
    assert vocab_range_check._range.cache_info().misses == before
    path.write_bytes(little("H", ids(300, at=999, count=1000)))
    assert problems(path)[0].startswith("data.vocab_size: 300: token 999 of a.bin is 300")
