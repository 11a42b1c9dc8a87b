"""A recipe from a stranger chooses among the launcher's options; it brings no code and starts no program."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from launcher.errors import RequestError
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
    "code": ("security: ${parallel.operators}\nparallel: {operators: {allow: [mine]}}", "security.allow"),
    "a list": ("security: {allow: '${parallel.operators.x}'}\nparallel: {operators: {x: [mine]}}", "security.allow"),
    "lines of bash": (
        "launch: {slurm: '${parallel.operators}'}\nparallel: {operators: {setup: [id]}}", "launch.slurm.setup",
    ),
    "all of launch": (
        "launch: ${parallel.operators}\nparallel: {operators: {slurm: {container: evil}}}", "launch.slurm.container",
    ),
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
def test_a_recipe_from_elsewhere_may_not(here, section, key, text):
    path = write(here.parent / "there", section)
    assert refused([f"recipe={path}"])[key] == (
        f"{text}, and {path} is outside of the current folder", "security.recipe=trusted",
    )  # fmt: skip
    assert key not in refused([f"recipe={path}", "security.recipe=trusted"])


@pytest.mark.parametrize(("section", "key"), BEHIND_A_NAME.values(), ids=BEHIND_A_NAME)
def test_what_it_may_not_set_it_may_not_name_either(here, section, key):
    path = write(here.parent / "there", section)
    assert key in refused([f"recipe={path}"])
    assert key not in refused([f"recipe={path}", "security.recipe=trusted"])


def test_a_file_cannot_trust_itself_by_another_name(here):
    path = write(here.parent / "there", "security: ${parallel.operators}\nparallel: {operators: {recipe: trusted}}")
    assert "security.recipe" in refused([f"recipe={path}"])


@pytest.mark.parametrize(("section", "key", "text"), BRINGS.values(), ids=BRINGS)
def test_an_untrusted_recipe_may_not_either(here, section, key, text):
    write(here, section)
    assert key not in refused(["recipe=theirs.yaml"])
    assert refused(["recipe=theirs.yaml", "security.recipe=untrusted"])[key] == (
        f"{text}, and the recipe is not trusted (security.recipe=untrusted)", "",
    )  # fmt: skip


def test_what_is_typed_is_the_users_own(here):
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
    assert refused(["recipe=theirs.yaml"])[setting][0].endswith(": should be one word")


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
