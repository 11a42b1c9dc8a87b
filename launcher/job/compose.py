"""From overrides to a validated Job, every problem reported at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from launcher.errors import Problem, RequestError
from launcher.job import surface
from launcher.job.explain import explain, missing, shown
from launcher.job.hydrate import CONFIG, Composed, hydrate, no_option
from launcher.job.merge import plain, put
from launcher.job.origins import COMMAND_LINE, Origin, Origins, gather, of_files
from launcher.job.overrides import Override, paste, quoted, read, shell
from launcher.job.redact import text as redacted
from launcher.job.schema import Job
from launcher.job.shelf import Shelf
from launcher.job.steps import named
from launcher.job.targets import refusal

_JOB = TypeAdapter(Job)  # its complaints are explained here, with where each value was set


@dataclass(frozen=True)
class Request:
    """``data`` is the resolved configuration as plain dicts and lists, ``overrides`` the command line as typed."""

    job: Job
    data: dict[str, Any]
    origins: Origins
    overrides: tuple[str, ...]


class BadRequest(RequestError):
    """A request that cannot be carried out, and where its values were set (problem by problem, where they differ)."""

    def __init__(self, problems: tuple[Problem, ...], origins: Origins | Mapping[Problem, Origins]) -> None:
        self.origins = origins
        super().__init__(problems)


def compose(overrides: Sequence[str], *, config_dir: Path | None = None) -> Request:
    """What ``overrides`` ask for, on top of the shipped options and those in ``config_dir``.

    Without ``recipe=`` it is the default recipe. Torch is not imported, nothing is written.
    Raises ``BadRequest`` with every problem found.
    """
    found: list[Problem] = []
    typed = read(overrides, found)
    shelf, typed = _shelf(typed, config_dir, found)
    said = tuple(_said(overrides))
    groups = [o for o in typed if o.key in shelf.groups() and not isinstance(o.value, Mapping)]
    choices = _choices(groups, shelf, found)
    wrong = {p.key for p in found} & set(shelf.groups())
    composed = hydrate(choices, shelf)
    if isinstance(composed, Problem):
        raise BadRequest((*found, composed), _partial(typed, shelf, said))
    rest = [o for o in typed if o not in groups]
    found += [p for p in (put(composed.cfg, o) for o in rest) if p is not None]
    data = _data(composed, found)
    origins = gather((*of_files(composed.files), *said), data)
    found = [p if p.text else missing(tuple(p.key.split(".")), data, origins) for p in found]
    job = _validated(data, origins, found)
    if job is None or found:
        raise BadRequest(_relevant(found, wrong, origins), origins)
    return Request(job, data, origins, tuple(overrides))


def _shelf(typed: tuple[Override, ...], user: Path | None, found: list[Problem]) -> tuple[Shelf, tuple[Override, ...]]:
    """The files at hand; ``recipe=FILE.yaml`` reads that file."""
    if user is not None and not user.is_dir():
        found.append(Problem("", f"--config-dir {user}: there is no such folder"))
        user = None
    files = [o for o in typed if o.key == "recipe" and isinstance(o.value, str) and o.value.endswith((".yaml", ".yml"))]
    folder = None
    for o in files:
        path = Path(o.value)
        if path.is_file() and path.suffix == ".yaml":
            folder = path.parent
            typed = tuple(Override(t.key, path.stem, t.text) if t is o else t for t in typed)
        else:
            why = "there is no such file" if not path.is_file() else "its name must end in .yaml"
            found.append(Problem("recipe", f"{o.value}: {why}", "recipe=NAME"))
            typed = tuple(t for t in typed if t is not o)
    shelf = Shelf.of(user, folder)
    found += [Problem("", f"{f}: a shipped option has this name; give yours another") for f in shelf.hidden()]
    return shelf, typed


def _choices(groups: list[Override], shelf: Shelf, found: list[Problem]) -> list[str]:
    """Overrides of groups for Hydra; those whose option is not there are reported, and left out."""
    texts = []
    for o in groups:
        names = [n for n in (o.value if isinstance(o.value, list) else [o.value]) if n is not None]
        options = shelf.options(o.key)
        bad = [str(n) for n in names if n not in options]
        if o.add and o.key == "steps":
            found.append(
                Problem("steps", f"{o.text}: the list is given as a whole, in order", shell("steps=[train,save]"))
            )
        elif bad and not o.delete:
            found += [_misspelt(o, b, options) for b in bad]
        elif o.delete or o.value is None:
            texts.append(f"~{o.key}")
        else:
            listed = (
                f"[{','.join(quoted(str(n)) for n in names)}]" if isinstance(o.value, list) else quoted(str(o.value))
            )
            texts.append(f"{o.key}={listed}")
    return texts


def _misspelt(o: Override, bad: str, options: Sequence[str]) -> Problem:
    problem = no_option(o.key, bad, options)
    if isinstance(o.value, list) and problem.cure:
        right = no_option(o.key, bad, options).cure.strip("'").partition("[")[2].rstrip("]")
        return Problem(problem.key, problem.text, paste(o.key, [right if n == bad else n for n in o.value]))
    return problem


def _data(composed: Composed, found: list[Problem]) -> dict[str, Any]:
    """Plain data with the names filled in that choosing options gives: the recipe, the run, the kind of each step."""
    cfg = composed.cfg
    cfg["recipe"] = composed.recipe
    data = plain(cfg, found)
    if data.get("name") is None:
        model = data.get("model")
        kind = model.get("name") if isinstance(model, dict) else None
        data["name"] = (composed.recipe or str(kind or "run")).replace("/", "-")
    return data


def _validated(data: dict[str, Any], origins: Origins, found: list[Problem]) -> Job | None:
    holes = {p.key for p in found}
    data["steps"] = _steps(data.get("steps"), origins, found)
    job = None
    try:
        job = _JOB.validate_python(data)
    except ValidationError as error:
        found += [p for p in explain(error, data, origins) if not _of_hole(p.key, holes)]
    allow = data.get("security", {}).get("allow") if isinstance(data.get("security"), dict) else ()
    found += _targets(data, tuple(allow) if isinstance(allow, list) else (), origins)
    return job


def _of_hole(key: str, holes: set[str]) -> bool:
    """A complaint that only follows from a value that is not there."""
    return any(key == h or h.startswith(key + ".") or key.startswith(h + ".") for h in holes if h)


def _steps(steps: Any, origins: Origins, found: list[Problem]) -> Any:
    """Steps that were chosen carry their kind; settings alone choose no step."""
    if not isinstance(steps, dict):
        return steps
    verbs = surface.kinds(surface.at(("steps", "any"), {}))
    kept = {}
    for name, step in steps.items():
        idle = name in verbs and isinstance(step, dict) and "kind" not in step
        if not idle:
            kept[name] = step
        elif (origin := origins.of(f"steps.{name}")) is not None and origin.typed:
            chosen = [n for n, s in steps.items() if isinstance(s, dict) and "kind" in s]
            text = f"{name!r} is not among the steps of this run ({', '.join(chosen) or 'none'})"
            whole = paste("steps", [*(c for c in chosen if c in verbs), name])
            found.append(Problem(f"steps.{name}", text, f"{whole} {shell(origin.text)}"))
    return named(kept)


def _targets(data: dict[str, Any], allow: tuple[str, ...], origins: Origins) -> Iterator[Problem]:
    """Classes of the user's own: allowed packages only, and not on top of a shipped option."""
    for section in ("model", "data", "optim"):
        node = data.get(section)
        target = node.get("_target_") if isinstance(node, dict) else None
        if not isinstance(node, dict) or not isinstance(target, str):
            continue
        key = f"{section}._target_"
        name = origins.of(f"{section}.name") if "name" in node else None
        if name is not None and name.shipped:
            text = f"{target}: the options of {section}={shown(node['name'], '')} would become its arguments"
            yield Problem(key, text, f"{section}=null {paste(key, target)}")
        if why := refusal(target, allow):
            yield Problem(key, f"{target}: {why[0]}", why[1])


def _relevant(found: list[Problem], wrong: set[str], origins: Origins) -> tuple[Problem, ...]:
    """Without what may only follow from a misspelt option; each problem once."""
    once = tuple(dict.fromkeys(found))
    if not wrong:
        return once
    hidden = {"model", "data", "optim", "schedule", "steps"} if "recipe" in wrong else wrong
    return tuple(p for p in once if p.key in wrong or p.key.partition(".")[0] not in hidden)


def _said(overrides: Sequence[str]) -> Iterator[tuple[str, Origin]]:
    for text in overrides:
        yield text.partition("=")[0].lstrip("+~"), Origin(COMMAND_LINE, redacted(text))


def _partial(typed: Sequence[Override], shelf: Shelf, said: Sequence[tuple[str, Origin]]) -> Origins:
    """What can be known where composing failed: the defaults lists of the configuration and of the recipe."""
    recipe = next((str(o.value) for o in reversed(typed) if o.key == "recipe"), None)
    paths = [p for p in (shelf.file(CONFIG), shelf.file(f"recipe/{recipe}") if recipe else None) if p]
    try:
        return gather((*of_files([(p, "") for p in paths]), *said), {})
    except (yaml.YAMLError, UnicodeDecodeError):
        return gather(said, {})
