"""Files of a stranger with very many wrong names: the first are listed, the rest counted, in bounded time."""

from __future__ import annotations

import gc
from pathlib import Path
from time import process_time

import numpy as np
import pytest
from safetensors.numpy import save_file

from launcher.__main__ import main
from launcher.checkpoint.foreign import import_checkpoint
from launcher.checkpoint.foreign.names import attempted
from launcher.checkpoint.tensorfile import safetensors
from launcher.errors import Problem
from launcher.job import overrides
from launcher.job.cures.validation_errors import counted, shown
from launcher.plan.resolve import transformer_opt
from launcher.plan.values.tensor_spec import TensorSpec

MANY = 2_000


def test_switches_that_there_are_not_are_counted_beyond_the_first() -> None:
    wrong = [*transformer_opt.wrong({f"nosuch{n}": True for n in range(200_000)}, lambda name: f"f.json: {name}")]
    assert len(wrong) == transformer_opt.SHOWN + 1
    assert str(wrong[-1]) == "parallel.transformer_opt: 199980 more of its 200000 entries are wrong"


def test_keys_that_there_are_not_are_counted_beyond_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"  nosuch{n}: 1\n" for n in range(MANY))
    Path("many.yaml").write_text(f"defaults: [lm_single]\ntrain:\n{rows}")
    assert main(["recipe=many.yaml", "show=plan"]) == 2
    said = capsys.readouterr().err
    assert said.count("unknown key") == 50
    assert f"\n  train: {MANY - 50} more keys are wrong\n    set in: many.yaml:2:1\n" in said


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        (
            "parallel:\n  pipeline:\n    stage_config:\n" + "".join(f"      m{n}: x\n" for n in range(MANY)),
            "parallel.pipeline.stage_config.m0: 'x' is not a stage number",
            "parallel.pipeline.stage_config: 1950 more keys are wrong\n    set in: many.yaml:4:5\n",
        ),
        (
            "".join(f"a{n}: ${{nosuch{n}}}\n" for n in range(MANY)),
            "a0: ${nosuch0}: cannot be resolved; there is no key 'nosuch0'",
            "a50: this and 1949 more keys are wrong\n    set in: many.yaml:52:1\n",
        ),
        (
            "train: {" + ", ".join(f"a{n}: 1" for n in range(MANY)) + "}\n",
            "train.a0: unknown key",
            "train: 1950 more keys are wrong\n    set in: many.yaml:2:1\n",
        ),
    ],
    ids=["stage_config", "interpolations", "a line"],
)
def test_a_file_of_wrong_entries_shows_the_first_with_their_lines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    first: str,
    last: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("many.yaml").write_text(f"defaults: [lm_tied_pp2_hsdp2]\n{text}")
    assert main(["recipe=many.yaml", "show=plan"]) == 2
    said = capsys.readouterr().err
    assert first in said
    assert last in said
    assert said.startswith("error: 51 problems in this request; nothing was started\n")
    assert said.count("set in: many.yaml:") == 51
    assert max(map(len, said.splitlines())) < 500


@pytest.mark.parametrize("entries", [20_000, 100_000])
def test_a_file_of_more_values_than_a_recipe_has_is_refused_at_its_line(
    entries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("many.yaml").write_text("model:\n" + "".join(f"  m{n}: 0\n" for n in range(entries)))
    before = process_time()
    assert main(["recipe=many.yaml", "show=plan"]) == 2
    assert process_time() - before < 5  # one pass over the values that are allowed
    said = capsys.readouterr().err
    assert said.endswith("  many.yaml:5000:10: it contains more than 10000 values\n")


def test_the_key_of_several_problems_is_the_one_above_them() -> None:
    assert counted(["train.a", "train.b"]) == Problem("train", "2 more keys are wrong")
    assert counted(["a.b.c", "a.b.d", "a.b"]) == Problem("a.b", "3 more keys are wrong")
    assert counted(["a", "b"]) == Problem("a", "this and 1 more keys are wrong")
    assert counted(["a"]) == Problem("a", "is also wrong")


def test_a_long_list_is_shown_by_its_start_without_writing_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    words: list[str] = []
    monkeypatch.setattr(overrides, "_word", lambda text: words.append(text) or text)
    assert shown(["a"] * 9_000, "metrics") == "[" + "a," * 28 + "..."
    assert len(words) == 60


def test_the_head_of_a_file_is_read_once_and_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls, read_hf = tmp_path / "a.safetensors", [], import_checkpoint.read_hf
    monkeypatch.setattr(import_checkpoint, "read_hf", lambda *args: (calls.append(args), read_hf(*args))[1])
    save_file({"a": np.zeros(2, np.float32)}, path)
    assert [*import_checkpoint.outline(path)] == [*import_checkpoint.outline(path)] == ["a"]
    assert len(calls) == 1
    save_file({"b": np.zeros(3, np.float32)}, path)
    assert [*import_checkpoint.outline(path)] == ["b"]
    assert len(calls) == 2


def test_the_head_of_a_file_is_read_without_its_tensors_and_without_a_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 200,000 names, each of the two takes as long as reading the header itself."""
    path = tmp_path / "a.safetensors"
    save_file({"a": np.zeros(2, np.float32), "b": np.zeros((2, 3), np.int8)}, path)
    for name in ("foreign", "Strategy"):
        monkeypatch.setattr(import_checkpoint, name, None)
    monkeypatch.setattr("launcher.checkpoint.foreign.hugging_face.blob_at", None)
    specs = {"a": TensorSpec((2,), "float32"), "b": TensorSpec((2, 3), "int8")}
    assert import_checkpoint.outline(path) == specs
    assert import_checkpoint.outline(path) == foreign_specs(path, monkeypatch)


def foreign_specs(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, TensorSpec]:
    monkeypatch.undo()
    return dict(import_checkpoint.foreign(path).read_full().specs)


def test_names_without_a_table_stay_as_the_empty_row_leaves_them() -> None:
    names = ["a.b", "", "c\nd", "e"]
    for old in ((), names, names[:1]):
        plain, row = attempted(old, None), attempted(old, {"": ""})
        assert (plain, plain.rows) == (row, row.rows)


def test_the_garbage_collector_does_not_search_the_names_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch imported, its searches took more time than the reading of 200,000 names."""
    path, parts, slot = tmp_path / "a.safetensors", [], safetensors._slot
    monkeypatch.setattr(safetensors, "_slot", lambda *args: (parts.append(gc.isenabled()), slot(*args))[1])
    save_file({"a": np.zeros(2, np.float32)}, path)
    assert [*import_checkpoint.outline(path)] == ["a"]
    assert parts == [False]
    assert gc.isenabled()
