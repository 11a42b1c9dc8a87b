"""Composes option files with Hydra, from the folders that a request may read."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import IConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.errors import Problem
from launcher.job.config_folders import ConfigFiles, short
from launcher.job.cures.options_of_other_programs import no_option
from launcher.job.merge import CHOSEN, RESOLVER, WordsOfFiles
from launcher.job.overrides import LISTS, hydra_hint, quoted, written
from launcher.job.schema.did_you_mean import unknown_choice
from launcher.job.schema.redact import text as redacted
from launcher.job.yaml_limits import Hostile, check, composed, load

GROUP = "recipe"
HEADER = 512
"""The number of characters in which Hydra looks for ``# @package`` at the start of a file."""
FILE = "file"
"""The entry of a header with the path of the file."""
HYDRA = "hydra"
"""The key of Hydra's own settings, which a file cannot set."""


class RecipeSource(ConfigSource):
    """``recipes://<folder>``: its YAML files are options of group ``recipe`` with package ``_global_``."""

    @staticmethod
    def scheme() -> str:
        return "recipes"

    def _file(self, config_path: str) -> Path | None:
        group, _, rest = config_path.partition("/")
        return Path(self.path, rest) if group == GROUP else None

    def available(self) -> bool:
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        path = self._file(config_path)
        return config_path == "" or (path is not None and path.is_dir())

    def is_config(self, config_path: str) -> bool:
        path = self._file(self._normalize_file_name(config_path))
        return path is not None and path.is_file()

    def load_config(self, config_path: str) -> ConfigResult:
        path = self._file(self._normalize_file_name(config_path))
        if path is None or not path.is_file():
            raise ConfigLoadError(f"Recipe not found: {config_path}")
        check(path)
        return ConfigResult(
            config=_loaded(path, [g for g in ConfigFiles().groups() if g != GROUP]),
            path=self.full_path(),
            provider=self.provider,
            # a recipe configures a complete run, whatever its folder
            header={"package": "_global_", FILE: str(path)},
        )

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        folder = self._file(config_path)
        names = sorted(p.name for p in folder.iterdir()) if folder else []
        if config_path == "":
            names = [GROUP]
        files: list[str] = []
        for name in names:
            at = f"{config_path}/{name}" if config_path else name
            self._list_add_result(files=files, file_path=at, file_name=name, results_filter=results_filter)
        return sorted(set(files))


class OptionSource(FileConfigSource):
    """``options://<folder>``: like Hydra's ``file://``, but checks files before it reads them."""

    @staticmethod
    def scheme() -> str:
        return "options"

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        if not path.exists():
            return super().load_config(config_path)  # raises: there is no such file
        check(path)
        with path.open(encoding="utf-8") as file:
            header = ConfigSource._get_header_dict(file.read(HEADER))
        return ConfigResult(
            config=_loaded(path),
            path=f"{self.scheme()}://{self.path}",
            provider=self.provider,
            header={**header, FILE: str(path)},
        )


def _loaded(path: Path, groups: Sequence[str] = ()) -> Container:
    """Reads the configuration at ``path`` like ``OmegaConf.load``, but keys are text as written.

    A complete request, such as the ``config.yaml`` of a run, replaces the chosen options. A word at one of
    ``groups`` chooses an option: ``model: lm`` means ``override /model: lm`` in the defaults list.
    """
    data = load(path)
    if isinstance(data, dict) and "defaults" in data:
        _check_defaults(path, data["defaults"])
    if isinstance(data, dict):
        data.pop(HYDRA, None)  # compose reports it; Hydra would read it, and resolve its interpolations
        complete = data.keys() >= COMPLETE and "defaults" not in data
        chosen = {f"override /{g}": data.pop(g) for g in groups if _is_choice(g, data.get(g))}
        emptied = {f"override /{group}": None for group in (*CHOSEN, "steps")} if complete else {}
        listed = [{key: option} for key, option in (emptied | chosen).items()]
        if listed:
            _check_once(path, data.get("defaults", []), chosen)
            data = {**data, "defaults": [*data.get("defaults", []), *listed]}
    try:
        return OmegaConf.create({} if data is None else data)
    except OmegaConfBaseException as error:
        why, _, at = str(error).strip().partition("full_key:")
        key = at.partition("\n")[0].strip()
        raise Hostile(Problem("", f"{short(path)}: {key}{': ' if key else ''}{why.strip()}")) from error


