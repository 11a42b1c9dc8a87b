"""A user's own file with an error: the place in the file, what it should say, and exit code 2."""

from __future__ import annotations

import pytest

from launcher.__main__ import main
from launcher.job.config_folders import ConfigFiles
from tests.test_cli_bad_input import STEPS, head

FILES = {
    "values in a recipe": (
        "# mine\ndefaults:\n  - override /steps: [train]\ntrain:\n  steps: 5\n  batch_size: abc\nmodel:\n  dimm: 3\n"
        "steps:\n  trian: {}\n",
        f"""
  model.dimm: unknown key, did you mean 'model.dim'? And then model.heads: 4: must cut model.dim=3 into \
even-sized heads
    set in: recipes/mine.yaml:8:3
          |   dimm: 3

  train.batch_size = abc: should be a whole number
    set in: recipes/mine.yaml:6:3
          |   batch_size: abc

  steps.trian: unknown step 'trian', did you mean 'train'? (steps: {STEPS})
    set in: recipes/mine.yaml:10:3
          |   trian: {{}}
    try:    '~steps.trian' steps.train.kind=train
""",
    ),
    "YAML syntax error": (
        "train:\n  steps: [1\nseed: 2\n",
        """
  recipes/mine.yaml:3:5: not valid YAML: expected ',' or ']', but got ':' (while parsing a flow sequence, begun at 2:10)
          | seed: 2
""",
    ),
    "duplicate key": (
        "train:\n  steps: 1\n  steps: 2\n",
        """
  recipes/mine.yaml:3:3: not valid YAML: found duplicate key steps
          |   steps: 2
""",
    ),
    "no text": (
        b"seed: caf\xe9\n",
        """
  recipes/mine.yaml: not UTF-8 text: byte 9 is 0xe9
""",
    ),
    "control character": (
        'name: "\x01"\n',
        """
  recipes/mine.yaml:1:8: not valid YAML: special characters are not allowed
""",
    ),
    "option that is not there": (
        "defaults:\n  - override /model: lmm\n",
        """
  model: unknown option 'lmm', did you mean 'lm'? (options: hf, lm, lm_tiny, mlp, resnet18, \
resnet34, resnet50, tied_pair)
    set in: recipes/mine.yaml:2:5
          |   - override /model: lmm
    try:    model=lm

  train.batch_size: needs a value
    set in: conf/config.yaml:30:3
          |   batch_size: ???     # samples per optimizer step, over all ranks

  train.steps = null: train.steps or train.epochs must say how long to train; set one of them
    set in: conf/config.yaml:28:3
          |   steps: null         # optimizer steps
""",
    ),
    "group that is not there": (
        "defaults:\n  - override /modle: lm\n",
        """
  modle: there is no such group, did you mean 'model'? """
        """(groups: cluster, data, debug, launch, logger, loss, model, operators, optim, recipe, schedule, steps)
    set in: recipes/mine.yaml:2:5
          |   - override /modle: lm
""",
    ),
    "included recipe that is not there": (
        "defaults:\n  - lm_single\n  - lm_sinlge  # mine\n",
        """
  recipes/mine.yaml:3:5: defaults: there is no recipe 'lm_sinlge', did you mean 'lm_single'? """
        f"""(recipes: {", ".join(sorted((*ConfigFiles().options("recipe"), "mine")))})
          |   - lm_sinlge  # mine
""",
    ),
    "list for a group of keys": (
        "train: [1]\n",
        """
  recipes/mine.yaml:1:1: train: a list in place of a group of keys, or a group of keys in place of a list
""",
    ),
    "missing values": (
        "seed: 1\n",
        """
  train.batch_size: needs a value
    set in: conf/config.yaml:30:3
          |   batch_size: ???     # samples per optimizer step, over all ranks

  train.steps = null: train.steps or train.epochs must say how long to train; set one of them
    set in: conf/config.yaml:28:3
          |   steps: null         # optimizer steps
""",
    ),
}


@pytest.mark.parametrize(("content", "text"), FILES.values(), ids=FILES)
def test_a_users_own_recipe_is_named_by_file_line_and_column(content, text, tmp_path, monkeypatch, capsys):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/mine.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.chdir(tmp_path)
    assert main(["--config-dir", ".", "recipe=mine"]) == 2
    assert capsys.readouterr().err == head(text.count("\n\n") + 1) + text


def test_a_file_of_the_users_with_a_shipped_name_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/lm.yaml").write_text("name: lm\n")
    monkeypatch.chdir(tmp_path)
    assert main(["--config-dir", "."]) == 2
    text = "\n  model/lm.yaml: a shipped option already has this name; rename this file\n"
    assert capsys.readouterr().err == head(1) + text
