"""``steps=[prepare,train]``: a request that prepares the tokens that it trains on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.data.prepare.__main__ import main as prepare
from tests.run.launching import losses, shape

MODEL = (
    "model=lm_tiny", "model.dim=16", "model.vocab_size=null", "data=tokens", "data.seq_len=8", "train.batch_size=16",
    "parallel.pipeline.micro_batch_num=2", "logger=plain", "train.steps=2",
)  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write("corpus.jsonl", "the sun rose over the hills and nobody saw it")
    return tmp_path


def write(path: str, text: str) -> None:
    Path(path).write_text("".join(json.dumps({"text": f"{text} {n}"}) + "\n" for n in range(90)))


def made(tokenizer: str = "bpe", **more: str) -> list[str]:
    prepare = {"src": "corpus.jsonl", "dst": "words", "tokenizer": tokenizer, "workers": "1"} | more
    return [*MODEL, "data.path=words", *(f"steps.prepare.{key}={value}" for key, value in prepare.items())]


BPE = made(vocab_size="300")


def vocabulary(run: str) -> int:
    params = json.loads(Path(run, "plan.json").read_text())["params"]
    return next(p["spec"]["shape"][0] for p in params if p["name"] == "embed.weight")


def test_preparing_tokens_in_the_run_gives_the_same_losses(here: Path) -> None:
    assert main([*BPE, *shape(pp=2), "steps=[prepare,train,save]", "run_dir=one"]) == 0
    assert main([*MODEL, "data.path=words", *shape(), "steps=[train,save]", "run_dir=two"]) == 0
    assert losses(Path("one")) == pytest.approx(losses(Path("two")), rel=1e-5)
    assert vocabulary("one") == vocabulary("two") == 300

    # a second start does not prepare again
    before = Path("words/prepared.json").stat().st_mtime_ns
    assert main([*BPE, *shape(pp=2), "steps=[prepare,train,save]", "run_dir=one"]) == 0
    assert Path("words/prepared.json").stat().st_mtime_ns == before


def test_the_plan_of_a_run_that_goes_on_has_the_vocabulary_of_its_files(here: Path) -> None:
    words = [*BPE, *shape(), "steps=[prepare,train,save]", "run_dir=one"]
    assert main(words) == 0
    assert main([*words, "train.steps=4", "show=plan"]) == 0
    assert main([*words, "train.steps=4"]) == 0


def test_of_tokens_that_are_made_anew_the_plan_is_made_anew(here: Path) -> None:
    assert main([*made("bytes"), *shape(), "steps=[prepare,train]", "run_dir=one"]) == 0
    words = [*made(vocab_size="300", overwrite="true"), *shape(), "steps=[prepare,train]", "run_dir=two"]
    assert main(words) == 0
    assert (vocabulary("one"), vocabulary("two") > 257) == (257, True)


def test_of_several_sources_only_what_it_makes_is_supposed(here: Path) -> None:
    write("other.jsonl", "quite another text")
    assert prepare(["src=other.jsonl", "dst=there", "tokenizer=bytes"]) == 0
    sources = "data.sources=[{path: words, weight: 3}, {path: there, weight: 1}]"
    words = [w for w in made("bytes") if not w.startswith("data.path")]
    words += [*shape(), sources, "data.path=null", "steps=[prepare,train]", "run_dir=one"]
    assert main([*words, "show=plan"]) == 0
    assert not Path("words").exists()
    assert main(words) == 0
    assert len(losses(Path("one"))) == 2


def test_a_plan_says_what_it_does_not_know(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BPE, "steps=[prepare,train]", "show=plan", "train.steps=null", "train.epochs=2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "words: steps.prepare has yet to make it; planned with at most 300 different tokens; "
        "the steps of train.epochs are known only then"
    )
    assert [p.name for p in here.iterdir()] == ["corpus.jsonl"]


def test_problems_are_reported_before_any_token_is_made(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*BPE, *shape(), "steps=[prepare,train]", "train.batch_size=15", "steps.prepare.src=corpus.json"]
    assert main(words) == 2
    assert capsys.readouterr().err == (
        "error: 2 problems in this request; nothing was started\n\n"
        "  steps.prepare.src = corpus.json: No such file or directory\n"
        "    set by: steps.prepare.src=corpus.json (command line)\n\n"
        "  train.batch_size = 15: these samples cannot be divided evenly into 1 data-parallel rank x 2 micro batches\n"
        "    set by: train.batch_size=15 (command line)\n"
        "    try:    train.batch_size=16\n"
    )
    assert [p.name for p in here.iterdir()] == ["corpus.jsonl"]


def test_after_training_it_is_too_late(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BPE, *shape(), "steps=[train,prepare]"]) == 2
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        "  data.path = words: No such file or directory\n"
        "    set by: data.path=words (command line)\n"
    )
