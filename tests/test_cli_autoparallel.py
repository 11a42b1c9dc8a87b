"""What the documents of AutoParallel call an error is refused at once: the full text, and a cure that is accepted."""

from __future__ import annotations

import os
import shlex

import pytest

from launcher.__main__ import main
from launcher.job.compose import compose

P, PIPE, FUSE = "parallel", "parallel.pipeline", "parallel.comm_fusion"
SCHEDULERS = "gpipe, 1f1b, zero_bubble_h1, zero_bubble_v, dualpipe_v, seqpipe, seqvpp, seqsmartvpp, auto"
MODES = "semi_auto, sharding_propagation, recursive_programming"
FLAG, WHOLE, GROUP = "should be true or false", "should be a whole number", "should be a group of keys"
SLICES = "should be data_parallel or full_batch or a list or a group of keys"
LAYOUT = "should be a layout such as {matrix: [2, 4], axes: [x, y], in: [[x, y], [x]]}, with one list per tensor"

CASES = [
    (f"{P}.hsdp.shard_size=0", "0: must be -1 (all data-parallel ranks) or a positive integer",
     ""),
    (f"{P}.hsdp.shard_size=a", f"a: {WHOLE}", ""),
    (f"{P}.hsdp.threshold=-1", "-1: should be at least 0", ""),
    (f"{P}.hsdp.optimizer_level=level4", "level4: should be one of level1, level2, level3",
     ""),
    (f"{P}.hsdp=level1", f"level1: {GROUP}", f"'{P}.hsdp={{optimizer_level:level1}}'"),
    (f"{PIPE}.stages=0", "0: should be at least 1", ""),
    (f"{PIPE}.stages=two", f"two: {WHOLE}", ""),
    (f"{PIPE}.micro_batch_num=0", "0: should be at least 1", ""),
    (f"{PIPE}.output_broadcast=1", f"1: {FLAG}", f"{PIPE}.output_broadcast=true"),
    (f"{PIPE}.interleave=yes", f"yes: {FLAG}", f"{PIPE}.interleave=true"),
    (f"{PIPE}.scheduler=1F1B", f"1F1B: should be one of {SCHEDULERS}; did you mean '1f1b'?", f"{PIPE}.scheduler=1f1b"),
    (f"{PIPE}.scheduler=3", f"3: should be one of {SCHEDULERS}", ""),
    (f"{PIPE}.scheduler=null", f"null: should be one of {SCHEDULERS}", ""),
    (f"{P}.mode=auto", f"auto: should be one of {MODES}", ""),
    (f"{P}.mode=data_parallel", "data_parallel: not supported; semi_auto is the mode; parallel.pipeline, hsdp and "
     "grid say how ranks share the work", ""),
    (f"{FUSE}=64", f"64: {GROUP}", ""),
    (f"{FUSE}.openstate=1", f"1: {FLAG}", f"{FUSE}.openstate=true"),
    (f"{FUSE}.allreduce=64", f"64: {GROUP}", f"'{FUSE}.allreduce={{mode:size,config:64}}'"),
    (f"{FUSE}.allgather.mode=index", "index: should be one of auto, size", ""),
    (f"{P}.dataset_strategy={{}}", f"{{}}: {LAYOUT}", ""),
    (f"{P}.dataset_strategy=null", f"null: {SLICES}", ""),
    (f"{P}.dataset_strategy=half", f"half: {SLICES}", ""),
    (f"{P}.dataset_strategy=8", f"8: {SLICES}", ""),
    (f"{P}.dataset_strategy=[8,1]", "[8,1]: item [0] = 8 should be a list", ""),
    (f"{P}.dataset_strategy=[[8,1.5],[8]]", f"[[8,1.5],[8]]: item [0][1] = 1.5 {WHOLE}",
     ""),
    (f"{P}.dataset_strategy=[[8,0],[8]]", "[[8,0],[8]]: item [0][1] = 0 should be at least 1",
     ""),
    (f"{P}.operator_strategy.save=o.json", "o.json: should be an absolute path",
     f"{P}.operator_strategy.save={os.path.abspath('o.json')}"),
    (f"{P}.operator_strategy.load=/data/o.txt", "/data/o.txt: should end in .json",
     ""),
    (f"{P}.operator_strategy.save=5", "5: should be text", ""),
    (f"{P}.param_strategy.save=p.txt", "p.txt: should end in .json or .ckpt", f"{P}.param_strategy.save=p.json"),
    (f"{P}.param_strategy.only_trainable=0", f"0: {FLAG}", f"{P}.param_strategy.only_trainable=false"),
    (f"{P}.group_file=g.pb", "g.pb: should end in .json or .ckpt", f"{P}.group_file=g.json"),
    (f"{P}.group_file=run:plan.json",
     "run:plan.json: the run itself writes plan.json in its folder; choose another name",
     f"\"{P}.group_file='run:mine/plan.json'\""),
    (f"{P}.local_norm.dump=''", "'': should not be empty", f"{P}.local_norm.dump=null"),
    (f"{P}.param_strategy.load=''", "'': should not be empty", f"{P}.param_strategy.load=null"),
    (f"{P}.local_norm.dump=run:../norms", "run:../norms: should be run:NAME, a name in the run folder",
     f"\"{P}.local_norm.dump='run:norms'\""),
    (f"{P}.param_strategy.load=run:p.json", "run:p.json: should be the path of an existing file",
     ""),
    (f"{P}.group_file=[a]", "[a]: should be text", ""),
    (f"{P}.local_norm.dump=3", "3: should be text", f"\"{P}.local_norm.dump='3'\""),
    (f"{P}.transformer_opt=5", "5: should be text or a group of keys", ""),
    (f"{P}.local_norm.print=1", f"1: {FLAG}", f"{P}.local_norm.print=true"),
    (f"{P}.gradients_mean=1", f"1: {FLAG}", f"{P}.gradients_mean=true"),
    (f"{P}.fp32_communication=1", f"1: {FLAG}", f"{P}.fp32_communication=true"),
    (f"{P}.gradient_fp32_sync=0", f"0: {FLAG}", f"{P}.gradient_fp32_sync=false"),
    (f"{P}.loss_repeated_mean=maybe", f"maybe: {FLAG}", ""),
    (f"{P}.deferred_init=no", f"no: {FLAG}", f"{P}.deferred_init=false"),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "text", "cure"), CASES, ids=[typed for typed, _, _ in CASES])
