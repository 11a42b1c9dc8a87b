"""Merges the strategy files of several pipeline stages into one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.checkpoint.foreign.recognize_strategy import is_ours
from launcher.checkpoint.layout import strategy_file
from launcher.checkpoint.layout.strategy import Strategy
from launcher.checkpoint.tensorfile.disk import write_text
from launcher.checkpoint.tensorfile.watched_folder import make_folder
from launcher.extras.mindspore.from_ours import stage_files
from launcher.extras.mindspore.strategy import MERGED, StrategyFile, StrategyForm, missing_stages
from launcher.extras.mindspore.strategy_file import form_of, parse, write_strategy
from launcher.untrusted.files import read_bytes

SUFFIX = {"protobuf": ".ckpt", "json": ".json"}
"""The suffixes by which MindSpore distinguishes its two formats."""


def merge(parts: Sequence[tuple[str, StrategyFile]]) -> StrategyFile:
    """Merges ``parts``, the files of all stages in order, each with its name for messages.

    Raises ``ValueError`` if two files of one stage disagree or a stage is missing. A stage may have no
    parameters, but its file must list an operator.
    """
    seen: dict[int, tuple[str, StrategyFile]] = {}
    for origin, file in parts:
        if file.merged:
            raise ValueError(f"{origin}: already merged; give the files of single stages")
        if not file.operators:
            raise ValueError(f"{origin}: lists no operator, so the stage of the file is unknown")
        first, other = seen.setdefault(file.stage, (origin, file))
        _agree(first, other, origin, file)

    assert seen, parts
    missing = missing_stages(seen)
    if missing:
        where = ", ".join(origin for origin, _ in parts)
        raise ValueError(
            f"{where}: stage {missing} of {max(seen) + 1} is missing; give the files of every stage"
        )
    operators = tuple(op for _, file in seen.values() for op in file.operators)
    layouts = {f"{stage}-{name}": s for stage, (_, file) in seen.items() for name, s in file.layouts.items()}
    return StrategyFile(MERGED, operators, layouts)


def _agree(first: str, a: StrategyFile, second: str, b: StrategyFile) -> None:
    odd = [n for n in {**a.layouts, **b.layouts} if a.layouts.get(n) != b.layouts.get(n)]
    if odd:
        raise ValueError(
            f"{first} and {second} are both of stage {a.stage} and disagree on {', '.join(sorted(odd))}"
        )


def read_stages(paths: Sequence[Path]) -> tuple[StrategyFile, StrategyForm]:
    """Reads the files of all stages as one merged file. Raises ``ValueError`` if they have two formats."""
    data = {path: read_bytes(path) for path in paths}
    if not data:
        raise ValueError("no strategy file to merge")
    forms = {path: form_of(text) for path, text in data.items()}
    if len({*forms.values()}) > 1:
        listing = ", ".join(f"{path} is {form}" for path, form in forms.items())
        raise ValueError(f"two forms in one merge: {listing}; merge files of one form")
    return merge([(str(path), parse(text, str(path))) for path, text in data.items()]), forms[paths[0]]


def merging(
    src_strategy_dirs: str | os.PathLike[str], dst_strategy_file: str | os.PathLike[str]
) -> Callable[[], None]:
    """Checks and merges the files; returns the function that writes the result.

    It raises as ``merge_pipeline_strategies`` does, before the returned function is called.
    """
    for key, value in (("src_strategy_dirs", src_strategy_dirs), ("dst_strategy_file", dst_strategy_file)):
        if not isinstance(value, str | os.PathLike):
            raise TypeError(f"{key}: expected a path, got {type(value).__name__}")
    folder = Path(src_strategy_dirs)
    path = Path(dst_strategy_file)
    if not folder.is_dir():
        raise NotADirectoryError(f"src_strategy_dirs: {folder} is not a folder")

    # all files must be ours, or all MindSpore's
    files = sorted(p for p in folder.iterdir() if p.suffix in SUFFIX.values() and p.is_file())
    if not files:
        raise ValueError(f"src_strategy_dirs: {folder} has no strategy files (.json or .ckpt)")
    ours = [file for file in files if is_ours(file)]
    if ours and len(ours) < len(files):
        other = next(file for file in files if file not in ours)
        raise ValueError(
            f"two forms in one merge: {ours[0]} is the launcher's, {other} is MindSpore's; merge files of "
            "one form"
        )
    return _merging_ours(files, path) if ours else _merging_mindspores(files, path)


def _merging_ours(files: list[Path], path: Path) -> Callable[[], None]:
    strategy = strategy_file.merge([strategy_file.read(file) for file in files])
    text = strategy_file.text(strategy, tuple(range(strategy.stages)))

    def write() -> None:
        make_folder(path.parent)
        write_text(path, text)

    return write


def _merging_mindspores(files: list[Path], path: Path) -> Callable[[], None]:
    merged, form = read_stages(files)
    if path.suffix != SUFFIX[form]:
        raise ValueError(
            f"dst_strategy_file: {path}: the files are {form}; give a name that ends in {SUFFIX[form]}"
        )

    def write() -> None:
        make_folder(path.parent)
        write_strategy(path, merged, form)

    return write


def merged_file(strategy: Strategy) -> StrategyFile:
    """Returns one file for all stages; if there are several, names are prefixed with their stage."""
    files = stage_files(strategy)
    if len(files) == 1:
        return files[0]
    return merge([(f"stage {i}", file) for i, file in enumerate(files)])
