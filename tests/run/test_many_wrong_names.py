"""Files of a stranger with very many wrong names: the first are told, the rest is counted, in bounded work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from launcher.__main__ import main
from launcher.checkpoint.foreign import read
from launcher.plan.settings import transformer_opt

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
    assert f"{MANY - 50} more keys are wrong" in said


def test_the_head_of_a_file_is_read_once_and_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls, foreign = tmp_path / "a.safetensors", [], read.foreign
    monkeypatch.setattr(read, "foreign", lambda *args, **kwargs: (calls.append(args), foreign(*args, **kwargs))[1])
    save_file({"a": np.zeros(2, np.float32)}, path)
    assert [*read.outline(path)] == [*read.outline(path)] == ["a"]
    assert len(calls) == 1
    save_file({"b": np.zeros(3, np.float32)}, path)
    assert [*read.outline(path)] == ["b"]
    assert len(calls) == 2