def test_an_error_of_autoparallel_is_refused_with_key_value_and_cure(
    typed: str, text: str, cure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show=plan", typed]) == 2
    head = "error: 1 problem in this request; nothing was started"
    tried = f"    try:    {cure}\n" if cure else ""
    whole = f"{head}\n\n  {typed.partition('=')[0]} = {text}\n    set by: {typed} (command line)\n{tried}"
    assert capsys.readouterr().err == whole
    if cure:
        compose([typed, *shlex.split(cure)])


FORMS = {
    "{mode:index,config:[3,1,3]}": ("mode index needs config: a list of ascending, distinct parameter indices",
        "{mode:index,config:[1,3]}"),
    "{mode:index}": ("mode index needs config: a list of ascending, distinct parameter indices", ""),
    "{mode:size,config:[1]}": ("mode size needs config: a size in MB, not a list", "{mode:index,config:[1]}"),
    "{mode:auto,config:3}": ("mode auto takes no config; for 3 MB: mode=size", "{mode:size,config:3}"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_fusion_of_the_wrong_form_is_cured_by_the_one_next_to_it(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, good = FORMS[form]
    key = f"{FUSE}.allreduce"
    assert main(["show=plan", f"{key}={form}"]) == 2
    tried = f"    try:    '{key}={good}'\n" if good else ""
    told = f"  {key} = {form}: {text}\n    set by: {key}={form} (command line)\n{tried}"
    assert capsys.readouterr().err == f"error: 1 problem in this request; nothing was started\n\n{told}"
    if good:
        compose([f"{key}={good}"])
