"""Problems with a tokenizer file."""

from __future__ import annotations

from launcher.data.files import bpe
from launcher.data.files.text_checks import check_absent, check_text
from launcher.job.schema.components import Text


def test_a_tokenizer_file_that_does_not_fit_says_so(tmp_path):
    def said(path, vocab_size):
        settings = Text(
            name="text", tokenizer="file", tokenizer_file=str(path), vocab_size=vocab_size, seq_len=32, val_fraction=0
        )
        [problem] = [*check_text(settings), *check_absent(settings)]
        return str(problem.key), problem.text, problem.cure

    bpe.train("to be or not to be\n" * 50, 270).save(str(tmp_path / "tokenizer.json"))
    assert said(tmp_path / "no.json", 300) == ("data.tokenizer_file", f"{tmp_path / 'no.json'}: no such file", "")
    assert said(tmp_path / "tokenizer.json", 256) == (
        "data.vocab_size",
        f"256: {tmp_path / 'tokenizer.json'} has 265 tokens",
        "data.vocab_size=265",
    )
    (tmp_path / "bad.json").write_text("{}")
    key, text, cure = said(tmp_path / "bad.json", 300)
    assert (key, cure) == ("data.tokenizer_file", "")
    assert text.startswith(f"{tmp_path / 'bad.json'}: not a tokenizer: ")
