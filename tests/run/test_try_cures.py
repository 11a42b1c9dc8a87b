"""The cures of one request add up: pasted together, they are one line that passes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from launcher.__main__ import check_words
from launcher.errors import RequestError
from launcher.job.compose import BadRequest, compose
from launcher.job.cures.paste import pasted
from launcher.run.try_cures import examine

BASE = ("recipe=lm_single", "data=random_tokens", "data.vocab_size=64", "steps=[train]")
MODEL = ("model=null", "model._target_=first_package.Net")
RATE = ("schedule=null", "schedule._target_=second_package.rates.Rate")
LOSS = ("loss=null", "loss._target_=third_package.Loss")
NESTED = ("callbacks=[{_target_: first_package.Diary, writer: {_target_: third_package.Writer}}]",)
UNKNOWN = ("train.stepz=3",)
LAYOUT = ("parallel.pipeline.schedular=gpipe", "checkpoint.evry=5")


@pytest.fixture(autouse=True)
def packages_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first_package", "second_package", "third_package"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)


def refused(words: tuple[str, ...]) -> BadRequest:
    with pytest.raises(RequestError) as caught:
        check_words(words)
    return examine(words, caught.value, check_words)


@pytest.mark.parametrize(
    ("more", "packages"),
    [
        ((*MODEL, *RATE), "first_package,second_package"),
        ((*MODEL, *RATE, *LOSS), "first_package,third_package,second_package"),
        (NESTED, "first_package,third_package"),
        ((*MODEL, *RATE, *UNKNOWN), "first_package,second_package"),
        ((*LOSS, *UNKNOWN, *MODEL, *LAYOUT, *RATE), "first_package,third_package,second_package"),
        (("security.allow=[mine]", *MODEL, *RATE), "mine,first_package,second_package"),
    ],
    ids=["two", "three", "in an argument", "beside a key", "beside several", "beside one that is trusted"],
)
def test_several_packages_are_trusted_by_one_line(more: tuple[str, ...], packages: str) -> None:
    words = (*BASE, *more)
    error = refused(words)
    cures = [p.cure for p in error.problems]
    trusting = [c for c in cures if "security.allow" in c]
    assert len(trusting) >= 2
    assert {shlex.split(c)[-1] for c in trusting} == {f"security.allow=[{packages}]"}

    # paste all cures in their places
    for problem in error.problems:
        words = pasted(words, problem, error.origins[problem])
    job = compose(words).job
    assert job.security.allow == tuple(packages.split(","))
    for word in more:
        key, _, path = word.partition("=")
        if key.endswith("._target_"):
            assert getattr(job, key.partition(".")[0]).target == path


def test_one_key_is_listed_once_and_all_lines_pasted_together_pass() -> None:
    words = (*BASE, "callbacks=[{_target_: first_package.Diary}]", "metrics=[{_target_: second_package.M}]",
             "loss._target_=third_package.Loss")  # fmt: skip
    error = refused(words)
    assert [p.key for p in error.problems] == ["loss._target_", "metrics", "callbacks.0._target_"]
    allow = "'security.allow=[third_package,second_package,first_package]'"
    assert [p.cure for p in error.problems] == [
        f"loss=null loss._target_=third_package.Loss {allow}",
        f"'metrics=[{{_target_: second_package.M}}]' {allow}",
        f"'callbacks=[{{_target_: first_package.Diary}}]' {allow}",
    ]
    for problem in error.problems:
        words = pasted(words, problem, error.origins[problem])
    job = compose(words).job
    assert [job.callbacks[0].target, job.loss.target] == ["first_package.Diary", "third_package.Loss"]


@pytest.mark.parametrize(
    ("name", "why"), [("nonesuch", "there is no such package"), ("builtins", "it is Python's own")]
)
def test_a_package_that_cannot_be_trusted_has_no_cure_and_others_keep_theirs(name: str, why: str) -> None:
    error = refused((*BASE, f"callbacks=[{{_target_: {name}.X}}, {{_target_: first_package.Diary}}]"))
    (one, other) = error.problems
    assert (one.text, one.cure) == (f"{name}.X: package '{name}' is not trusted: {why}", "")
    assert other.cure.endswith("security.allow=[first_package]'")


@pytest.mark.parametrize(
    ("asked", "cure"),
    [
        ("optim.groups.embed.learning_rate=0.1", "optim.groups.embed.lr=0.1"),
        ("optim.groups.head.wd=0.2", "optim.groups.head.weight_decay=0.2"),
        ("optim.groups.layers.0.wieght_decay=0.2", "optim.groups.layers.0.weight_decay=0.2"),
        ("optim.groups.head.max_steps=3", ""),
        ("optim.learning_rate=0.1", "optim.lr=0.1"),
        ("optim.name=adam", "optim.name=adamw optim.weight_decay=0"),
        ("loss.name=ce", "loss.name=cross_entropy"),
        ("launch.gpu=2", "launch.nproc=2"),
    ],
)
def test_a_cure_has_the_meaning_of_the_word(asked: str, cure: str) -> None:
    (problem,) = refused((*BASE, asked)).problems
    assert problem.cure == cure


@pytest.mark.parametrize("key", ["\uff53eed", "\u0455eed", "se\u200bed", "'\u202edees'"])
def test_a_key_that_no_override_can_name_has_no_cure(tmp_path: Path, key: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"defaults: [lm_single]\n{key}: 1\n", encoding="utf-8")
    (problem,) = refused((f"recipe={file}",)).problems
    assert problem.key == key.strip("'")
    assert problem.text.startswith("unknown key (valid here: name, seed, ")
    assert problem.cure == ""


def test_in_a_recipe_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "defaults: [lm_single, override /model: null, _self_]\n"
        "model: {_target_: torch.nn.Net, inner: {_target_: tests.mine.Inner}}\n"
    )
    words = (f"recipe={file}", "steps=[train]", "security.recipe=trusted")
    error = refused(words)
    assert [p.key for p in error.problems] == ["model._target_", "model.inner._target_"]
    assert {p.cure for p in error.problems} == {"'security.allow=[torch,tests]'"}
    compose((*words, "security.allow=[torch,tests]"))


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        (("steps=[sample]",), "train,save,export,sample"),
        (("steps=[export,sample]",), "train,save,export,sample"),
        (("steps=[evaluate]", "steps.evaluate.of=exported"), "train,save,export,evaluate"),
        (("steps=[evaluate]", "steps.evaluate.of=transformed"), "train,save,transform,evaluate"),
        (("steps=[export]",), "train,save,export"),
        (("steps=[transform]",), "train,save,transform"),
        (("steps=[verify]",), "train,save,verify"),
        (("steps=[inspect]",), "train,save,inspect"),
        (("steps=[merge_strategies]",), "train,save,merge_strategies"),
        (("steps=[load]",), "train,save,load"),
        (("steps=[save,sample]",), "save,export,sample"),
    ],
    ids=lambda value: value.replace(",", " ") if isinstance(value, str) else "",
)
def test_a_step_without_weights_to_work_on_gets_the_steps_that_make_them(asked: tuple[str, ...], steps: str) -> None:
    words = ("recipe=lm_single", *asked, "show=plan")
    error = refused(words)
    assert {problem.cure for problem in error.problems} == {f"'steps=[{steps}]'"}
    problem = error.problems[0]
    mended = pasted(words, problem, error.origins[problem])
    check_words(mended)
    assert list(compose(mended).job.steps) == steps.split(",")


def test_settings_that_depend_on_a_missing_recipe_are_not_reported(tmp_path: Path) -> None:
    words = ("recipe=gone.yaml", f"data.path={tmp_path}", "train.stepz=3")
    assert [p.key for p in refused(words).problems] == ["recipe", "train.stepz"]


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        ("model.lora={rank:2,modules:[q]}", ["alpha"]),
        ("model.lora={rank:no,modules:[q]}", ["alpha", "rank"]),
        ("model.lora={rank:2,alpha:4,modules:[q_proj]}", ["modules"]),
        ("model.lora={rank:2}", ["alpha", "modules"]),
    ],
)
def test_keys_typed_beside_a_wrong_key_are_not_reported_as_missing(typed: str, keys: list[str]) -> None:
    """A placeholder for the wrong key once replaced everything that was typed."""
    error = refused((*BASE, "model=lm_tiny", "model.vocab_size=64", typed))
    assert sorted(p.key for p in error.problems) == [f"model.lora.{key}" for key in keys]


def test_each_cure_of_a_word_with_several_problems_passes_alone() -> None:
    """The first one was tried below a placeholder for the others, so it lacked ``launch.nproc``."""
    words = ("recipe=lm_single", "launch.nproc=3", "parallel.grid.tp=3", "model.layers=1", "operators=megatron")
    error = refused(words)
    assert {p.cure for p in error.problems} == {"parallel.grid.tp=2 launch.nproc=4"}
    for problem in error.problems:
        check_words(pasted(words, problem, error.origins[problem]))
