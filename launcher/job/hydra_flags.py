"""Explains what to write in place of flags of Hydra, such as ``--info``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

SHORT = {
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
    """Our counterpart of a flag. ``cure``: what to type, with the flag's value in place of ``{}``.

    ``value``: a pattern for the flag's value.
    """

    sentence: str
    cure: str = ""
    value: str = ""


_FLAGS = {
    "--config-name": HydraFlag("recipe=NAME or recipe=FILE.yaml says what is run", value=r"[^-].*"),
    "--config-path": HydraFlag(
        "--config-dir adds a folder of options and recipes", "--config-dir {}", value=r"([^-][^=]*)"
    ),
    "--info": HydraFlag("show=config prints the composed settings", "show=config", value=_ABOUT),
    "--resolve": HydraFlag("show=config prints the settings, always resolved", "show=config"),
    "--package": HydraFlag(
        "show=config prints the settings, all sections of them", "show=config", value=r"[^-][^=]*"
    ),
    "--experimental-rerun": HydraFlag(
        "command.txt of a run folder is the command to paste; with the same run_dir a run goes on",
        value=r"[^-][^=]*",
    ),
    "--run": HydraFlag("without -m there is one run, always"),
    "--shell-completion": HydraFlag(
        "--completion prints what a shell needs", "--completion {}", value=_SHELL
    ),
    "--hydra-help": HydraFlag("--help says all there is", "--help"),
}


def instead(word: str, after: Sequence[str]) -> tuple[str, int, str] | None:
    """The sentence, the number of words ``after`` that belong to the flag, and the cure.

    ``None`` for a flag that is not Hydra's.
    """
    name, equals, value = word.partition("=")
    flag = _FLAGS.get(SHORT.get(name, name))
    if flag is None:
        return None

    # its value, in the same word or the next one
    follows = not equals and bool(flag.value and after and re.fullmatch(flag.value, after[0]))
    found = re.fullmatch(flag.value, after[0] if follows else value)
    cure = flag.cure
    if "{}" in cure:
        cure = cure.format(shlex.quote(found[1])) if found else ""
    return flag.sentence, int(follows), cure
