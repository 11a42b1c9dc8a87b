"""Documents encoded in batches and pieces have the tokens that `tokenizers` gives for full documents."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from launcher.data import text_tokenizer, train_byte_pairs
from launcher.data.prepare import encode
from launcher.data.prepare.encode import Encoder, Recipe
from tests.data.prepare.corpora import END, ODD, TEXT

LETTERS = r"[^\r\n\p{L}\p{N}]?"
PATTERNS = {
    "gpt2": None,
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + LETTERS + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + LETTERS + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "o200k": LETTERS + r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    + LETTERS + r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}  # fmt: skip
ENDED = [f"{part}{end}" for part in TEXT[:60_000].split("\n\n") for end in ("\n\n", "  \n", " \n", "\r\n")]
TRAINED = train_byte_pairs.train_on(ENDED, 500, [END]).to_str()  # several spaces are one token within one word
CHARS = st.one_of(st.sampled_from("ab'sS 1\n\n\r\t.-/日🙂"), st.characters(exclude_categories=["Cs"]))


def split_by(pattern: str | None) -> Tokenizer:
    tokenizer = Tokenizer.from_str(TRAINED)
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    return tokenizer


TOKENIZERS = {name: split_by(pattern) for name, pattern in PATTERNS.items()}
ENCODERS = {name: Encoder(Recipe(t.to_str(), end=0)) for name, t in TOKENIZERS.items()}


@pytest.mark.parametrize("name", PATTERNS)
@settings(deadline=None, max_examples=100)
@example(texts=["x 🙂\n\nab\n\nc \nd\r\ne!\n/f 日\ng\n\n"])
@given(texts=st.lists(st.text(CHARS) | st.sampled_from([f"a{END}b", *ODD]), max_size=6))
def test_any_documents_have_the_tokens_that_tokenizers_alone_gives(name, texts):
    rows = TOKENIZERS[name].encode_batch(texts, add_special_tokens=False)
    assert ENCODERS[name](texts, end=True).tolist() == [i for row in rows for i in (*row.ids, 0)]


@pytest.mark.parametrize("name", PATTERNS)
def test_a_document_that_is_encoded_in_pieces_has_the_tokens_of_tokenizers(name, monkeypatch):
    monkeypatch.setattr(encode, "PIECE", 5000)
    whole = TOKENIZERS[name].encode(TEXT[:200_000], add_special_tokens=False)
    assert ENCODERS[name]([TEXT[:200_000]], end=True).tolist() == [*whole.ids, 0]


def test_a_normalizer_and_a_prefix_space_give_the_tokens_of_tokenizers():
    lower, prefix = (Tokenizer.from_str(TRAINED) for _ in range(2))
    lower.normalizer = normalizers.Lowercase()
    prefix.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    for tokenizer in (lower, prefix):
        texts = ["Hello World", "a b"]
        rows = tokenizer.encode_batch(texts, add_special_tokens=False)
        encoded = Encoder(Recipe(tokenizer.to_str(), end=0))(texts, end=False)
        assert encoded.tolist() == [i for row in rows for i in row.ids]


@pytest.mark.parametrize("call", [lambda t: t.enable_truncation(3), lambda t: t.enable_padding(length=20)])
def test_nothing_is_cut_off_or_padded_whatever_the_file_of_the_tokenizer_says(call, tmp_path):
    cut, whole = Tokenizer.from_str(TRAINED), Tokenizer.from_str(TRAINED)
    call(cut)
    cut.save(str(tmp_path / "t.json"))
    text = "one two three four five\nsix seven eight nine\n"
    wanted = whole.encode(text, add_special_tokens=False).ids
    assert Encoder(Recipe(cut.to_str(), end=0))([text], end=False).tolist() == wanted
    assert text_tokenizer.encode(text_tokenizer.load(tmp_path / "t.json"), text).tolist() == wanted
