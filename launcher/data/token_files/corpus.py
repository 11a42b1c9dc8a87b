"""The files that ``data=tokens`` names: splits them into training and validation data, and checks them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.data.files.bad_file import BadFile
from launcher.data.token_files.document_index import document_index
from launcher.data.token_files.file_windows import FileWindows, split, total, windows
from launcher.data.token_files.mixture import PERIOD, Mixture
from launcher.data.token_files.paths import files as files_of
from launcher.data.token_files.read import token_file
from launcher.data.token_files.token_file import TokenFile
from launcher.errors import Problem, said
from launcher.job.schema.components import Paths, Tokens

END = "data.end_of_document"


@dataclass(frozen=True)
class Corpus:
    """The windows of each source for training, which ``mixture`` mixes. Tokens are below ``vocab_size``."""

    train: tuple[tuple[FileWindows, ...], ...]
    val: tuple[FileWindows, ...]
    mixture: Mixture
    vocab_size: int


def corpus(settings: Tokens) -> tuple[Corpus | None, list[Problem]]:
    """Opens every file, and reads headers and indices only. Returns no corpus if there is a problem."""
    problems: list[Problem] = []
    named = {f"data.sources.{i}.path": source.path for i, source in enumerate(settings.sources)}
    if settings.path is not None:
        named = {"data.path": settings.path}
    sources = {key: _token_files(key, paths, settings.dtype, problems) for key, paths in named.items()}
    held = [] if settings.val is None else _token_files("data.val", settings.val, settings.dtype, problems)
    if problems:
        return None, problems

    # check the files together
    vocab_size, wrong = _vocab_size(settings, [f for files in (*sources.values(), held) for f in files])
    sources = {key: [*_ended(key, files, settings, problems)] for key, files in sources.items()}
    held = [*_ended("data.val", held, settings, problems)]
    mixture = Mixture.of([source.weight for source in settings.sources] or [1.0])
    train, val, few = _windows(settings, sources, held)
    if settings.end_of_document is not None and settings.end_of_document >= vocab_size > 0:
        problems.append(Problem(END, f"{settings.end_of_document} is not below data.vocab_size={vocab_size}"))
    problems += [*_twice(sources, held), *wrong, *_tiny(settings, mixture), *few]
    return (None, problems) if problems else (Corpus(train, val, mixture, vocab_size), [])


def vocab_size(settings: Tokens) -> int | None:
    """The vocabulary size by the files; ``None`` if they do not tell or have a problem."""
    made, _ = corpus(settings)
    return None if made is None else made.vocab_size


def _token_files(key: str, paths: Paths, dtype: str, found: list[Problem]) -> list[TokenFile]:
    """The files that can be read; problems of the others are appended to ``found``."""
    out = []
    try:
        named = files_of(paths)
    except BadFile as error:
        found.append(Problem(key, str(error)))
        return []
    except OSError as error:
        found.append(Problem(key, said(error)))
        return []
    for path in named:
        try:
            out.append(token_file(path, dtype))
        except BadFile as error:
            found.append(Problem(key, f"{path}: {error}"))
        except OSError as error:
            found.append(Problem(key, said(error)))
    return out


def _vocab_size(settings: Tokens, files: Sequence[TokenFile]) -> tuple[int, list[Problem]]:
    """The bound that every token is below: that of the settings, or else that of all files."""
    key = "data.vocab_size"
    told = {f.vocab_size: f.path for f in files if f.vocab_size is not None}
    if settings.vocab_size is not None:
        most = max(told, default=0)
        if most <= settings.vocab_size:
            return settings.vocab_size, []
        text = f"{settings.vocab_size}: {told[most]} has tokens below {most}"
        return most, [Problem(key, text, f"{key}={most}")]

    silent: Path | None = next((f.path for f in files if f.vocab_size is None), None)
    if silent is not None:
        example = f"the number of tokens of its tokenizer, {key}=50257 for that of GPT-2"
        return 0, [Problem(key, f"null: {silent} is of a format that does not say it; give {example}")]
    if len(told) > 1:
        most, least = max(told), min(told)
        text = f"null: {told[most]} has tokens below {most}, {told[least]} below {least}"
        return 0, [Problem(key, text, f"{key}={most}")]
    return next(iter(told)), []


def _ended(
    key: str, files: Sequence[TokenFile], settings: Tokens, found: list[Problem]
) -> Iterator[TokenFile]:
    """Yields the files with their end token, if it is needed; reports the first file without one."""
    if not settings.by_document:
        yield from files
        return
    given, silent = settings.end_of_document, False
    for file in files:
        told = file.end_of_document
        if given is not None and told not in (None, given):
            text = f"{given}: {file.path} says that {told} ends its documents"
            found.append(Problem(END, text, f"{END}=null"))
        elif given is None and told is None and not silent:
            silent = True
            text = f"{file.path} does not say which token ends its documents"
            example = f"give it, {END}=50256 for those of GPT-2"
            found.append(Problem(key, f"{text}, and {_why(settings)}; {example}"))
        yield file if given is None else replace(file, end_of_document=given)


def _why(settings: Tokens) -> str:
    if settings.document_mask:
        return "data.document_mask=true keeps them apart"
    return f"data.packing={settings.packing} takes them whole"


def _windows(
    settings: Tokens, sources: dict[str, list[TokenFile]], held: Sequence[TokenFile]
) -> tuple[tuple[tuple[FileWindows, ...], ...], tuple[FileWindows, ...], list[Problem]]:
    """The windows for training, by source; those for validation; and problems if there are none."""
    problems: list[Problem] = []
    train, val = [], _all(settings, held)
    if settings.val is not None and not total(val):
        problems.append(_too_few(settings, "data.val", held))
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
    """All windows of each file."""
    how, length = settings.packing, settings.seq_len
    if how == "windows":
        return windows(files, length)
    return [FileWindows(file, 0, len(document_index(file, length, how))) for file in files]


def _tiny(settings: Tokens, mixture: Mixture) -> Iterator[Problem]:
    for i, n in enumerate(mixture.counts):
        if n == 0:
            text = f"{settings.sources[i].weight} is less than one in {PERIOD} of all weights"
            yield Problem(f"data.sources.{i}.weight", text)


def _twice(sources: dict[str, list[TokenFile]], held: Sequence[TokenFile]) -> list[Problem]:
    trained = {f.path.resolve() for files in sources.values() for f in files}
    both = [f.path for f in held if f.path.resolve() in trained]
    return [Problem("data.val", f"{both[0]}: held out and trained on")] if both else []


def _too_few(settings: Tokens, key: str, files: Sequence[TokenFile]) -> Problem:
    longest = max(files, key=lambda f: f.tokens)
    if settings.packing != "windows":
        few = f"{longest.tokens} tokens are too few documents of a token and the next one"
        return Problem(key, f"{longest.path}: {few} for data.packing={settings.packing}")
    text = f"{longest.tokens} tokens"
    if key != "data.val" and settings.val is None and settings.val_fraction:
        text += f", of which data.val_fraction={settings.val_fraction} is held out,"
    if len(files) > 1:
        text = f"the longest of {len(files)} files, {text}"
    window = f"a window takes data.seq_len={settings.seq_len} tokens and the next one, all of one file"
    return Problem(key, f"{longest.path}: {text} are too few: {window}")
