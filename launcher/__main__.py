"""The command ``python -m launcher``."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from launcher import __version__, requirements
from launcher.console import say, tell
from launcher.errors import DONE, FAILED, INTERRUPTED, REFUSED, RequestError, RunError, printable, refuse
from launcher.job.args import Args, parse
from launcher.job.schema.redact import hide, typed
from launcher.optional import has, lacking, starter, sweep_commands, sweeps
from launcher.runtime import gc_thresholds
from launcher.runtime.cluster import launch_env
from launcher.runtime.console_log import recorded
from launcher.runtime.stdio import open_missing, spare_streams

if TYPE_CHECKING:
    from launcher.job.compose import Depth
    from launcher.run.external_ranks.leader import FollowerRanks

UNSAID = 120
"""The exit code when the output cannot be flushed: Python uses the same one."""
OF_A_RUN = ("status", "logs", "cancel")
"""Commands whose argument is a run folder."""
BEGIN = "init"
"""The command that starts a small project; its argument is the new folder."""
OUT_OF_MEMORY = "this process is out of memory; it may have a limit (ulimit -v), or other programs use it"


_is_command = False
"""True if ``script`` runs in this process, which then does nothing but import until it runs the request."""


class _AlreadyReported(RequestError):
    """A refused request whose problems have already been printed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: ``DONE``, ``REFUSED`` (the request is wrong, nothing started) or ``FAILED``."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        rank = launch_env.rank()
    except RequestError as error:
        return _refuse(error, words, None)
    if rank:
        code = _main(words, rank)
    else:
        with recorded():
            code = _main(words, rank)
    if rank is not None and code not in (DONE, REFUSED):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # destroying the process group would wait for ranks that may wait for this one
    return code


def _main(words: list[str], rank: int | None) -> int:
    try:
        if words and words[0] in OF_A_RUN:
            return _of_a_run(words)
        if words and words[0] == BEGIN:
            refuse([replace(problem, words=tuple(words)) for problem in lacking("starter")])
            return DONE if rank else starter.carry_out(words)
        args = parse(words)
        if args.help or args.version or args.completion:
            if not rank:
                say(_about(args))
            return DONE
        if lacks := requirements.missing():
            tell(f"error: {lacks}; nothing was started")
            return REFUSED
        if args.multirun:
            return sweeps.sweep(args, rank)

        # rank 0 reads the request; the other ranks wait for its instructions
        if not rank:
            return _run(args, words, rank)
        if _only_prints(args):
            return DONE
        from launcher.run.run import follow_rank_0

        rank = None  # a rank that cannot join reports that itself
        return follow_rank_0(partial(_patience, args))
    except _AlreadyReported:
        return REFUSED
    except RequestError as error:
        return _refuse(error, words, rank)
    except RunError as error:
        tell(hide(printable(f"error: {error}", "\n\t"), typed(words)))
        return FAILED
    except MemoryError:
        tell(f"error: {OUT_OF_MEMORY}")
        return FAILED
    except (OSError, ImportError) as error:
        if unloadable := requirements.unloadable(error):
            tell(printable(f"error: {unloadable}", "\n\t"))
            return FAILED
        if not isinstance(error, OSError):
            raise
        from launcher.checkpoint.tensorfile.disk import unwritten
        from launcher.run.process_limits import exhausted

        if not (full := unwritten(error) or exhausted(error)):
            raise
        tell(printable(f"error: {full}", "\n\t"))
        return FAILED
    except KeyboardInterrupt:
        tell("interrupted")
        return INTERRUPTED


@contextmanager
def _leading(args: Args, words: list[str], rank: int | None) -> Iterator[FollowerRanks | None]:
    """Yields the other ranks of an outer launcher, ``None`` if none is needed; releases them at the end."""
    if launch_env.place() is None or _only_prints(args):
        yield None
        return
    from launcher.run.external_ranks.leader import leading

    with leading() as others:
        try:
            yield others
        except RequestError as error:  # printed first: torchrun ends this process when another has ended
            _refuse(error, words, rank)
            raise _AlreadyReported(error.problems) from error


def _patience(args: Args) -> float:
    """Returns the request's ``launch.timeout_s``.

    If the request is wrong, which rank 0 reports, it is the default.
    """
    from launcher.job.compose import compose
    from launcher.job.schema.launch import Launch

    try:
        return compose(args.overrides, config_dir=args.config_dir).job.launch.timeout_s
    except RequestError:
        return Launch().timeout_s


def _of_a_run(words: list[str]) -> int:
    """Carries out a command about the folder of a run, or of a sweep."""
    if has("sweep_commands"):
        return sweep_commands.carry_out(words)
    from launcher.run import status_logs_cancel

    return status_logs_cancel.carry_out(words)


