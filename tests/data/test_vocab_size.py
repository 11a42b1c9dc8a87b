"""The number of tokens for which a model has rows, if its data determine it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from launcher.__main__ import main
from launcher.data.spec import vocab
from launcher.data.vocab_size import with_vocabulary
from launcher.errors import RequestError
from launcher.planner.plan_job import check_without_torch, plan_job, resolve_job
from tests.data.token_bytes import little, own
from tests.plan.made import job

NOTE = "data.vocab_size null -> 300: as the headers of its files say"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.tokens"
    path.write_bytes(own([k % 300 for k in range(2000)], 300))
    return path


def tokens_job(path, *words):
    return job("data=tokens", f"data.path={path}", "data.seq_len=16", "model=lm_tiny", "steps=[train]", *words)


@pytest.mark.parametrize("model", ["lm_tiny", "tied_pair"])
def test_a_model_has_as_many_rows_as_the_header_says(file, model):
    made, source = with_vocabulary(tokens_job(file, f"model={model}"))
    assert (made.model.vocab_size, made.data.vocab_size, vocab(made.data)) == (300, 300, 300)
    assert source == "as the headers of its files say"
    assert with_vocabulary(made) == (made, "")


def test_the_plan_notes_the_vocab_size_that_null_resolves_to(file):
    plan = plan_job(tokens_job(file))
    assert NOTE in [f"{n.key} {n.text}" for n in plan.notes]
    assert plan.params[0].spec.shape == (300, 32)
    noted = plan_job(tokens_job(file, "data.vocab_size=300")).notes
    assert "data.vocab_size" not in [n.key for n in noted]


def test_a_model_may_have_more_rows_than_there_are_tokens_but_not_fewer(file):
    check_without_torch(resolve_job(tokens_job(file, "model.vocab_size=320")))
    with pytest.raises(RequestError) as refused:
        check_without_torch(resolve_job(tokens_job(file, "model.vocab_size=299")))
    assert str(refused.value) == (
        "model.vocab_size: 299 are too few for the 300 tokens of data tokens (try: model.vocab_size=300)"
    )


def test_a_null_vocab_size_of_the_model_is_that_of_its_data():
    made, source = with_vocabulary(job("data=text", "model.vocab_size=null"))
    assert source == ""
    assert made.model.vocab_size == 256


def test_null_beside_a_class_of_the_users_own_is_refused():
    words = ("data=null", "data._target_=tests.data.own.Ramp", "security.allow=[tests]", "model.vocab_size=null")
    with pytest.raises(RequestError) as refused:
        check_without_torch(resolve_job(job(*words, "steps=[train]")))
    assert str(refused.value) == (
        "model.vocab_size: null: your own data class does not define the number of tokens; set it here"
    )


def test_images_are_not_what_a_language_model_reads_and_tokens_not_what_others_read(file):
    with pytest.raises(RequestError) as refused:
        check_without_torch(resolve_job(tokens_job(file, "model=resnet50")))
    assert str(refused.value) == "model: model resnet reads images, data tokens has tokens"


@pytest.mark.parametrize("show", ["null", "plan"])
def test_a_problem_of_a_token_file_is_reported_once_and_nothing_starts(tmp_path, capsys, show):
    path = tmp_path / "a.bin"
    path.write_bytes(little("H", range(1000)))
    words = ["recipe=lm_single", "data=tokens", f"data.path={path}", "steps=[train]", f"run_dir={tmp_path}/run"]
    assert main([*words, f"show={show}"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "error: 1 problem in this request; nothing was started\n\n"
        f"  data.vocab_size = null: {path} has a format that does not record it; give the number of tokens of its "
        "tokenizer, data.vocab_size=50257 for GPT-2\n"
        "    set in: conf/data/tokens.yaml:6:1\n"
        "          | vocab_size: null    # tokens; null: from the headers of .tokens files\n"
    )
    assert not (tmp_path / "run").exists()


def test_files_of_tokens_are_checked_without_torch(file):
    code = (
        "import sys\n"
        "from launcher.job.compose import compose\n"
        "from launcher.planner.plan_job import check_without_torch, resolve_job\n"
        f"job = compose(['recipe=lm_single', 'data=tokens', 'data.path={file}', 'steps=[train]']).job\n"
        "assert check_without_torch(resolve_job(job)).job.model.vocab_size == 300\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
