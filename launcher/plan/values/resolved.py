"""A request with what its files and its data decided, and where each value came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from launcher.job.schema.job import Job


@dataclass(frozen=True)
class EngineChoice:
    """How operators are cut: over the axis ``tp``, or each over a device matrix of all ranks of a stage.

    ``why`` is the reason for device matrices. ``ranks_at_least`` is the number of ranks, over all stages,
    that the layouts of a file need.
    """

    name: Literal["tp", "device_matrix"] = "tp"
    why: str = ""
    ranks_at_least: int = 1

    @property
    def over_matrices(self) -> bool:
        return self.name == "device_matrix"


OVER_TP = EngineChoice()


@dataclass(frozen=True)
class StrategyOrigin:
    """The file that has the strategy of one module.

    ``setting`` is the setting that names the file ``path``. ``key`` is the name or glob under which the
    strategy was written. ``outside``: the module has its name in MindSpore, possibly with the prefixes of
    wrappers around the model. ``assigned``: a mode assigned the strategy when the file was written.
    """

    setting: str
    path: str
    key: str = ""
    outside: bool = False
    assigned: bool = False


Origins = Mapping[str, StrategyOrigin]
"""The origins of strategies by their keys; a key of the request itself has none."""
NO_FILE: Origins = MappingProxyType({})


@dataclass(frozen=True)
class SwitchesFile:
    """A file of switches: its ``path``, and the switches that the request sets itself (``typed``)."""

    path: str
    typed: frozenset[str]


@dataclass(frozen=True)
class Resolved:
    """A request with everything that files and data decide filled in.

    ``job`` has the values; the other fields say where they came from.

    They are not part of the job, because copies of the job would lose them.

    ``engine``: how operators are cut; ``None`` until the files are read.
    ``strategies``: the origins of the strategies in ``parallel.operators`` that come from files.
    ``vocabulary_from``: where ``data.vocab_size`` was read from, if the request left it open.
    ``switches_file``: the file that has switches of ``parallel.transformer_opt``.
    ``search_reasons``: the reasons of the search that wrote the file of operator strategies; ``None`` if no
    search wrote it, empty if it was edited.
    ``threshold_from_file``: ``parallel.hsdp`` follows a file of layouts; its threshold needs the model, too.
    ``epoch_samples``: the samples of an epoch, if ``train.steps`` was computed from ``train.epochs``.
    """

    job: Job
    engine: EngineChoice | None = None
    strategies: Origins = field(default_factory=dict)
    vocabulary_from: str = ""
    switches_file: SwitchesFile | None = None
    search_reasons: tuple[str, ...] | None = None
    threshold_from_file: bool = False
    epoch_samples: int | None = None

    def with_job(self, job: Job) -> Resolved:
        """Returns the same provenance for a changed ``job``."""
        return self if job is self.job else replace(self, job=job)