def _check_defaults(path: Path, defaults: object) -> None:
    """Raises ``Hostile`` for a defaults list that Hydra would refuse without naming the file."""
    where = f"{short(path)}: defaults"
    if not isinstance(defaults, list):
        raise Hostile(Problem("", f"{where}: should be a list, as in [override /model: lm, _self_]"))
    if defaults.count("_self_") > 1:
        raise Hostile(Problem("", f"{where}: {written(defaults)}: _self_ is listed twice; remove one"))
    override = None
    for n, item in enumerate(defaults):
        (group, option), *more = item.items() if isinstance(item, dict) and item else [("", item)]
        options = option if isinstance(option, list) else [option]
        if more or not all(isinstance(one, str) or (group and one is None) for one in options):
            text = "should be a recipe, or a group and its option in text, as in override /model: lm"
            raise Hostile(Problem("", f"{where}.{n}: {written(item)}: {text}"))
        name = str(group).split()[-1].lstrip("/") if group else ""
        resolver = next((text for text in map(str, (group, *options)) if RESOLVER.search(text)), None)
        if resolver is not None:
            text = f"{written(resolver)}: a defaults list cannot read the environment; name an option"
            raise Hostile(Problem("", f"{where}.{n}: {text}"))
        overrides = bool(group) and "override" in str(group).split()[:-1]
        if override is not None and not overrides and item != "_self_":
            text = f"overrides come last; move it before {override}"
            raise Hostile(Problem("", f"{where}.{n}: {written(item)}: {text}"))
        override = group if overrides and override is None else override
        if isinstance(option, list) and name not in LISTS:
            text = f"only one option can be chosen, as in {group}: {next(iter(option), 'NAME')}"
            raise Hostile(Problem("", f"{where}.{n}: {written(item)}: {text}"))


def _is_choice(group: str, value: object) -> bool:
    """Returns true if ``value`` is a word, or a list of words of a group that allows several options."""
    if isinstance(value, list):
        return group in LISTS and all(_is_choice(group, one) for one in value)
    return isinstance(value, str) and value != "???" and "${" not in value


def _check_once(path: Path, defaults: Sequence[object], chosen: Mapping[str, object]) -> None:
    """Raises ``Hostile`` if the defaults list chooses an option of a group that is among ``chosen`` too."""
    choices = (key for item in defaults if isinstance(item, dict) for key in item)
    listed = {str(key).split()[-1].lstrip("/") for key in choices}
    for key, option in chosen.items():
        group = key.rpartition("/")[2]
        if group in listed:
            text = f"{written(option)}: the defaults list chooses an option of {group} too; keep one of them"
            raise Hostile(Problem("", f"{short(path)}: {group}: {text}"))


COMPLETE = {"name", "train", "parallel", "steps", *CHOSEN}
"""The keys of a complete request. Its ``recipe`` is a record of what it was composed from."""


def register() -> None:
    """Registers the schemes with Hydra; further calls change nothing."""
    with _no_plugins():
        plugins = Plugins.instance()
    plugins.register(RecipeSource)
    plugins.register(OptionSource)


@contextmanager
def _no_plugins() -> Iterator[None]:
    """Keeps Hydra from importing a package ``hydra_plugins``, such as one in the current folder."""
    name = "hydra_plugins"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # None makes Python refuse the import
    try:
        yield
    finally:
        del sys.modules[name]


CONFIG = "config"


@dataclass(frozen=True)
class Layer:
    """A file as Hydra merges it. ``package``: the dotted place of its keys. ``data``: keys from the root.

    Interpolations in ``data`` are text.
    """

    path: Path
    package: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Composed:
    """A composed configuration.

    ``layers``: in the order of merging. ``steps``: the options of that group in the order in which they were
    chosen, with repetitions.
    """

    cfg: DictConfig
    layers: tuple[Layer, ...]
    recipe: str | None
    steps: tuple[str, ...] = ()

    @property
    def files(self) -> Iterator[tuple[Path, str]]:
        """Yields the path and package of each layer."""
        yield from ((layer.path, layer.package) for layer in self.layers)


def hydrate(choices: Sequence[str], configs: ConfigFiles) -> Composed | Problem:
    """Composes overrides of groups (``model=lm``); the caller applies all other overrides."""
    if configs != ConfigFiles():
        return _hydrated(tuple(choices), configs)
    known = _of_shipped(tuple(choices), configs)  # a copy, because the caller changes it
    return known if isinstance(known, Problem) else replace(known, cfg=copy.deepcopy(known.cfg))


