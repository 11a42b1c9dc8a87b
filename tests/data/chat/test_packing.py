"""A sample with several conversations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from launcher.__main__ import main
from launcher.data.chat.samples import open_chat
from tests.data.chat.chats import CHATML, TURNS, messages, request_words, written


def test_several_conversations_in_a_sample(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [messages(TURNS[:2]), messages(), messages(TURNS[2:]), messages(TURNS[:2])]
    settings = written(tmp_path, CHATML, rows)
    alone, packed = (open_chat(settings.model_copy(update={"packing": p})).train for p in ("single", "best_fit"))
    (tokens,), targets = alone.inputs(at := np.arange(4)), alone.targets(at)
    assert len(packed) == len(packed.inputs(np.arange(2))) == 2
    (both, numbers), both_targets = packed.inputs(np.arange(2)), packed.targets(np.arange(2))

    # each conversation occurs once, uncut, under its own number; the rest has the next number and no target
    size = [int((t != -100).nonzero().max()) + 1 for t in targets]
    want = {(tuple(tokens[i, :n].tolist()), tuple(targets[i, :n].tolist())) for i, n in enumerate(size)}
    found = []
    for row in range(2):
        count = int(numbers[row].max())
        assert numbers[row].tolist() == sorted(numbers[row].tolist())
        assert (both_targets[row][numbers[row] == count] == -100).all()
        for number in range(count):
            mine = numbers[row] == number
            last = int((both_targets[row][mine] != -100).nonzero().max()) + 1
            found.append((tuple(both[row][mine][:last].tolist()), tuple(both_targets[row][mine][:last].tolist())))
    assert len(found) == 4
    assert {*found} == want


def test_best_fit_packing_is_refused_where_documents_cannot_be_kept_apart(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = written(tmp_path, CHATML, [messages()] * 9)
    words = [*request_words(settings), "data.packing=best_fit", "show=plan"]
    assert main(words) == 0
    assert (
        "data.packing=best_fit: applied, full conversations, several in a sample if they fit, each kept separate;"
    ) in " ".join(capsys.readouterr().out.split())
    assert main([*words, "parallel.pipeline.scheduler=seqpipe", "parallel.pipeline.seq_chunks=2"]) == 2
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        "  parallel.pipeline.seq_chunks = 2: data.packing=best_fit restarts positions and ends attention "
        "inside a piece of a sequence, which sequence chunks do not support; use full sequences\n"
        "    set by: parallel.pipeline.seq_chunks=2 (command line)\n"
    )
    assert main([*words, "model=tied_pair", "steps=[train]"]) == 2
    assert (
        "  data.packing = best_fit: model tied_pair takes only tokens and cannot separate documents\n"
        "    set by: data.packing=best_fit (command line)\n"
    ) in capsys.readouterr().err
