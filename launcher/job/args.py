"""Flags and overrides of a command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import Problem, collecting_problems
from launcher.job.config_folders import ConfigFiles
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
    with collecting_problems() as wrong:
        # separate flags and their values; all other words are overrides
        while rest:
            word = rest.pop(0)
            name, equals, value = word.partition("=")
            flag = SHORT.get(name, name)
            if name == "sweep_dir" and equals:
                sweep_dir = Path(value)
                wrong += _not_local("sweep_dir", value, value, (word,))
            elif not word.startswith("-"):
                overrides.append(word)
            elif flag not in FLAGS:
                taken, problem = _unknown_flag(word, rest, config_dir)
                wrong.append(problem)
                del rest[:taken]
            elif flag not in TAKE_A_VALUE:
                seen.add(flag)
            else:
                if not equals:
                    value = rest.pop(0) if rest else ""
                typed = (word,) if equals or not value else (word, value)
                if flag == "--config-dir":
                    refused = _not_local("", f"{flag} {value}", value, typed) if value else []
                    wrong += refused
                    config_dir = Path(value) if value and not refused else None
                    if not value:
                        wrong.append(Problem("", "--config-dir: needs a folder", "", (word,)))
                elif flag == "--completion":
                    completion = value
                    if value not in SHELLS:
                        text = f"{' '.join(typed)}: needs the name of a shell: {', '.join(SHELLS)}"
                        wrong.append(Problem("", text, "", typed))
                elif value == "job":
                    overrides.append("show=config")
                else:
                    text = f"--cfg {value}: only --cfg job is supported"
                    wrong.append(Problem("", text, "show=config", (word, value)))

        # settings of a sweep are errors without a sweep
        if not {"--multirun", "--help"} & seen:
            own = [] if sweep_dir is None else [f"sweep_dir={sweep_dir}"]
            wrong += map(_no_sweep, [*own, *(word for word in overrides if word.startswith("sweep."))])
    return Args(
        tuple(overrides),
        help="--help" in seen,
        version="--version" in seen,
        multirun="--multirun" in seen,
        config_dir=config_dir,
        sweep_dir=sweep_dir,
        completion=completion,
    )


def _not_local(key: str, shown: str, path: str, words: tuple[str, ...]) -> list[Problem]:
    from launcher.job.schema.paths import unusable

    why = unusable(path)
    return [Problem(key, f"{shown}: {why}", "", words)] if why else []


def _no_sweep(typed: str) -> Problem:
    key, _, value = typed.partition("=")
    return Problem(key, f"{value}: only a sweep has this setting", shlex.join(["-m", typed]), (typed,))


def _unknown_flag(word: str, after: Sequence[str], config_dir: Path | None) -> tuple[int, Problem]:
    """Returns the number of words ``after`` the flag that are its value, and the problem to report."""
    from launcher.job.cures.keys_of_other_programs import why_not
    from launcher.job.schema.did_you_mean import did_you_mean, nearest
    from launcher.job.stray_arguments import KnownNames, flag

    name = word.partition("=")[0]
    configs = ConfigFiles.from_folders(config_dir)
    taken, meant = flag(word, after, KnownNames(configs.groups(), configs.options("recipe")))

    # a flag of Hydra: the sentence names our counterpart
    if hydras := instead(word, after):
        sentence, taken, cure = hydras
        words = (word, *after[:taken])
        text = f"{redacted(' '.join(words))}: unknown flag; {sentence}"
        return taken, Problem("", text, meant or cure, words)

    # any other flag
    words = (word, *after[:taken])
    why = "" if meant else why_not(name)
    hint = None if meant or why else nearest(name, FLAGS, 0.75)
    advice = f": {why}" if why else did_you_mean(hint, shown=str)
    known = f"flags: {', '.join(FLAGS)}; settings are key=value"
    text = f"{redacted(' '.join(words))}: unknown flag{advice} ({known})"

    # a flag that takes a value cannot be pasted without one
    cure = meant or hint or ""
    return taken, Problem("", text, "" if cure in TAKE_A_VALUE else cure, words)


HYDRA_SHORT = {
    "-cn": "--config-name",
    "-cp": "--config-path",
    "-p": "--package",
    "-r": "--run",
    "-sc": "--shell-completion",
}
_SHELL = r"(?:install|uninstall|query)=(\w+)"
_ABOUT = "all|config|defaults|defaults-tree|plugins|searchpath"


@dataclass(frozen=True)
class HydraFlag:
    """The counterpart of a Hydra flag. ``cure``: what to type, with the flag's value in place of ``{}``.

    ``value``: a pattern for the flag's value.
    """

    sentence: str
    cure: str = ""
    value: str = ""


_FLAGS = {
    "--config-name": HydraFlag("recipe=NAME or recipe=FILE.yaml chooses the run", value=r"[^-].*"),
    "--config-path": HydraFlag(
        "--config-dir adds a folder of options and recipes", "--config-dir {}", value=r"([^-][^=]*)"
    ),
    "--info": HydraFlag("show=config prints the composed settings", "show=config", value=_ABOUT),
    "--resolve": HydraFlag("show=config prints the settings, always resolved", "show=config"),
    "--package": HydraFlag(
        "show=config prints all sections of the settings", "show=config", value=r"[^-][^=]*"
    ),
    "--experimental-rerun": HydraFlag(
        "command.txt in a run folder contains the command to paste; with the same run_dir the run resumes",
        value=r"[^-][^=]*",
    ),
    "--run": HydraFlag("without -m there is always one run"),
    "--shell-completion": HydraFlag(
        "--completion prints the completion script of a shell", "--completion {}", value=_SHELL
    ),
    "--hydra-help": HydraFlag("--help prints the complete help", "--help"),
}


def instead(word: str, after: Sequence[str]) -> tuple[str, int, str] | None:
    """Returns the sentence, the number of words ``after`` that belong to the flag, and the cure.

    ``None`` for a flag that is not Hydra's.
    """
    name, equals, value = word.partition("=")
    flag = _FLAGS.get(HYDRA_SHORT.get(name, name))
    if flag is None:
        return None

    # its value, in the same word or the next one
    follows = not equals and bool(flag.value and after and re.fullmatch(flag.value, after[0]))
    match = re.fullmatch(flag.value, after[0] if follows else value)
    cure = flag.cure
    if "{}" in cure:
        cure = cure.format(shlex.quote(match[1])) if match else ""
    return flag.sentence, int(follows), cure
