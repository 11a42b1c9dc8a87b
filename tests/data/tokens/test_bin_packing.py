"""The documents of a window, and which targets belong to the document of their token."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.data.open import open_data
from launcher.data.source import Dataset
from launcher.errors import RequestError
from launcher.job.schema.data import Tokens
from tests.data.token_bytes import little, own

SEQ = 4


def opened(**changes) -> Dataset:
    asked = {"name": "tokens", "seq_len": SEQ, "val_fraction": 0, "document_mask": True}
    return open_data(Tokens.model_validate(asked | changes), seed=0)


def by_hand(tokens: list[int], end: int, seq_len: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Tokens, documents and targets of every window, computed token by token."""
    out = []
    for at in range(0, len(tokens) - seq_len, seq_len):
        document, documents, targets = 0, [], []
        for i in range(at, at + seq_len):
            documents.append(document)
            targets.append(-100 if tokens[i] == end else tokens[i + 1])
            document += tokens[i] == end
        out.append((tokens[at : at + seq_len], documents, targets))
    return out


@given(st.lists(st.integers(0, 3), min_size=8, max_size=60), st.integers(1, 7), st.integers(0, 3))
def test_documents_are_numbered_in_each_window_and_targets_stay_within_them(tmp_path_factory, tokens, seq_len, end):
    path = tmp_path_factory.mktemp("of") / "a.tokens"
    path.write_bytes(own(tokens, 4, end=end))
    train = opened(path=str(path), seq_len=seq_len).train
    indices = np.random.default_rng(0).permutation(len(train))
    (x, documents), y = train.inputs(indices), train.targets(indices)
    want = by_hand(tokens, end, seq_len)
    assert [*zip(x.tolist(), documents.tolist(), y.tolist(), strict=True)] == [want[i] for i in indices]


@pytest.mark.parametrize("packing", ["best_fit", "single"])
@given(st.lists(st.integers(0, 3), min_size=8, max_size=60).filter(lambda t: any(t[:-1])), st.integers(2, 9))
def test_documents_are_whole_with_padding_after_them(tmp_path_factory, packing, tokens, seq_len):
    path = tmp_path_factory.mktemp("of") / "a.tokens"
    path.write_bytes(own(tokens, 4, end=0))
    train = opened(path=str(path), seq_len=seq_len, packing=packing).train
    indices = np.random.default_rng(0).permutation(len(train))
    (x, documents), y = train.inputs(indices), train.targets(indices)
    found = []
    for row in zip(x.tolist(), documents.tolist(), y.tolist(), strict=True):
        runs = [[*zip(*run, strict=True)] for _, run in groupby(zip(*row, strict=True), key=lambda cell: cell[1])]
        if all(target == -100 for target in runs[-1][2]):  # every document has a target
            assert {*runs.pop()[0]} == {0}
        found += [(inside, targets) for inside, _, targets in runs]
        assert packing == "best_fit" or len(runs) == 1
    assert Counter(found) == Counter(pieces(tokens, seq_len))


def pieces(tokens: list[int], seq_len: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each document with its end token, in pieces of up to ``seq_len`` tokens, and the targets of each piece."""
    text = "".join(map(str, tokens))
    for document in re.findall("[^0]*0|[^0]+$", text):
        for at in range(0, len(document), seq_len):
            targets = [*map(int, document[at + 1 : at + seq_len + 1])]
            if targets:
                inside = (*map(int, document[at : at + seq_len]),)
                yield inside, (*targets, *[-100] * (len(inside) - len(targets)))


def test_one_document_a_window_needs_no_mask(tmp_path):
    (tmp_path / "a.tokens").write_bytes(own([1, 2, 0, 3, 4, 5, 6, 7, 0, 0], 9, end=0))
    train = opened(path=f"{tmp_path}/a.tokens", packing="single", document_mask=False).train
    assert [t.tolist() for t in train.inputs(np.arange(3))] == [[[1, 2, 0, 0], [3, 4, 5, 6], [7, 0, 0, 0]]]
    assert train.targets(np.arange(3)).tolist() == [[2, 0, -100, -100], [4, 5, 6, 7], [0, -100, -100, -100]]


def test_held_out_windows_are_of_all_kinds(tmp_path):
    """They are not only the short documents that are packed last."""
    lengths = np.random.default_rng(0).integers(2, 20, 600)
    tokens = [token for n in lengths.tolist() for token in [*[1] * (n - 1), 0]]
    (tmp_path / "a.tokens").write_bytes(own(tokens, 9, end=0))
    data = opened(path=f"{tmp_path}/a.tokens", packing="best_fit", seq_len=20, val_fraction=0.2)
    held, train = ((s.inputs(np.arange(len(s)))[0] == 0).float().sum(1).mean().item() for s in (data.val, data.train))
    assert held == pytest.approx(train, rel=0.15)


def test_a_file_without_a_document_to_learn_from(tmp_path):
    path = tmp_path / "a.tokens"
    path.write_bytes(own([0, 0, 0, 1], 9, end=0))
    with pytest.raises(RequestError) as refused:
        opened(path=str(path), packing="single")
    assert str(refused.value) == (
        f"data.path: {path}: 4 tokens: no document has the two tokens that it needs for data.packing=single"
    )


def test_each_file_of_a_mixture_has_the_end_that_it_says(tmp_path):
    for name, end in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.tokens").write_bytes(own([1, 2, 3, 4, 5], 9, end=end))
    train = opened(sources=[{"path": f"{tmp_path}/{name}.tokens", "weight": 1} for name in "ab"]).train
    x, documents = train.inputs(np.arange(2))
    assert (x.tolist(), documents.tolist()) == ([[1, 2, 3, 4]] * 2, [[0, 1, 1, 1], [0, 0, 1, 1]])
    assert train.targets(np.arange(2)).tolist() == [[-100, 3, 4, 5], [2, -100, 4, 5]]


def silent(tmp_path: Path) -> Path:
    path = tmp_path / "a.bin"
    path.write_bytes(little("H", [1, 2, 3, 4, 5]))
    return path


def test_a_file_that_does_not_say_it_has_the_end_of_the_request(tmp_path):
    train = opened(path=str(silent(tmp_path)), vocab_size=9, end_of_document=3).train
    assert train.inputs(np.arange(1))[1].tolist() == [[0, 0, 0, 1]]


def test_ends_that_are_not_known_and_ends_that_are_others(tmp_path):
    path, other = silent(tmp_path), tmp_path / "b.tokens"
    other.write_bytes(own([1, 2, 3, 4, 5], 9, end=2))
    cases = [
        (
            {},
            f"data.path: {path} does not say which token ends its documents, which data.document_mask=true "
            "needs; give it, data.end_of_document=50256 for GPT-2",
        ),
        (
            {"end_of_document": 3},
            f"data.end_of_document: 3: {other} says that 2 ends its documents (try: data.end_of_document=null)",
        ),
        ({"end_of_document": 9, "path": str(path)}, "data.end_of_document: 9 is not below data.vocab_size=9"),
    ]
    for changes, said in cases:
        with pytest.raises(RequestError) as refused:
            opened(**{"path": [str(path), str(other)], "vocab_size": 9} | changes)
        assert str(refused.value) == said
    assert len(opened(path=[str(path), str(other)], vocab_size=9, end_of_document=2).train) == 2
