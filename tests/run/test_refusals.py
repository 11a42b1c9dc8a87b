"""A request that cannot be carried out: the full text, exit code 2, and no file written."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.__main__ import main
from tests.data.sample_files import write_idx
from tests.run.launching import TINY

PIPE = "parallel.pipeline"
STAGES = f"{PIPE}.stage_config"

CASES = {
    "a module that is not there": (
        [STAGES + "={embed: 0, layer.0: 0, layers.1: 1, norm: 1, head: 1}"],
        """
  parallel.pipeline.stage_config.layer.0: the model has no module 'layer.0', did you mean 'layers.0'?
    set by: parallel.pipeline.stage_config={embed: 0, layer.0: 0, layers.1: 1, norm: 1, head: 1} (command line)
    try:    'parallel.pipeline.stage_config={embed:0,layers.1:1,norm:1,head:1,layers.0:0}'
""",
    ),
    "a module without a stage": (
        [STAGES + "={embed: 0, layers.1: 1, norm: 1, head: 1}"],
        """
  parallel.pipeline.stage_config: 'layers.0' has parameters but no stage
    set by: parallel.pipeline.stage_config={embed: 0, layers.1: 1, norm: 1, head: 1} (command line)
    try:    'parallel.pipeline.stage_config={embed:0,layers.1:1,norm:1,head:1,layers.0:0}'
""",
    ),
    "a hole between the stages": (
        [
            "parallel.hsdp=null",
            "launch.nproc=3",
            f"{PIPE}.stages=3",
            f"{PIPE}.micro_batch_num=4",
            STAGES + "={embed: 0, layers: 2, norm: 2, head: 2}",
        ],
        """
  parallel.pipeline.stage_config: nothing is on stage 1; there are stages 0..2 (parallel.pipeline.stages=3)
    set by: parallel.pipeline.stage_config={embed: 0, layers: 2, norm: 2, head: 2} (command line)
""",
    ),
    "fewer micro batches than stages": (
        [f"{PIPE}.micro_batch_num=1"],
        """
  parallel.pipeline.micro_batch_num = 1: too few to fill 2 stages; at least as many are needed
    set by: parallel.pipeline.micro_batch_num=1 (command line)
    try:    parallel.pipeline.micro_batch_num=2
""",
    ),
    "a world that cannot be divided": (
        ["launch.nproc=3"],
        """
  launch.nproc = 3: cannot be divided evenly into 2 pipeline stages
    set by: launch.nproc=3 (command line)
    try:    launch.nproc=4
""",
    ),
    "a batch that cannot be divided": (
        ["train.batch_size=14"],
        """
  train.batch_size = 14: these samples cannot be divided evenly into 2 data-parallel ranks x 2 micro batches
    set by: train.batch_size=14 (command line)
    try:    train.batch_size=16
""",
    ),
    "two steps in the wrong order": (
        ["steps=[transform,save]"],
        """
  steps.transform: needs a checkpoint, but 'save', which makes it, comes after 'transform'
    set in: conf/steps/transform.yaml:2:1
          | transform:
    try:    'steps=[save,transform]'
""",
    ),
    "several at once": (
        [f"{PIPE}.micro_batch_num=1", "train.batch_size=12", "launch.nnodes=2", "launch.nproc=2"],
        """
  launch.nnodes = 2: without torchrun or srun the launcher starts ranks on this machine only; run torchrun \
--nnodes 2 -m launcher ... on each node, or submit it with launch=slurm
    set by: launch.nnodes=2 (command line)

  parallel.pipeline.micro_batch_num = 1: too few to fill 2 stages; at least as many are needed
    set by: parallel.pipeline.micro_batch_num=1 (command line)
    try:    parallel.pipeline.micro_batch_num=2
""",
    ),
    "external without a launcher": (
        ["launch.mode=external"],
        """
  launch.mode = external: neither torchrun nor srun has started this process; launch.mode=auto starts the ranks itself
    set by: launch.mode=external (command line)
""",
    ),
    "several ranks in one process": (
        ["launch.mode=inproc"],
        """
  launch.mode = inproc: one process is one rank, but the plan has 4; debug=onerank plans for one
    set by: launch.mode=inproc (command line)
""",
    ),
    "nccl on the CPU": (
        ["launch.backend=nccl", "launch.device=cpu"],
        """
  launch.backend = nccl: the ranks of this run are on the CPU and need gloo
    set by: launch.backend=nccl (command line)
""",
    ),
    "a checkpoint to load that is not there": (
        ["steps=[load,train]", "steps.load.path=nowhere"],
        """
  steps.load.path = nowhere: cannot resume from this checkpoint: nowhere: no checkpoint: no such folder
    set by: steps.load.path=nowhere (command line)
