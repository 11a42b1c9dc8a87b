"""Running the same command twice gives the same bits."""

from __future__ import annotations

import re

import pytest

from launcher.__main__ import main
from tests.run.launching import TINY, losses, run, shape, tensors


@pytest.mark.parametrize("more", [[], ["deterministic=true"]], ids=["as it is", "deterministic"])
def test_the_same_command_gives_the_same_bits(tmp_path, more):
    first, second = (run(tmp_path / name, *more, steps=3) for name in ("first", "second"))
    assert tensors(first, 3) == tensors(second, 3)
    assert losses(first) == losses(second)


def test_another_seed_gives_others(tmp_path):
    first, second = (run(tmp_path / name, f"seed={name}", steps=1) for name in ("1", "2"))
    assert tensors(first, 1).keys() == tensors(second, 1).keys()
    assert losses(first) != losses(second)


def test_the_same_command_is_not_done_once_its_data_has_changed(tmp_path, capsys):
    text = tmp_path / "t.txt"
    text.write_text("to be or not to be\n" * 40)
    words = [w for w in TINY if not w.startswith("data")]
    words += ["data=text", f"data.path={text}", "data.seq_len=8", "train.steps=2", f"run_dir={tmp_path}/run", *shape()]
    assert main(words) == 0
    assert main(words) == 0
    assert capsys.readouterr().out.endswith(f"already done: {tmp_path}/run\n")

    text.write_text("to be, or not to be\n" * 40)
    assert main(words) == 2
    err = capsys.readouterr().err
    assert re.search(
        f"  data.path: 800 bytes with the digest .*: {tmp_path}/run/checkpoints/step-000002 was trained with 760 bytes "
        "with the digest .*: other samples would follow\n",
        err,
    )
    assert err.endswith(" 'checkpoint.accept_changes=[data.path]'\n")
    assert main([*words, "checkpoint.accept_changes=[data.path]"]) == 0
