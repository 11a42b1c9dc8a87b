"""Cached tokens of ``data=text``: they are made once and give the same samples as without a cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from launcher.data import train_byte_pairs
from launcher.data.open import open_data
from launcher.data.prepare import documents, text_cache
from launcher.data.prepare.prepare import prepare
from launcher.data.prepare.progress import ProgressReporter
from launcher.data.tokens.formats import mapped, token_file
from launcher.job.compose import compose
from launcher.job.schema.data import Text
from launcher.job.schema.steps import Prepare
from launcher.run.run import rehearse
from tests.data.prepare.corpora import END, TEXT, tokenizer


def text(tmp_path: Path, **more) -> Text:
    """Text over several blocks, whose lines end in every way that Python knows."""
    path = tmp_path / "a.txt"
    if not path.exists():
        odd = "one\r\ntwo\x0bthree\u2028four\x85\n\n  \nñ ² 🙂\r"
        path.write_bytes((TEXT[:150_000].replace("\n\n", odd)).encode())
    return Text(name="text", path=str(path), seq_len=32, **more)


def make(settings: Text) -> list[str]:
    lines: list[str] = []
    text_cache.make(settings, lines.append, ProgressReporter("off", lines.append))
    return lines


@pytest.mark.parametrize("val_fraction", [0.1, 0.0])
@pytest.mark.parametrize("how", ["bpe", "file"])
def test_samples_are_those_of_a_process_that_encodes_for_itself(tmp_path, monkeypatch, how, val_fraction):
    monkeypatch.setattr(documents, "BLOCK", 10_000)
    monkeypatch.setattr(text_cache, "cores", lambda: 2)
    more = {"tokenizer": how, "vocab_size": 600, "val_fraction": val_fraction}
    if how == "file":
        more["tokenizer_file"] = str(tokenizer(tmp_path))
    own = open_data(text(tmp_path, **more), seed=0)
    kept = text(tmp_path, cache=str(tmp_path / "cache"), **more)
    assert len(make(kept)) == 1
    monkeypatch.setattr("launcher.data.text_windows._tokens", None)  # must not encode it again
    read = open_data(kept, seed=0)

    for a, b in ((own.train, read.train), (own.val, read.val)):
        assert len(a) == len(b)
        every = np.arange(len(a))
        assert (a.inputs(every)[0] == b.inputs(every)[0]).all()
        assert (a.targets(every) == b.targets(every)).all()
    assert own.entropy == read.entropy
    assert own.encode("naïve <|end|>") == read.encode("naïve <|end|>")
    assert read.decode(own.encode("naïve")) == "naïve"


def _over_lines() -> Tokenizer:
    """Byte pairs some of which span lines, as those of Qwen and GPT-4o do ("\\n\\n")."""
    return train_byte_pairs.train_on([TEXT[:100_000]], 600, [END])


def _with_prefix() -> Tokenizer:
    """The form of Llama 2 and Mistral: a space goes before each text that is encoded."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    words = (TEXT[at : at + 40] for at in range(0, 40_000, 40))
    made.train_from_iterator(words, trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", END]))
    return made


@pytest.mark.parametrize("make_tokenizer", [_over_lines, _with_prefix])
def test_the_tokens_are_those_of_prepare_and_of_tokenizers_alone(tmp_path, monkeypatch, make_tokenizer):
    monkeypatch.setattr("launcher.data.prepare.child_processes.cores", lambda: 2)
    file = tmp_path / "tokenizer.json"
    make_tokenizer().save(str(file))
    source = tmp_path / "a.txt"
    source.write_text(TEXT[:150_000] + "\n\n\n    indented\n\n")
    settings = Text(
        name="text", path=str(source), seq_len=32, tokenizer="file", tokenizer_file=str(file), vocab_size=600,
        val_fraction=0, cache=str(tmp_path / "cache"),
    )  # fmt: skip
    make(settings)
    cached = text_cache.cached_tokens(settings)
    assert cached is not None

    one = Prepare(
        kind="prepare", src=str(source), dst=str(tmp_path / "out"), tokenizer_file=str(file), end_of_document=END
    )
    prepare(one, "steps.prepare", lambda _: None, ProgressReporter("off", lambda _: None))
    (made,) = (tmp_path / "out").glob("*.tokens")
    prepared = mapped(token_file(made, dtype="uint16")).tolist()
    alone = Tokenizer.from_file(str(file)).encode(source.read_text(), add_special_tokens=False).ids
    assert cached.train.tolist() == prepared[:-1] == alone
    assert open_data(settings.model_copy(update={"cache": None}), seed=0).train.tokens.tolist() == alone


def test_tokens_are_made_once_and_anew_for_another_text_or_tokenizer(tmp_path):
    cache = tmp_path / "cache"
    settings = text(tmp_path, cache=str(cache), tokenizer="bpe", vocab_size=300)
    assert len(make(settings)) == 1
    assert make(settings) == []
    assert make(settings.model_copy(update={"seq_len": 64})) == []  # windows are cut later
    assert len(make(settings.model_copy(update={"vocab_size": 301}))) == 1
    Path(settings.path).write_text("another\n" * 500)
    assert len(make(settings)) == 1
    assert len(list(cache.iterdir())) == 3
    assert make(settings.model_copy(update={"tokenizer": "bytes"})) == []


def test_tokens_are_kept_beside_the_runs_unless_it_is_said_where(tmp_path, monkeypatch):
    job = compose(["data=text_bpe", f"runs={tmp_path}/runs"]).job
    assert text_cache.with_cache(job).data.cache == f"{tmp_path}/runs/.tokens"
    own = job.model_copy(update={"run_dir": f"{tmp_path}/one"})
    assert text_cache.with_cache(own).data.cache == f"{tmp_path}/.tokens"
    assert text_cache.with_cache(compose(["data=text"]).job).data.cache is None
    named = compose(["data=text_bpe", "data.cache=there"]).job
    assert text_cache.with_cache(named).data.cache == "there"
    monkeypatch.setattr("os.access", lambda *_: False)  # the user who runs the tests may write everywhere
    assert text_cache.with_cache(own).data.cache == f"{tmp_path}/one/tokens"


def test_a_cache_that_cannot_be_written_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("")
    words = ["recipe=lm_single", "data=text_bpe", f"data.cache={tmp_path}/file/cache", f"runs={tmp_path}/runs"]
    with pytest.raises(ValueError, match=r"^data\.cache: ") as error:
        rehearse(compose(words), planned=False)
    place = f"{tmp_path}/file/cache: {tmp_path}/file is not a folder"
    assert str(error.value) == f"data.cache: the tokens of data.path cannot be made at {place}"
    assert not (tmp_path / "runs").exists()
