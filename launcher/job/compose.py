"""From overrides to a validated Job, every problem reported at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter, ValidationError

from launcher.errors import Problem, RequestError
from launcher.job.cures.explain import explain, missing, shown
from launcher.job.cures.whole_group import whole
from launcher.job.hydra_compose import CONFIG, Composed, hydrate, no_option
from launcher.job.overrides import intended_value
from launcher.job.overrides.grammar import Override, paste, read, shell, written
from launcher.job.overrides.merge import keys, plain, put
from launcher.job.schema import schema_keys
from launcher.job.schema.job import Job
from launcher.job.schema.redact import text as redacted
from launcher.job.schema.similar_names import nearest
from launcher.job.schema.steps import named
from launcher.job.stray_arguments import Names, sift
from launcher.job.targets import refusal
from launcher.job.yaml.config_search import Shelf
from launcher.job.yaml.limits import Hostile
from launcher.job.yaml.origins import COMMAND_LINE, Origin, Origins, gather, of_files

_JOB = TypeAdapter(Job)  # its complaints are explained here, with where each value was set


@dataclass(frozen=True)
class Request:
    """``data`` is the resolved configuration as plain dicts and lists, ``overrides`` the command line as typed."""

    job: Job
    data: dict[str, Any]
    origins: Origins
    overrides: tuple[str, ...]


class BadRequest(RequestError):
    """A request that cannot be carried out, and where its values were set (problem by problem, where they differ).

    ``late``: each value is right by itself, and they cannot be together.
    """

    def __init__(
        self,
        problems: tuple[Problem, ...],
        origins: Origins | Mapping[Problem, Origins],
        late: bool = False,
        planned: bool = False,
    ) -> None:
        self.origins = origins
        self.late = late
        self.planned = planned
        super().__init__(problems)


def late(error: RequestError, request: Request) -> BadRequest:
    """``error`` about a request that is composed, with where its values were set."""
    typed = read(request.overrides, [])
    return BadRequest(whole(error.problems, typed, request.origins), request.origins, late=True, planned=error.planned)


def compose(overrides: Sequence[str], *, config_dir: Path | None = None) -> Request:
    """What ``overrides`` ask for, on top of the shipped options and those in ``config_dir``.

    Without ``recipe=`` it is the default recipe. Torch is not imported, nothing is written.
    Raises ``BadRequest`` with every problem found.
    """
    found: list[Problem] = []
    here = Shelf.of(config_dir)
    typed = read(sift(overrides, Names(here.groups(), here.options("recipe")), found), found)
    shelf, typed = _shelf(typed, config_dir, found)
    said = tuple(_said(overrides, typed))
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
    found += _idle(origins)
    found = [p if p.text else missing(tuple(p.key.split(".")), data, origins) for p in found]
    job = _validated(data, origins, found)
    if job is None or found:
        raise BadRequest(whole(_relevant(found, wrong, origins), typed, origins), origins)
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
            found.append(Problem("recipe", f"{o.value}: {why}", _file_meant(o.value)))
            typed = tuple(t for t in typed if t is not o)
    shelf = Shelf.of(user, folder)
    found += [Problem("", f"{f}: a shipped option has this name; give yours another") for f in shelf.hidden()]
    return shelf, typed


def _file_meant(name: str) -> str:
    """The recipe that is there under nearly this name."""
    path = Path(name)
    there = [str(p) for p in path.parent.glob("*.yaml") if p.is_file()] if path.parent.is_dir() else []
    shipped = [f"{r}.yaml" for r in Shelf().options("recipe")]
    if path.name in shipped:
        return paste("recipe", path.stem)
    close = nearest(name, there, 0.8)
    return paste("recipe", close) if close else ""


def _choices(groups: list[Override], shelf: Shelf, found: list[Problem]) -> list[str]:
    """Overrides of groups for Hydra; those whose option is not there are reported, and left out."""
    texts = []
    for o in groups:
        names = [_name(n) for n in (o.value if isinstance(o.value, list) else [o.value]) if n is not None]
        options = shelf.options(o.key)
        bad = [str(n) for n in names if n not in options]
        if o.add and o.key == "steps":
            found.append(Problem("steps", f"{o.text}: the list is given as a whole, in order"))
        elif bad and not o.delete:
            found += [_misspelt(o, b, options) for b in bad]
        elif o.delete or o.value is None:
            texts.append(f"~{o.key}")
        else:
            listed = f"[{','.join(map(written, names))}]" if isinstance(o.value, list) else written(names[0])
            texts.append(f"{o.key}={listed}")
    return texts


def _name(option: Any) -> str:
    """An option's name may read as a number or a boolean: 1, true."""
    return str(option).lower() if isinstance(option, bool) else str(option)


