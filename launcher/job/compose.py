"""Composes overrides into a validated Job; reports every problem at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter, ValidationError

from launcher.errors import Problem, RequestError
from launcher.job import intended_value, recipe_trust, sweep_grid
from launcher.job import overrides as override_words
from launcher.job.config_folders import ConfigFiles
from launcher.job.cures.options_of_other_programs import no_option, of_other_programs, right_name
from launcher.job.cures.paste import with_group_cures
from launcher.job.cures.validation_errors import explain, missing, shown
from launcher.job.hydra_compose import COMPLETE, CONFIG, GROUP, Composed, hydrate
from launcher.job.merge import CHOSEN, expansion, keys, plain, put, replaced, words_first
from launcher.job.origins import COMMAND_LINE, Origin, Origins, gather, of_files
from launcher.job.overrides import LISTS, Override, paste, read, shell, written
from launcher.job.schema import keys as schema_keys
from launcher.job.schema.base import yaml_text
from launcher.job.schema.did_you_mean import nearest
from launcher.job.schema.job import Job
from launcher.job.schema.paths import unusable
from launcher.job.schema.redact import HIDDEN, secret
from launcher.job.schema.redact import text as redacted
from launcher.job.schema.steps import named
from launcher.job.stray_arguments import KnownNames, sift
from launcher.job.targets import BASES, OURS, refusal
from launcher.job.yaml_limits import Hostile

_JOB = TypeAdapter(Job)  # unlike Job(...), it raises pydantic's error, which is explained here with origins


@dataclass(frozen=True)
class Request:
    """A composed request.

    ``data``: the resolved configuration. ``overrides``: as typed. ``code``: the code that its files name.
    ``stand_ins``: lines about the files that ``job`` names until a step has written the real ones.
    """

    job: Job
    data: dict[str, Any]
    origins: Origins
    overrides: tuple[str, ...]
    code: tuple[str, ...] = ()
    stand_ins: tuple[str, ...] = ()


class Depth(IntEnum):
    """How far a request has been checked: by the schema, by all checks without torch, or by its plan.

    A check of each level imports several times as much as one of the level before.
    """

    COMPOSED = 0
    SETTLED = 1
    PLANNED = 2


class BadRequest(RequestError):
    """A request that cannot be carried out, with the origins of its values (or of each problem's values).

    ``late``: each value is valid by itself, but not in combination.
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


def depth(error: RequestError) -> Depth:
    """Returns how far the request had been checked when ``error`` was raised."""
    if error.planned:
        return Depth.PLANNED
    return Depth.SETTLED if isinstance(error, BadRequest) and error.late else Depth.COMPOSED


def late(error: RequestError, request: Request) -> BadRequest:
    """Returns ``error``, raised about a composed request, with the origins and cures of that request."""
    typed = read(request.overrides, [])
    problems = with_group_cures(error.problems, typed, request.origins)
    return BadRequest(problems, request.origins, late=True, planned=error.planned)


def compose(overrides: Sequence[str], *, config_dir: Path | None = None) -> Request:
    """Composes ``overrides`` on top of the shipped options and those in ``config_dir``.

    Without ``recipe=``, the default recipe is used. This imports no torch and writes nothing. It raises
    ``BadRequest`` with every problem.
    """
    problems: list[Problem] = []

    # the command line: report and drop words that are not overrides
    here = ConfigFiles.from_folders(config_dir)
    texts = sift(overrides, KnownNames(here.groups(), here.options("recipe")), problems)
    typed = read(texts, problems)
    configs, typed = _config_files(typed, config_dir, problems)
    places = tuple(_typed_places(overrides, typed))

    # Hydra merges the files of the chosen options
    groups = [o for o in typed if o.key in configs.groups() and not isinstance(o.value, Mapping)]
    choices = _choices(groups, configs, problems)
    misspelled = {p.key for p in problems} & set(configs.groups())
    composed = hydrate(choices, configs)
    if isinstance(composed, Problem):
        nested = tuple(_nested_recipes(_of_chosen(typed, configs)))
        raise BadRequest((*problems, *(nested or (composed,))), _partial(typed, configs, places))

    # apply every other override
    rest = words_first([o for o in typed if o not in groups])
    problems += [*replaced(rest), *(p for p in (put(composed.cfg, o) for o in rest) if p is not None)]

    # before anything is resolved, refuse what untrusted files may not set and values that expand forever
    raw = cast(dict[str, Any], OmegaConf.to_container(composed.cfg, resolve=False))
    of_read = tuple(of_files(composed.files))
    problems += _nested_recipes(of_read)
    known = (*of_read, *places)
    trust = recipe_trust.Trust(composed.layers, rest, raw, config_dir)
    early = [*trust.problems(raw), *trust.unsafe_interpolations()]
    if (endless := expansion(raw)) is not None:
        early.append(endless)
    if early:
        raise BadRequest((*problems, *early), gather(known, raw))

    # resolve, then validate with the schema
    data = _data(composed, problems)
    origins = gather(known, data)
    problems += trust.problems(data)
    recipe_trust.forget(data)
    problems += [*_idle(origins), *_lost(data)]
    problems = [p if p.text else missing(tuple(p.key.split(".")), data, origins) for p in problems]
    job = _validated(data, origins, problems)
    if job is not None:
        problems += sweep_grid.wrong(job, data)
        job, unknown = sweep_grid.named_operators(job, configs)
        problems += unknown
    if job is None or problems:
        relevant = [trust.without_moves(p, origins) for p in _relevant(problems, misspelled)]
        raise BadRequest(with_group_cures(relevant, typed, origins), origins)
    return Request(job, data, origins, tuple(overrides), tuple(trust.code(data, origins)))


def _config_files(
    typed: tuple[Override, ...], user: Path | None, problems: list[Problem]
) -> tuple[ConfigFiles, tuple[Override, ...]]:
    """Returns the files to read, and ``typed`` with the recipe's name in place of ``recipe=FILE.yaml``."""
    if user is not None and not user.is_dir():
        problems.append(Problem("", f"--config-dir {user}: there is no such folder"))
        user = None

    # a recipe named by its file becomes an option of its folder
    folder = None
    for o in typed:
        if not _names_a_file(o):
            continue
        path = Path(o.value)
        if path.is_file() and path.suffix == ".yaml":
            folder = path.parent
            typed = tuple(Override(t.key, path.stem, t.text) if t is o else t for t in typed)
        else:
            why = "its name must end in .yaml" if path.is_file() else "there is no such file"
            why = unusable(o.value) or why
            problems.append(Problem("recipe", f"{o.value}: {why}", _file_meant(o.value)))
            typed = tuple(t for t in typed if t is not o)

    configs = ConfigFiles.from_folders(user, folder)
    shadowed = "a shipped option already has this name; rename this file"
    problems += [Problem("", f"{file}: {shadowed}") for file in configs.hidden()]
    return configs, typed


def _names_a_file(o: Override) -> bool:
    return o.key == "recipe" and isinstance(o.value, str) and o.value.endswith((".yaml", ".yml"))


def _file_meant(name: str) -> str:
    """Returns the override for an existing recipe with a similar name; "" if there is none."""
    path = Path(name)
    there = [str(p) for p in path.parent.glob("*.yaml") if p.is_file()] if path.parent.is_dir() else []
    shipped = [f"{r}.yaml" for r in ConfigFiles().options("recipe")]
    if path.name in shipped:
        return paste("recipe", path.stem)
    close = nearest(name, there, 0.8)
    return paste("recipe", close) if close else ""


def _choices(groups: list[Override], configs: ConfigFiles, problems: list[Problem]) -> list[str]:
    """Returns the group overrides for Hydra; reports and drops those with an unknown option."""
    texts = []
    for o in groups:
        chosen = o.value if isinstance(o.value, list) else [o.value]
        # the grammar may have parsed a name as a number or a boolean
        names = [yaml_text(n) for n in chosen if n is not None]
        options = configs.options(o.key)
        bad = [n for n in names if n not in options]

        # refuse, delete or choose
        if o.add and o.key in LISTS:
            problems.append(Problem(o.key, f"{o.text}: give the complete list, in order"))
        elif isinstance(o.value, list) and o.key not in LISTS and len(names) != 1:
            problems.append(_takes_one(o.key, names, options))
        elif bad and not o.delete:
            problems += [_misspelled(o, b, options) for b in bad]
        elif o.key == "steps" and (o.delete or o.value is None):
            value = o.text if o.delete else "null"
            problems.append(Problem(o.key, f"{value}: list the steps, in order; [] runs none", "steps=[]"))
        elif o.delete or o.value is None:
            texts.append(f"~{o.key}")
        else:
            listed = f"[{','.join(map(written, names))}]" if isinstance(o.value, list) else written(names[0])
            texts.append(f"{o.key}={listed}")
    return texts


_COMPARED = {"recipe", "model", "data", "loss", "optim", "schedule", "operators"}
"""Groups whose options can be compared in a sweep."""


def _takes_one(group: str, names: Sequence[str], options: Sequence[str]) -> Problem:
    """Returns the problem of a list for a ``group`` that takes one option; Hydra would use the last."""
    text = f"{written(names)}: takes one option, not a list; choose one"
    meant = dict.fromkeys(n if n in options else right_name(group, n, options) or n for n in names)
    unknown = not meant or not meant.keys() <= set(options) or any(of_other_programs(group, n) for n in names)
    if unknown:
        return Problem(group, f"{text} (options: {', '.join(options)})")
    if len(meant) == 1:
        return Problem(group, text, paste(group, *meant))
    if group not in _COMPARED:
        return Problem(group, text)
    each = ",".join(map(written, meant))
    return Problem(group, f"{text}, or run each of them with -m", f"-m {shell(f'{group}={each}')}")


def _misspelled(o: Override, bad: str, options: Sequence[str]) -> Problem:
    if o.key == GROUP and Path(f"{bad}.yaml").is_file():
        text = f"no shipped recipe is called {bad!r}; name a recipe file with its suffix"
        return Problem(o.key, text, paste(GROUP, f"{bad}.yaml"))
    problem = no_option(o.key, bad, options)
    if o.key in LISTS and set(bad.split(",")) <= set(options):
        return Problem(o.key, f"{bad!r} is one word; write a list as [a,b]", paste(o.key, bad.split(",")))
    if isinstance(o.value, list) and (right := right_name(o.key, bad, options)):
        return Problem(problem.key, problem.text, paste(o.key, [right if n == bad else n for n in o.value]))
    return problem


def _data(composed: Composed, problems: list[Problem]) -> dict[str, Any]:
    """Returns the configuration as plain data, with the recipe's name.

    It also has a name for the run, unless one is set.
    """
    cfg = composed.cfg
    cfg["recipe"] = composed.recipe
    data = plain(cfg, problems)
    _typed_by_schema(cfg, data)
    data["steps"] = _each_time(data.get("steps"), composed.steps)
    if data.get("name") is None:
        model = data.get("model")
        kind = model.get("name") if isinstance(model, dict) else None
        data["name"] = (composed.recipe or str(kind or "run")).replace("/", "-")
    return data


def _each_time(steps: Any, chosen: Sequence[str]) -> Any:
    """Returns ``steps`` with one entry for each time a step was ``chosen``: train, train_2, train_3.

    A repeated step has the settings of the first, overridden by those under its own name.
    """
    if not isinstance(steps, dict) or len(set(chosen)) == len(chosen):
        return steps
    out: dict[str, Any] = {}
    times: Counter[str] = Counter()
    for name in chosen:
        times[name] += 1
        if name not in steps:  # removed again by ~steps.NAME
            continue
        again = name if times[name] == 1 else f"{name}_{times[name]}"
        first, own = steps[name], steps.get(again) or {}
        out[again] = {**first, **own} if isinstance(first, dict) and isinstance(own, dict) else own
    return out | {name: step for name, step in steps.items() if name not in out}


def _typed_by_schema(cfg: DictConfig, data: dict[str, Any]) -> None:
    """Converts environment variables, which are text, to the types that the schema requires."""
    raw = OmegaConf.to_container(cfg, resolve=False)
    for key in keys(raw):
        *above, name = key.split(".")
        source = _node(raw, above)
        node = _node(data, above)
        written_as = source.get(name) if isinstance(source, dict) else None
        if not isinstance(written_as, str) or "oc.env:" not in written_as or not isinstance(node, dict):
            continue
        value = node.get(name)
        note = schema_keys.at(key.split("."), data)
        if isinstance(value, str) and note is not None and not schema_keys.accepts(note, value):
            node[name] = next(intended_value.readings(key, note, value), value)


def _node(tree: Any, parts: Sequence[str]) -> Any:
    """Returns the value at a key, given as its parts; ``None`` if there is none."""
    for part in parts:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _validated(data: dict[str, Any], origins: Origins, problems: list[Problem]) -> Job | None:
    """Validates ``data``; if the schema refuses it, returns ``None`` and adds the reasons to ``problems``."""
    holes = {p.key for p in problems}
    data["steps"] = _steps(data.get("steps"), origins, problems)
    job = None
    try:
        job = _JOB.validate_python(data)
    except ValidationError as error:
        problems += [p for p in explain(error, data, origins) if not _of_hole(p.key, holes)]
    allow = _node(data, ("security", "allow"))
    problems += _targets(data, tuple(allow) if isinstance(allow, list) else (), origins)
    return job


def _idle(origins: Origins) -> Iterator[Problem]:
    """Reports Hydra's own settings in a file: the launcher does not read them."""
    origin = origins.of("hydra")
    if origin is not None and not origin.typed:
        yield Problem("", f"{origin.where}: {override_words.hydra_hint('hydra', None)[0]}")


def _nested_recipes(places: Iterable[tuple[str, Origin]]) -> Iterator[Problem]:
    """Reports a recipe that a file chooses: Hydra reads only the recipe of the command line."""
    keys_of: dict[str, set[str]] = {}
    chosen: list[tuple[str, Origin]] = []
    for key, origin in places:
        file = origin.where.rsplit(":", 2)[0]
        keys_of.setdefault(file, set()).add(key)
        if key == "recipe" and not origin.shipped and origin.value not in (None, "", "null", "~"):
            chosen.append((file, origin))
    for file, origin in chosen:
        if not keys_of[file] >= COMPLETE:
            name = str(origin.value).removesuffix(".yaml")
            text = f"a file cannot choose a recipe; to start from the settings of {name}, write"
            where = f"{origin.where}: recipe {name}"
            yield Problem(
                "",
                f"{where}: {text} - /recipe/{name} as the first of its defaults\n          | {origin.text}",
            )


def _lost(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Reports secrets that the file of a run hides, so that they cannot be read back."""
    for key, text in recipe_trust.texts(data):
        if text == HIDDEN or (HIDDEN in text and secret(key)):
            yield Problem(key, f"{HIDDEN}: this value is hidden in the file of a run; set it again")


def _of_hole(key: str, holes: set[str]) -> bool:
    """Returns true if a problem at ``key`` is only a consequence of a missing value."""
    return any(key == h or h.startswith(key + ".") or key.startswith(h + ".") for h in holes if h)


def _steps(steps: Any, origins: Origins, problems: list[Problem]) -> Any:
    """Drops settings of steps that were not chosen; chosen steps have a ``kind``.

    They are a problem if they are typed, or if the file that has them, or one that it includes, chooses the
    steps. A later choice of other steps, as ``steps=[train]`` on the command line, drops them on purpose.
    """
    if not isinstance(steps, dict):
        return steps
    verbs = schema_keys.kinds(schema_keys.at(("steps", "any"), {}))
    kept = {}
    for name, step in steps.items():
        idle = name in verbs and isinstance(step, dict) and "kind" not in step
        if not idle:
            kept[name] = step
            continue

        # settings of a step mean that it should run
        origin = origins.of(f"steps.{name}")
        if origin is not None and (origin.typed or _chooses_steps(origin, origins)):
            chosen = [n for n, s in steps.items() if isinstance(s, dict) and "kind" in s]
            text = f"{name!r} is not among the steps of this run ({', '.join(chosen) or 'none'})"
            more = [name] if origin.typed else [n for n in steps if n not in chosen and n in verbs]
            listed = paste("steps", [*(c for c in chosen if c in verbs), *more])
            cure = f"{listed} {shell(origin.text)}" if origin.typed else listed
            problems.append(Problem(f"steps.{name}", text, cure))
    return named(kept)


def _chooses_steps(origin: Origin, origins: Origins) -> bool:
    """Returns true if the user's file that has ``origin`` chooses the steps, or includes a file that does."""
    places = origins.all("steps")
    if origin.shipped or any(place.typed for place in places):
        return False
    files = [place.where.rsplit(":", 2)[0] for place in places]
    choices = [k for k, place in enumerate(places) if "/steps" in place.text]
    own = [k for k, file in enumerate(files) if file == origin.where.rsplit(":", 2)[0]]
    return bool(own) and own[-1] >= max(choices, default=0)


def _targets(data: dict[str, Any], allow: tuple[str, ...], origins: Origins) -> Iterator[Problem]:
    """Checks that users' own classes are in allowed packages and do not extend a shipped option."""
    for section in CHOSEN:
        node = data.get(section)
        target = node.get("_target_") if isinstance(node, dict) else None
        if not isinstance(node, dict) or not isinstance(target, str):
            continue

        # the settings of a shipped option would become arguments of the class
        key = f"{section}._target_"
        name = origins.of(f"{section}.name") if "name" in node else None
        untrusted = next(_untrusted(key, section, target, allow), None)
        if name is not None and name.shipped:
            text = f"{target}: the settings of {section}={shown(node['name'], '')} would become its arguments"
            mine = origins.of(key)
            if mine is not None and not mine.typed:
                text += f"; in a recipe, drop them with - override /{section}: null"
                cure = f"{section}=null"
            else:
                cure = f"{section}=null {paste(key, target)}"
            if untrusted is not None:  # one problem for both, because an override for one would be refused
                text += f"; and {untrusted.text.removeprefix(f'{target}: ')}"
                cure = f"{cure} {untrusted.cure}" if untrusted.cure else ""
            yield Problem(key, text, cure)
        elif untrusted is not None:
            yield untrusted
        yield from _untrusted_arguments(node, section, allow)

    metrics = data.get("metrics")
    for one in metrics if isinstance(metrics, list) else ():
        target = one.get("_target_") if isinstance(one, dict) else None
        if isinstance(target, str):
            yield from _untrusted("metrics", "metrics", target, allow)
            yield from _untrusted_arguments(one, "metrics", allow)

    logger = data.get("logger")
    own = {
        "callbacks": data.get("callbacks"),
        "logger.others": logger.get("others") if isinstance(logger, dict) else None,
    }
    for section, nodes in own.items():
        for i, node in enumerate(nodes if isinstance(nodes, list) else ()):
            target = node.get("_target_") if isinstance(node, dict) else None
            if isinstance(target, str):
                yield from _untrusted(f"{section}.{i}._target_", section, target, allow)
                yield from _untrusted_arguments(node, f"{section}.{i}", allow)


def _untrusted(key: str, section: str, target: str, allow: tuple[str, ...]) -> Iterator[Problem]:
    why = refusal(target, allow, OURS[BASES[section]])
    if why:
        yield Problem(key, f"{target}: {why[0]}", why[1])


def _untrusted_arguments(node: Any, key: str, allow: tuple[str, ...]) -> Iterator[Problem]:
    """Checks the classes in arguments of a user's class; the launcher's own are checked by type later."""
    for name, value in enumerate(node) if isinstance(node, list) else node.items():
        if not isinstance(value, dict | list):
            continue
        below = f"{key}.{name}"
        target = value.get("_target_") if isinstance(value, dict) else None
        why = refusal(target, allow, (target,)) if isinstance(target, str) else None
        if why:
            yield Problem(f"{below}._target_", f"{target}: {why[0]}", why[1])
        yield from _untrusted_arguments(value, below, allow)


def _relevant(problems: list[Problem], misspelled: set[str]) -> tuple[Problem, ...]:
    """Returns each problem once, without those that may result from a misspelled option of a group."""
    once = tuple(dict.fromkeys(problems))
    if not misspelled:
        return once
    hidden = {"model", "data", "loss", "optim", "schedule", "steps"} if "recipe" in misspelled else misspelled
    return tuple(p for p in once if p.key in misspelled or p.key.partition(".")[0] not in hidden)


def _typed_places(overrides: Sequence[str], typed: Sequence[Override]) -> Iterator[tuple[str, Origin]]:
    """Yields each key that an override sets, including those in a mapping, with the override as origin."""
    by_text = {o.text: o for o in typed}
    for text in overrides:
        origin = Origin(COMMAND_LINE, redacted(text))
        override = by_text.get(text)
        yield text.partition("=")[0].strip().lstrip("+~"), origin
        if override is not None and isinstance(override.value, Mapping):
            yield from ((key, origin) for key in keys(override.value, override.key))


def _partial(
    typed: Sequence[Override], configs: ConfigFiles, places: Sequence[tuple[str, Origin]]
) -> Origins:
    """Returns the origins known when composing fails: those in the main configuration and the recipe."""
    return gather((*_of_chosen(typed, configs), *places), {})


def _of_chosen(typed: Sequence[Override], configs: ConfigFiles) -> tuple[tuple[str, Origin], ...]:
    """Returns each key that the main configuration and the recipe set; none if one of them cannot be read."""
    recipe = next((str(o.value) for o in reversed(typed) if o.key == "recipe"), None)
    options = [CONFIG, *([f"recipe/{recipe}"] if recipe else [])]
    files = [(path, "") for path in map(configs.file, options) if path]
    try:
        return tuple(of_files(files))
    except (yaml.YAMLError, UnicodeDecodeError, Hostile):
        return ()
