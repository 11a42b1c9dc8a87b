"""Which models can process sequences in pieces, and that their results are right."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from launcher.errors import Problem, RequestError
from launcher.parallel import position_mixing, sequence_chunks
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.planner.plan_job import plan_job
from tests.parity import assert_parity, batch, build, error, job, own, plain, step
from tests.ranks import on_ranks
from tests.test_parity_tp import SEQUENCE

STAGES = {"embed": 0, "a": 0, "b": 1, "head": 1}


def pieced(net: str, count: int = 3, length: int = 7) -> Any:
    pipe = {"stages": 2, "scheduler": "seqpipe", "seq_chunks": count, "micro_batch_num": 3, "stage_config": STAGES}
    return own(f"piece_nets.{net}", ["int64", length], stages=STAGES, parallel={"pipeline": pipe})


def test_a_users_module_with_a_state_of_its_own_equals_one_process():
    plan, _ = assert_parity(pieced("Summing"))
    assert plan.pieces == (3, 2, 2)


def test_a_users_module_that_says_it_is_positionwise_equals_one_process():
    assert_parity(pieced("Sorting"))


CURE = "(try: parallel.pipeline.seq_chunks=1)"
MIXES = (
    "which may mix positions, and has no method 'piece' to run a sequence in pieces; give it one, set positionwise = "
    f"True in it, or set parallel.pipeline.seq_chunks=1 {CURE}"
)
REFUSED = {
    "Flipping": [f"model: a (Backwards) calls flip, {MIXES}", f"model: b (Backwards) calls flip, {MIXES}"],
    "Twice": [f"model: a (RunningSum) runs 2 times in one forward; the state of its pieces would mix {CURE}"],
    "Positions": [f"model: the forward of Positions calls arange, {MIXES}"],
}


@pytest.mark.parametrize("net", REFUSED)
def test_modules_that_cannot_process_pieces_are_refused_by_name(net):
    with pytest.raises(RequestError) as refused:
        plan_job(pieced(net))
    assert [str(RequestError((p,))) for p in refused.value.problems] == REFUSED[net]


def test_more_pieces_than_positions_are_refused():
    with pytest.raises(RequestError) as refused:
        plan_job(pieced("Summing", count=8))
    assert str(refused.value) == (
        f"parallel.pipeline.seq_chunks: 8: dim 1 of (4, 7) has 7 positions, fewer than 8 {CURE}"
    )


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (
            [(4, 8), (4, 7)],
            "2: the inputs (4, 8), (4, 7) differ in dim 1, the sequence, so they cannot be cut together",
        ),
        ([(4,)], "2: inputs of shape (4,) have no dim 1 to cut"),
        ([(4, 1)], "2: dim 1 of (4, 1) has 1 position, fewer than 2"),
    ],
)
def test_inputs_without_one_sequence_are_refused(shapes, text):
    specs = [TensorSpec(shape, "int64") for shape in shapes]
    key = position_mixing.KEY
    assert sequence_chunks.problems(nn.Identity(), specs, 2) == [Problem(key, text, f"{key}=1")]


def test_pieces_of_fewer_positions_than_operators_cut_them_over_ranks_are_refused():
    pipe = {"stages": 2, "scheduler": "seqpipe", "seq_chunks": 4}
    with pytest.raises(RequestError) as refused:
        plan_job(job(parallel={"pipeline": pipe, "grid": {"tp": 2}, "operators": SEQUENCE}, data__seq_len=6))
    assert str(refused.value) == (
        "parallel.pipeline.seq_chunks: 4: operators cut each piece over tp=2, so its length is a multiple of 2; "
        "6 positions make at most 3 pieces (try: parallel.pipeline.seq_chunks=3)"
    )


def test_an_image_has_no_sequence():
    j = job(model={"name": "mlp", "features": 784, "hidden": 24}, data={"name": "mnist5k"}, train__batch_size=8,
            parallel={"pipeline": {"stages": 2, "scheduler": "seqpipe", "seq_chunks": 2}})  # fmt: skip
    with pytest.raises(RequestError) as refused:
        plan_job(j)
    assert {p.cure for p in refused.value.problems} == {"parallel.pipeline.seq_chunks=1"}


def rank_evaluate(world, j, plan) -> tuple[Any, list[int]]:
    par, pipe = build(world, j, plan)
    step(j, par, pipe)
    xs, _ = batch(j, plan)
    out = pipe.predict(xs)
    return out, [len(p.carry.states) for p in par.parts]


def test_evaluation_after_a_step_in_pieces_runs_whole_sequences_and_nothing_is_kept():
    pipe = {"stages": 2, "scheduler": "seqpipe", "seq_chunks": 3, "micro_batch_num": 4}
    j = job(parallel={"pipeline": pipe}, data__seq_len=11)
    plan = plan_job(j)
    (_, first), (out, last) = on_ranks(2, rank_evaluate, j, plan)
    (x,), _ = batch(j, plan)
    assert error(out, plain(j, plan)(x).detach()) <= 1e-12
    assert (first, last) == ([0], [0])


def test_held_activations_include_what_a_piece_reads_from_earlier_pieces():
    pipe = {"stages": 2, "scheduler": "seqpipe", "micro_batch_num": 2, "seq_split": "equal"}
    whole, cut = (plan_job(job(parallel={"pipeline": pipe | {"seq_chunks": n}}, data__seq_len=64)) for n in (1, 4))
    assert cut.pieces == (16, 16, 16, 16)
    assert max(cut.estimate.timeline.peak) < max(whole.estimate.timeline.peak)
    assert cut.estimate.timeline.bubble < whole.estimate.timeline.bubble
