"""The variables of torchrun and srun are validated: every problem is reported at once, and never as a traceback."""

from __future__ import annotations

import os

import pytest

from launcher.__main__ import main
from launcher.errors import RequestError, RunError
from launcher.run.external_ranks.follower import follow
from launcher.run.external_ranks.leader import leading
from launcher.runtime.cluster.launch_env import Place, again, job, place, rank
from launcher.runtime.cluster.messages import Messages, secret
from launcher.runtime.cluster.rendezvous import open_store
from tests.ports import free_port
from tests.runtime.cluster.test_world import SRUN, TORCHRUN

BAD = ": the environment of torchrun or srun is damaged, or was set by hand"


def test_a_whole_environment_is_a_place():
    assert place(TORCHRUN) == Place(5, 8, 1, 4, 2, "a", 1)
    assert place(SRUN) == Place(5, 7, 1, 3, 0, "gpu01", 15000 + 16 * 77 % 15000)
    assert place(SRUN | {"MASTER_ADDR": "b", "MASTER_PORT": "7"}) == Place(5, 7, 1, 3, 0, "b", 7)


CASES = {
    "RANK": ({"RANK": ""}, ["RANK is '', which is not a whole number of at least 0"]),
    "WORLD_SIZE": ({"WORLD_SIZE": "x"}, ["WORLD_SIZE is 'x', which is not a whole number of at least 0"]),
    "a rank too high": ({"RANK": "8"}, ["RANK is 8, which is not below 8"]),
    "a negative rank": ({"RANK": "-1"}, ["RANK is '-1', which is not a whole number of at least 0"]),
    "a local rank too high": ({"LOCAL_RANK": "4"}, ["LOCAL_RANK is 4, which is not below 4"]),
    "MASTER_PORT": ({"MASTER_PORT": "http"}, ["MASTER_PORT is 'http', which is not a whole number of at least 0"]),
    "a port too high": ({"MASTER_PORT": "65536"}, ["MASTER_PORT is 65536, which is not below 65536"]),
    "two": (
        {"RANK": "a", "TORCHELASTIC_RESTART_COUNT": ""},
        [
            "RANK is 'a', which is not a whole number of at least 0",
            "TORCHELASTIC_RESTART_COUNT is '', which is not a whole number of at least 0",
        ],
    ),
}
SLURM = {
    "SLURM_PROCID": ({"SLURM_PROCID": ""}, ["SLURM_PROCID is '', which is not a whole number of at least 0"]),
    "SLURM_NODEID": ({"SLURM_NODEID": "2"}, ["SLURM_NODEID is 2, which is not below 2"]),
    "SLURM_LOCALID": ({"SLURM_LOCALID": "9"}, ["SLURM_LOCALID is 9, which is not below 3"]),
    "SLURM_JOB_ID": ({"SLURM_JOB_ID": "j"}, ["SLURM_JOB_ID is 'j', which is not a whole number of at least 0"]),
    "SLURM_RESTART_COUNT": (
        {"SLURM_RESTART_COUNT": "x"},
        ["SLURM_RESTART_COUNT is 'x', which is not a whole number of at least 0"],
    ),
    "SLURM_STEP_NUM_TASKS": (
        {"SLURM_STEP_NUM_TASKS": "many"},
        ["SLURM_STEP_NUM_TASKS is 'many', which is not a whole number of at least 0"],
    ),
    "SLURM_STEP_TASKS_PER_NODE": (
        {"SLURM_STEP_TASKS_PER_NODE": "4(x"},
        ["SLURM_STEP_TASKS_PER_NODE is '4(x', which does not add up to the 7 tasks of SLURM_STEP_NUM_TASKS"],
    ),
    "SLURM_STEP_NODELIST": ({"SLURM_STEP_NODELIST": ""}, ["SLURM_STEP_NODELIST is '', which names no node"]),
    "MASTER_PORT": ({"MASTER_PORT": "p"}, ["MASTER_PORT is 'p', which is not a whole number of at least 0"]),
}


