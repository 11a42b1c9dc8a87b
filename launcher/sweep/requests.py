"""The request of each cell of a sweep, composed and checked before any runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.errors import Problem, RequestError
from launcher.job.args import Args
from launcher.job.compose import BadRequest, Request, compose, late
from launcher.job.overrides.grammar import shell
from launcher.job.schema import redact
from launcher.job.sweep_grid import Cell, cells
from launcher.job.yaml.config_files import ConfigFiles
from launcher.job.yaml.origins import Origins


def composed(args: Args) -> dict[Cell, Request]:
    """The cells, each composed. Raises ``RequestError`` with each problem once, whichever cell has it."""
    errors: dict[Cell, BadRequest] = {}
    out: dict[Cell, Request] = {}
    for cell in cells(args.overrides, ConfigFiles.of(args.config_dir)):
        try:
            request = compose(cell.overrides, config_dir=args.config_dir)
        except BadRequest as error:
            errors[cell] = error
            continue

        out[cell] = request
        if request.job.run_dir is not None:
            errors[cell] = BadRequest((_own_folder(request.job.run_dir, args),), request.origins)
    if errors:
        raise together(errors)
    return out


def _own_folder(run_dir: str, args: Args) -> Problem:
    typed = tuple(o for o in args.overrides if o.lstrip("+").startswith("run_dir="))[-1:]
    cure = shell(f"sweep_dir={run_dir}") if typed else ""
    return Problem("run_dir", f"{run_dir}: a sweep gives each cell its own folder", cure, typed)


def impossible(requests: Mapping[Cell, Request], planned: bool = True) -> dict[Cell, BadRequest]:
    """The cells that would be refused when their turn came, and why."""
    from launcher.run.run_job import rehearse

    out = {}
    for cell, request in requests.items():
        try:
            rehearse(request, planned)
        except RequestError as error:
            out[cell] = late(error, request)
    return out


def together(errors: Mapping[Cell, BadRequest]) -> BadRequest:
    """Each problem once, whichever cell has it."""
    places: dict[Problem, Origins] = {}
    for error in errors.values():
        origins = error.origins if isinstance(error.origins, Origins) else Origins()
        places.update({p: origins for p in error.problems if p not in places})
    late = all(e.late for e in errors.values())
    planned = any(e.planned for e in errors.values())
    return BadRequest(tuple(places), places, late, planned)


def reason(error: RequestError, words: Sequence[str]) -> str:
    """What is wrong, in one line, without the secrets of the command line ``words``."""
    said = "; ".join(f"{p.key}: {p.text}" if p.key else p.text for p in error.problems)
    return redact.hide(said, redact.typed(words))
