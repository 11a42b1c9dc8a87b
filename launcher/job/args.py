"""Splits the command line into flags and overrides, without parsing the overrides."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import Problem, problems
from launcher.job.schema.redact import text as redacted

TAKE_A_VALUE = ("--config-dir", "--cfg", "--completion")
FLAGS = ("--help", "--version", "--multirun", *TAKE_A_VALUE)
SHORT = {"-h": "--help", "-m": "--multirun", "-cd": "--config-dir", "-c": "--cfg"}
SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class Args:
    """The parsed command line.

    ``overrides``: in order, without ``sweep_dir``, which belongs to the sweep, not to a run.
    """

    overrides: tuple[str, ...] = ()
    help: bool = False
    version: bool = False
    multirun: bool = False
    config_dir: Path | None = None
    sweep_dir: Path | None = None
    completion: str | None = None


def parse(argv: Sequence[str]) -> Args:
    """Parses the arguments; flags may be anywhere among the overrides. Raises ``RequestError``."""
    rest = list(argv)
    overrides: list[str] = []
    seen: set[str] = set()
    config_dir: Path | None = None
    sweep_dir: Path | None = None
    completion: str | None = None
    with problems() as found:
        # separate flags and their values; all other words are overrides
        while rest:
            word = rest.pop(0)
            name, equals, value = word.partition("=")
            flag = SHORT.get(name, name)
            if name == "sweep_dir" and equals:
                sweep_dir = Path(value)
                found += _not_local(word, value)
            elif not word.startswith("-"):
                overrides.append(word)
            elif flag not in FLAGS:
                taken, problem = _unknown_flag(word, rest, config_dir)
                found.append(problem)
                del rest[:taken]
            elif flag not in TAKE_A_VALUE:
                seen.add(flag)
            else:
                if not equals:
                    value = rest.pop(0) if rest else ""
                if flag == "--config-dir":
                    config_dir = Path(value) if value else None
                    if not value:
                        found.append(Problem("", "--config-dir: needs a folder", "", (word,)))
                elif flag == "--completion":
                    completion = value
                    if value not in SHELLS:
                        typed = (word,) if equals or not value else (word, value)
                        text = f"{' '.join(typed)}: takes the name of a shell, {', '.join(SHELLS)}"
                        found.append(Problem("", text, "", typed))
                elif value == "job":
                    overrides.append("show=config")
                else:
                    text = f"--cfg {value}: only --cfg job is there"
                    found.append(Problem("", text, "show=config", (word, value)))

        # settings of a sweep are errors without a sweep
        if not {"--multirun", "--help"} & seen:
            own = [] if sweep_dir is None else [f"sweep_dir={sweep_dir}"]
            found += map(_no_sweep, [*own, *(word for word in overrides if word.startswith("sweep."))])
    return Args(
        tuple(overrides),
        help="--help" in seen,
        version="--version" in seen,
        multirun="--multirun" in seen,
        config_dir=config_dir,
        sweep_dir=sweep_dir,
        completion=completion,
    )


def _not_local(word: str, value: str) -> list[Problem]:
    from launcher.job.schema.run_paths import local  # imports pydantic

    try:
        local(value)
    except ValueError as error:
        return [Problem("sweep_dir", f"{value}: {error}", "", (word,))]
    return []


def _no_sweep(typed: str) -> Problem:
    key, _, value = typed.partition("=")
    return Problem(key, f"{value}: only a sweep has one", shlex.join(["-m", typed]), (typed,))


def _unknown_flag(word: str, after: Sequence[str], config_dir: Path | None) -> tuple[int, Problem]:
    """The number of words ``after`` the flag that are its value, and the problem to report."""
    from launcher.job import hydra_flags
    from launcher.job.schema.similar_names import did_you_mean, nearest
    from launcher.job.stray_arguments import KnownNames, flag
    from launcher.job.yaml.config_files import ConfigFiles

    name = word.partition("=")[0]
    configs = ConfigFiles.of(config_dir)
    taken, meant = flag(word, after, KnownNames(configs.groups(), configs.options("recipe")))

    # a flag of Hydra: the sentence names our counterpart
    if hydras := hydra_flags.instead(word, after):
        sentence, taken, cure = hydras
        words = (word, *after[:taken])
        text = f"{redacted(' '.join(words))}: unknown flag; {sentence}"
        return taken, Problem("", text, meant or cure, words)

    # any other flag
    words = (word, *after[:taken])
    hint = None if meant else nearest(name, FLAGS, 0.75)
    advice = did_you_mean(hint, shown=str)
    known = f"flags: {', '.join(FLAGS)}; settings are key=value"
    text = f"{redacted(' '.join(words))}: unknown flag{advice} ({known})"

    # a flag that takes a value cannot be pasted without one
    cure = meant or hint or ""
    return taken, Problem("", text, "" if cure in TAKE_A_VALUE else cure, words)
