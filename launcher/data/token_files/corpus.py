"""The files that ``data=tokens`` names: what of them is trained on, what is held out, and what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.data.files.bad_file import BadFile
from launcher.data.token_files.mixture import PERIOD, Mixture
from launcher.data.token_files.paths import files
from launcher.data.token_files.read import shard
from launcher.data.token_files.shard import Shard
from launcher.data.token_files.spans import Span, count, spans, split
from launcher.errors import Problem, said
from launcher.job.schema.components import Paths, Tokens


@dataclass(frozen=True)
class Corpus:
    """``train``: the windows of each source, which ``mixture`` mixes; tokens are below ``vocab_size``."""

    train: tuple[tuple[Span, ...], ...]
    val: tuple[Span, ...]
    mixture: Mixture
    vocab_size: int


def corpus(settings: Tokens) -> tuple[Corpus | None, list[Problem]]:
    """Opens every file, and reads headers and indices only. ``None`` where anything is wrong."""
    found: list[Problem] = []
    named = {f"data.sources.{i}.path": source.path for i, source in enumerate(settings.sources)}
    if settings.path is not None:
        named = {"data.path": settings.path}
    sources = {key: _shards(key, paths, settings.dtype, found) for key, paths in named.items()}
    held = [] if settings.val is None else _shards("data.val", settings.val, settings.dtype, found)
    if found:
        return None, found

    # what they say together
    everything = [s for shards in (*sources.values(), held) for s in shards]
    vocab_size, wrong = _vocab_size(settings, everything)
    found += [*_twice(sources, held), *wrong]
    mixture = Mixture.of([source.weight for source in settings.sources] or [1.0])
    for i, n in enumerate(mixture.counts):
        if n == 0:
            text = f"{settings.sources[i].weight} is less than one in {PERIOD} of all weights"
            found.append(Problem(f"data.sources.{i}.weight", text))

    # windows
    train, val = [], spans(held, settings.seq_len)
    for key, shards in sources.items():
        parts = spans(shards, settings.seq_len)
        mine, rest = (parts, []) if settings.val is not None else split(parts, settings.val_fraction)
        val += rest
        train.append(tuple(mine))
        if not count(mine):
            found.append(_too_few(settings, key, shards))
    if settings.val is not None and not count(val):
        found.append(_too_few(settings, "data.val", held))
    if found:
        return None, found
    return Corpus(tuple(train), tuple(val), mixture, vocab_size), []


def vocab_size(settings: Tokens) -> int | None:
    """As the files say it, ``None`` where they do not or something is wrong with them."""
    made, _ = corpus(settings)
    return None if made is None else made.vocab_size


def _shards(key: str, paths: Paths, dtype: str, found: list[Problem]) -> list[Shard]:
    """Every file that can be read; what is wrong with others goes to ``found``."""
    out = []
    try:
        named = files(paths)
    except BadFile as error:
        found.append(Problem(key, str(error)))
        return []
    except OSError as error:
        found.append(Problem(key, said(error)))
        return []
    for path in named:
        try:
            out.append(shard(path, dtype))
        except BadFile as error:
            found.append(Problem(key, f"{path}: {error}"))
        except OSError as error:
            found.append(Problem(key, said(error)))
    return out


def _vocab_size(settings: Tokens, shards: Sequence[Shard]) -> tuple[int, list[Problem]]:
    """What every token is below: as the settings say it, or else as all files do."""
    key = "data.vocab_size"
    told = {s.vocab_size: s.path for s in shards if s.vocab_size is not None}
    if settings.vocab_size is not None:
        most = max(told, default=0)
        if most <= settings.vocab_size:
            return settings.vocab_size, []
        text = f"{settings.vocab_size}: {told[most]} has tokens below {most}"
        return most, [Problem(key, text, f"{key}={most}")]

    silent: Path | None = next((s.path for s in shards if s.vocab_size is None), None)
    if silent is not None:
        example = f"the number of tokens of its tokenizer, {key}=50257 for that of GPT-2"
        return 0, [Problem(key, f"null: {silent} is of a format that does not say it; give {example}")]
    if len(told) > 1:
        most, least = max(told), min(told)
        text = f"null: {told[most]} has tokens below {most}, {told[least]} below {least}"
        return 0, [Problem(key, text, f"{key}={most}")]
    return next(iter(told)), []


def _twice(sources: dict[str, list[Shard]], held: Sequence[Shard]) -> list[Problem]:
    trained = {s.path.resolve() for shards in sources.values() for s in shards}
    both = [s.path for s in held if s.path.resolve() in trained]
    return [Problem("data.val", f"{both[0]}: held out and trained on")] if both else []


def _too_few(settings: Tokens, key: str, shards: Sequence[Shard]) -> Problem:
    longest = max(shards, key=lambda s: s.tokens)
    text = f"{longest.tokens} tokens"
    if key != "data.val" and settings.val is None and settings.val_fraction:
        text += f", of which data.val_fraction={settings.val_fraction} is held out,"
    if len(shards) > 1:
        text = f"the longest of {len(shards)} files, {text}"
    window = f"a window takes data.seq_len={settings.seq_len} tokens and the next one, all of one file"
    return Problem(key, f"{longest.path}: {text} are too few: {window}")
