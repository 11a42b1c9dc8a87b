"""A problem in a strategy over a device matrix is reported with key, value and the nearest valid value."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.errors import RequestError
from launcher.planner.plan_job import plan_job
from tests.plan.made import job, words

NET = (
    "model=mlp", "data=mnist5k", "optim=sgd", "schedule=constant", "steps=[train]", "launch.nproc=8",
    "train.batch_size=32", "train.precision=fp64", "parallel.hsdp=null",
)  # fmt: skip
"""The modules are flatten, layer1 (784 to 512), relu1, layer2 (512 to 512), relu2, layer3 (512 to 10)."""

OPS = "parallel.operators"
SET = "parallel.dataset_strategy"
X = f"{OPS}.layer2={{matrix:[8],axes:[x],in:[[x,null]]}}"
"""An override that makes the plan use device matrices."""
THERE = "these have: flatten, layer1, relu1, layer2, relu2, layer3"
XY = "matrix:[2,4],axes:[x,y]"

STRATEGIES = {
    "dim no multiple": (
        f"{OPS}.layer1={{in:[[3,1],[1,1]]}}",
        "layer1: in[0]: [3, 1]: dim 0 of [32, 784] is not a multiple of 3 "
        f"(try: '{OPS}.layer1.in=[[2, 1], [1, 1]]')",
    ),
    "more slices than ranks": (
        f"{OPS}.layer1={{in:[[16,1],[1,1]]}}",
        "layer1: in: 16 slices do not divide the 8 ranks of a stage; possible: 1, 2, 4, 8 "
        f"(try: '{OPS}.layer1.in=[[8, 1], [1, 1]]')",
    ),
    "slices that do not divide the ranks": (
        f"{OPS}.layer1={{in:[[4,4],[4,1]]}}",
        "layer1: in: 4 x 4 = 16 slices do not divide the 8 ranks of a stage; possible: 1, 2, 4, 8 "
        f"(try: '{OPS}.layer1.in=[[4, 2], [2, 1]]')",
    ),
    "weight as a matrix product takes it": (
        f"{OPS}.layer3={{in:[[1,1],[1,4]]}}",
        f"layer3: in[1]: [1, 4]: dim 1 of [512, 10] is not a multiple of 4 (try: '{OPS}.layer3.in=[[1, 1], [1, 2]]')",
    ),
    "tensors that disagree": (
        f"{OPS}.layer1={{in:[[2,4],[2,1]]}}",
        "layer1: in[1]: [2, 1]: dim 0 is cut in 2, but the same dim of in[0] in 4",
    ),
    "tensors whose axes disagree": (
        f"{OPS}.layer1={{{XY},in:[[x,y],[x,null]]}}",
        "layer1: in[1]: [x, null]: dim 0 is cut by x, but the same dim of in[0] by y",
    ),
    "axis used twice in a tensor": (
        f"{OPS}.layer1={{{XY},in:[[x,x],[x,null]]}}",
        "layer1: in[0]: [x, x]: axis x cannot cut twice",
    ),
    "axis for two dims of two tensors": (
        f"{OPS}.layer1={{{XY},in:[[x,null],[x,null]]}}",
        "layer1: in: axis x cuts two dims that are not the same",
    ),
    "unknown axis": (
        f"{OPS}.layer1={{{XY},in:[[x,z],[z,null]]}}",
        "layer1: in[0]: [x, z]: z is not an axis; the axes are x, y, or null",
    ),
    "matrix that does not divide the ranks": (
        f"{OPS}.layer1={{matrix:[3,4],axes:[x,y],in:[[x,y],[null,y]]}}",
        "layer1: matrix: [3, 4]: its 12 ranks do not divide the 8 ranks of a stage; possible: 1, 2, 4, 8 "
        f"(try: '{OPS}.layer1.matrix=[2, 4]')",
    ),
    "matrix of no sizes": (
        f"{OPS}.layer1={{matrix:[2,0],axes:[x,y],in:[[x,y]]}}",
        "layer1: matrix: [2, 0]: must be the sizes of its axes, as in {matrix: [2, 4], axes: [x, y]}",
    ),
    "axes without a matrix": (
        f"{OPS}.layer1={{axes:[x,y],in:[[x,y]]}}",
        "layer1: matrix: null: must be the sizes of its axes, as in {matrix: [2, 4], axes: [x, y]}",
    ),
    "matrix without axes": (
        f"{OPS}.layer1={{matrix:[2,4],in:[[x,y]]}}",
        "layer1: axes: null: must be the names of the axes of the matrix, as in {matrix: [2, 4], axes: [x, y]}",
    ),
    "axis without a name": (
        f"{OPS}.layer1={{matrix:[2,4],axes:[x],in:[[x,null]]}}",
        "layer1: axes: [x]: must name each of the 2 axes of matrix [2, 4]",
    ),
    "two axes of one name": (
        f"{OPS}.layer1={{matrix:[2,4],axes:[x,x],in:[[x,null]]}}",
        "layer1: axes: [x, x]: two axes are called x",
    ),
    "no such module": (
        f"{OPS}.lyer1={{{XY},in:[[x,y]]}}",
        f"lyer1: no module with operators has this name; {THERE}, did you mean 'layer1'? (try: '~{OPS}.lyer1')",
    ),
    "glob of no module": (
        f"{OPS}.block*={{{XY},in:[[x,y]]}}",
        f"block*: no module with operators has this name; {THERE} (try: '~{OPS}.block*')",
    ),
    "glob of modules that differ": (
        f"{OPS}.*={{matrix:[8],axes:[x],in:[[x,null]]}}",
        "*: flatten: in[0]: [x, null]: 2 dims, but the tensor is [32, 1, 28, 28]",
    ),
    "too many tensors": (
        f"{OPS}.layer2={{{XY},in:[[x,y],[null,y],[null],[x]]}}",
        "layer2: in: [[x, y], [null, y], [null], [x]]: 4 tensors, but linear takes [32, 512], [512, 512], [512]",
    ),
    "too many dims": (
        f"{OPS}.layer1={{{XY},in:[[x,y,null]]}}",
        "layer1: in[0]: [x, y, null]: 3 dims, but the tensor is [32, 784]",
    ),
    "no list of tensors": (f"{OPS}.layer1={{{XY},in:3}}", "layer1: in: 3: must be a list with one list for each input"),
    "no list of dims": (
        f"{OPS}.layer1={{{XY},in:[x]}}",
        "layer1: in[0]: x: must be a list with axes or null for each dim",
    ),
    "names without a matrix": (
        f"{OPS}.layer1={{weight:[tp,null]}}",
        "layer1: in[1]: [tp, null]: numbers of slices must be positive; names need the keys matrix and axes",
    ),
    "no strategy": (f"{OPS}={{layer1:3}}", "layer1: 3: not a strategy such as {in: [[2, 4], [4, 1]]}"),
    "no field of a strategy": (f"{OPS}.layer1=3", "layer1: 3: not a strategy such as {in: [[2, 4], [4, 1]]}"),
    "unknown key": (
        f"{OPS}.layer1={{in:[[2,4]],wait:[1,1]}}",
        "layer1: wait: no such key; the keys are in, out, input, output, makes, matrix, axes, weight",
    ),
    "dim that cannot be cut": (
        f"{OPS}.flatten={{in:[[2,1,1,2]]}}",
        "flatten: in[0]: [2, 1, 1, 2]: dim 3 of [32, 1, 28, 28] is cut, but flatten needs all of it "
        f"(try: '{OPS}.flatten.in=[[2, 1, 1, 1]]')",
    ),
    "out of more tensors": (
        f"{OPS}.layer1={{{XY},in:[[x,y]],out:[[x,null],[x]]}}",
        "layer1: out: [[x, null], [x]]: must be a list with one list, for the only output",
    ),
    "out of fewer dims": (
        f"{OPS}.layer1={{{XY},in:[[x,y]],out:[[x]]}}",
        "layer1: out: [x]: 1 dim, but the tensor is [32, 512]",
    ),
    "out that does not divide": (
        f"{OPS}.layer3={{{XY},in:[[x,y]],out:[[x,y]]}}",
        f"layer3: out: [x, y]: dim 1 of [32, 10] is not a multiple of 4 (try: '{OPS}.layer3.out=[[x, null]]')",
    ),
    "out in slices": (
        f"{OPS}.layer3={{in:[[8,1]],out:[[3,2]]}}",
        f"layer3: out: [3, 2]: dim 0 of [32, 10] is not a multiple of 3 (try: '{OPS}.layer3.out=[[2, 2]]')",
    ),
    "out in slices that do not divide the ranks": (
        f"{OPS}.layer1={{in:[[8,1]],out:[[4,4]]}}",
        "layer1: out: [4, 4]: 4 x 4 = 16 slices do not divide the 8 ranks of a stage; possible: 1, 2, 4, 8 "
        f"(try: '{OPS}.layer1.out=[[4, 2]]')",
    ),
}  # fmt: skip


def refused(*typed: str, net: tuple[str, ...] = NET) -> RequestError:
    with pytest.raises(RequestError) as caught:
        plan_job(job(*net, *typed))
    return caught.value


@pytest.mark.parametrize("case", STRATEGIES)
def test_a_strategy_that_does_not_fit_is_refused_and_the_cure_accepted(case: str) -> None:
    typed, message = STRATEGIES[case]
    error = refused(X, typed)
    assert str(error) == f"{OPS}.{message}"
    if "try: " in message:
        plan_job(job(*NET, X, typed, *words(error)))


INPUTS = {
    "[[1,1,1,3],[8]]": "input 0: [1, 1, 1, 3]: dim 3 of [32, 1, 28, 28] is not a multiple of 3 "
    f"(try: '{SET}=[[1,1,1,2],[8]]')",
    "[[1,1,28,1],[8]]": "input 0: [1, 1, 28, 1]: 28 slices do not divide the 8 ranks of a stage; possible: 1, 2, 4, 8 "
    f"(try: '{SET}=[[1,1,4,1],[8]]')",
    "[[1,1,4,1],[3]]": "target: [3]: 3 slices do not divide the 8 ranks of a stage; possible: 1, 2, 4, 8",
    "[[1,1,4,1]]": "[[1,1,4,1]]: a batch has 2 tensors: input 0 has 4 dims, the target has 1 dim "
    f"(try: '{SET}=[[1,1,4,1],[1]]')",
    "{matrix:[2,4],axes:[x,y],in:[[x,null,z,null],[x]]}": "input 0: [x, null, z, null]: z is not an axis; the axes "
    "are x, y, or null",
    "{matrix:[2,4],axes:[x,y],in:[[x,null,x,null],[x]]}": "input 0: [x, null, x, null]: axis x cannot cut twice",
    "{matrix:[8],axes:[x],in:[[null,null,x,null],[x]]}": "input 0: [null, null, x, null]: dim 2 of [32, 1, 28, 28] is "
    "not a multiple of 8",
    "{matrix:[2,4],axes:[x,y],in:[[x,null,y,null],[z]]}": "target: [z]: z is not an axis; the axes are x, y, or null",
}  # fmt: skip


@pytest.mark.parametrize("typed", INPUTS)
def test_parts_of_a_batch_that_do_not_fit_are_refused_and_the_cure_accepted(typed: str) -> None:
    error = refused(f"{SET}={typed}")
    assert str(error) == f"{SET}: {INPUTS[typed]}"
    if "try: " in INPUTS[typed]:
        plan_job(job(*NET, f"{SET}={typed}", *words(error)))


def test_a_matrix_that_does_not_divide_the_ranks_is_told_once_of_all_tensors() -> None:
    assert str(refused(f"{SET}={{matrix:[2,3],axes:[x,y],in:[[x,null,y,null],[x]]}}")) == (
        f"{SET}: matrix: [2, 3]: its 6 ranks do not divide the 8 ranks of a stage; possible: 1, 2, 4, 8"
    )


BESIDE = {
    "parallel.grid.dp_shard=2": "parallel.grid.dp_shard: 2: has no meaning with device matrices, where each operator "
    "divides all ranks of a stage in its own way (try: '~parallel.grid.dp_shard')",
    "parallel.grid.dp_replicate=2": "parallel.grid.dp_replicate: 2: has no meaning with device matrices, where each "
    "operator divides all ranks of a stage in its own way (try: '~parallel.grid.dp_replicate')",
    "parallel.grid.tp=4": "parallel.grid.tp: 4: operators are cut over all 8 ranks of a stage (try: "
    "'~parallel.grid.tp')",
    "parallel.recompute={modules:'*'}": "parallel.recompute: operators over device matrices cannot be recomputed yet "
    "(try: '~parallel.recompute')",
    "train.compile={modules:stages}": "train.compile: operators over device matrices are not compiled yet (try: "
    "'~train.compile')",
    "optim=muon": "optim.name: muon: a step needs full tensors, but each operator cuts them in its own way (try: "
    "optim=adamw)",
}  # fmt: skip


@pytest.mark.parametrize("typed", BESIDE)
def test_settings_that_exclude_device_matrices_are_refused_and_the_cure_accepted(typed: str) -> None:
    error = refused(X, typed)
    assert str(error) == BESIDE[typed]
    plan_job(job(*NET, X, typed, *words(error)))


def test_a_backward_that_is_cut_in_two_is_refused() -> None:
    typed = [
        f"{OPS}.layer2={{matrix:[4],axes:[x],in:[[x,null]]}}",
        "parallel.pipeline.stages=2",
        "parallel.pipeline.stage_config=auto",
        "parallel.pipeline.scheduler=zero_bubble_h1",
    ]
    error = refused(*typed)
    assert str(error) == (
        "parallel.pipeline.scheduler: zero_bubble_h1: a backward over device matrices cannot be split in two (try: "
        "parallel.pipeline.scheduler=1f1b)"
    )
    plan_job(job(*NET, *typed, *words(error)))


SHOWN = """
  parallel.operators.layer1: in: 4 x 4 = 16 slices do not divide the 8 ranks of a stage; possible: 1, 2, 4, 8
    set by: parallel.operators.layer1={in:[[4,4],[4,1]]} (command line)
    try:    'parallel.operators.layer1={in:[[4,2],[2,1]]}'
