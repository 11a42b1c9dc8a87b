"""A recipe from a stranger chooses among the launcher's options; it brings no code and starts no program."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from launcher.errors import RequestError
from launcher.job import config_folders, recipe_trust
from launcher.job.compose import compose

RECIPE = """
defaults:
  - lm_single
{section}
"""
BRINGS = {
    "code": ("security: {allow: [mine]}", "security.allow", "['mine']: it makes Python import packages"),
    "lines of bash": (
        "launch: {slurm: {setup: [id]}}", "launch.slurm.setup", "['id']: its lines are run by bash",
    ),
    "options of sbatch": (
        "launch: {slurm: {extra: ['--prolog=x']}}", "launch.slurm.extra",
        "['--prolog=x']: options of sbatch can run programs",
    ),
    "an image": ("launch: {slurm: {container: evil}}", "launch.slurm.container", "evil: ranks run in this image"),
    "an environment": ("name: ${oc.env:USER}", "name", "${oc.env:USER}: it may read the environment"),
    "an environment, in a list": (
        "logger: {wandb: {tags: ['a${oc.env:HOME}']}}", "logger.wandb.tags.0",
        "a${oc.env:HOME}: it may read the environment",
    ),
    "an environment by its name": (
        "name: ${${runs}:USER}\nruns: oc.env", "name", "${${runs}:USER}: it may read the environment",
    ),
}  # fmt: skip


BEHIND_A_NAME = {
    "code, in a merge": (
        "<<: {security: '${parallel.operators}'}\nparallel: {operators: {allow: [mine]}}", "security.allow",
    ),
    "code": ("security: ${parallel.operators}\nparallel: {operators: {allow: [mine]}}", "security.allow"),
    "a list": ("security: {allow: '${parallel.operators.x}'}\nparallel: {operators: {x: [mine]}}", "security.allow"),
    "lines of bash": (
        "launch: {slurm: '${parallel.operators}'}\nparallel: {operators: {setup: [id]}}", "launch.slurm.setup",
    ),
    "all of launch": (
        "launch: ${parallel.operators}\nparallel: {operators: {slurm: {container: evil}}}", "launch.slurm.container",
    ),
}  # fmt: skip


OTHER_WAYS = {
    "a merge": "security: {<<: {allow: [mine]}}",
    "a merge of everything": "<<: {security: {allow: [mine]}}",
    "a list of merges": "<<: [{seed: 1}, {security: {allow: [mine]}}]",
    "two merges": "<<: {seed: 1}\n<<: {security: {allow: [mine]}}",
    "a merge in a merge": "<<: {<<: {security: {<<: {allow: [mine]}}}}",
    "an alias": "parallel: {operators: &x {allow: [mine]}}\nsecurity: *x",
    "a merged alias": "parallel: {operators: &x {allow: [mine]}}\nsecurity: {<<: *x}",
    "an alias of a merge": "<<: &x {security: {allow: [mine]}}\nparallel: {operators: *x}",
    "a merge that is set again": "<<: {security: {allow: []}}\nsecurity: {allow: [mine]}",
    "escaped keys": '"\\u0073ecurity": {"\\x61llow": [mine]}',
    "quoted keys": "'security': {'allow': [mine]}",
    "keys with a mark": "? security\n: ? allow\n  : [mine]",
    "keys with a tag": "!!str security: {!!str allow: [mine]}",
    "a name among its items": "security: {allow: ['${name}']}\nname: mine",
    "a relative name": "security: {allow: '${..parallel.operators.x}'}\nparallel: {operators: {x: [mine]}}",
}
INCLUDES = {
    "in the section": "[lm_single, inner@security]",
    "as an option in the section": "[lm_single, {/recipe@security: inner}]",
    "as an option in all": "[lm_single, {/recipe@_global_.security: inner}]",
    "optional": "[lm_single, {optional /recipe@security: inner}]",
    "by a path": "[../there/inner@security, lm_single]",
    "in a merge": "[lm_single, {<<: {/recipe@security: inner}}]",
}
READS_THE_ENVIRONMENT = {
    "a merge": "<<: {name: '${oc.env:USER}'}",
    "an escape": 'name: "\\x24{oc.env:USER}"',
    "a group that another file completes": "parallel: {transformer_opt: '${oc.env:USER}'}",
}
DEFAULTS = {
    "an option": ("[lm_single, {override /model: '${oc.env:USER}'}]", "${oc.env:USER}"),
    "a recipe": ("[lm_single, '${oc.env:USER}']", "${oc.env:USER}"),
    "a list": ("[lm_single, {override /steps: [train, 'x${oc.env:USER}']}]", "'x${oc.env:USER}'"),
    "a package": ("[lm_single, {'/model@${oc.env:USER}': lm_tiny}]", "'/model@${oc.env:USER}'"),
    "a group": ("[lm_single, {'override /${oc.env:USER}': lm_tiny}]", "'override /${oc.env:USER}'"),
}
TAGS = {
    "a merge by its tag": ("!!merge foo: {security: {allow: [mine]}}", "!!merge"),
    "a merge by a directive": ("%TAG !e! tag:yaml.org,2002:\n---\n!e!merge foo: {seed: 1}", "!!merge"),
    "text that is a group of keys": ("security: !!str {=: '${parallel.operators}'}", "!!str"),
    "bytes": ("!!binary c2VjdXJpdHk=: {allow: [mine]}", "!!binary"),
    "a set": ("security: {allow: !!set {mine}}", "!!set"),
    "a path": ("runs: !!python/object/apply:pathlib.Path [x]", "!!python/object/apply:pathlib.Path"),
    "one of its own": ("!foo security: {allow: [mine]}", "!foo"),
}  # fmt: skip


def write(folder: Path, section: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "theirs.yaml").write_text(RECIPE.format(section=section))
    return folder / "theirs.yaml"


def refused(words: list[str]) -> dict[str, tuple[str, str]]:
    try:
        compose(words)
    except RequestError as error:
        return {p.key: (p.text, p.cure) for p in error.problems}
    return {}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("USER", "me")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize(("section", "key", "text"), BRINGS.values(), ids=BRINGS)
def test_a_recipe_outside_of_the_current_folder_may_not_bring_code(here, section, key, text):
    path = write(here.parent / "there", section)
    assert refused([f"recipe={path}"])[key] == (
        f"{text}, and {path} is outside of the current folder", "security.recipe=trusted",
    )  # fmt: skip
    assert key not in refused([f"recipe={path}", "security.recipe=trusted"])


@pytest.mark.parametrize(("section", "key"), BEHIND_A_NAME.values(), ids=BEHIND_A_NAME)
def test_a_recipe_from_elsewhere_may_not_bring_code_by_an_interpolation(here, section, key):
    path = write(here.parent / "there", section)
    assert key in refused([f"recipe={path}"])
    assert key not in refused([f"recipe={path}", "security.recipe=trusted"])


def test_a_file_cannot_trust_itself_by_another_name(here):
    path = write(here.parent / "there", "security: ${parallel.operators}\nparallel: {operators: {recipe: trusted}}")
    assert "security.recipe" in refused([f"recipe={path}"])


@pytest.mark.parametrize(("section", "key", "text"), BRINGS.values(), ids=BRINGS)
def test_a_recipe_that_is_declared_untrusted_may_not_bring_code(here, section, key, text):
    write(here, section)
    assert key not in refused(["recipe=theirs.yaml"])
    assert refused(["recipe=theirs.yaml", "security.recipe=untrusted"])[key] == (
        f"{text}, and the recipe is not trusted (security.recipe=untrusted)", "",
    )  # fmt: skip


SENDS = {
    "logger: {mlflow: {tracking_uri: 'http://h:8766'}}": "logger.mlflow.tracking_uri='http://h:8766'",
    "logger: {wandb: {entity: them}}": "logger.wandb.entity=them",
    "logger: {wandb: {mode: online}}": "logger.wandb.mode=online",
    "logger: {trackio: {space_id: them/x}}": "logger.trackio.space_id=them/x",
}


@pytest.mark.parametrize("section", SENDS)
def test_a_recipe_that_is_not_trusted_does_not_choose_where_the_run_is_sent(here, section):
    write(here, section)
    (key,) = refused(words := ["recipe=theirs.yaml", "security.recipe=untrusted"]).keys()
    text, cure = refused(words)[key]
    assert text.endswith(f"{recipe_trust.SENDS[key]}, and the recipe is not trusted (security.recipe=untrusted)")
    (cure,) = shlex.split(cure)
    assert (cure, refused([*words, cure]), refused(["recipe=theirs.yaml"])) == (SENDS[section], {}, {})


@pytest.mark.parametrize("section", ["logger: {wandb: {mode: offline}}", "logger: {mlflow: {}, trackio: {project: a}}"])
def test_a_recipe_that_is_not_trusted_may_log_on_this_machine(here, section):
    write(here, section)
    assert not refused(["recipe=theirs.yaml", "security.recipe=untrusted"])


@pytest.mark.parametrize("section", OTHER_WAYS.values(), ids=OTHER_WAYS)
def test_every_way_to_set_security_allow_is_refused(here, section):
    path = write(here.parent / "there", section)
    assert "it makes Python import packages" in refused([f"recipe={path}"])["security.allow"][0]
    write(here, section)
    assert "security.allow" in refused(["recipe=theirs.yaml", "security.recipe=untrusted"])
    assert compose(["recipe=theirs.yaml"]).code[0].startswith("code: mine, allowed by theirs.yaml:")


@pytest.mark.parametrize("defaults", INCLUDES.values(), ids=INCLUDES)
def test_security_allow_in_an_included_file_is_refused(here, defaults):
    there = here.parent / "there"
    there.mkdir()
    (there / "inner.yaml").write_text("allow: [mine]\n")
    (there / "theirs.yaml").write_text(f"defaults: {defaults}\n")
    assert "it makes Python import packages" in refused([f"recipe={there}/theirs.yaml"])["security.allow"][0]


@pytest.mark.parametrize(("section", "line"), [
    ("security: {<<: {allow: [mine]}}", 4),
    ("<<:\n  security:\n    allow: [mine]", 6),
    ("parallel:\n  operators: &x\n    allow: [mine]\nsecurity: {<<: *x}", 6),
])  # fmt: skip
def test_the_line_of_a_merged_key_is_where_it_is_written(here, section, line):
    write(here, section)
    assert compose(["recipe=theirs.yaml"]).code == (f"code: mine, allowed by theirs.yaml:{line}",)


def test_every_merged_setting_that_starts_a_program_is_refused(here):
    there = here.parent / "there"
    path = write(there, "<<: {launch: {<<: {slurm: {<<: {setup: [id], extra: [x]}}, k8s: {image: x, env: {A: b}}}}}")
    assert set(refused([f"recipe={path}"])) >= {
        "launch.slurm.setup", "launch.slurm.extra", "launch.k8s.image", "launch.k8s.env",
    }  # fmt: skip


def test_a_typed_setting_does_not_cover_others_of_its_group(here):
    path = write(here.parent / "there", "launch: {k8s: {env: {B: theirs}}}")
    assert "launch.k8s.env" in refused([f"recipe={path}", "launch.k8s.env={A: mine}"])


def test_a_shipped_option_in_another_place_is_not_a_shipped_value(here):
    there = here.parent / "there"
    there.mkdir()
    (there / "theirs.yaml").write_text("defaults: [lm_single, {/model@launch.k8s.env: lm_tiny}]\n")
    assert "launch.k8s.env" in refused([f"recipe={there}/theirs.yaml"])


def test_a_resolver_that_makes_a_group_is_refused_though_a_later_file_completes_it(here):
    there = here.parent / "there"
    there.mkdir()
    (there / "inner.yaml").write_text('launch: "${oc.create:{slurm: {setup: [id]}}}"\n')
    (there / "theirs.yaml").write_text("defaults: [lm_single, inner]\nlaunch: {nproc: 1}\n")
    assert {"launch", "launch.slurm.setup"} <= set(refused([f"recipe={there}/theirs.yaml"]))


@pytest.mark.parametrize(("section", "key", "meant"), [
    ("security: {alow: [mine]}", "security.alow", "security.allow"),
    ("securty: {allow: [mine]}", "securty", "security.allow"),
    ("launch: {slurm: {setpu: [echo]}}", "launch.slurm.setpu", "launch.slurm.setup"),
])  # fmt: skip
def test_no_cure_moves_a_value_of_an_untrusted_file_to_what_it_may_not_set(
    here: Path, section: str, key: str, meant: str
) -> None:
    write(here, section)
    text, cure = refused(["recipe=theirs.yaml", "security.recipe=untrusted"])[key]
    assert f"{meant} cannot be set there: {recipe_trust.PROGRAMS[meant]}, and the recipe is not trusted" in text
    assert not cure
    assert "=" in refused(["recipe=theirs.yaml", "security.recipe=trusted"])[key][1]


@pytest.mark.parametrize("trust", ["trusted", "untrusted"])
def test_a_file_cannot_declare_its_trust_in_a_merge(here, trust):
    path = write(here.parent / "there", f"security: {{<<: {{recipe: {trust}}}}}")
    assert refused([f"recipe={path}"])["security.recipe"][0] == (
        f"{trust}: a file cannot declare itself trusted; set this on the command line"
    )


@pytest.mark.parametrize("section", READS_THE_ENVIRONMENT.values(), ids=READS_THE_ENVIRONMENT)
def test_the_environment_is_not_read_in_another_way(here, section):
    path = write(here.parent / "there", section)
    assert any(": it may read the environment, and " in text for text, _ in refused([f"recipe={path}"]).values())


@pytest.mark.parametrize(("defaults", "shown"), DEFAULTS.values(), ids=DEFAULTS)
def test_a_defaults_list_does_not_read_the_environment(here, defaults, shown):
    (here / "theirs.yaml").write_text(f"defaults: {defaults}\n")
    assert refused(["recipe=theirs.yaml"]) == {
        "": (f"theirs.yaml: defaults.1: {shown}: a defaults list cannot read the environment; name an option", "")
    }


@pytest.mark.parametrize(
    "section", ["hydra: '${oc.env:USER}'", "<<: {hydra: {searchpath: ['${oc.env:USER}'], job: {env_copy: [NONE]}}}"]
)
def test_hydras_own_settings_are_not_resolved(here, section):
    path = write(here.parent / "there", section)
    ((text, _),) = refused([f"recipe={path}"]).values()
    assert "Hydra's own settings have no effect here" in text


@pytest.mark.parametrize("package", ["hydra", "hydra.job", "_global_.hydra"])
def test_no_file_is_placed_among_hydras_own_settings(here, package):
    (here / "inner.yaml").write_text("name: ${oc.env:USER}\n")
    (here / "theirs.yaml").write_text(f"defaults: [lm_single, inner@{package}]\n")
    assert "Hydra's own settings have no effect here" in refused(["recipe=theirs.yaml"])[""][0]


@pytest.mark.parametrize(("text", "tag"), TAGS.values(), ids=TAGS)
def test_a_tag_that_builds_other_values_than_plain_data_is_refused(here, text, tag):
    (here / "theirs.yaml").write_text(f"{text}\n")
    assert refused(["recipe=theirs.yaml"])[""][0].endswith(f": the tag {tag} is not read in a file of settings")


def test_a_path_out_of_the_shipped_folders_is_not_shipped(here, monkeypatch):
    monkeypatch.setattr(config_folders, "RECIPES", here.parent / "launcher/recipes")
    (here.parent / "launcher/recipes").mkdir(parents=True)
    assert config_folders.shipped(here.parent / "launcher/recipes/mine.yaml")
    assert not config_folders.shipped(here.parent / "launcher/recipes/../../there/theirs.yaml")


def test_a_typed_name_of_a_value_is_the_users_own(here):
    path = write(here.parent / "there", "parallel: {operators: {x: [mine]}}")
    assert "security.allow" not in refused([f"recipe={path}", "security.allow=${parallel.operators.x}"])


def test_typed_settings_are_trusted_beside_an_untrusted_recipe(here):
    path = write(here.parent / "there", "train: {steps: 3}")
    assert refused([f"recipe={path}", "security.allow=[mine]", "name=${oc.env:USER}"]) == {}


def test_a_file_cannot_trust_itself(here):
    write(here, "security: {recipe: trusted}")
    assert refused(["recipe=theirs.yaml"])["security.recipe"] == (
        "trusted: a file cannot declare itself trusted; set this on the command line", "",
    )  # fmt: skip


def test_a_link_to_elsewhere_is_elsewhere(here):
    write(here.parent / "there", "security: {allow: [mine]}")
    (here / "theirs.yaml").symlink_to(here.parent / "there/theirs.yaml")
    assert "security.allow" in refused(["recipe=theirs.yaml"])


def test_the_request_that_is_frozen_in_the_run_folder_was_checked_when_it_was_asked_for(here):
    run = here.parent / "run"
    write(run, "security: {allow: [mine]}").rename(run / "request.yaml")
    assert refused([f"recipe={run}/request.yaml", f"run_dir={run}"]) == {}
    assert "security.allow" in refused([f"recipe={run}/request.yaml", f"run_dir={here}"])


def test_a_file_cannot_name_the_run_folder_that_it_would_be_frozen_in(here):
    run = here.parent / "run"
    write(run, "security: {allow: [mine]}\nrun_dir: ../run").rename(run / "request.yaml")
    assert "security.allow" in refused([f"recipe={run}/request.yaml"])
    assert "security.allow" in refused(["recipe=../run/request.yaml"])


@pytest.mark.parametrize("setting", ["launch.slurm.partition", "launch.slurm.account"])
@pytest.mark.parametrize("text", ["gpu\nid", "gpu --wrap=id", "", "a\x1b[0m"], ids=["line", "option", "none", "escape"])
def test_a_name_for_slurm_is_one_word_of_its_batch_file(here, setting, text):
    write(here, yaml.safe_dump({"launch": {"slurm": {setting.rpartition(".")[2]: text}}}))
    assert refused(["recipe=theirs.yaml"])[setting][0].endswith(": should be one word, without spaces or line breaks")


@pytest.mark.parametrize("key", ["runs", "run_dir", "steps.export.path"])
def test_a_path_cannot_begin_a_line_of_a_batch_file(here, key):
    section: object = "runs/a\nid"
    for name in reversed(key.split(".")):
        section = {name: section}
    write(here, yaml.safe_dump(section))
    why = "should be a path without line breaks and other control characters"
    assert refused(["recipe=theirs.yaml", "steps=[train,save,export]"])[key][0].endswith(why)


def test_options_of_a_folder_that_is_named_are_trusted(here):
    own = here.parent / "options"
    (own / "recipe").mkdir(parents=True)
    (own / "recipe/theirs.yaml").write_text(
        "# @package _global_\n" + RECIPE.format(section="security: {allow: [mine]}")
    )
    assert compose(["recipe=theirs"], config_dir=own).code


def test_the_plan_says_what_code_a_recipe_brings(here):
    write(here, "security: {allow: [gpt, chars]}")
    request = compose(["recipe=theirs.yaml"])
    assert request.code == ("code: gpt, chars, allowed by theirs.yaml:4",)
    assert compose(["recipe=theirs.yaml", "security.allow=[gpt]"]).code == ()
    assert compose([]).code == ()


def test_trust_from_the_command_line_is_not_saved(here):
    assert compose(["security.recipe=trusted"]).job.security.recipe == "auto"


AXES = {
    "packages": ("security.allow: [[mine]]", "security.allow"),
    "packages, as text": ("security.allow: '[mine],[yours]'", "security.allow"),
    "packages, with a mark": ("+security.allow: [[mine]]", "+security.allow"),
    "nested keys": ("security: {allow: [[mine]]}", "security.allow"),
    "a group around it": ("launch.slurm: [{setup: [id]}]", "launch.slurm"),
    "a section around it": ("launch: [{slurm: {setup: [id]}}]", "launch"),
    "trust": ("security.recipe: [trusted]", "security.recipe"),
    "a place": ("logger.mlflow.tracking_uri: [http://there]", "logger.mlflow.tracking_uri"),
    "a run folder": ("run_dir: [theirs]", "run_dir"),
}


@pytest.mark.parametrize(("axis", "key"), AXES.values(), ids=AXES)
@pytest.mark.parametrize("behind", [False, True], ids=["", "behind a name"])
def test_an_axis_of_a_sweep_brings_nothing_that_the_recipe_must_not_bring(here, axis, key, behind):
    """The value of an axis is an override of its cell, so it would count as typed."""
    over = (
        f"{{over: '${{parallel.operators}}'}}\nparallel: {{operators: {{{axis}}}}}"
        if behind
        else f"{{over: {{{axis}}}}}"
    )
    path = write(here.parent / "there", f"sweep: {over}")
    text, cure = refused([f"recipe={path}"])[f"sweep.over.{key}"]
    assert text.endswith(f", and {path} is outside of the current folder")
    assert cure == "security.recipe=trusted"


def test_an_axis_may_vary_other_settings_and_choose_shipped_options(here):
    path = write(
        here.parent / "there", "sweep: {over: {optim.lr: [0.1, 0.2], launch: [cpu, auto], logger: 'csv,plain'}}"
    )
    assert refused([f"recipe={path}"]) == {}
    assert refused([f"recipe={path}", "sweep.over={security.allow: [[mine]]}"]) == {}
