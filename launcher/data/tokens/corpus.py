"""Opens token files as one corpus, and mixes sources by weight."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from math import ceil, lcm
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from launcher.data.file_kinds import BadFile
from launcher.data.tokens.bin_packing import document_index
from launcher.data.tokens.formats import token_file
from launcher.data.tokens.token_file import TokenFile
from launcher.errors import Problem, error_text
from launcher.job.schema.data import Paths, Tokens
from launcher.untrusted.hub_name_hint import download_hint

SUFFIXES = (".tokens", ".bin")
_HELD_OUT = re.compile(r"(?<![a-z])(val|valid|validation|test|dev|eval)(?![a-z])")


def files_of(paths: Paths, suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """Returns the files in the order of ``paths``; those of a folder or pattern by name, with ``suffixes``.

    Raises ``BadFile`` with the path.
    """
    each = [paths] if isinstance(paths, str) else paths
    files = [file for path in each for file in _files_at(path, suffixes)]
    twice = [file for file, n in Counter(map(os.path.realpath, files)).items() if n > 1]
    if twice:
        raise BadFile(f"{twice[0]}: named twice")
    return files


def _files_at(path: str, suffixes: tuple[str, ...]) -> list[Path]:
    here = Path(path)
    if here.is_dir():
        return _in_folder(here, suffixes)
    if here.exists():
        return [here.with_suffix(".bin") if here.suffix == ".idx" else here]
    if glob.has_magic(path):
        return _matching(path, suffixes)
    if of_hub := download_hint(path, "dataset"):
        raise BadFile(f"{path}: no such file or folder{of_hub}")
    prefix = Path(f"{path}.bin")  # Megatron names two files by their common prefix
    return [prefix] if prefix.exists() and Path(f"{path}.idx").exists() else [here]


def _matching(pattern: str, suffixes: tuple[str, ...]) -> list[Path]:
    files = sorted(Path(name) for name in glob.glob(pattern) if name.endswith(suffixes))
    if not files:
        raise BadFile(f"{pattern}: no {' or '.join(suffixes)} file matches")
    return files


def _in_folder(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Returns the files of a folder. Raises ``BadFile`` if only some have names of validation data."""
    files = sorted(f for f in folder.iterdir() if f.name.endswith(suffixes) and not f.name.startswith("."))
    if not files:
        raise BadFile(f"{folder}: no {' or '.join(suffixes)} file is in this folder")
    held_out = [f for f in files if _HELD_OUT.search(f.stem.lower())]
    if held_out and len(held_out) < len(files):
        text = f"{folder}: by its name {held_out[0].name} is held out, {_other(files, held_out).name} is not"
        raise BadFile(f"{text}: name the files of each by a pattern, {folder}/NAME*{held_out[0].suffix}")
    return files


def _other(files: list[Path], held_out: list[Path]) -> Path:
    return next(f for f in files if f not in held_out)


PERIOD = 1 << 16
"""The most samples after which the order of sources repeats; weights are rounded to this many parts."""

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Mixture:
    """A mixture of sources; ``counts[s]`` is the number of samples of source ``s`` in one period.

    The first ``n`` samples have ``n * counts[s] / sum(counts)`` of source ``s``, rounded up or down, for any
    ``n``.
    """

    counts: tuple[int, ...]

    @classmethod
    def from_weights(cls, weights: Sequence[float]) -> Mixture:
        """Returns the mixture of ``weights``, which need not add up to 1. A relatively tiny one counts 0.

        >>> Mixture.from_weights([0.7, 0.2, 0.1]).counts
        (7, 2, 1)
        """
        exact = [Fraction(str(w)) for w in weights]
        shares = [w / sum(exact) for w in exact]
        period = lcm(*(share.denominator for share in shares))
        if period <= PERIOD:
            return cls(tuple(int(share * period) for share in shares))

        # round to the nearest counts that add up; on ties the first source wins
        counts = [int(share * PERIOD) for share in shares]
        by_shortfall = sorted(range(len(shares)), key=lambda s: (counts[s] - shares[s] * PERIOD, s))
        for s in by_shortfall[: PERIOD - sum(counts)]:
            counts[s] += 1
        return cls(tuple(counts))

    def at(self, indices: Indices) -> tuple[Indices, Indices]:
        """Returns the source of each sample, and the number of earlier samples of that source."""
        sources, before = _period(self.counts)
        periods, places = np.divmod(indices, len(sources))
        chosen = sources[places]
        return chosen, periods * np.array(self.counts)[chosen] + before[places]

    def epoch(self, sizes: Sequence[int]) -> int:
        """Returns the samples until all ``sizes[s]`` windows of every source are read; small ones repeat.

        >>> Mixture((1, 1)).epoch([10, 3])
        19
        """
        return max((self._index(s, n - 1) + 1 for s, n in enumerate(sizes) if n), default=0)

    def _index(self, source: int, ordinal: int) -> int:
        """Returns the index of sample number ``ordinal`` (from 0) of ``source``."""
        periods, rest = divmod(ordinal, self.counts[source])
        places = np.flatnonzero(_period(self.counts)[0] == source)
        return periods * sum(self.counts) + int(places[rest])