def _check_of_a_run(words: Sequence[str]) -> None:
    if has("sweep_commands"):
        sweep_commands.check(words)
        return
    from launcher.run import status_logs_cancel

    status_logs_cancel.check(words)


def _only_prints(args: Args) -> bool:
    """Returns true if rank 0 only prints and needs no other; ``show=search`` may measure on all ranks."""
    return any(o.startswith("show=") and o not in ("show=null", "show=search") for o in args.overrides)


def _run(args: Args, words: list[str], rank: int | None) -> int:
    """Composes the request and runs it, in the only process or on rank 0 of an outer launcher."""
    with _leading(args, words, rank) as others:
        from launcher.job.compose import compose, late
        from launcher.job.cures.report import as_yaml

        request = compose(args.overrides, config_dir=args.config_dir)
        if request.job.show == "config":
            say(as_yaml(request.data).removesuffix("\n"))
            return DONE
        from launcher.run.run import run_request

        if _is_command:
            from launcher.runtime.processes.fork_server import only_imported

            only_imported()
        try:
            return run_request(request, words, others)
        except RequestError as error:
            raise late(error, request) from error


def check_words(words: Sequence[str], depth: Depth | None = None) -> None:
    """Raises ``RequestError`` if the command line ``words`` would be refused; starts and prints nothing.

    ``depth`` limits how far the request is checked; ``None`` includes its plan. A smaller depth imports
    neither torch nor the user's classes.
    """
    if words and words[0] in OF_A_RUN:
        _check_of_a_run(words)
        return
    args = parse(words)
    if args.help or args.version or args.completion:
        _about(args)
        return
    if args.multirun:
        sweeps.check(args, depth)
        return
    from launcher.job.compose import Depth, compose, late

    request = compose(args.overrides, config_dir=args.config_dir)
    if depth == Depth.COMPOSED:
        return
    from launcher.run.run import rehearse

    try:
        rehearse(request, depth != Depth.SETTLED)
    except RequestError as error:
        raise late(error, request) from error


def _about(args: Args) -> str:
    if args.help:
        return _help(args)
    if args.completion:
        from launcher.job.completion import script

        return script(args.completion, (BEGIN, *OF_A_RUN)).removesuffix("\n")
    return _version()


def _version() -> str:
    """Returns the versions of launcher (with the commit, in a checkout) and torch; imports no torch."""
    from importlib.metadata import PackageNotFoundError, version

    from launcher.runtime import git

    root = Path(__file__).parents[1]
    # an installation may be inside a repository of the user
    commit = git.shown(*git.commit(root)) if (root / ".git").exists() else ""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    return f"launcher {__version__}{f' ({commit})' if commit else ''}, torch {torch}"


def _help(args: Args) -> str:
    """Returns the help, or the help on each word of the command line that sets nothing."""
    from launcher.job.usage import HEAD, usage

    names = [word for word in args.overrides if "=" not in word]
    if not names:
        return usage(args.config_dir)
    from launcher.job.config_folders import ConfigFiles
    from launcher.job.help import explain

    configs = ConfigFiles.from_folders(args.config_dir)
    commands = (BEGIN, *OF_A_RUN)
    return "\n\n".join(HEAD.rstrip() if name in commands else explain(name, configs) for name in names)


def _refuse(error: RequestError, words: Sequence[str], rank: int | None) -> int:
    if not rank:
        from launcher.job.cures.report import render
        from launcher.run.try_cures import examine

        if words and words[0] in (*OF_A_RUN, BEGIN):  # a command has no settings to mend
            tell(render(error.problems, None, typed(words)))
            return REFUSED
        known = examine(words, error, check_words)
        tell(render(known.problems, known.origins, typed(words)))
    return REFUSED


def script() -> NoReturn:
    """Runs the command and ends the process.

    ``_leave`` skips the interpreter's shutdown: its last garbage collection visits all of torch, which takes
    most of a second, and a thread of torch may abort the process after a run that succeeded.
    """
    open_missing()
    try:
        here = os.getcwd()
    except OSError as error:  # paths in the request, and the folder of runs, may be relative to it
        tell(f"error: the current folder cannot be used: {error.strerror}; change to a folder that exists")
        sys.exit(REFUSED)
    if not sys.flags.safe_path and here not in sys.path:
        sys.path.append(here)  # for classes of the user; last, so that no file here replaces a package
    gc_thresholds.seldom()
    spare_streams()
    global _is_command
    _is_command = True
    codes = [FAILED]
    atexit.register(_leave, codes)  # registered first, so it runs last
    codes.append(main())
    sys.exit(codes[-1])


def _leave(codes: list[int]) -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            codes.append(UNSAID)
    os._exit(codes[-1])


if __name__ == "__main__":
    script()
