"""Every file in conf/ and recipes/ composes, validates, has comments, and agrees with the schema."""

from __future__ import annotations

import re

import pytest
import yaml

from launcher.job.compose import compose
from launcher.job.config_folders import CONF, RECIPES, ConfigFiles
from launcher.job.schema import keys as schema_keys
from launcher.job.schema.job import Job

CONFIGS = ConfigFiles()
OPTIONS = [f"{g}={o}" for g in CONFIGS.groups() if g != "steps" for o in CONFIGS.options(g)]
STEPS = CONFIGS.options("steps")
NEEDS = {  # what an option cannot know by itself
    "data=idx": ["data.root=x", "model=mlp"],
    "data=cifar10": ["model=resnet18"],
    "data=images": ["data.root=x", "model=resnet18"],
    "data=mnist5k": ["model=mlp"],
    "data=tokens": ["data.path=x", "data.vocab_size=9"],
    "debug=drill": ["checkpoint.every=3", "launch.max_restarts=1"],
    "launch=k8s": ["launch.k8s.image=x", "launch.k8s.claim=x", "launch.k8s.mount=/x"],
    "model=hf": ["model.path=x"],
    "schedule=cosine_restarts": ["schedule.period_steps=9"],
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes_and_validates(option):
    request = compose([option, *NEEDS.get(option, [])])
    group, _, name = option.partition("=")
    assert (CONFIGS.file(f"{group}/{name}") or CONF).is_file()
    assert request.job.model.name is not None


def needs(step):
    named = {"load": ["path"], "import": ["src"], "prepare": ["src", "dst", "tokenizer_file"]}
    return [f"steps.{step}.{key}=x" for key in named.get(step, [])]


@pytest.mark.parametrize("step", STEPS)
def test_every_step_is_named_after_its_verb(step):
    request = compose([f"steps=[{step}]", *needs(step)])
    assert [(name, s.kind) for name, s in request.job.steps.items()] == [(step, step)]


@pytest.mark.parametrize("recipe", CONFIGS.options("recipe"))
def test_every_recipe_says_what_it_shows_and_names_its_run(recipe):
    request = compose([f"recipe={recipe}"])
    assert (request.job.recipe, request.job.name) == (recipe, recipe)
    text = (RECIPES / f"{recipe}.yaml").read_text()
    assert re.match(r"# [A-Z].*\.\ndefaults:\n", text)


def test_no_recipe_is_the_default_recipe():
    assert compose([]).data == compose(["recipe=lm_tied_pp2_hsdp2"]).data


def test_the_default_is_a_tied_language_model_on_two_stages_and_two_shards():
    job = compose([]).job
    assert (job.model.name, job.model.tied, job.data.name) == ("lm", True, "text")
    assert (job.launch.nproc, job.parallel.pipeline.stages, job.parallel.pipeline.micro_batch_num) == (4, 2, 4)
    assert (job.parallel.hsdp.shard_size, job.parallel.hsdp.optimizer_level) == (2, "level1")
    assert list(job.steps) == ["train", "evaluate", "sync_shared", "save", "transform", "export", "sample"]


FILES = sorted([*CONF.rglob("*.yaml"), *RECIPES.rglob("*.yaml")])


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_file_opens_with_a_comment_and_every_key_of_an_option_has_one(path):
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    keys = [line for line in lines if re.match(r"\s*[a-z_]+: *[^\s{[&]", line) and "defaults" not in line]
    bare = [line for line in keys if "#" not in line and not re.match(r"(name|  - )", line)]
    assert path.parent == RECIPES or bare == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_no_option_is_named_like_a_boolean(path):
    assert isinstance(yaml.safe_load(path.stem), str)


CHOSEN = ("model", "data", "loss", "optim", "schedule", "steps")


def test_config_and_the_plain_options_show_every_key_with_the_schemas_default():
    data = compose(["recipe=null", "train.steps=1", "train.batch_size=1", "name=x"]).data
    plain = {k: v for k, v in data.items() if k not in (*CHOSEN, "recipe", "name")}
    least = {k: data[k] for k in CHOSEN if k != "steps"} | {"name": "x", "train": {"steps": 1, "batch_size": 1}}
    default = Job.model_validate(least).model_dump(mode="json", by_alias=True)
    assert plain == {k: v for k, v in default.items() if k not in (*CHOSEN, "recipe", "name")}


@pytest.mark.parametrize(
    "option",
    [o for o in OPTIONS if o.partition("=")[0] in CHOSEN] + [f"steps={s}" for s in STEPS],
)
def test_every_option_shows_every_key_of_its_kind(option):
    request = compose([option, *NEEDS.get(option, []), *needs(option.removeprefix("steps="))])
    group, _, name = option.partition("=")
    parts = (group, name) if group == "steps" else (group,)
    node = request.data[group][name] if group == "steps" else request.data[group]
    assert set(node) == set(schema_keys.names(parts, request.data))
