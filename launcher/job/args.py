"""The command line, before any of it is understood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import Problem, problems

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
                found.append(_no_flag(word, name))
            elif flag in ("--config-dir", "--cfg"):
                value = value if equals else (rest.pop(0) if rest else "")
                if flag == "--config-dir":
                    config_dir = Path(value) if value else None
                    found += [] if value else [Problem("", "--config-dir: needs a folder", "--config-dir DIR")]
                elif value == "job":
                    overrides.append("show=config")
                else:
                    found.append(Problem("", f"--cfg {value}: only --cfg job is there", "show=config"))
            else:
                seen.add(flag)
        if sweep_dir is not None and not {"--multirun", "--help"} & seen:
            found.append(Problem("sweep_dir", f"{sweep_dir}: only a sweep has one", f"-m sweep_dir={sweep_dir}"))
    return Args(tuple(overrides), "--help" in seen, "--version" in seen, "--multirun" in seen, config_dir, sweep_dir)


def _no_flag(word: str, name: str) -> Problem:
    from launcher.job.near import nearest

    hint = nearest(name, FLAGS)
    said = f", did you mean {hint}?" if hint else ""
    return Problem("", f"{word}: unknown flag{said} (flags: {', '.join(FLAGS)}; settings are key=value)", hint or "")
