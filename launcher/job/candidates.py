"""Candidates of a search as a request gives them: what each key accepts, and options of operators by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from launcher.errors import Problem
from launcher.job.hydra_compose import hydrate
from launcher.job.overrides.grammar import OPERATORS, Override, paste, written
from launcher.job.schema import schema_keys
from launcher.job.schema.components import HuggingFace
from launcher.job.schema.job import Job
from launcher.job.schema.search import AUTO, AXES, PARALLEL
from launcher.job.yaml.config_files import ConfigFiles


def all_open(overrides: Iterable[Override]) -> tuple[Override, ...]:
    """With ``parallel=auto`` as the keys that it leaves open, so that a later override can close one."""
    return tuple(
        Override(o.key, _every_axis(), o.text) if (o.key, o.value) == (PARALLEL, AUTO) else o
        for o in overrides
    )


def open_in_file(cfg: DictConfig, overrides: Iterable[Override]) -> None:
    """The same of ``parallel: auto`` in a file, which a key of the command line would replace."""
    if cfg.get(PARALLEL) == AUTO and any(o.key.startswith(f"{PARALLEL}.") for o in overrides):
        cfg[PARALLEL] = _every_axis()


def _every_axis() -> dict[str, Any]:
    out: dict[str, Any] = {"pipeline": {"stage_config": AUTO}, "grid": dict.fromkeys(("pp", "dp_shard"))}
    for key in AXES:
        _, *above, name = key.split(".")
        node = out
        for part in above:
            node = node.setdefault(part, {})
        if isinstance(node, dict):  # what is open as a whole is open below
            node[name] = AUTO
    return {k: v if k != "hsdp" else AUTO for k, v in out.items()}


def wrong(job: Job, data: Mapping[str, Any]) -> Iterator[Problem]:
    """Candidates that their key would not accept, and keys that nothing searches for.

    ``data``: as composed.
    """
    for key, candidates in job.search.over.items():
        if key not in AXES:
            yield Problem(f"search.over.{key}", f"no key that is searched for; those are {', '.join(AXES)}")
        elif isinstance(candidates, tuple) and not candidates:
            yield Problem(key, "[]: a list of candidates, and there is none", paste(key, AUTO))
        elif isinstance(candidates, tuple) and key != OPERATORS:
            note = schema_keys.at(key.split("."), data)
            bad = [c for c in candidates if c == AUTO or not schema_keys.accepts(note, c)]
            if bad:
                listed = written(list(candidates))
                good = [c for c in candidates if c not in bad]
                text = f"{listed}: {written(bad[0])} is no value of this key, and no candidate"
                yield Problem(key, text, paste(key, good) if good else "")


def named_operators(job: Job, configs: ConfigFiles) -> tuple[Job, list[Problem]]:
    """With the options that ``parallel.operators`` may be, by their names; those of a list have numbers."""
    asked = job.search.over.get(OPERATORS)
    if asked is None or isinstance(asked, Mapping):
        return job, []
    says = isinstance(job.model, HuggingFace)  # how it is cut
    options = [o for o in configs.options("operators") if says or o != AUTO]
    named: dict[str, Any] = {}
    found = []
    for n, one in enumerate(options if asked == AUTO else asked, 1):
        if isinstance(one, Mapping):
            named[str(n)] = dict(one)
        elif one in options:
            named[str(one)] = _option(str(one), configs)
        else:
            text = f"{one}: neither an option of operators ({', '.join(options)}) nor strategies by module"
            found.append(Problem(OPERATORS, text))
    search = job.search.model_copy(update={"over": {**job.search.over, OPERATORS: named}})
    return job.model_copy(update={"search": search}), found


def _option(name: str, configs: ConfigFiles) -> Any:
    """What ``operators=NAME`` sets."""
    composed = hydrate([f"operators={name}"], configs)
    assert not isinstance(composed, Problem)
    return OmegaConf.to_container(OmegaConf.select(composed.cfg, OPERATORS), resolve=True)
