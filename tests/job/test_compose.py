"""From overrides to a Job: which values are set, in which order, and from which source."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from launcher.__main__ import main
from launcher.errors import RequestError
from launcher.job.compose import BadRequest, compose
from launcher.job.config_folders import CONF, RECIPES
from launcher.job.cures.report import as_yaml, render
from launcher.job.schema.logger import Logger, Trackio, Wandb


def where(request, key):
    origin = request.origins.of(key)
    return (origin.where, origin.text) if origin else None


def test_many_jobs_compose_in_one_process_and_leave_hydra_as_it_was():
    jobs = [compose([f"seed={n}"]).job for n in range(3)]
    assert [j.seed for j in jobs] == [0, 1, 2]
    assert not GlobalHydra.instance().is_initialized()


def test_composing_within_a_hydra_application_leaves_it_as_it_was():
    from hydra import initialize_config_dir

    with initialize_config_dir(str(CONF), version_base="1.3"):
        mine = GlobalHydra.instance().hydra
        compose([])
        assert GlobalHydra.instance().hydra is mine


def test_an_override_beats_the_recipe_and_the_recipe_beats_the_option():
    assert compose(["recipe=lm_single"]).job.optim.lr == 0.003
    assert compose(["recipe=lm_single", "optim.lr=1"]).job.optim.lr == 1
    assert compose(["recipe=lm_single", "model=tied_pair"]).job.model.name == "tied_pair"


def test_a_plus_makes_no_difference():
    assert (
        compose(["+seed=3", "++train.steps=4", "+model=lm_tiny"]).data
        == compose(["seed=3", "train.steps=4", "model=lm_tiny"]).data
    )


@pytest.mark.parametrize(
    ("override", "steps"),
    [("steps=[save,train]", ["save", "train"]), ("steps=train", ["train"]), ("steps=[]", [])],
)
def test_a_list_of_steps_sets_content_and_order(override, steps):
    assert list(compose(["recipe=tied_pp2_to_single", override]).job.steps) == steps


ON = {"progress": "plain", "csv": True, "tensorboard": True}


@pytest.mark.parametrize(
    ("overrides", "differ"),
    [
        (["logger=tensorboard"], {"tensorboard": True}),
        (["logger=[tensorboard,csv,plain]"], ON),
        (["logger=[csv]", "logger.tensorboard=true", "logger.progress=plain"], ON),
        (["logger=[]"], {}),
        (["logger=[wandb,trackio]"], {"wandb": Wandb(), "trackio": Trackio()}),
        (["logger.wandb=true", "logger.mlflow=false"], {"wandb": Wandb()}),
        (["logger=[csv]", "logger.wandb.project=mine"], {"csv": True, "wandb": Wandb(project="mine")}),
        (["logger=[wandb]", "logger.wandb.tags=[a,b]"], {"wandb": Wandb(tags=("a", "b"))}),
    ],
    ids=" ".join,
)
def test_any_number_of_loggers_is_chosen_at_once(overrides: list[str], differ: dict[str, Any]) -> None:
    assert compose(overrides).job.logger == Logger(**differ)


def test_a_recipe_chooses_a_list_of_loggers_that_the_command_line_replaces(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "# Mine.\ndefaults:\n  - override /logger: [tensorboard, csv]\ntrain: {steps: 2, batch_size: 8}\n"
    )
    assert compose([f"recipe={recipe}"]).job.logger == Logger(tensorboard=True, csv=True)
    assert compose([f"recipe={recipe}", "logger=plain"]).job.logger == Logger(progress="plain")


def test_a_step_of_ones_own_name_comes_after_the_chosen_ones():
    request = compose(["steps=[train,evaluate]", "steps.again={kind: evaluate, of: exported}"])
    assert [(n, s.kind) for n, s in request.job.steps.items()] == [
        ("train", "train"),
        ("evaluate", "evaluate"),
        ("again", "evaluate"),
    ]


def test_stage_config_takes_module_names_with_dots_and_stars_on_the_command_line():
    node = "parallel.pipeline.stage_config"
    request = compose([f"{node}.layers.3=1", f"{node}.layers.*=0", f"{node}.layers.3=2", f"{node}.layers.10=1"])
    assert request.data["parallel"]["pipeline"]["stage_config"] == {"layers.*": 0, "layers.3": 2, "layers.10": 1}


def test_an_override_of_a_stage_replaces_the_nested_spelling_of_the_same_module(tmp_path):
    path = tmp_path / "nested.yaml"
    path.write_text(
        "train: {steps: 1, batch_size: 4}\nparallel: {pipeline: {stage_config: {layers: {0: 0, 1: 0}, layers.2: 1}}}\n"
    )
    request = compose([f"recipe={path}", "parallel.pipeline.stage_config.layers.1=1"])
    assert request.data["parallel"]["pipeline"]["stage_config"] == {"layers.0": 0, "layers.2": 1, "layers.1": 1}


def test_operator_strategies_take_module_names_with_dots():
    request = compose(
        [
            "parallel.operators.layers.0.in=[[1,2]]",
            "parallel.operators.layers.0.out=[[2]]",
            "parallel.operators.h*={in: [[4]]}",
        ]
    )
    assert request.data["parallel"]["operators"] == {"layers.0": {"in": [[1, 2]], "out": [[2]]}, "h*": {"in": [[4]]}}


def test_groups_of_parameters_take_names_with_dots_and_a_later_one_comes_last(tmp_path):
    path = tmp_path / "nested.yaml"
    groups = "{layers: {0: {lr: 0.5}}, '*.bias': {weight_decay: 0}}"
    path.write_text(f"train: {{steps: 1, batch_size: 4}}\noptim: {{groups: {groups}}}\n")
    request = compose([f"recipe={path}", "optim.groups.layers.0.eps=0.25", "optim.groups.h*={lr: 2}"])
    want = {"*.bias": {"weight_decay": 0}, "layers.0": {"lr": 0.5, "eps": 0.25}, "h*": {"lr": 2}}
    assert request.data["optim"]["groups"] == want
    assert [*request.job.optim.groups] == [*want]


def test_a_group_is_deleted_by_its_name():
    more = ["optim.groups.*.bias.lr=1", "optim.groups.embed.lr=1", "~optim.groups.*.bias"]
    assert [*compose(["recipe=lm_single", *more]).job.optim.groups] == ["embed"]


@pytest.mark.parametrize(("word", "text"), [
    ("optim.groups.lr=1", "optim.groups = {lr:1}: lr: 1 is not a group; a group is a name or a glob with settings, "
     "as {'*.bias': {weight_decay: 0}}"),
    ("optim.groups.embed.moment=1", "optim.groups.embed.moment: unknown key (valid here: lr, weight_decay, betas, "
     "eps)"),
    ("optim.groups.embed.lr=-1", "optim.groups.embed.lr = -1: should be at least 0"),
])  # fmt: skip
def test_a_group_that_is_none_is_refused(word, text, capsys):
    assert main(["recipe=lm_single", word]) == 2
    assert capsys.readouterr().err.splitlines()[2] == f"  {text}"


@pytest.mark.parametrize(
    ("word", "cure"),
    [
        ("launch=[slurm,cpu]", ""),
        ("debug=[limit,overfit]", ""),
        ("operators=[]", ""),
        ("optim=[adam,sgd]", ""),  # adam is adamw without decay
        ("optim=[adamw,sgd]", "-m optim=adamw,sgd"),
        ("recipe=[lm_single,mlp_autoparallel]", "-m recipe=lm_single,mlp_autoparallel"),
        ("model=[lm,lmm]", "model=lm"),
    ],
)
def test_a_list_for_a_group_that_takes_one_option_is_refused(word: str, cure: str) -> None:
    with pytest.raises(BadRequest) as caught:
        compose([word])
    (problem,) = caught.value.problems
    key, _, names = word.partition("=")
    assert problem.key == key
    assert problem.text.startswith(f"{names}: takes one option, not a list; choose one")
    assert problem.cure == cure


def test_a_list_of_one_option_is_that_option() -> None:
    assert compose(["schedule=[linear]"]).job == compose(["schedule=linear"]).job


def test_another_model_by_mapping_brings_its_own_keys_only():
    request = compose(["data=mnist5k", "model={name: mlp, hidden: 7}"])
    assert request.data["model"] == {"name": "mlp", "hidden": 7}


def test_a_class_of_the_users_own_replaces_the_option():
    request = compose(["model=null", "model._target_=mine.net.Net", "model.width=3", "security.allow=[mine]"])
    assert (request.job.model.target, request.job.model.arguments) == ("mine.net.Net", {"width": 3})


def test_a_recipe_may_be_a_file_and_may_build_on_a_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("defaults:\n  - lm_single\n  - _self_\nseed: 5\n")
    request = compose(["recipe=mine.yaml"])
    assert (request.job.name, request.job.seed, request.job.train.steps) == ("mine", 5, 200)
    assert where(request, "seed") == ("mine.yaml:4:1", "seed: 5")


@pytest.mark.parametrize("folder", ["recipe", "recipes"])
def test_a_folder_of_the_users_adds_recipes_and_options(folder, tmp_path):
    (tmp_path / folder).mkdir()
    (tmp_path / "model").mkdir()
    header = "# @package _global_\n" if folder == "recipe" else ""
    (tmp_path / folder / "mine.yaml").write_text(
        f"{header}defaults:\n  - override /model: own\ntrain: {{steps: 3, batch_size: 4}}\n"
    )
    (tmp_path / "model/own.yaml").write_text("name: lm\nvocab_size: 10\n")
    job = compose(["recipe=mine"], config_dir=tmp_path).job
    assert (job.train.steps, job.model.vocab_size) == (3, 10)


def test_every_value_knows_the_line_or_the_override_that_set_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = compose(["recipe=lm_single", "+train.steps=7"])
    lines = (RECIPES / "lm_single.yaml").read_text().splitlines()
    at = next(n for n, line in enumerate(lines, 1) if line.startswith("optim:"))
    assert where(request, "train.steps") == ("command line", "+train.steps=7")
    assert where(request, "optim.lr") == (f"recipes/lm_single.yaml:{at}:9", "optim: {lr: 0.003}")
    assert where(request, "model.dim") == ("conf/model/lm.yaml:4:1", "dim: 128          # width")
    assert where(request, "recipe") == ("command line", "recipe=lm_single")
    assert where(request, "parallel.pipeline.stages.none")[0].startswith("conf/config.yaml:")


def test_a_problem_found_later_is_printed_with_the_same_origins():
    from launcher.errors import Problem

    request = compose(["parallel.pipeline.stages=3"])
    text = render(
        [Problem("parallel.pipeline.stages", "3: does not divide 4 ranks", "launch.nproc=3")], request.origins
    )
    assert text == (
        "error: 1 problem in this request; nothing was started\n\n"
        "  parallel.pipeline.stages = 3: does not divide 4 ranks\n"
        "    set by: parallel.pipeline.stages=3 (command line)\n"
        "    try:    launch.nproc=3"
    )


def test_a_missing_key_of_a_group_that_a_file_sets_to_null_was_caused_by_the_key_beside_it(capsys):
    assert main(["recipe=lm_single", "model.lora.rank=8", "model.lora.alpha=16"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "error: 1 problem in this request; nothing was started\n\n"
        "  model.lora.modules: needs a value: names or globs, for example layers.*.attn\n"
        "    set by: model.lora.alpha=16 (command line)\n"
    )


def test_a_value_nobody_set_is_a_default():
    from launcher.errors import Problem
    from launcher.job.origins import Origins

    text = render([Problem("train.precision", "fp32: too precise")], Origins({}, {"train": {"precision": "fp32"}}))
    assert text.endswith("  train.precision = fp32: too precise\n    set in: default")


def test_secrets_are_never_shown(monkeypatch, tmp_path):
    monkeypatch.setenv("HUB", "hunter2")
    path = tmp_path / "mine.yaml"
    path.write_text("train: {steps: 1, batch_size: x}\nmodel:\n  api_key: hunter2\n  token:\n    - hunter2\n")
    with pytest.raises(BadRequest) as caught:
        compose(
            [
                f"recipe={path}",
                "logger.password=hunter2",
                "optim.hub_token=${oc.env:HUB}",
                "data={secret: hunter2, x: 1}",
                "train.access_token='hunter2",
                "checkpoint.every={key: hunter2}",
            ]
        )
    text = render(caught.value.problems, caught.value.origins) + str(caught.value)
    assert "hunter2" not in text
    assert text.count("***") > 5


def test_the_printed_configuration_hides_secrets_and_keeps_the_rest():
    request = compose(
        ["model=null", "model={_target_: mine.x.Y, api_key: hunter2, heads: 3, keys: [a]}", "security.allow=[mine]"]
    )
    assert as_yaml({"model": request.data["model"], "tokens": 3}) == (
        "model:\n  _target_: mine.x.Y\n  api_key: '***'\n  heads: 3\n  keys:\n  - '***'\ntokens: 3\n"
    )


@pytest.mark.parametrize(
    "bad",
    [
        ["parallel.pipeline.stags=2"],
        ["train.batch_size=abc"],
        ["train.steps=1e3"],
        ["seed='7'"],
        ["name=a b/c"],
        ["launch.port=99999"],
        ["parallel.hsdp.optimizer_level=levl2"],
        ["optim.betas=[1]"],
        ["steps=[trian,save]"],
        ["model=resnt50", "data=cifar10"],
        ["security.allow=foo"],
        ["data.path=a=b"],
        ["deterministic=maybe"],
        ["steps=[train]", "steps.sample.tokens=5"],
    ],
    ids=" ".join,
)
def test_pasting_the_cure_in_place_of_the_bad_override_helps(bad):
    import shlex

    with pytest.raises(BadRequest) as caught:
        compose(bad)
    problem = caught.value.problems[0]
    origins = caught.value.origins
    culprit = origins.of(problem.key)
    rest = [o for o in bad if culprit is None or o != culprit.text]
    assert compose([*rest, *shlex.split(problem.cure)]).job


def test_a_strategy_under_a_glob_is_deleted_by_its_name() -> None:
    job = compose(["recipe=lm_tp2", "~parallel.operators.layers.*.mlp.up", "~parallel.operators.head"]).job
    kept = {"embed", "layers.*.attn.[qkv]", "layers.*.attn.o", "layers.*.mlp.gate", "layers.*.mlp.down"}
    assert job.parallel.operators.keys() == kept
    with pytest.raises(RequestError) as caught:
        compose(["recipe=lm_tp2", "~parallel.operators.layers.*.mlp.upp"])
    key = "parallel.operators.layers.*.mlp"
    told = f"~{key}.upp: nothing to delete, did you mean '{key}.up'?"
    assert str(caught.value) == f"{key}.upp: {told} (try: '~{key}.up')"


def test_another_key_of_the_section_is_no_misspelling_of_the_one_that_is_referred_to() -> None:
    with pytest.raises(RequestError) as refused:
        compose(["recipe=lm_single", "data=null", "data._target_=mine.Chars", "data.block_size=16"])
    (text,) = [str(p) for p in refused.value.problems if p.key == "model.vocab_size"]
    assert text.endswith("cannot be resolved; there is no key 'data.vocab_size': this data has none")
    with pytest.raises(RequestError, match=r"did you mean \$\{data\.vocab_size\}\?"):
        compose(["recipe=lm_single", "model.vocab_size=${data.vocabsize}"])


SMALL = "train: {batch_size: 8, steps: 4}\n"
NESTED = {
    "recipe: lm_single\n" + SMALL: "1:1: recipe lm_single",
    "defaults:\n  - recipe: lm_single\n" + SMALL: "2:5: recipe lm_single",
    "defaults:\n  - /recipe: lm_single\n" + SMALL: "2:5: recipe lm_single",
    "defaults:\n  - override /recipe: lm_single\n" + SMALL: "2:5: recipe lm_single",
}


@pytest.mark.parametrize("text", NESTED)
def test_a_recipe_that_a_file_chooses_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(text)
    with pytest.raises(RequestError) as raised:
        compose(["recipe=mine.yaml"])
    assert [problem.text.partition("\n")[0] for problem in raised.value.problems] == [
        f"mine.yaml:{NESTED[text]}: a file cannot choose a recipe; to start from the settings of lm_single, "
        "write - /recipe/lm_single as the first of its defaults"
    ]


def test_a_file_begins_with_the_settings_of_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("defaults:\n  - /recipe/lm_single\ntrain: {steps: 7}\n")
    mine, other = compose(["recipe=mine.yaml"]).job, compose(["recipe=lm_single", "train.steps=7"]).job
    assert mine.model_copy(update={"name": other.name, "recipe": other.recipe}) == other


@pytest.mark.parametrize("words", ["recipe=mlp_autoparallel", "recipe=lm_single steps=[train] launch=slurm"])
def test_the_composed_request_of_a_run_is_a_recipe_for_the_same(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = compose(words.split())
    Path("config.yaml").write_text(as_yaml(first.data))
    assert compose(["recipe=config.yaml"]).job.model_copy(update={"recipe": first.job.recipe}) == first.job


def test_a_secret_that_is_hidden_in_the_request_of_a_run_is_set_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    key = "5a" * 32
    Path("config.yaml").write_text(as_yaml(compose(["recipe=lm_single", f"checkpoint.encrypt={key}"]).data))
    assert key not in Path("config.yaml").read_text()
    with pytest.raises(RequestError) as raised:
        compose(["recipe=config.yaml"])
    assert [(p.key, p.text) for p in raised.value.problems] == [
        ("checkpoint.encrypt", "***: this value is hidden in the file of a run; set it again")
    ]
    assert compose(["recipe=config.yaml", f"checkpoint.encrypt={key}"]).job.checkpoint.encrypt == key


def test_a_recipe_of_the_current_folder_without_its_suffix_is_answered_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("defaults: [lm_single, _self_]\n")
    with pytest.raises(RequestError) as raised:
        compose(["recipe=mine"])
    [problem] = raised.value.problems
    assert problem.cure == "recipe=mine.yaml"
    assert compose([problem.cure]).job.name == "mine"


@pytest.mark.parametrize(
    ("listed", "item"),
    [
        ("[override /steps: [train, save], lm_single]", "lm_single"),
        ("[lm_single, override /optim: sgd, {/model: lm_tiny}]", "{/model:lm_tiny}"),
        ("[lm_single, {optional override /optim: sgd}, _self_, lm_single]", "lm_single"),
    ],
    ids=["a recipe", "an option", "after _self_"],
)
def test_an_include_after_an_override_is_a_line_with_a_way_out(tmp_path, listed, item):
    file = tmp_path / "mine.yaml"
    file.write_text(f"defaults: {listed}\n")
    with pytest.raises(RequestError) as caught:
        compose([f"recipe={file}"])
    (problem,) = caught.value.problems
    assert re.fullmatch(
        rf".*mine.yaml: defaults.\d: {re.escape(item)}: overrides come last; move it before (optional )?override /\w+",
        problem.text,
    )


IDLE = "defaults: [{first}, _self_]\nsteps: {{save: {{}}, evaluate: {{batches: 0}}}}\n"


@pytest.mark.parametrize("first", ["lm_single, override /steps: [train]", "mine"])
def test_settings_of_a_step_that_their_own_file_does_not_choose_are_refused(first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("defaults: [lm_single, override /steps: [train], _self_]\n")
    Path("r.yaml").write_text(IDLE.format(first=first))
    with pytest.raises(BadRequest) as caught:
        compose(["recipe=r.yaml"])
    text = "{!r} is not among the steps of this run (train)"
    assert [(p.key, p.text, p.cure) for p in caught.value.problems] == [
        (f"steps.{name}", text.format(name), "'steps=[train,save,evaluate]'") for name in ("save", "evaluate")
    ]
    assert list(compose(["recipe=r.yaml", "steps=[train]"]).job.steps) == ["train"]


def test_settings_of_a_step_that_an_outer_recipe_leaves_out_are_dropped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text("defaults: [lm_single, _self_]\nsteps: {evaluate: {batches: 2}}\n")
    Path("r.yaml").write_text("defaults: [base, override /steps: [train], _self_]\n")
    assert list(compose(["recipe=r.yaml"]).job.steps) == ["train"]
    assert compose(["recipe=base.yaml"]).job.steps["evaluate"].batches == 2


@pytest.mark.parametrize("word", ["steps=null", "~steps"])
def test_steps_cannot_be_deleted(word):
    with pytest.raises(BadRequest) as caught:
        compose([word])
    (problem,) = caught.value.problems
    text = f"{word.removeprefix('steps=')}: list the steps, in order; [] runs none"
    assert (problem.key, problem.text, problem.cure) == ("steps", text, "steps=[]")
    assert not compose(["steps=[]"]).job.steps


def test_the_list_of_another_recipe_in_the_same_folder_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files of a folder are read by name; only the chosen recipe and those that it includes can be wrong."""
    monkeypatch.chdir(tmp_path)
    for name, listed in {"a": "model: mlp", "b": "override model: mlp", "c": "b"}.items():
        Path(f"{name}.yaml").write_text(f"defaults:\n  - {listed}\n")
    for chosen, wrong in {"a": "a", "b": "b", "c": "b"}.items():
        assert main([f"recipe={chosen}.yaml", "show=plan"]) == 2
        assert f"\n  {wrong}.yaml:2:5: a recipe chooses options of the whole run; " in capsys.readouterr().err
