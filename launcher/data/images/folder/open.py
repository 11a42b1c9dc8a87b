"""Opens an image folder as samples: normalised float tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from launcher.data.files.bad_file import BadFile
from launcher.data.images.folder.augmentation import Augmentation, Pixels
from launcher.data.images.folder.listing import listed
from launcher.data.images.folder.read import decoded
from launcher.data.shuffle import Indices, permutation
from launcher.data.source import Dataset, Source, entropy
from launcher.errors import RunError
from launcher.job.schema.components import ImageFolder

SPLIT_SEED = 0  # not the job's: every run is validated on the same images


@dataclass(frozen=True)
class FolderImages(Source):
    """The images ``numbers`` of ``files``; index ``i`` is image ``i % len`` in epoch ``i // len``.

    Images are not cached. ``augmentation``: ``None`` for validation images.
    """

    files: list[tuple[str, int]]
    numbers: Indices
    settings: ImageFolder
    augmentation: Augmentation | None
    seed: int

    def __len__(self) -> int:
        return len(self.numbers)

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        pixels = np.stack([self._read(int(i)) for i in indices])
        x = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(torch.float32) / 255
        normalise = self.settings.normalise
        mean, std = (
            torch.tensor(v, dtype=torch.float32).view(-1, 1, 1) for v in (normalise.mean, normalise.std)
        )
        return (((x - mean) / std).contiguous(),)

    def targets(self, indices: Indices) -> Tensor:
        return torch.tensor([self.files[self.numbers[i % len(self)]][1] for i in indices.tolist()])

    def _read(self, index: int) -> Pixels:
        """Reads an image, crops and mirrors it, then resizes it: the order of MindSpore's guide."""
        epoch, at = divmod(index, len(self))
        number = int(self.numbers[at])
        path = self.files[number][0]
        try:
            image = decoded(path, self.settings.channels)
        except BadFile as error:
            raise RunError(f"{path}: {error}") from error

        pixels = np.asarray(image).reshape(image.height, image.width, self.settings.channels)
        if self.augmentation:
            pixels = self.augmentation(pixels, self.seed, epoch, number)
        return self._resized(pixels)

    def _resized(self, pixels: Pixels) -> Pixels:
        from PIL import Image

        size = self.settings.size
        if pixels.shape[:2] == (size, size) or self.settings.resize is None:
            return pixels
        how = Image.Resampling[self.settings.resize.upper()]
        image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).resize((size, size), how)
        return np.asarray(image).reshape(size, size, pixels.shape[2])


def open_images(settings: ImageFolder, seed: int) -> Dataset:
    crop, found = settings.crop, listed(settings.root)
    drawn = Augmentation(settings.cut if crop else None, crop.padding if crop else 0, settings.flip)

    # validation images: another folder, or some of the training images
    n = len(found.images)
    held, of = np.arange(0), found.images
    if settings.val is not None:
        of = listed(settings.val, found.classes).images
        train, held = np.arange(n), np.arange(len(of))
    else:
        order = permutation(SPLIT_SEED, 0, n)
        cut = n - round(n * settings.val_fraction)
        train, held = np.sort(order[:cut]), np.sort(order[cut:])
    val = FolderImages(of, held, settings, None, seed)
    return Dataset(
        FolderImages(found.images, train, settings, drawn, seed),
        val,
        entropy(val),
        reading="in epochs",
    )
