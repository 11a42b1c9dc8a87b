"""Requests for which a drill is useless are refused, each with a cure."""

from __future__ import annotations

import pytest

from launcher.errors import RequestError
from launcher.job.compose import compose
from launcher.job.cures.report import as_yaml
from launcher.run.run import rehearse
from tests.run.launching import TINY, run

KILL = "debug.drill={kill_rank: {rank: 1, step: 4}}"
SAVES, AGAIN = "checkpoint.every=2", "launch.max_restarts=1"
NOTHING = "debug.drill: names no fault (try: debug.drill=null)"
SAME = "a drill compares its saved weights with those of the undisturbed run"
REFUSED = {
    "no restart": (
        [KILL, SAVES],
        "launch.max_restarts: 0: debug.drill ends a rank, and the ranks would not be restarted "
        "(try: launch.max_restarts=1)",
    ),
    "no restart in a job of Slurm": (
        [KILL, SAVES, "launch=slurm", "launch.slurm.submit=false", "launch.device=cpu"],
        "launch.max_restarts: 0: debug.drill ends a rank, and the ranks would not be restarted "
        "(try: launch.max_restarts=1)",
    ),
    "no restart of pods": (
        [KILL, SAVES, "launch=k8s", "launch.k8s.image=us", "launch.k8s.claim=ours", "launch.k8s.mount=/"],
        "launch.max_restarts: 0: debug.drill ends a rank, and the ranks would not be restarted "
        "(try: launch.max_restarts=1)",
    ),
    "no restart of a PyTorchJob": (
        [
            KILL, SAVES, "launch=k8s", "launch.k8s.kind=pytorchjob", "launch.k8s.image=us", "launch.k8s.claim=ours",
            "launch.k8s.mount=/",
        ],
        "launch.k8s.kind: pytorchjob: debug.drill ends a rank, and a PyTorchJob that fails is not restarted; "
        "a JobSet is restarted if launch.max_restarts=1",
    ),
    "no checkpoint": (
        [KILL, AGAIN],
        "checkpoint.every: null: debug.drill.kill_rank needs a checkpoint during training to resume from "
        "(try: checkpoint.every=2)",
    ),
    "no such rank": (
        ["debug.drill={kill_rank: {rank: 4, step: 4}}", SAVES, AGAIN],
        "debug.drill.kill_rank.rank: 4: the plan has 4 ranks (try: debug.drill.kill_rank.rank=3)",
    ),
    "no such step": (
        ["debug.drill={hang_rank: {rank: 0, step: 7}}", SAVES, AGAIN],
        "debug.drill.hang_rank.step: 7: the training ends after 6 steps (try: debug.drill.hang_rank.step=6)",
    ),
    "two faults": (
        ["debug.drill={kill_rank: {rank: 0, step: 3}, hang_rank: {rank: 0, step: 3}}", SAVES, AGAIN],
        "debug.drill: kill_rank, hang_rank: a drill has one fault, so that everything that follows is caused by it; "
        "set all but one of them to null",
    ),
    "no fault": (["debug.drill={}"], NOTHING),
    "none of the preset": (["debug=drill", "debug.drill.kill_rank=null"], NOTHING),
    "nothing is written then": (
        ["debug.drill={torn_write: {rank: 1, step: 3}}", SAVES, AGAIN],
        "debug.drill.torn_write.step: 3: training writes no checkpoint in that step (checkpoint.every=2) "
        "(try: debug.drill.torn_write.step=4)",
    ),
    "not the last": (
        ["debug.drill={disk_full: {rank: 1, step: 6}}", SAVES, AGAIN],
        "debug.drill.disk_full.step: 6: training writes no checkpoint in that step (checkpoint.every=2) "
        "(try: debug.drill.disk_full.step=4)",
    ),
    "no two checkpoints": (
        ["debug.drill={bitflip: {rank: 1, step: 4}}", SAVES, AGAIN, "checkpoint.keep=1"],
        "checkpoint.keep: 1: bitflip damages the newest checkpoint, and there would be no other "
        "(try: checkpoint.keep=2)\n"
        "debug.drill.bitflip.step: 4: at that step there are fewer than two checkpoints (checkpoint.every=2) "
        "(try: debug.drill.bitflip.step=5)",
    ),
    "nothing to compare": (
        [KILL, SAVES, AGAIN, "steps=[train,evaluate]"],
        f"steps: no save step after train: {SAME} (try: 'steps=[train,save,evaluate]')",
    ),
    "no training": (
        ["debug.drill={slow_rank: {rank: 1, step: 4}}", "steps=[evaluate]"],
        "debug.drill: no step trains, so no fault happens (try: debug.drill=null)",
    ),
    "one rank": (
        ["debug.drill={slow_rank: {rank: 0, step: 3}}", "debug.onerank=true"],
        "debug.drill.slow_rank: the plan has one rank, so no other rank waits for it",
    ),
    "one node": (
        ["debug.drill={lose_node: {node: 0, step: 3}}", SAVES],
        "debug.drill.lose_node: without torchrun or srun this machine is the only node, and nothing restarts it",
    ),
    "in this process": (
        ["debug.drill={kill_rank: {rank: 0, step: 3}}", SAVES, "debug.onerank=true", "launch.mode=inproc"],
        "launch.mode: inproc: a rank in this process is not restarted, and debug.drill ends it "
        "(try: launch.mode=auto)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("words", "told"), REFUSED.values(), ids=list(REFUSED))
def test_drills_that_could_show_nothing_are_refused(words, told, tmp_path):
    with pytest.raises(RequestError) as error:
        rehearse(compose([*TINY, "train.steps=6", f"run_dir={tmp_path}/run", *words]), planned=False)
    assert str(error.value) == told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words",
    [[KILL], ["debug.drill={bitflip: {rank: 0, step: 5}}"], ["debug.drill={torn_write: {rank: 0, step: 3}}"]],
    ids=["kill_rank", "bitflip", "torn_write"],
)
def test_the_cures_for_a_refused_drill_are_accepted(words, tmp_path):
    asked = [*TINY, "train.steps=6", f"run_dir={tmp_path}/run", *words]
    with pytest.raises(RequestError) as error:
        rehearse(compose(asked), planned=False)
    cures = [p.cure for p in error.value.problems]
    assert len(cures) == 2
    rehearse(compose([*asked, *cures]), planned=False)


def test_a_folder_with_checkpoints_of_another_training_is_left_alone(tmp_path):
    folder = run(tmp_path / "run", "checkpoint.every=2", steps=6)
    words = [*TINY, "train.steps=6", f"run_dir={folder}", KILL, SAVES, AGAIN]
    with pytest.raises(RequestError) as error:
        rehearse(compose(words), planned=False)
    text = f"{folder}: contains checkpoints of another training, which a drill may damage; use a new folder"
    assert str(error.value) == f"run_dir: {text} (try: run_dir=null)"

    # the start of the drill itself is not refused
    (folder / "config.yaml").write_text(as_yaml(compose(words).data))
    rehearse(compose(words), planned=False)