def _hydrated(choices: tuple[str, ...], configs: ConfigFiles) -> Composed | Problem:
    # Hydra merges the defaults list of the main configuration with the choices
    register()
    places = [*(f"recipes://{r}" for r in configs.recipes), *(f"options://{c}" for c in configs.conf[1:])]
    overrides = [f"hydra.searchpath=[{','.join(map(quoted, places))}]", *choices]
    try:
        with _opened(configs.conf[0]) as loader:
            cfg = compose(CONFIG, overrides, return_hydra_config=True)
    except Hostile as error:
        return error.problem
    except yaml.YAMLError as error:
        return _syntax(error)
    except RecursionError:
        return Problem("defaults", "a file includes itself, by its own list or by that of another file")
    except MissingConfigException as error:
        return _missing_option(error, configs, choices)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        return _conflict(" ".join(str(error).split()), configs, choices)

    # drop what Hydra adds; record which files it read
    recipe = cfg.hydra.runtime.choices.get("recipe")
    OmegaConf.set_struct(cfg, False)  # the schema checks keys
    del cfg["hydra"]
    paths = (d.config_path or "" for d in loader.merged)
    steps = tuple(path.removeprefix("steps/") for path in paths if path.startswith("steps/"))
    return Composed(cfg, tuple(loader.layers), recipe, steps)


_of_shipped = lru_cache(64)(_hydrated)  # shipped files never change


