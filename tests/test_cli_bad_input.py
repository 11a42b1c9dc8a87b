"""A bad request: the full text that a user reads, exit code 2, nothing started, nothing written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.job.config_folders import ConfigFiles

RECIPES = ", ".join(ConfigFiles().options("recipe"))
STEPS = (
    "train, evaluate, predict, sync_shared, save, load, broadcast, certify, calibrate, merge_strategies, transform, "
    "export, import, verify, inspect, sample, prepare"
)
TOP = (
    "name, seed, deterministic, recipe, runs, run_dir, show, model, data, loss, metrics, optim, schedule, train, "
    "parallel, search, sweep, launch, cluster, checkpoint, callbacks, steps, logger, debug, security"
)

CASES = {
    "misspelt key": (
        ["parallel.pipeline.stags=2"],
        """
  parallel.pipeline.stags: unknown key, did you mean 'parallel.pipeline.stages'?
    set by: parallel.pipeline.stags=2 (command line)
    try:    parallel.pipeline.stages=2
""",
    ),
    "misspelt key after a plus": (
        ["+train.stesp=3"],
        """
  train.stesp: unknown key, did you mean 'train.steps'?
    set by: +train.stesp=3 (command line)
    try:    train.steps=3
""",
    ),
    "misspelt section": (
        ["parallell.hsdp.shard_size=3"],
        """
  parallell.hsdp.shard_size: unknown key, did you mean 'parallel.hsdp.shard_size'? And then \
parallel.hsdp.shard_size: 3: does not divide the 2 data-parallel ranks (4 ranks / 2); use one of 1, 2
    set by: parallell.hsdp.shard_size=3 (command line)
    try:    parallel.hsdp.shard_size=2
""",
    ),
    "right name in the wrong place": (
        ["trainer.optimizer_level=level2"],
        """
  trainer.optimizer_level: unknown key, did you mean 'parallel.hsdp.optimizer_level'?
    set by: trainer.optimizer_level=level2 (command line)
    try:    parallel.hsdp.optimizer_level=level2
""",
    ),
    "unlike anything": (
        ["zzz=1"],
        f"""
  zzz: unknown key (valid here: {TOP})
    set by: zzz=1 (command line)
""",
    ),
    "wrong type": (
        ["train.batch_size=abc"],
        """
  train.batch_size = abc: should be a whole number
    set by: train.batch_size=abc (command line)
""",
    ),
    "float for a whole number": (
        ["train.steps=1e3"],
        """
  train.steps = 1000.0: should be a whole number
    set by: train.steps=1e3 (command line)
    try:    train.steps=1000
""",
    ),
    "out of range": (
        ["train.steps=0"],
        """
  train.steps = 0: should be at least 1
    set by: train.steps=0 (command line)
""",
    ),
    "value instead of a section": (
        ["train=5"],
        """
  train = 5: should be a group of keys; it needs batch_size
    set by: train=5 (command line)
""",
    ),
    "neither word nor mapping": (
        ["parallel.pipeline.stage_config=3"],
        """
  parallel.pipeline.stage_config = 3: should be auto or a group of keys
    set by: parallel.pipeline.stage_config=3 (command line)
""",
    ),
    "item of a nested list": (
        ["parallel.dataset_strategy=[[1,a]]"],
        """
  parallel.dataset_strategy = [[1,a]]: item [0][1] = a should be a whole number
    set by: parallel.dataset_strategy=[[1,a]] (command line)
""",
    ),
    "rule over several keys": (
        ["model.heads=3"],
        """
  model.heads = 3: must cut model.dim=128 into even-sized heads; use model.heads=4
    set by: model.heads=3 (command line)
    try:    model.heads=4
""",
    ),
    "rule with its own advice": (
        ["data=text", "data.vocab_size=300"],
        """
  data.vocab_size = 300: the byte tokenizer has 256 tokens; use data.tokenizer=bpe
    set by: data.vocab_size=300 (command line)
    try:    data.vocab_size=300 data.tokenizer=bpe