""",
    ),
    "weights from two places": (
        ["steps=[load,train]", "steps.load.path=nowhere", "checkpoint.resume=elsewhere"],
        """
  checkpoint.resume = elsewhere: cannot resume from this checkpoint: elsewhere: no checkpoint: no such folder
    set by: checkpoint.resume=elsewhere (command line)

  checkpoint.resume = elsewhere: the step 'load' loads the weights from elsewhere
    set by: checkpoint.resume=elsewhere (command line)

  steps.load.path = nowhere: cannot resume from this checkpoint: nowhere: no checkpoint: no such folder
    set by: steps.load.path=nowhere (command line)
""",
    ),
    "a folder below a file": (
        ["runs=file/runs"],
        """
  runs: a run folder cannot be made at file/runs: file is not a folder
    set by: runs=file/runs (command line)
""",
    ),
    "two files in one": (
        ["parallel.param_strategy.save=run:p.json", "parallel.group_file=run:p.json"],
        """
  parallel.group_file = run:p.json: parallel.param_strategy.save is also written to this file
    set by: parallel.group_file=run:p.json (command line)
""",
    ),
    "a folder in the place of a file": (
        ["parallel.local_norm.dump=run:x.json", "parallel.group_file=run:x.json"],
        """
  parallel.local_norm.dump = run:x.json: parallel.group_file is also written to this file
    set by: parallel.local_norm.dump=run:x.json (command line)
""",
    ),
    "a folder that is a file": (
        ["run_dir=file"],
        """
  run_dir: a run folder cannot be made at file: file is not a folder
    set by: run_dir=file (command line)
""",
    ),
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    yield
    assert [p.name for p in tmp_path.iterdir() if p.name != "data"] == ["file"]


def refused(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """Return the text of the problems, and check that their number in the head is right."""
    assert main(overrides) == 2
    said = capsys.readouterr()
    assert said.out == ""
    head, _, told = said.err.partition("\n")
    n = told.count("\n\n") + 1
    assert head == f"error: {n} problem{'s' * (n > 1)} in this request; nothing was started"
    return told


@pytest.mark.parametrize(("overrides", "told"), CASES.values(), ids=CASES)
def test_impossible_requests_are_refused_with_their_full_text(overrides, told, capsys):
    assert refused(capsys, *TINY, *overrides) == told


def test_nodes_that_are_not_here_are_all_that_is_wrong(capsys):
    """One node cannot run the stages of this eight-node recipe, but the request does not ask for one node."""
    assert (
        refused(capsys, "recipe=lm_8b_h100x64")
        == """
  launch.nnodes = 8: without torchrun or srun the launcher starts ranks on this machine only; run torchrun \
--nnodes 8 -m launcher ... on each node, or submit it with launch=slurm
    set in: recipes/lm_8b_h100x64.yaml:12:10
          | launch: {nnodes: 8, nproc: 8}
"""
    )


def test_an_unknown_recipe_is_refused_with_a_suggestion(capsys):
    assert refused(capsys, "recipe=lm_singel").startswith(
        "\n  recipe: unknown option 'lm_singel', did you mean 'lm_single'?"
    )


def test_a_data_file_that_is_not_there(capsys):
    assert (
        refused(capsys, "data.path=nowhere.txt")
        == """
  data.path = nowhere.txt: No such file or directory
    set by: data.path=nowhere.txt (command line)
"""
    )


def test_a_data_file_that_is_cut_short(capsys):
    write_idx(Path("data"), "")
    with Path("data/train-images-idx3-ubyte").open("ab") as file:
        file.truncate(100)
    words = ["recipe=mlp_autoparallel", "data=idx", "data.root=data", "data.size=4", "model.features=16"]
    told = refused(capsys, *words)
    assert (
        told
        == """
  data.root: data/train-images-idx3-ubyte: cut off: its header promises 6 x 4 x 4 bytes, 112 with the header; \
the file has 100
    set by: data.root=data (command line)
"""
    )


def test_a_port_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert (
            refused(capsys, *TINY, f"launch.port={port}")
            == f"""
  launch.port: port {port} on 127.0.0.1 cannot be used: Address already in use; null takes a free one
    set by: launch.port={port} (command line)
"""
        )


@contextmanager
def nobody() -> Iterator[None]:
    """Run as a user other than root, because root may write anywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_a_folder_that_may_only_be_read(capsys):
    assert main([*TINY, "show=config"]) == 0  # imports now what that user may not read
    capsys.readouterr()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        with nobody():
            told = refused(capsys, *TINY, f"runs={folder}/runs")
        assert os.listdir(folder) == []
    assert (
        told
        == f"""
  runs: a run folder cannot be made at {folder}/runs: {folder} is not writable
    set by: runs={folder}/runs (command line)
"""
    )