@lru_cache(maxsize=8)
def _period(counts: tuple[int, ...]) -> tuple[Indices, Indices]:
    """Returns the sources of one period, and for each place the number of earlier samples of its source.

    The ``k``-th sample of a source comes no earlier than its share, rounded up, allows and no later than its
    share, rounded down, requires. The sample with the earliest deadline comes first. This always works: it is
    a proportionate fair schedule (Baruah et al. 1996) on one processor.
    """
    period = sum(counts)
    later = [(0, s, 0) for s, n in enumerate(counts) if n]  # earliest place, source, number
    ready: list[tuple[int, int, int]] = []  # deadline (place), source, number
    sources, before = np.zeros((2, period), np.int64)
    for place in range(period):
        while later and later[0][0] <= place:
            _, s, k = heappop(later)
            heappush(ready, (-(-(k + 1) * period // counts[s]), s, k))
        _, s, k = heappop(ready)
        sources[place], before[place] = s, k
        heappush(later, ((k + 1) * period // counts[s], s, k + 1))
    return sources, before


@dataclass(frozen=True)
class FileWindows:
    """``count`` windows of a file, from window number ``first`` on."""

    file: TokenFile
    first: int
    count: int


def windows(files: Sequence[TokenFile], seq_len: int) -> list[FileWindows]:
    """Returns all windows of each file, of ``seq_len`` tokens plus one. The rest of a file is not read."""
    return [FileWindows(file, 0, max(file.tokens - 1, 0) // seq_len) for file in files]


def total(parts: Sequence[FileWindows]) -> int:
    return sum(part.count for part in parts)


def split(parts: Sequence[FileWindows], share: float) -> tuple[list[FileWindows], list[FileWindows]]:
    """Splits windows into those for training and the last ``share``, rounded up, for validation."""
    end = total(parts)
    kept = end - ceil(end * share)
    return list(_cut(parts, 0, kept)), list(_cut(parts, kept, end))


def _cut(parts: Sequence[FileWindows], start: int, stop: int) -> Iterator[FileWindows]:
    """Yields windows ``[start, stop)`` of all ``parts``, counted from the first."""
    at = 0
    for part in parts:
        a, b = max(start - at, 0), min(stop - at, part.count)
        if a < b:
            yield FileWindows(part.file, part.first + a, b - a)
        at += part.count


END = "data.end_of_document"


@dataclass(frozen=True)
class Corpus:
    """The training windows of each source, which ``mixture`` mixes, and the validation windows.

    Tokens are below ``vocab_size``.
    """

    train: tuple[tuple[FileWindows, ...], ...]
    val: tuple[FileWindows, ...]
    mixture: Mixture
    vocab_size: int


def corpus(settings: Tokens) -> tuple[Corpus | None, list[Problem]]:
    """Opens every file; reads only headers and indices, and all tokens if documents are packed.

    Returns no corpus if it finds a problem.
    """
    problems: list[Problem] = []
    named = {f"data.sources.{i}.path": source.path for i, source in enumerate(settings.sources)}
    if settings.path is not None:
        named = {"data.path": settings.path}
    sources = {key: _token_files(key, paths, settings.dtype, problems) for key, paths in named.items()}
    held_out = (
        [] if settings.val is None else _token_files("data.val", settings.val, settings.dtype, problems)
    )
    if problems:
        return None, problems

    # check the files together
    vocab_size, wrong = _vocab_size(settings, [f for files in (*sources.values(), held_out) for f in files])
    sources = {key: [*_ended(key, files, settings, problems)] for key, files in sources.items()}
    held_out = [*_ended("data.val", held_out, settings, problems)]
    mixture = Mixture.from_weights([source.weight for source in settings.sources] or [1.0])
    train, val, few = _windows(settings, sources, held_out)
    if settings.end_of_document is not None and settings.end_of_document >= vocab_size > 0:
        problems.append(Problem(END, f"{settings.end_of_document} is not below data.vocab_size={vocab_size}"))
    problems += [*_twice(sources, held_out), *wrong, *_tiny(settings, mixture), *few]
    return (None, problems) if problems else (Corpus(train, val, mixture, vocab_size), [])


def vocab_size(settings: Tokens) -> int | None:
    """Returns the vocabulary size that the files record; ``None`` if it is unknown or they have a problem."""
    made, _ = corpus(settings)
    return None if made is None else made.vocab_size


def _token_files(key: str, paths: Paths, dtype: str, problems: list[Problem]) -> list[TokenFile]:
    """Returns the files that can be read, and appends the problems of the others to ``problems``."""
    out = []
    try:
        named = files_of(paths)
    except BadFile as error:
        problems.append(Problem(key, str(error)))
        return []
    except OSError as error:
        problems.append(Problem(key, error_text(error)))
        return []
    for path in named:
        try:
            out.append(token_file(path, dtype))
        except BadFile as error:
            problems.append(Problem(key, f"{path}: {error}"))
        except OSError as error:
            problems.append(Problem(key, error_text(error)))
    return out


def _vocab_size(settings: Tokens, files: Sequence[TokenFile]) -> tuple[int, list[Problem]]:
    """Returns the bound that every token is below, from the settings or else from the files."""
    key = "data.vocab_size"
    recorded = {f.vocab_size: f.path for f in files if f.vocab_size is not None}
    if settings.vocab_size is not None:
        most = max(recorded, default=0)
        if most <= settings.vocab_size:
            return settings.vocab_size, []
        text = f"{settings.vocab_size}: {recorded[most]} has tokens below {most}"
        return most, [Problem(key, text, f"{key}={most}")]

    silent: Path | None = next((f.path for f in files if f.vocab_size is None), None)
    if silent is not None:
        example = f"the number of tokens of its tokenizer, {key}=50257 for GPT-2"
        return 0, [Problem(key, f"null: {silent} has a format that does not record it; give {example}")]
    if len(recorded) > 1:
        most, least = max(recorded), min(recorded)
        text = f"null: {recorded[most]} has tokens below {most}, {recorded[least]} below {least}"
        return 0, [Problem(key, text, f"{key}={most}")]
    return next(iter(recorded)), []


def _ended(
    key: str, files: Sequence[TokenFile], settings: Tokens, problems: list[Problem]
) -> Iterator[TokenFile]:
    """Yields the files with their end token, if it is needed.

    Appends a problem for each file with another end token than requested, and for the first file without one.
    """
    if not settings.by_document:
        yield from files
        return
    requested, silent = settings.end_of_document, False
    for file in files:
        recorded = file.end_of_document
        if requested is not None and recorded not in (None, requested):
            text = f"{requested}: {file.path} says that {recorded} ends its documents"
            problems.append(Problem(END, text, f"{END}=null"))
        elif requested is None and recorded is None and not silent:
            silent = True
            text = f"{file.path} does not say which token ends its documents"
            example = f"give it, {END}=50256 for GPT-2"
            problems.append(Problem(key, f"{text}, which {_why(settings)} needs; {example}"))
        yield file if requested is None else replace(file, end_of_document=requested)


def _why(settings: Tokens) -> str:
    if settings.document_mask:
        return "data.document_mask=true"
    return f"data.packing={settings.packing}"


def _windows(
    settings: Tokens, sources: dict[str, list[TokenFile]], held_out: Sequence[TokenFile]
) -> tuple[tuple[tuple[FileWindows, ...], ...], tuple[FileWindows, ...], list[Problem]]:
    """Returns the training windows by source, the validation windows, and problems if either has none."""
    problems: list[Problem] = []
    train, val = [], _all(settings, held_out)
    if settings.val is not None and not total(val):
        problems.append(_too_few(settings, "data.val", held_out))
    for key, files in sources.items():
        mine = _all(settings, files)
        if settings.val is None:
            mine, rest = split(mine, settings.val_fraction)
            val += rest
        train.append(tuple(mine))
        if not total(mine):
            problems.append(_too_few(settings, key, files))
    return tuple(train), tuple(val), problems


def _all(settings: Tokens, files: Sequence[TokenFile]) -> list[FileWindows]:
    """Returns all windows of each file."""
    how, length = settings.packing, settings.seq_len
    if how == "windows":
        return windows(files, length)
    return [FileWindows(file, 0, len(document_index(file, length, how))) for file in files]


def _tiny(settings: Tokens, mixture: Mixture) -> Iterator[Problem]:
    for i, n in enumerate(mixture.counts):
        if n == 0:
            text = f"{settings.sources[i].weight} is less than one in {PERIOD} of all weights"
            yield Problem(f"data.sources.{i}.weight", text)


def _twice(sources: dict[str, list[TokenFile]], held_out: Sequence[TokenFile]) -> list[Problem]:
    trained = {os.path.realpath(f.path) for files in sources.values() for f in files}
    both = [f.path for f in held_out if os.path.realpath(f.path) in trained]
    return [Problem("data.val", f"{both[0]}: it is both held out and trained on")] if both else []


def _too_few(settings: Tokens, key: str, files: Sequence[TokenFile]) -> Problem:
    longest = max(files, key=lambda f: f.tokens)
    if settings.packing != "windows":
        few = f"{longest.tokens} tokens: no document has the two tokens that it needs"
        return Problem(key, f"{longest.path}: {few} for data.packing={settings.packing}")
    text = f"{longest.tokens} tokens"
    if key != "data.val" and settings.val is None and settings.val_fraction:
        text += f", of which data.val_fraction={settings.val_fraction} is held out,"
    if len(files) > 1:
        text = f"the longest of {len(files)} files, {text}"
    counts = f"(data.seq_len={settings.seq_len}, and one for the last target), all from one file"
    window = f"a sample needs {settings.seq_len + 1} tokens {counts}"
    return Problem(key, f"{longest.path}: {text} are too few: {window}")