""",
    ),
    "unknown recipe": (
        ["recipe=lm_singel"],
        f"""
  recipe: unknown option 'lm_singel', did you mean 'lm_single'? (options: {RECIPES})
    set by: recipe=lm_singel (command line)
    try:    recipe=lm_single
""",
    ),
    "recipe file that is not there": (
        ["recipe=mine.yaml"],
        """
  recipe: mine.yaml: there is no such file
    set by: recipe=mine.yaml (command line)
""",
    ),
    "unknown option": (
        ["model=resnet5"],
        """
  model: unknown option 'resnet5', did you mean 'resnet50'? (options: hf, lm, lm_tiny, mlp, resnet18, \
resnet34, resnet50, tied_pair); and then model: model resnet reads images, data text has tokens
    set by: model=resnet5 (command line)
""",
    ),
    "unknown model name": (
        ["model.name=lmm"],
        """
  model.name: unknown model 'lmm', did you mean 'lm'? (models: lm, resnet, mlp, tied_pair, hf)
    set by: model.name=lmm (command line)
    try:    model.name=lm
""",
    ),
    "unknown scheduler": (
        ["parallel.pipeline.scheduler=1f1bb"],
        """
  parallel.pipeline.scheduler = 1f1bb: should be one of gpipe, 1f1b, zero_bubble_h1, zero_bubble_v, dualpipe_v, """
        """seqpipe, seqvpp, seqsmartvpp, auto; did you mean '1f1b'?
    set by: parallel.pipeline.scheduler=1f1bb (command line)
    try:    parallel.pipeline.scheduler=1f1b
""",
    ),
    "unknown step in the list": (
        ["steps=[trian,save]"],
        """
  steps: unknown step 'trian', did you mean 'train'? """
        """(steps: broadcast, calibrate, certify, evaluate, export, import, inspect, load, merge_strategies, """
        """predict, prepare, sample, save, sync_shared, train, transform, verify)
    set by: steps=[trian,save] (command line)
    try:    'steps=[train,save]'
""",
    ),
    "unknown logger in the list": (
        ["logger=[tensorbord,csv]"],
        """
  logger: unknown option 'tensorbord', did you mean 'tensorboard'? """
        """(options: auto, csv, mlflow, plain, tensorboard, trackio, wandb)
    set by: logger=[tensorbord,csv] (command line)
    try:    'logger=[tensorboard,csv]'
""",
    ),
    "loggers as one word": (
        ["logger='csv,plain'"],
        """
  logger: 'csv,plain' is one word; write a list as [a,b]
    set by: logger='csv,plain' (command line)
    try:    'logger=[csv,plain]'
""",
    ),
    "loggers without brackets": (
        ["logger=csv,plain"],
        """
  logger: csv,plain: has several values; a sweep needs -m
    set by: logger=csv,plain (command line)
    try:    'logger=[csv,plain]'
""",
    ),
    "another logger by a plus": (
        ["+logger=csv"],
        """
  logger: +logger=csv: give the complete list, in order
    set by: +logger=csv (command line)
