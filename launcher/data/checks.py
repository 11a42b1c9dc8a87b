"""Checks the files of a data set before it is loaded."""

from __future__ import annotations

from launcher.data.cifar10_fallback import resolve
from launcher.data.mnist5k import check_mnist5k
from launcher.data.text_file_checks import check_absent, check_text
from launcher.data.tokens.corpus import corpus
from launcher.data.tokens.vocab_range_check import check_ids
from launcher.errors import Problem, error_text
from launcher.job.schema.components import Data
from launcher.job.schema.data import Chat, Cifar10, Idx, ImageFolder, Mnist5k, Text, Tokens
from launcher.optional import image_files, lacking


def check(settings: Data) -> list[Problem]:
    """Returns every problem with the files of ``settings``; none for random tokens and a user's own class."""
    settings, _ = resolve(settings)
    if isinstance(settings, Idx | Cifar10 | ImageFolder) and (lacks := lacking("image_files", "data")):
        return lacks
    match settings:
        case Text():
            return list(check_text(settings))
        case Mnist5k():
            return list(check_mnist5k(settings))
        case Idx():
            return list(image_files.check_idx(settings))
        case Cifar10():
            return list(image_files.check_cifar10(settings))
        case ImageFolder():
            return list(image_files.check_images(settings))
        case Tokens():
            return _check_tokens(settings)
        case Chat():
            from launcher.data.chat.checks import check_first_rows

            return check_first_rows(settings)
        case _:
            return []


def _check_tokens(settings: Tokens) -> list[Problem]:
    made, problems = corpus(settings)
    if made is None:
        return problems
    try:
        return [*check_ids(made)]
    except OSError as error:  # a file was removed after it was opened
        return [Problem("data.path", error_text(error))]


def absent(settings: Data) -> list[Problem]:
    """Returns problems with files that a run reads but a plan does not need."""
    return list(check_absent(settings)) if isinstance(settings, Text) else []
