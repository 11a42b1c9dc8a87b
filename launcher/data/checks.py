"""Checks the data that a job names, without loading it."""

from __future__ import annotations

from launcher.data.chat.checks import check_chat
from launcher.data.fallback import resolve
from launcher.data.files.image_checks import check_cifar10, check_idx
from launcher.data.files.mnist5k import check_mnist5k
from launcher.data.files.text_checks import check_absent, check_text
from launcher.data.images.folder.checks import check_images
from launcher.data.token_files.corpus import corpus
from launcher.errors import Problem
from launcher.job.schema.components import Chat, Cifar10, Data, Idx, ImageFolder, Mnist5k, Text, Tokens


def check(settings: Data) -> list[Problem]:
    """Every problem with the named files. Random tokens and a user's own class have none."""
    settings, _ = resolve(settings)
    match settings:
        case Text():
            return list(check_text(settings))
        case Mnist5k():
            return list(check_mnist5k(settings))
        case Idx():
            return list(check_idx(settings))
        case Cifar10():
            return list(check_cifar10(settings))
        case ImageFolder():
            return list(check_images(settings))
        case Tokens():
            return corpus(settings)[1]
        case Chat():
            return list(check_chat(settings))
        case _:
            return []


def absent(settings: Data) -> list[Problem]:
    """Problems with files that a run reads and a plan does not need."""
    return list(check_absent(settings)) if isinstance(settings, Text) else []
