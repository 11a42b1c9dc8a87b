"""``python -m launcher.data.prepare``: runs the step ``prepare`` alone, without a plan or torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launcher.console import say, tell
from launcher.data.prepare.prepare import prepare, problems
from launcher.data.prepare.progress import ProgressReporter
from launcher.errors import DONE, FAILED, INTERRUPTED, REFUSED, RequestError, RunError, refuse
from launcher.job.compose import Request, compose, late
from launcher.job.config_folders import CONF
from launcher.job.cures.report import render
from launcher.job.origins import Origins
from launcher.job.schema.redact import typed
from launcher.job.schema.steps import Prepare
from launcher.runtime.stdio import open_missing

KEY = "steps.prepare"
USAGE = "python -m launcher.data.prepare src=FILES dst=FOLDER tokenizer_file=tokenizer.json [key=value ...]"


def main(words: Sequence[str]) -> int:
    """Runs the command; returns its exit code.

    ``words`` are KEY=VALUE with the step's keys, with or without the prefix ``steps.prepare.``.
    """
    if {"-h", "--help"} & {*words}:
        say(f"{USAGE}\n\n{(CONF / 'steps/prepare.yaml').read_text(encoding='utf-8')}".rstrip())
        return DONE
    try:
        settings = _settings(words)
        with ProgressReporter("auto", say) as speed:
            say(prepare(settings, KEY, say, speed).text(settings.dst))
    except RequestError as error:
        tell(render(error.problems, getattr(error, "origins", Origins()), typed(words)))
        return REFUSED
    except RunError as error:
        tell(f"error: {error}")
        return FAILED
    except KeyboardInterrupt:
        tell("interrupted; the same command continues after the complete files")
        return INTERRUPTED
    return DONE


def _settings(words: Sequence[str]) -> Prepare:
    request: Request = compose([f"steps=[{KEY.rpartition('.')[2]}]", *map(_with_prefix, words)])
    step = request.job.steps["prepare"]
    assert isinstance(step, Prepare)
    try:
        refuse(problems(step, KEY))
    except RequestError as error:
        raise late(error, request) from error
    return step


def _with_prefix(word: str) -> str:
    return word if word.startswith((f"{KEY}.", "-")) or "=" not in word else f"{KEY}.{word}"


if __name__ == "__main__":
    open_missing()
    sys.exit(main(sys.argv[1:]))
