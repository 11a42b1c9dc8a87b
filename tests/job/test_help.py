"""``--help NAME``: what the option files say about a group, a section, a key or an option."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.__main__ import check_words, main
from launcher.errors import RequestError
from launcher.job.completion import noted
from launcher.job.config_folders import ConfigFiles
from launcher.job.help import explain, options
from launcher.job.schema.job import Job

OURS = ConfigFiles()


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["--help", *words])
    return code, *capsys.readouterr()


def test_an_option_has_its_title_and_its_keys_with_defaults_and_comments() -> None:
    assert (
        explain("idx", OURS)
        == """\
data=idx  # Files in idx form (MNIST, Fashion-MNIST), plain or gzipped.
  data.root=       required; folder with train-images-idx3-ubyte and its kin
  data.size=28     side in pixels; larger pads with zeros
  data.channels=1  3: the same image three times"""
    )


def test_a_group_has_all_of_its_options() -> None:
    text = explain("schedule", OURS)
    assert text.startswith("schedule=constant  # The same learning rate throughout, after warmup.\n")
    assert [o for o in OURS.options("schedule") if f"schedule={o}  # " not in text] == []
    assert "  schedule.period_steps=        required; optimizer steps from the end of warmup" in text


def test_a_section_has_all_of_its_keys_and_a_key_itself() -> None:
    assert (
        explain("checkpoint", OURS).splitlines()[1]
        == "checkpoint.keep=2              newest checkpoints kept; null: all"
    )
    assert explain("parallel.pipeline.stages", OURS) == "parallel.pipeline.stages=1  number of pipeline stages"
    assert "parallel.grid.tp=null            ranks that share one operator" in explain("parallel.grid", OURS)


def test_a_comment_of_two_lines_is_printed_to_its_end() -> None:
    assert explain("parallel.recompute", OURS).endswith(
        "or auto: as few blocks of each stage as let it fit cluster.memory_gb"
    )


def test_a_key_below_a_null_is_explained_by_the_comment_of_the_null() -> None:
    assert explain("parallel.hsdp.shard_size", OURS) == explain("parallel.hsdp", OURS)


def test_every_setting_every_group_and_every_option_is_explained() -> None:
    names = {key for key, _ in noted()} | set(Job.model_fields) | set(OURS.groups())
    names |= {option.name for option in options(OURS)} - {""}
    assert [name for name in sorted(names) if not explain(name, OURS)] == []


def test_an_option_of_ones_own_is_listed_with_its_title(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_bytes(b"# My model \xff.\na: [\n")
    code, out, _ = answer(capsys, "model", "--config-dir", str(tmp_path))
    assert code == 0
    assert "model=mine  # My model \ufffd.\n" in out


@pytest.mark.parametrize(
    ("word", "text", "cure"),
    [
        ("pralel", "no group, setting or option has this name, did you mean 'parallel'?", "parallel"),
        ("parallel.pipeline.stags", "did you mean 'parallel.pipeline.stages'?", "parallel.pipeline.stages"),
        ("gpus", "did you mean 'launch.nproc'?", "launch.nproc"),
        ("cosin", "did you mean 'cosine'?", "cosine"),
        ("fp8", "fp8 is not supported", ""),
        ("zzz", "(groups and settings: name, seed,", ""),
    ],
)
def test_another_word_is_refused_with_the_name_that_may_be_meant(
    word: str, text: str, cure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, said = answer(capsys, word)
    assert (code, out) == (2, "")
    assert f"  {word}: " in said
    assert text in said
    assert (f"    try:    --help {cure}\n" in said) if cure else ("try:" not in said)
    with pytest.raises(RequestError):
        check_words(["--help", word])


def test_words_that_set_something_are_no_names_and_commands_have_their_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert answer(capsys, "model=lm")[1] == answer(capsys)[1]
    assert answer(capsys, "status")[1].endswith("python -m launcher status|logs|cancel RUN\n")