def _misspelt(o: Override, bad: str, options: Sequence[str]) -> Problem:
    problem = no_option(o.key, bad, options)
    if o.key == "steps" and set(bad.split(",")) <= set(options):
        return Problem("steps", f"{bad!r} is one word; a list is [a,b]", paste("steps", bad.split(",")))
    if isinstance(o.value, list) and problem.cure:
        right = no_option(o.key, bad, options).cure.strip("'").partition("[")[2].rstrip("]")
        return Problem(problem.key, problem.text, paste(o.key, [right if n == bad else n for n in o.value]))
    return problem


def _data(composed: Composed, found: list[Problem]) -> dict[str, Any]:
    """Plain data with the names filled in that choosing options gives: the recipe, the run, the kind of each step."""
    cfg = composed.cfg
    cfg["recipe"] = composed.recipe
    data = plain(cfg, found)
    _typed_by_schema(cfg, data)
    if data.get("name") is None:
        model = data.get("model")
        kind = model.get("name") if isinstance(model, dict) else None
        data["name"] = (composed.recipe or str(kind or "run")).replace("/", "-")
    return data


def _typed_by_schema(cfg: DictConfig, data: dict[str, Any]) -> None:
    """The environment holds texts: what comes from there is read as what its key takes."""
    raw = OmegaConf.to_container(cfg, resolve=False)
    for key in keys(raw):
        *above, name = key.split(".")
        source: Any = raw
        node: Any = data
        for part in above:
            source, node = (t.get(part) if isinstance(t, dict) else None for t in (source, node))
        written_as = source.get(name) if isinstance(source, dict) else None
        if isinstance(written_as, str) and "oc.env:" in written_as and isinstance(node, dict):
            value, note = node.get(name), schema_keys.at(key.split("."), data)
            if isinstance(value, str) and note is not None and not schema_keys.accepts(note, value):
                node[name] = next(intended_value.readings(key, note, value), value)


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


def _idle(origins: Origins) -> Iterator[Problem]:
    """What Hydra would read, and nothing here does."""
    if (origin := origins.of("hydra")) is not None and not origin.typed:
        text = "Hydra's own settings have no effect here; run_dir sets the folder, --config-dir adds options"
        yield Problem("", f"{origin.where}: {text}")


def _of_hole(key: str, holes: set[str]) -> bool:
    """A complaint that only follows from a value that is not there."""
    return any(key == h or h.startswith(key + ".") or key.startswith(h + ".") for h in holes if h)


def _steps(steps: Any, origins: Origins, found: list[Problem]) -> Any:
    """Steps that were chosen carry their kind; settings alone choose no step."""
    if not isinstance(steps, dict):
        return steps
    verbs = schema_keys.kinds(schema_keys.at(("steps", "any"), {}))
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
            mine = origins.of(key)
            if mine is not None and not mine.typed:
                yield Problem(
                    key, f"{text}; a recipe leaves them out with - override /{section}: null", f"{section}=null"
                )
            else:
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


def _said(overrides: Sequence[str], typed: Sequence[Override]) -> Iterator[tuple[str, Origin]]:
    """What each override set: its key, and those of the group of keys that it is."""
    read = {o.text: o for o in typed}
    for text in overrides:
        origin, override = Origin(COMMAND_LINE, redacted(text)), read.get(text)
        yield text.partition("=")[0].strip().lstrip("+~"), origin
        if override is not None and isinstance(override.value, Mapping):
            yield from ((key, origin) for key in keys(override.value, override.key))


def _partial(typed: Sequence[Override], shelf: Shelf, said: Sequence[tuple[str, Origin]]) -> Origins:
    """What can be known where composing failed: the defaults lists of the configuration and of the recipe."""
    recipe = next((str(o.value) for o in reversed(typed) if o.key == "recipe"), None)
    paths = [p for p in (shelf.file(CONFIG), shelf.file(f"recipe/{recipe}") if recipe else None) if p]
    try:
        return gather((*of_files([(p, "") for p in paths]), *said), {})
    except (yaml.YAMLError, UnicodeDecodeError, Hostile):
        return gather(said, {})
