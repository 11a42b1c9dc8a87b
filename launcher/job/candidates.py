"""Checks the candidates that a request lists for a search, and looks up options of operators by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from launcher.errors import Problem
from launcher.job.hydra_compose import hydrate
from launcher.job.overrides.grammar import OPERATORS, paste, written
from launcher.job.schema import schema_keys
from launcher.job.schema.components import HuggingFace
from launcher.job.schema.job import Job
from launcher.job.schema.search import AUTO, AXES, RECOMPUTE
from launcher.job.yaml.config_files import ConfigFiles


def wrong(job: Job, data: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields candidates that their key does not accept, and keys that cannot be searched over.

    ``data``: the composed configuration.
    """
    for key, candidates in job.search.over.items():
        if key not in AXES:
            yield Problem(f"search.over.{key}", f"no key that is searched for; those are {', '.join(AXES)}")
        elif isinstance(candidates, tuple) and not candidates:
            yield Problem(key, "[]: a list of candidates, and there is none", paste(key, AUTO))
        elif isinstance(candidates, tuple) and key != OPERATORS:
            note = schema_keys.at(key.split("."), data)
            own = AUTO if key == RECOMPUTE else None  # auto leaves the other keys to the search itself
            bad = [c for c in candidates if c != own and (c == AUTO or not schema_keys.accepts(note, c))]
            if bad:
                listed = written(list(candidates))
                good = [c for c in candidates if c not in bad]
                text = f"{listed}: {written(bad[0])} is no value of this key, and no candidate"
                yield Problem(key, text, paste(key, good) if good else "")


def named_operators(job: Job, configs: ConfigFiles) -> tuple[Job, list[Problem]]:
    """Replaces names of options for ``parallel.operators`` by their content, under that name.

    Items of a list that are no names get their number as the name. Returns the problems, too.
    """
    asked = job.search.over.get(OPERATORS)
    if asked is None or isinstance(asked, Mapping):
        return job, []
    says = isinstance(job.model, HuggingFace)  # such a model says how it is cut
    options = [o for o in configs.options("operators") if says or o != AUTO]
    named: dict[str, Any] = {}
    problems = []
    for n, one in enumerate(options if asked == AUTO else asked, 1):
        if isinstance(one, Mapping):
            named[str(n)] = dict(one)
        elif one in options:
            named[str(one)] = _option(str(one), configs)
        else:
            text = f"{one}: neither an option of operators ({', '.join(options)}) nor strategies by module"
            problems.append(Problem(OPERATORS, text))
    search = job.search.model_copy(update={"over": {**job.search.over, OPERATORS: named}})
    return job.model_copy(update={"search": search}), problems


def _option(name: str, configs: ConfigFiles) -> Any:
    """The value that ``operators=NAME`` sets."""
    composed = hydrate([f"operators={name}"], configs)
    assert not isinstance(composed, Problem)
    return OmegaConf.to_container(OmegaConf.select(composed.cfg, OPERATORS), resolve=True)
