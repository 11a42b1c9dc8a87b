"""Opens the data set that a request names."""

from __future__ import annotations

from launcher.data.checks import check
from launcher.data.cifar10_fallback import resolve
from launcher.data.image_source import open_mnist5k
from launcher.data.source import Dataset, open_random_tokens
from launcher.data.text_windows import open_text
from launcher.data.tokens.windows import open_tokens
from launcher.data.torch_datasets.open import open_own
from launcher.errors import RequestError
from launcher.job.schema.components import Data
from launcher.job.schema.data import Chat, Cifar10, Idx, ImageFolder, Mnist5k, RandomTokens, Text, Tokens
from launcher.optional import images


def open_data(settings: Data, *, seed: int, allow: tuple[str, ...] = ()) -> Dataset:
    """Opens a data set, the same on every rank. Raises ``RequestError``.

    ``seed`` matters only for random tokens, random augmentation and a user's own torch data set.
    """
    settings, _ = resolve(settings)
    if isinstance(settings, ImageFolder):
        return images.open_images(
            settings, seed
        )  # the plan has checked its headers: there may be millions of files
    if isinstance(settings, Tokens):
        return open_tokens(settings)  # checks the files as it opens them: an index may be long
    if problems := check(settings):
        raise RequestError(tuple(problems))

    match settings:
        case Text():
            return open_text(settings)
        case Chat():
            from launcher.data.chat.samples import open_chat  # imports jinja2, which takes 80 ms

            return open_chat(settings)
        case Mnist5k():
            return open_mnist5k(settings)
        case Idx():
            return images.open_idx(settings)
        case Cifar10():
            return images.open_cifar10(settings)
        case RandomTokens():
            return open_random_tokens(settings, seed)

        case _:
            return open_own(settings, seed, allow)
