"""Config sources for Hydra: recipes as the group ``recipe``, and the user's own options."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import Container, OmegaConf

from launcher.job.yaml.limits import check
from launcher.job.yaml.parsers import load
from launcher.job.yaml.shipped import shipped

GROUP = "recipe"
HEADER = 512
"""The number of characters in which Hydra looks for ``# @package`` at the start of a file."""


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
            config=_loaded(path),
            path=self.full_path(),
            provider=self.provider,
            header={"package": "_global_"},  # a recipe configures a complete run, whatever its folder
        )

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        folder = self._file(config_path)
        names = sorted(p.name for p in folder.iterdir()) if folder else []
        if config_path == "":
            names = [GROUP]
        found: list[str] = []
        for name in names:
            at = f"{config_path}/{name}" if config_path else name
            self._list_add_result(files=found, file_path=at, file_name=name, results_filter=results_filter)
        return sorted(set(found))


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
            config=_loaded(path), path=f"{self.scheme()}://{self.path}", provider=self.provider, header=header
        )


def _loaded(path: Path) -> Container:
    """Reads the configuration at ``path`` like ``OmegaConf.load``."""
    if not shipped(path):
        return OmegaConf.load(path)
    data = load(path)
    return OmegaConf.create({} if data is None else data)


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
    sys.modules[name] = None  # type: ignore[assignment]  # as Python has it of what may not be imported
    try:
        yield
    finally:
        del sys.modules[name]