class _Loader(ConfigLoaderImpl):
    """Hydra's loader, which records in ``merged`` and ``layers`` the files that it merged last, in order.

    Hydra's own API computes them again, which takes as long as composing.
    """

    merged: Sequence[ResultDefault] = ()
    layers: Sequence[Layer] = ()
    words = WordsOfFiles()

    def _compose_config_from_defaults_list(
        self, defaults: list[ResultDefault], repo: IConfigRepository
    ) -> DictConfig:
        self.merged = tuple(defaults)
        self.layers = []
        self.words = WordsOfFiles()
        return super()._compose_config_from_defaults_list(defaults, repo)

    def _load_single_config(self, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        if (default.package or "").partition(".")[0] == HYDRA and not _hydras_own(default):
            text = f"{default.config_path}@{default.package}: {hydra_hint(HYDRA, None)[0]}"
            raise Hostile(Problem("", text))
        result = super()._load_single_config(default, repo)
        if isinstance(result.config, DictConfig):
            file = result.header.get(FILE)
            if file is not None:  # a copy: what Hydra merges into a layer changes it
                package = (default.package or "").replace("_global_", "").strip(".")
                data = OmegaConf.to_container(result.config, resolve=False)
                self.layers = [*self.layers, Layer(Path(file), package, cast(dict[str, Any], data))]
            self.words.read(result.config)
        return result


def _hydras_own(default: ResultDefault) -> bool:
    return (default.config_path or "").startswith(f"{HYDRA}/")


@contextmanager
def _opened(folder: Path) -> Iterator[_Loader]:
    """Sets Hydra up to read ``folder``; afterwards restores the state of an enclosing Hydra application."""
    enclosing = GlobalHydra.instance()
    mine = enclosing.hydra
    enclosing.clear()
    try:
        with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            places = hydra.config_loader.get_search_path()
            for place in places.get_path():
                if place.provider == "main":
                    place.path = f"options://{folder}"
            hydra.config_loader = loader = _Loader(config_search_path=places)
            yield loader
    finally:
        GlobalHydra.set_instance(enclosing)
        enclosing.hydra = mine


def _syntax(error: yaml.YAMLError) -> Problem:
    """Returns a YAML syntax error with its line."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        name, why = getattr(error, "name", "?"), getattr(error, "reason", error)
        return Problem("", f"{short(Path(name))}{_place_of(error)}: not valid YAML: {why}")
    mark, start = error.problem_mark, error.context_mark
    why = str(error.problem)
    if start is not None and start.line != mark.line and "duplicate" not in why:
        why += f" ({error.context}, begun at {start.line + 1}:{start.column + 1})"
    lines = Path(mark.name).read_text(encoding="utf-8").splitlines()
    source = f"\n          | {redacted(lines[mark.line].rstrip())}" if mark.line < len(lines) else ""
    where = f"{short(Path(mark.name))}:{mark.line + 1}:{mark.column + 1}"
    return Problem("", f"{where}: not valid YAML: {why}{source}")


def _place_of(error: yaml.YAMLError) -> str:
    """Returns the line and the column of a character that YAML does not allow; "" if the error has none."""
    name, position = getattr(error, "name", None), getattr(error, "position", None)
    if not isinstance(name, str) or not isinstance(position, int) or not Path(name).is_file():
        return ""
    before = Path(name).read_text(encoding="utf-8", errors="replace")[:position]
    return f":{before.count(chr(10)) + 1}:{position - before.rfind(chr(10))}"


def _missing_option(error: MissingConfigException, configs: ConfigFiles, choices: Sequence[str]) -> Problem:
    """Returns an unknown option in a defaults list; options on the command line were checked before."""
    wanted = error.missing_cfg_file or ""
    group, _, option = wanted.rpartition("/")
    first, _, path_like = wanted.partition("/")
    for of, name in ((group, option), (first, path_like)):
        options = configs.options(of) if of != GROUP else ()
        if options:
            return no_option(of, name, options)
    if group == GROUP and (included := _missing_recipe(option, configs, choices)):
        return included
    hydras = Problem("", " ".join(str(error).partition("Config search path")[0].split()))
    return _relative_choice(group.removeprefix("recipe/"), option, configs, choices) or hydras


def _missing_recipe(name: str, configs: ConfigFiles, choices: Sequence[str]) -> Problem | None:
    """Returns the problem of a recipe that includes a recipe ``name``, which does not exist."""
    unknown = f"there is no recipe {name!r}{unknown_choice(name, configs.options(GROUP), 'recipes')}"
    for path in _read_recipes(configs, choices):
        for n, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            got = re.search(
                rf"(?<![\w./-])(?:/?recipe/)?{re.escape(name)}(?![\w./-])", line.partition("#")[0]
            )
            if got:
                where = f"{short(path)}:{n}:{got.start() + 1}"
                return Problem("", f"{where}: defaults: {unknown}\n          | {redacted(line.rstrip())}")
    return None


def _relative_choice(group: str, option: str, configs: ConfigFiles, choices: Sequence[str]) -> Problem | None:
    """Returns the problem of a recipe that has ``- model: mlp`` or ``- override model: mlp``.

    Without ``/``, Hydra looks below ``recipe``.
    """
    if group not in configs.groups():
        return None
    for path in _read_recipes(configs, choices):
        for n, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            got = re.match(rf"(\s*-\s*)(?:override\s+)?{re.escape(group)}\s*:\s*(.*?)\s*(?:#.*)?$", line)
            if got and (not option or option in got[2]):
                where = f"{short(path)}:{n}:{len(got[1]) + 1}"
                text = f"a recipe chooses options of the whole run; write - override /{group}: {got[2]}"
                return Problem("", f"{where}: {text}\n          | {redacted(line.rstrip())}")
    return None


def _read_recipes(configs: ConfigFiles, choices: Sequence[str]) -> Iterator[Path]:
    """Yields the files of the chosen recipe and of the recipes that its defaults list includes.

    Other files of their folders are not read, so the problem cannot be theirs.
    """
    names = [choice.partition("=")[2] for choice in choices if choice.startswith("recipe=")]
    for name in names:  # grows while it is read
        file = configs.file(f"recipe/{name}")
        if file is not None:
            yield file
            text = file.read_text(encoding="utf-8", errors="replace")
            included = re.findall(r"^\s*-\s*(?:/?recipe\s*:\s*)?([\w./-]+)\s*(?:#.*)?$", text, re.MULTILINE)
            names += [other for other in included if other not in names]


def _conflict(text: str, configs: ConfigFiles, choices: Sequence[str]) -> Problem:
    """Returns the problem of files that cannot be merged."""
    # a recipe overrides an unknown group
    named = re.search(r"Could not override '([^'@]+)(?:@[^']*)?'", text)
    if named:
        group = named[1].removeprefix("recipe/")
        if group in configs.groups():
            text = f"a recipe chooses options of the whole run; write override /{group} in its defaults"
            return _relative_choice(group, "", configs, choices) or Problem(group, text)
        return Problem(group, f"there is no such group{unknown_choice(group, configs.groups(), 'groups')}")

    # everything else in Hydra's words, with the path of the file
    text = text.partition(" full_key:")[0]
    mixed = re.search(r"Cannot merge (Dict|List)Config with (Dict|List)Config", text)
    if mixed:
        where = text.partition(":")[0]
        text = f"{where}: a list in place of a group of keys, or a group of keys in place of a list"
    within = re.match(r"In '([^']+)': (.*)", text)
    if within:
        path = configs.file(within[1])
        like = composed(configs.conf[0] / f"{CONFIG}.yaml") if mixed else None
        at = _misplaced(composed(path), like) if path else ""
        text = f"{short(path) if path else within[1]}{at}: {within[2]}"
    return Problem("", text)


def _misplaced(node: yaml.Node | None, like: yaml.Node | None) -> str:
    """Returns the line and the column of a list where ``like`` has a group of keys, or the reverse.

    It is "" if there is none.
    """
    if not isinstance(node, yaml.MappingNode) or not isinstance(like, yaml.MappingNode):
        return ""
    known = {key.value: value for key, value in like.value if key.value != "defaults"}
    for key, value in node.value:
        other = known.get(key.value)
        kinds = {type(value), type(other)}
        if kinds == {yaml.MappingNode, yaml.SequenceNode}:
            return f":{key.start_mark.line + 1}:{key.start_mark.column + 1}: {key.value}"
        if deeper := _misplaced(value, other):
            return deeper
    return ""
