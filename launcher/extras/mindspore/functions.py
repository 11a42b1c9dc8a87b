"""Functions with MindSpore's names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.checkpoint.foreign.recognize_strategy import open_strategy
from launcher.checkpoint.layout.strategy import match
from launcher.checkpoint.store import check_apart, check_empty
from launcher.checkpoint.tensorfile.disk import replaced
from launcher.checkpoint.transform import is_checkpoint
from launcher.extras.mindspore.convert import (
    check_rank,
    file_transform,
    of_checkpoint,
    of_rank_folders,
    sides,
    write_ranks,
)
from launcher.extras.mindspore.encryption import MODES, CipherMode, check_key
from launcher.extras.mindspore.layouts_without_checkpoint import on_paper
from launcher.extras.mindspore.load_module import load_into, parameter
from launcher.extras.mindspore.merge_strategies import merging
from launcher.extras.mindspore.rank_files import SUFFIXES, RankSource, open_source, takes
from launcher.plan.values.layout import Layout

PathLike = str | os.PathLike[str] | None


def build_searched_strategy(strategy_filename: str) -> dict[str, Layout]:
    """Returns the layout of each parameter in a strategy file: ours, or MindSpore's in either format.

    MindSpore's protobuf format has no shapes; each shape is then the smallest that the layout can cut. Raises
    ``TypeError`` if the argument is not a path, ``ValueError`` if it is not a strategy file.
    """
    opened = open_strategy("strategy_filename", strategy_filename)
    if opened is None:
        raise TypeError("strategy_filename: expected a path, got NoneType")
    strategy, _ = on_paper(opened, None)
    return {name: entry.layout for name, entry in strategy.entries.items()}


def rank_list_for_transform(
    rank_id: int, src_strategy_file: PathLike = None, dst_strategy_file: PathLike = None
) -> list[int]:
    """Returns the source ranks whose files ``rank_id`` of the destination needs, in descending order.

    A strategy of ``None`` means a full checkpoint: rank 0 has it, and other ranks have copies. Raises
    ``TypeError`` for an argument of the wrong type, ``ValueError`` for a strategy that cannot be read, a rank
    outside the destination, or strategies that do not fit together.
    """
    _check_type("rank_id", rank_id, int)
    before = open_strategy("src_strategy_file", src_strategy_file)
    after = open_strategy("dst_strategy_file", dst_strategy_file)

    # one full checkpoint is one file
    if before is None:
        dst = None if after is None else on_paper(after, None)[0]
        check_rank(rank_id, dst)
        return [0]

    src, target = sides(before, after)
    check_rank(rank_id, target)
    reads = takes(src, target, match(src, target), rank_id)
    return sorted({take.rank for take in reads}, reverse=True)


def transform_checkpoint_by_rank(
    rank_id: int,
    checkpoint_files_map: Mapping[int, Any],
    save_checkpoint_file_name: str,
    src_strategy_file: PathLike = None,
    dst_strategy_file: PathLike = None,
) -> None:
    """Writes the file of ``rank_id`` of the destination.

    ``checkpoint_files_map`` has the source's files by rank. It must have those of the ranks that
    ``rank_list_for_transform`` returns, and may have more. Raises as that function does, and ``ValueError``
    if a source file is missing or does not fit.
    """
    # check the arguments in MindSpore's order
    _check_type("rank_id", rank_id, int)
    if not isinstance(checkpoint_files_map, dict):
        raise TypeError(f"checkpoint_files_map: expected a dict, got {type(checkpoint_files_map).__name__}")
    paths = {rank: _source(rank, path) for rank, path in sorted(checkpoint_files_map.items())}
    _check_type("save_checkpoint_file_name", save_checkpoint_file_name, str)
    path = Path(save_checkpoint_file_name)
    _check_suffix("save_checkpoint_file_name", path)
    src = open_strategy("src_strategy_file", src_strategy_file)
    dst = open_strategy("dst_strategy_file", dst_strategy_file)

    # write the file; it gets its final name once it is complete
    transform = file_transform(paths, src, dst, rank_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as new:
        transform.write(rank_id, new)


def transform_checkpoints(
    src_checkpoints_dir: PathLike,
    dst_checkpoints_dir: PathLike,
    ckpt_prefix: str,
    src_strategy_file: PathLike = None,
    dst_strategy_file: PathLike = None,
    process_num: int = 1,
    output_format: str = "ckpt",
) -> None:
    """Writes ``rank_<k>/<ckpt_prefix><k>.<output_format>`` for every rank of the destination.

    Everything is checked before anything is written, and the destination appears when it is complete. A
    strategy of trainable parameters does not list other tensors, such as the statistics of BatchNorm. These
    are copied: all ranks that have one must have the same values.

    Args:
        src_checkpoints_dir: A folder of ``rank_<k>`` folders, or a checkpoint of ours, which contains its
            strategy. If a rank's folder has several files, the one of the highest step is read.
        dst_checkpoints_dir: The folder to write; absent or empty.
        ckpt_prefix: The start of the names of the files to write.
        src_strategy_file: The source's strategy; ``None``: every rank has the same full checkpoint.
        dst_strategy_file: The destination's strategy; ``None``: one full checkpoint.
        process_num: How many ranks are written at a time, by threads; one more thread syncs their files.
        output_format: ``ckpt`` or ``safetensors``, whatever the format of the source.

    Raises:
        TypeError, ValueError: As the functions above.
        NotADirectoryError: The source or the destination is not a folder.
        FileExistsError: The destination is not empty.
    """
    # check the arguments in MindSpore's order
    source = _folder("src_checkpoints_dir", src_checkpoints_dir)
    target = _folder("dst_checkpoints_dir", dst_checkpoints_dir)
    _check_prefix(ckpt_prefix)
    _check_count("process_num", process_num)
    _check_format(output_format)
    src = open_strategy("src_strategy_file", src_strategy_file)
    dst = open_strategy("dst_strategy_file", dst_strategy_file)

    # check the source, then the destination
    read = of_checkpoint if is_checkpoint(source) else of_rank_folders
    made = read(source, src, dst)
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"dst_checkpoints_dir: {target} is not a folder")
    check_apart(source, target)
    check_empty(target)
    write_ranks(made, target, ckpt_prefix, f".{output_format}", workers=process_num)


def _source(rank: Any, value: Any) -> Path:
    _check_type("checkpoint_files_map: a rank", rank, int)
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"checkpoint_files_map: rank {rank}: expected a path, got {type(value).__name__}")
    path = Path(value)
    _check_suffix(f"checkpoint_files_map: rank {rank}", path)
    if not path.is_file():
        raise ValueError(f"checkpoint_files_map: rank {rank}: {path}: no such file")
    return path


def _folder(key: str, value: PathLike) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{key}: expected a path, got {type(value).__name__}")
    path = Path(value)
    if key.startswith("src") and not path.is_dir():
        raise NotADirectoryError(f"{key}: {path} is not a folder")
    return path


def _check_type(key: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{key}: expected {kind.__name__}, got {type(value).__name__}")


def _check_prefix(prefix: Any) -> None:
    _check_type("ckpt_prefix", prefix, str)
    if Path(f"{prefix}0").name != f"{prefix}0" or "\0" in prefix:
        raise ValueError(f"ckpt_prefix: {prefix!r} leaves the rank's folder; give the start of a file name")


def _check_count(key: str, value: Any) -> None:
    _check_type(key, value, int)
    if value < 1:
        raise ValueError(f"{key}: {value} is less than 1")


def _check_suffix(key: str, path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{key}: {path} does not end in {' or '.join(SUFFIXES)}")


def _check_format(name: str) -> None:
    if f".{name}" not in SUFFIXES:
        raise ValueError(f"output_format: {name!r} is not known; give safetensors or ckpt")


def merge_pipeline_strategies(
    src_strategy_dirs: str | os.PathLike[str], dst_strategy_file: str | os.PathLike[str]
) -> None:
    """Merges the strategy files in the folder ``src_strategy_dirs`` into one file of the same format.

    The format is recognized by content. Raises ``TypeError`` for an argument that is not a path,
    ``NotADirectoryError`` if the source is not a folder, ``ValueError`` if it has no strategy file, files of
    two formats, or files that do not belong together.
    """
    merging(src_strategy_dirs, dst_strategy_file)()


merge_pipeline_strategys = merge_pipeline_strategies  # MindSpore's spelling of the name


Prefixes = str | list[str] | tuple[str, ...] | None


def load_segmented_checkpoints(
    ckpt_file_dir: str,
    net: Any = None,
    strict_load: bool = False,
    filter_prefix: Prefixes = None,
    dec_key: bytes | None = None,
    dec_mode: str = "AES-GCM",
    specify_prefix: Prefixes = None,
    choice_func: Callable[[str], bool] | None = None,
) -> dict[str, Any]:
    """Returns the tensors of every ``*.safetensors``, or every ``*.ckpt``, in a folder, by name.

    Tensors are ``torch.nn.Parameter``; strings that were saved among them are ``str``.

    Args:
        ckpt_file_dir: The folder.
        net: A ``torch.nn.Module`` to load the tensors into. Each of its tensors takes the tensor of the same
            name, or one whose name ends in a dot and this name, and casts it to its own width.
        strict_load: Require the same names and dtypes in ``net`` and in the files; the files may also have
            counters and optimizer states.
        filter_prefix: Leave out names that start with one of these.
        dec_key: The key of ``.ckpt`` files that are encrypted in ``dec_mode``.
        dec_mode: The mode of their encryption.
        specify_prefix: Leave out names that start with none of these.
        choice_func: Leave out names for which it returns False. It is called only if no prefix is given.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The folder is missing or empty, has files of two formats or files that cannot be read, has
            two tensors of one name, no tensor is left, or the tensors do not fit ``net``.
    """
    if not isinstance(ckpt_file_dir, str):
        raise TypeError(f"ckpt_file_dir: expected str, got {type(ckpt_file_dir).__name__}")
    if net is not None and not (hasattr(net, "state_dict") and hasattr(net, "load_state_dict")):
        raise TypeError(f"net: expected a torch.nn.Module, got {type(net).__name__}")
    mode = _mode(dec_key, dec_mode)
    drop = _prefixes("filter_prefix", filter_prefix)
    keep = _prefixes("specify_prefix", specify_prefix)

    # index every file; two files may have a tensor of one name only if it is the same tensor
    where: dict[str, RankSource] = {}
    texts: dict[str, str] = {}
    for source in (open_source(path, dec_key, mode) for path in _files(Path(ckpt_file_dir), dec_key)):
        for name in source.specs:
            if not _same(where.setdefault(name, source), source, name):
                clash = f"{name} is in {where[name].path.name} too; only one file may have it"
                raise ValueError(f"{source.path}: {clash}")
        for name, text in source.texts.items():
            if texts.setdefault(name, text) != text:
                raise ValueError(f"{source.path}: the string {name} differs from that of another file")

    # select names; choice_func is called only if no prefix is given
    def is_requested(name: str) -> bool:
        if choice_func is not None and not drop and not keep:
            return _choice(choice_func, name)
        return not name.startswith(drop) and (not keep or name.startswith(keep))

    chosen = {name: source for name, source in where.items() if is_requested(name)}
    texts = {name: text for name, text in texts.items() if is_requested(name)}
    if not chosen:
        filters = "filter_prefix, specify_prefix and choice_func"
        raise ValueError(f"{ckpt_file_dir}: {filters} leave none of {len(where)} tensors")

    parameters = {name: parameter(source.specs[name], source.chunks(name)) for name, source in chosen.items()}
    if net is not None:
        load_into(net, parameters, strict=strict_load)
    return parameters | texts


def _same(first: RankSource, other: RankSource, name: str) -> bool:
    """Returns true if both files have an equal tensor ``name``: step counters, for example, are in each."""
    if first is other:
        return True
    return first.specs[name] == other.specs[name] and b"".join(first.chunks(name)) == b"".join(
        other.chunks(name)
    )


def _files(folder: Path, key: bytes | None) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"ckpt_file_dir: {folder} is not a folder")
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())
    if not files:
        raise ValueError(f"ckpt_file_dir: {folder} has no .safetensors or .ckpt file")
    if other := [path for path in files if path.suffix != files[0].suffix]:
        raise ValueError(
            f"{files[0]} and {other[0].name}: two formats in one folder; keep files of one format"
        )
    if key is not None and files[0].suffix != ".ckpt":
        raise ValueError(f"dec_key: {files[0]} is not a .ckpt file; leave out dec_key")
    return files


def _mode(key: bytes | None, mode: str) -> CipherMode:
    if mode not in MODES:
        raise ValueError(f"dec_mode: {mode!r} is not known; give one of {', '.join(MODES)}")
    if key is not None and not isinstance(key, bytes):
        raise TypeError(f"dec_key: expected bytes, got {type(key).__name__}")
    if key is not None:
        check_key(key, mode)
    return mode


def _prefixes(key: str, value: Prefixes) -> tuple[str, ...]:
    prefixes = (value,) if isinstance(value, str) else (value or ())
    if not isinstance(prefixes, list | tuple) or not all(isinstance(prefix, str) for prefix in prefixes):
        raise TypeError(f"{key}: expected str, or a list or tuple of str, got {value!r}")
    if "" in prefixes:
        raise ValueError(f"{key}: an empty prefix matches every name")
    return tuple(prefixes)


def _choice(choice: Callable[[str], bool], name: str) -> bool:
    answer = choice(name)
    if not isinstance(answer, bool):
        raise TypeError(f"choice_func: it returned {answer!r} for {name}; expected True or False")
    return answer
