"""The command line, before any of it is understood."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import Problem, problems
from launcher.job.schema.redact import text as redacted

FLAGS = ("--help", "--version", "--multirun", "--config-dir", "--cfg")
SHORT = {"-h": "--help", "-m": "--multirun", "-cd": "--config-dir", "-c": "--cfg"}


@dataclass(frozen=True)
class Args:
    """``overrides`` in order, without ``sweep_dir``, which is the sweep's own."""

    overrides: tuple[str, ...] = ()
    help: bool = False
    version: bool = False
    multirun: bool = False
    config_dir: Path | None = None
    sweep_dir: Path | None = None


def parse(argv: Sequence[str]) -> Args:
    """Flags may stand anywhere. Raises ``RequestError``."""
    rest, overrides = list(argv), []
    seen: set[str] = set()
    config_dir = sweep_dir = None
    with problems() as found:
        while rest:
            word = rest.pop(0)
            name, equals, value = word.partition("=")
            flag = SHORT.get(name, name)
            if name == "sweep_dir" and equals:
                sweep_dir = Path(value)
            elif not word.startswith("-"):
                overrides.append(word)
            elif flag not in FLAGS:
                taken, problem = _no_flag(word, rest, config_dir)
                found.append(problem)
                del rest[:taken]
            elif flag in ("--config-dir", "--cfg"):
                value = value if equals else (rest.pop(0) if rest else "")
                if flag == "--config-dir":
                    config_dir = Path(value) if value else None
                    found += [] if value else [Problem("", "--config-dir: needs a folder", "", (word,))]
                elif value == "job":
                    overrides.append("show=config")
                else:
                    found.append(Problem("", f"--cfg {value}: only --cfg job is there", "show=config", (word, value)))
            else:
                seen.add(flag)
        if sweep_dir is not None and not {"--multirun", "--help"} & seen:
            cure = shlex.join(["-m", f"sweep_dir={sweep_dir}"])
            found.append(Problem("sweep_dir", f"{sweep_dir}: only a sweep has one", cure, (f"sweep_dir={sweep_dir}",)))
    return Args(tuple(overrides), "--help" in seen, "--version" in seen, "--multirun" in seen, config_dir, sweep_dir)


def _no_flag(word: str, after: Sequence[str], config_dir: Path | None) -> tuple[int, Problem]:
    """How many arguments ``after`` it are its value, and what is wrong with it."""
    from launcher.job.schema.similar_names import nearest
    from launcher.job.stray_arguments import KnownNames, flag
    from launcher.job.yaml.config_files import ConfigFiles

    name = word.partition("=")[0]
    configs = ConfigFiles.of(config_dir)
    taken, meant = flag(word, after, KnownNames(configs.groups(), configs.options("recipe")))
    hint = "" if meant else nearest(name, FLAGS, 0.75) or ""
    said = f", did you mean {hint}?" if hint else ""
    shown = redacted(" ".join([word, *after[:taken]]))
    text = f"{shown}: unknown flag{said} (flags: {', '.join(FLAGS)}; settings are key=value)"
    alone = hint in ("", "--config-dir", "--cfg") and not meant
    return taken, Problem("", text, "" if alone else meant or hint, (word, *after[:taken]))
