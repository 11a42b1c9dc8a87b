"""Images in folders as samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from launcher.data.file_kinds import BadFile
from launcher.data.shuffle import Indices, permutation
from launcher.data.source import Dataset, Source, entropy
from launcher.errors import RunError
from launcher.extras.images.folder_files import decoded, listed
from launcher.job.schema.data import ImageFolder

Pixels = NDArray[np.uint8]
"""An array of shape (height, width, channels)."""


@dataclass(frozen=True)
class Augmentation:
    """``RandomCrop(crop, padding)``, then ``RandomHorizontalFlip(flip)``, as in MindSpore."""

    crop: int | None
    padding: int
    flip: float

    def __bool__(self) -> bool:
        return self.crop is not None or self.flip > 0

    def __call__(self, pixels: Pixels, seed: int, epoch: int, number: int) -> Pixels:
        """Augments image ``number`` of the data set. Random numbers depend on seed, epoch and number only."""
        # raw numbers of Philox, which numpy promises never to change
        stream = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch, number)))
        top, left, coin = stream.random_raw(3).tolist()
        if self.crop is not None:
            pixels = self._cropped(pixels, top, left)
        if coin < self.flip * 2**64:
            pixels = pixels[:, ::-1]
        return np.ascontiguousarray(pixels)

    def _cropped(self, pixels: Pixels, top: int, left: int) -> Pixels:
        """Pads the image with black and crop a square; every position is equally likely."""
        assert self.crop is not None
        around = (self.padding, self.padding)
        pixels = np.pad(pixels, (around, around, (0, 0)))
        down, right = (n - self.crop + 1 for n in pixels.shape[:2])
        top, left = top % down, left % right
        return pixels[top : top + self.crop, left : left + self.crop]


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
        normalize = self.settings.normalise
        mean, std = (
            torch.tensor(v, dtype=torch.float32).view(-1, 1, 1) for v in (normalize.mean, normalize.std)
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
    crop, listing = settings.crop, listed(settings.root)
    drawn = Augmentation(settings.cut if crop else None, crop.padding if crop else 0, settings.flip)

    # validation images: another folder, or some of the training images
    n = len(listing.images)
    held_out, of = np.arange(0), listing.images
    if settings.val is not None:
        of = listed(settings.val, listing.classes).images
        train, held_out = np.arange(n), np.arange(len(of))
    else:
        order = permutation(SPLIT_SEED, 0, n)
        cut = n - round(n * settings.val_fraction)
        train, held_out = np.sort(order[:cut]), np.sort(order[cut:])
    val = FolderImages(of, held_out, settings, None, seed)
    return Dataset(
        FolderImages(listing.images, train, settings, drawn, seed),
        val,
        entropy(val),
        reading="in epochs",
    )