""",
    ),
    "password in an address": (
        ["logger.mlflow.tracking_uri=http://me:hunter2@host:5000"],
        """
  logger.mlflow.tracking_uri = http://***@host:5000: a user and password would be written to the run folder; """
        """set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD
    set by: logger.mlflow.tracking_uri=http://***@host:5000 (command line)
    try:    "logger.mlflow.tracking_uri='http://host:5000'"
""",
    ),
    "logger that is neither on nor off": (
        ["logger.wandb=yes"],
        """
  logger.wandb = yes: should be a group of keys
    set by: logger.wandb=yes (command line)
    try:    logger.wandb=true
""",
    ),
    "unknown step by its settings": (
        ["steps.evaluat.batches=1"],
        f"""
  steps.evaluat: unknown step 'evaluat', did you mean 'evaluate'? (steps: {STEPS})
    set by: steps.evaluat.batches=1 (command line)
    try:    steps.evaluate.batches=1
""",
    ),
    "settings of a step that is not chosen": (
        ["steps=[train,save]", "steps.sample.tokens=5"],
        """
  steps.sample: 'sample' is not among the steps of this run (train, save); and then steps.sample: needs an \
exported model, but there is no 'export' step to make one
    set by: steps.sample.tokens=5 (command line)
    try:    'steps=[train,save,export,sample]' steps.sample.tokens=5
""",
    ),
    "missing value": (
        ["recipe=resnet50_cifar_pp2", "data=idx"],
        """
  data.root: needs a value
    set in: conf/data/idx.yaml:3:1
          | root: ???    # folder with train-images-idx3-ubyte and its kin

  data.fallback: unknown key: it is a setting of data=cifar10
    set in: recipes/resnet50_cifar_pp2.yaml:8:8
          | data: {fallback: mnist5k}
    try:    '~data.fallback'

  model.channels: 3 does not fit data idx, whose images are 1 x 28 x 28
    set in: conf/model/resnet50.yaml:6:1
          | channels: 3   # channels of the image
    try:    model.channels=1
""",
    ),
    "interpolation to nothing": (
        ["data=mnist5k"],
        """
  model.vocab_size: ${data.vocab_size}: cannot be resolved; there is no key 'data.vocab_size': this data \
has none
    set in: conf/model/lm.yaml:3:1
          | vocab_size: ${data.vocab_size}  # tokens, as many as the data has

  steps.sample: continues text, but data is mnist5k
    set in: conf/steps/sample.yaml:2:1
          | sample:
    try:    'steps=[train,evaluate,sync_shared,save,transform,export]'
""",
    ),
    "misspelt interpolation": (
        ["schedule.final=${optm.lr}"],
        """
  schedule.final: ${optm.lr}: cannot be resolved; there is no key 'optm.lr', did you mean ${optim.lr}?
    set by: schedule.final=${optm.lr} (command line)
    try:    'schedule.final=${optim.lr}'
""",
    ),
    "circular interpolation": (
        ["name=${runs}", "runs=${name}"],
        """
  name: ${runs}: cannot be resolved; it refers to itself
    set by: name=${runs} (command line)

  runs: ${name}: cannot be resolved; it refers to itself
    set by: runs=${name} (command line)
""",
    ),
    "environment variable that is not set": (
        ["runs=${oc.env:NOT_SET_ANYWHERE}"],
        """
  runs: ${oc.env:NOT_SET_ANYWHERE}: cannot be resolved; Environment variable 'NOT_SET_ANYWHERE' not found
    set by: runs=${oc.env:NOT_SET_ANYWHERE} (command line)
""",
    ),
    "no override": (
        ["lm_single"],
        """
  lm_single: not an override; a recipe is chosen with recipe=
    try:    recipe=lm_single
""",
    ),
    "value the grammar cannot read": (
        ["data.path=a=b"],
        """
  data.path: a=b: cannot be read; quote the value; and then data.path: a=b: No such file or directory
    set by: data.path=a=b (command line)
""",
    ),
    "group with a name the grammar cannot read": (
        ["parallel.operators={head[a]: {weight: [2, 1]}}"],
        """
  parallel.operators: {head[a]: {weight: [2, 1]}}: cannot be read; set each name by itself
    set by: parallel.operators={head[a]: {weight: [2, 1]}} (command line)
""",
    ),
    "several values without -m": (
        ["seed=1,2"],
        """
  seed: 1,2: has several values; a sweep needs -m
    set by: seed=1,2 (command line)
    try:    -m seed=1,2
""",
    ),
    "deletion of nothing": (
        ["~train.clip_nrm"],
        """
  train.clip_nrm: ~train.clip_nrm: nothing to delete, did you mean 'train.clip_norm'?
    set by: ~train.clip_nrm (command line)
    try:    '~train.clip_norm'
""",
    ),
    "Hydra's own settings": (
        ["hydra.run.dir=x"],
        """
  hydra.run.dir: Hydra's own settings have no effect here; run_dir sets the folder of a run
    set by: hydra.run.dir=x (command line)
    try:    run_dir=x
""",
    ),
    "steps appended": (
        ["+steps=sample"],
        """
  steps: +steps=sample: give the complete list, in order
    set by: +steps=sample (command line)
""",
    ),
    "class of a package that is not trusted": (
        ["model={_target_: torch.nn.Linear, in_features: 3, out_features: 4}"],
        """
  model._target_ = torch.nn.Linear: package 'torch' is not trusted (trusted: none)
    set by: model={_target_: torch.nn.Linear, in_features: 3, out_features: 4} (command line)
    try:    'model={_target_:torch.nn.Linear,in_features:3,out_features:4}' 'security.allow=[torch]'
""",
    ),
    "class on top of a shipped option": (
        ["model._target_=mine.Net", "security.allow=[mine]"],
        """
  model._target_ = mine.Net: the settings of model=lm would become its arguments; and then model._target_: \
mine.Net: there is no module mine on sys.path; start in the folder that contains it
    set by: model._target_=mine.Net (command line)
""",
    ),
    "unknown flag": (
        ["--hlep"],
        """
  --hlep: unknown flag, did you mean --help? """
        """(flags: --help, --version, --multirun, --config-dir, --cfg, --completion; settings are key=value)
    try:    --help
""",
    ),
    "sweep folder without a sweep": (
        ["sweep_dir=x"],
        """
  sweep_dir: x: only a sweep has this setting
    try:    -m sweep_dir=x
""",
    ),
    "config folder that is not there": (
        ["--config-dir", "nowhere"],
        """
  --config-dir nowhere: there is no such folder
""",
    ),
    "several at once": (
        ["recipe=lm_singel", "parallel.pipeline.stags=2", "seed=-1", "debug=limt"],
        f"""
  recipe: unknown option 'lm_singel', did you mean 'lm_single'? (options: {RECIPES})
    set by: recipe=lm_singel (command line)
    try:    recipe=lm_single

  debug: unknown option 'limt', did you mean 'limit'? (options: anomaly, drill, graphs, limit, none, onerank, \
overfit, profiler)
    set by: debug=limt (command line)
    try:    debug=limit

  seed = -1: should be at least 0
    set by: seed=-1 (command line)

  parallel.pipeline.stags: unknown key, did you mean 'parallel.pipeline.stages'?
    set by: parallel.pipeline.stags=2 (command line)
    try:    parallel.pipeline.stages=2

  launch.nproc = 1: cannot be divided evenly into 2 pipeline stages
    set in: recipes/lm_single.yaml:9:10
          | launch: {{nproc: 1}}
    try:    launch.nproc=2
""",
    ),
}


def head(count: int) -> str:
    return f"error: {count} problem{'s' if count > 1 else ''} in this request; nothing was started\n"


@pytest.mark.parametrize(("argv", "text"), CASES.values(), ids=CASES)
def test_a_bad_request_is_refused_with_reason_origin_and_cure(argv, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert err == head(text.count("\n\n") + 1) + text
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_request_that_cannot_be_composed_is_answered_without_torch(tmp_path):
    (tmp_path / "mine.yaml").write_text("seed: [1\n")
    script = "import sys; from launcher.__main__ import main; print(main(['recipe=mine.yaml']), 'torch' in sys.modules)"
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path, env=where
    )
    assert done.stdout == "2 False\n"


def test_a_current_folder_that_is_gone_is_a_line(tmp_path):
    gone = tmp_path / "gone"
    command = f"mkdir {gone} && cd {gone} && rmdir {gone} && exec {sys.executable} -m launcher show=config"
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, env=where)
    text = "error: the current folder cannot be used: No such file or directory; change to a folder that exists\n"
    assert (done.returncode, done.stderr) == (2, text)