"""


def test_the_command_line_refuses_with_2_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    net = [*NET, "parallel.pipeline.stages=1", "parallel.pipeline.stage_config=auto"]
    assert main([*net, X, f"{OPS}.layer1={{in:[[4,4],[4,1]]}}", f"run_dir={run}"]) == 2
    out, err = capsys.readouterr()
    assert SHOWN in out + err
    assert not run.exists()


def test_the_cure_of_a_module_whose_name_has_dots_is_below_that_name(capsys: pytest.CaptureFixture[str]) -> None:
    request = ["recipe=lm_single", "launch.nproc=4", "operators=none", "show=plan"]
    assert main([*request, f"{OPS}={{layers.0.mlp.gate:{{in:[[1,2,1],[1,3]]}}}}"]) == 2
    cure = f"{OPS}={{layers.0.mlp.gate:{{in:[[1,2,1],[1,2]]}}}}"
    assert f"try:    '{cure}'\n" in capsys.readouterr().err
    assert main([*request, cure]) == 0


ALONE = "{layers.0.attn.q: {in: [[1,1,1],[4,1]]}}"
MISFIT = (
    "in layers.0.attn: attention of a tensor cut over tp has shape [32, 4, 128, 32], which is not one rank's part of "
    "the full model's shape [32, 4, 128, 32]"
)


def test_slices_that_fit_no_axis_tp_are_over_device_matrices_and_the_plan_says_why() -> None:
    made = plan_job(job("launch.nproc=4", f"+{OPS}={ALONE}"))
    assert made.sharding is not None
    assert [str(n) for n in made.notes if n.key == OPS] == [
        f"{OPS} uses device matrices, because the strategies do not fit one tp axis: {MISFIT}"
    ]


@pytest.mark.parametrize("typed", ["parallel.grid.tp=4", "parallel.recompute={modules:'*'}"])
def test_slices_stay_on_one_axis_tp_where_that_is_asked_for_or_nothing_else_can_be(typed: str) -> None:
    error = refused("launch.nproc=4", f"+{OPS}={ALONE}", typed, net=())
    assert str(error) == f"{OPS}: {MISFIT}"


@pytest.mark.parametrize("value", ["3", "{in:3}", "{in:[3]}", "{in:[]}", "{}", "null", "{in:[[1,1],[a,1]]}"])
def test_a_strategy_without_slices_is_read_as_one_over_the_axis_tp(value: str) -> None:
    assert str(refused("launch.nproc=4", f"+{OPS}={{embed: {value}}}", net=())) == (
        "parallel.grid.tp: null: parallel.operators names the axis tp, but no setting says how many ranks it has "
        "(try: parallel.grid.tp=2)"
    )
