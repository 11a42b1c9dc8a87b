"""A resumed run skips a step only if its weights come after it; else it would go on with other weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.job.schema.steps import Load, Save, Train
from launcher.plan.resolve.encryption import ANYONE
from launcher.steps.on_ranks import _again, _loaded_before, _passed

SIX = SimpleNamespace(sizes=SimpleNamespace(steps=6))


@pytest.mark.parametrize(
    ("verbs", "start", "now", "loaded", "skipped"),
    [
        ("load train save", 2, 2, {"load": "best"}, True),
        ("load train save", 2, 2, {}, False),
        ("load train save", 2, 2, {"load": "/other"}, False),
        ("load train save", 2, 2, None, True),
        ("load train save", 0, 0, None, False),
        ("train save load", 6, 6, {"load": "best"}, False),
        ("train save load", 5, 6, None, False),
        ("save load", 6, 6, {"load": "best"}, False),
        ("train load train2", 2, 3, {"load": "best"}, False),
        ("train load train2", 5, 5, {"load": "best"}, True),
        ("train load train2", 3, 3, {}, False),
        ("train load train2", 3, 3, None, False),
        ("train load train2", 4, 4, None, True),
    ],
)
def test_a_load_is_skipped_only_if_the_weights_come_after_it(verbs, start, now, loaded, skipped):
    kinds: dict[str, Any] = {"load": Load(path="best"), "save": Save(), "train": Train(), "train2": Train()}
    job: Any = SimpleNamespace(steps={name: kinds[name] for name in verbs.split()})
    live: Any = SimpleNamespace(step=now, loaded=loaded, plan=SIX)
    assert _loaded_before(live, job, "load", start) is skipped


def test_a_restarted_attempt_names_an_incomplete_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-000002"
    folder.mkdir(parents=True)
    said: list[dict[str, Any]] = []
    live: Any = SimpleNamespace(trust=ANYONE, world=SimpleNamespace(rank=0, size=1), emit=said.append)
    todo: Any = SimpleNamespace(folder=tmp_path, before=None, resume=None)
    assert _again(live, todo) is None
    why = f"{folder}: incomplete checkpoint: it has no manifest.json, which is written last"
    assert said == [{"text": f"a checkpoint is skipped: {why}"}]


@pytest.mark.parametrize(
    ("verbs", "at", "loaded", "passed"),
    [
        ("train save", None, [], ""),  # of an older version
        ("train save", "train", [], ""),
        ("train save", "save", [], ""),  # more steps may be requested
        ("train save train2 save2", "train2", [], "train save"),
        ("train save load train2 save2", "train2", ["load"], "train save load"),
        ("train save load train2 save2", "save2", ["load"], "train save"),
        ("train save load train2 save2", "save", [], ""),
        ("load train save", "train", ["load"], "load"),
        ("load train save", "other", ["load"], ""),
    ],
)
def test_the_steps_before_the_place_of_a_checkpoint_are_not_repeated(verbs, at, loaded, passed):
    kinds: dict[str, Any] = {"load": Load(path="best"), "save": Save(), "train": Train()}
    job: Any = SimpleNamespace(steps={name: kinds[name.rstrip("2")] for name in verbs.split()})
    live: Any = SimpleNamespace(at=at, loaded=dict.fromkeys(loaded, "best"))
    assert _passed(live, job) == set(passed.split())