@pytest.mark.parametrize(
    ("env", "told"),
    [(TORCHRUN | more, told) for more, told in CASES.values()] + [(SRUN | more, told) for more, told in SLURM.values()],
    ids=[*(f"torchrun: {k}" for k in CASES), *(f"srun: {k}" for k in SLURM)],
)
def test_all_problems_of_a_launch_environment_are_reported_at_once(env, told):
    with pytest.raises(RequestError) as refused:
        place(env)
    assert [p.text for p in refused.value.problems] == [text + BAD for text in told]


@pytest.mark.parametrize(
    ("env", "lacking"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK and MASTER_ADDR and MASTER_PORT"),
        (TORCHRUN | {"MASTER_PORT": ""}, "MASTER_PORT"),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"}, "MASTER_ADDR"),
    ],
    ids=["two alone", "an empty one", "one missing"],
)
def test_half_an_environment_is_refused(env, lacking):
    with pytest.raises(RequestError) as refused:
        place(env)
    assert str(refused.value) == (
        f"launch.mode: RANK and WORLD_SIZE are set, but not {lacking}: torchrun sets them all; "
        "start the ranks with it, or unset RANK and WORLD_SIZE so that this command starts them"
    )


@pytest.mark.parametrize("more", [more for more, _ in CASES.values()], ids=CASES)
def test_the_command_refuses_it_in_words(more, monkeypatch, capsys):
    for key, value in (TORCHRUN | {"RANK": "0"} | more).items():
        monkeypatch.setenv(key, value)
    assert main(["recipe=lm_single"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert err.startswith("error: ")


def test_a_rank_is_known_before_all_the_rest():
    assert [rank(e) for e in ({}, {"RANK": "3", "WORLD_SIZE": "4"}, SRUN, {"SLURM_PROCID": "1"})] == [None, 3, 5, None]
    assert rank({k: v for k, v in SRUN.items() if "STEP" not in k}) is None  # the shell of sbatch, which starts a sweep
    assert rank(SRUN | {"SLURM_NTASKS": "0"}) == rank({k: v for k, v in SRUN.items() if k != "SLURM_NTASKS"}) == 5


def test_a_job_keeps_its_name_when_it_is_run_again():
    array = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    assert [job(e) for e in ({}, {"SLURM_JOB_ID": "9", "SLURM_CLUSTER_NAME": "c"}, array)] == [
        None,
        "slurm c 9",
        "slurm  7_2",
    ]
    counts = [{}, {"SLURM_RESTART_COUNT": "0"}, {"SLURM_RESTART_COUNT": "1"}, {"TORCHELASTIC_RESTART_COUNT": "2"}]
    assert [again(e) for e in counts] == [False, False, True, True]


def test_a_rank_0_that_dies_before_its_last_word_is_told(monkeypatch):
    port = free_port()
    first = Place(0, 2, 0, 2, 0, "localhost", port)
    env = {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    pid = os.fork()
    if pid == 0:
        open_store(first, lambda: 60.0, print).get("launcher0/here1")
        os._exit(0)
    told = r"rank 1: rank 0, or its launcher, has ended: .*(Connection|got 0 bytes).*"
    with pytest.raises(RunError, match=told):
        follow(lambda: 60.0)
    os.waitpid(pid, 0)


def test_a_rank_that_knows_of_another_world_is_told():
    port = free_port()
    with leading(Place(0, 2, 0, 2, 0, "localhost", port)) as others:
        other = Place(1, 3, 1, 3, 0, "localhost", port)
        own = Messages(open_store(other, lambda: 60.0, print), secret(other)).within("launcher0")
        for name, value in (("size1", "3"), ("here1", "there 1"), ("heard0.1", "")):
            own.set(name, value)
        with pytest.raises(RequestError) as refused:
            others.gather(60.0)
    text = "rank 1 was started for 3 ranks, rank 0 for 2"
    assert str(refused.value) == text + BAD
