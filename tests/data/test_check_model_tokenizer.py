"""Text is read with the tokenizer of a Hugging Face folder, or refused."""

from __future__ import annotations

from pathlib import Path

from launcher.data import train_byte_pairs
from launcher.data.check_model_tokenizer import check_tokenizer
from launcher.job.compose import compose


def problems(folder: Path, *words: str) -> list[str]:
    job = compose(["recipe=lm_single", "model=hf", f"model.path={folder}", *words, "steps=[train]"]).job
    return [str(p) for p in check_tokenizer(job.model, job.data)]


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def tokenizer(path: Path, text: str = "to be or not to be", size: int = 260) -> Path:
    train_byte_pairs.train(text, size).save(str(path))
    return path


TEXT = ("data=text", "data.seq_len=16")


def test_text_is_not_read_as_bytes_by_a_model_that_has_a_tokenizer(tmp_path: Path) -> None:
    own = tokenizer(folder(tmp_path / "m") / "tokenizer.json")
    text = f"data.tokenizer: bytes: {own} is the tokenizer of the model and has different tokens"
    cure = f"data.tokenizer=file data.tokenizer_file={own}"
    assert problems(tmp_path / "m", *TEXT) == [f"{text} (try: {cure} data.vocab_size=260)"]
    assert problems(tmp_path / "m", *TEXT, *cure.split(), "data.vocab_size=260") == []
    assert problems(tmp_path / "m", "data=chat")[0] == f"{text} (try: {cure})"
    assert problems(tmp_path / "m", "data=chat", "model.weights=false")[0] == f"{text} (try: {cure})"


def test_bpe_of_the_text_is_another_tokenizer_too(tmp_path: Path) -> None:
    tokenizer(folder(tmp_path / "m") / "tokenizer.json")
    (one,) = problems(tmp_path / "m", *TEXT, "data.tokenizer=bpe", "data.vocab_size=260")
    assert one.startswith("data.tokenizer: bpe: ")


def test_a_tokenizer_of_an_older_form_says_what_to_do(tmp_path: Path) -> None:
    (folder(tmp_path / "m") / "tokenizer.model").touch()
    (one,) = problems(tmp_path / "m", *TEXT)
    assert one == (
        f"data.tokenizer: bytes: the tokenizer of the model is {tmp_path}/m/tokenizer.model, which is not read; "
        "save it as tokenizer.json first, as AutoTokenizer of transformers does"
    )


def test_weights_without_a_tokenizer_are_of_no_known_tokens(tmp_path: Path) -> None:
    folder(tmp_path / "m")
    (one,) = problems(tmp_path / "m", *TEXT)
    assert one.startswith(f"data.tokenizer: bytes: the weights in {tmp_path}/m were trained with a tokenizer, but")
    assert problems(tmp_path / "m", *TEXT, "model.weights=false") == []


def test_a_folder_that_is_not_there_is_no_problem_of_the_tokenizer(tmp_path: Path) -> None:
    assert problems(tmp_path / "none", *TEXT) == []


def test_a_tokenizer_with_other_numbers_is_refused_and_one_with_more_tokens_is_not(tmp_path: Path) -> None:
    own = tokenizer(folder(tmp_path / "m") / "tokenizer.json")
    other = tokenizer(tmp_path / "other.json", "zzzz yyyy zzzz yyyy")
    words = (*TEXT, "data.tokenizer=file", "data.vocab_size=264")
    (one,) = problems(tmp_path / "m", *words, f"data.tokenizer_file={other}")
    assert one.startswith(f"data.tokenizer_file: {other}: it has different ids for ")
    assert one.endswith(f" of the 260 tokens of {own} (try: data.tokenizer_file={own})")
    more = tokenizer(tmp_path / "more.json", size=264)
    assert problems(tmp_path / "m", *words, f"data.tokenizer_file={more}") == []
