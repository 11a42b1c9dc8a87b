"""The index of a sweep's folder: each cell keeps its name, and no name leads out of the folder."""

from __future__ import annotations

import json

import pytest

from launcher.errors import RequestError
from launcher.extras.sweep import folder
from launcher.extras.sweep.cell_process import known_result
from launcher.job.config_folders import ConfigFiles
from launcher.job.sweep_grid import axes, grid
from launcher.runtime.run_folder import write_status


@pytest.mark.parametrize("word", [
    "model.config.num_key_value_heads=1,2,4", "+data.mask_token=1,200,201", "+data.mask_token=a,b,c",
    "+hub.token=first,second,third", "model.path=http://me:a@h/x,http://me:b@h/x,http://you:a@h/x",
])  # fmt: skip
def test_cells_with_other_values_are_other_cells_though_the_values_are_hidden(word, tmp_path):
    made = folder.named(tmp_path, grid(axes([word], ConfigFiles())))
    assert [cell.name.partition("-")[0] for cell in made] == ["0", "1", "2"]
    assert folder.named(tmp_path, made[::-1]) == made[::-1]
    written = (tmp_path / folder.INDEX).read_text()
    assert not [secret for secret in ("first", "second", "third", "me:", "you:") if secret in written]


def test_a_result_belongs_to_the_cell_of_its_secret(tmp_path):
    first, second = folder.named(tmp_path, grid(axes(["+hub.token=first,second"], ConfigFiles())))
    (tmp_path / first.name).mkdir()
    write_status(tmp_path / first.name, status="done", overrides=folder.identity(first.overrides))
    (tmp_path / second.name).symlink_to(tmp_path / first.name)
    assert known_result(tmp_path, first) is not None
    (tmp_path / second.name).unlink()
    (tmp_path / first.name).rename(tmp_path / second.name)
    assert known_result(tmp_path, second) is None


@pytest.mark.parametrize("name", ["../escape", "0-x/../../escape", "/escape", "a", "", "..", "0/1", "0x", "1e3"])
def test_a_name_that_is_not_of_a_cell_is_refused(name, tmp_path):
    index = tmp_path / folder.INDEX
    index.write_text(json.dumps({name: ["seed=1"]}))
    with pytest.raises(RequestError) as caught:
        folder.named(tmp_path, grid(axes(["seed=1"], ConfigFiles())))
    (problem,) = caught.value.problems
    text = f"{index}: {name!r} is not the name of a cell, which is a number and words, such as 0-1"
    assert (problem.key, problem.text, problem.cure) == ("sweep_dir", text, f"sweep_dir={tmp_path}-2")


def test_a_new_cell_never_shares_the_folder_of_a_known_one(tmp_path):
    (tmp_path / folder.INDEX).write_text(json.dumps({"1-2": ["seed=1"]}))
    assert [cell.name for cell in folder.named(tmp_path, grid(axes(["seed=1,2"], ConfigFiles())))] == ["1-2", "2-2"]
