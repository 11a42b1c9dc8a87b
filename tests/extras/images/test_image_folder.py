"""``data=images`` trains like a plain loop that reads, crops, flips, resizes and normalizes; bad files are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from launcher.data.checks import check
from launcher.data.open import open_data
from launcher.data.spec import check_fit, input_specs, target_spec
from launcher.job.schema.components import Data
from launcher.job.schema.data import ImageFolder
from launcher.job.schema.models import ResNet
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.runtime.faults import RanksFailed
from tests.data.torch_datasets.training import LAYOUTS, Batch, alone, assert_same, on_layout, order, trained
from tests.extras.images.folders import SIDE, write

MODEL = {"name": "mlp", "features": 3 * SIDE * SIDE, "hidden": 8, "classes": 3}
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
SEED, PADDING = 7, 2


def settings(root: Path, **more: Any) -> Data:
    return ImageFolder.model_validate({"name": "images", "root": str(root), "size": SIDE} | more)


def normalized(pixels: np.ndarray) -> torch.Tensor:
    x = torch.tensor(pixels.copy(), dtype=torch.float32) / torch.tensor(255.0)
    return ((x - torch.tensor(MEAN)) / torch.tensor(STD)).movedim(-1, 0)


def augmented(pixels: np.ndarray, epoch: int, number: int) -> np.ndarray:
    """Augment an image pixel by pixel, as docs/data.md describes it."""
    raw = np.random.Philox(np.random.SeedSequence(SEED, spawn_key=(epoch, number))).random_raw(3)
    top, left = (int(r) % (2 * PADDING + 1) - PADDING for r in raw[:2])
    out = np.zeros_like(pixels)
    for row in range(SIDE):
        for column in range(SIDE):
            y, x = row + top, column + left
            if 0 <= y < SIDE and 0 <= x < SIDE:
                out[row, column] = pixels[y, x]
    return np.fliplr(out) if int(raw[2]) / 2**64 < 0.5 else out


def test_crop_flip_and_normalise_equal_a_plain_loop_on_any_layout_and_after_a_resume(tmp_path):
    known, others = write(tmp_path / "train"), write(tmp_path / "val", each=2, seed=1)
    places = order(len(known), seed=SEED)

    def batch(step: int) -> Batch:
        x = torch.stack([normalized(augmented(known[i][0], epoch, i)) for epoch, i in places[step]])
        return (x.double(),), torch.tensor([known[i][1] for _, i in places[step]])

    held = (torch.stack([normalized(p) for p, _ in others]).double(),), torch.tensor([y for _, y in others])
    data = {
        "name": "images", "root": str(tmp_path / "train"), "val": str(tmp_path / "val"), "size": SIDE,
        "crop": {"padding": PADDING}, "flip": 0.5, "normalise": {"mean": MEAN, "std": STD},
    }  # fmt: skip
    jobs = {name: trained(data, name, model=MODEL, seed=SEED) for name in LAYOUTS}
    want = alone(jobs["one rank"], batch, held)
    for name, j in jobs.items():
        assert_same(on_layout(j, tmp_path / name), want)

    # the second epoch begins with step 4: stop before it, and resume in another layout
    saved, *_ = on_layout(jobs["pp2"], tmp_path / "stopped", until=3)
    assert_same(on_layout(jobs["hsdp2"], tmp_path / "on", saved=saved), want)


def test_images_of_any_size_are_resized_as_pillow_does(tmp_path):
    known = write(tmp_path, each=2, side=9)
    x = open_data(settings(tmp_path, resize="bilinear", val_fraction=0), seed=0).train.inputs(np.arange(6))[0]
    pixels = torch.stack([torch.tensor(p, dtype=torch.float64).movedim(-1, 0) for p, _ in known])
    want = F.interpolate(pixels, size=(SIDE, SIDE), mode="bilinear", antialias=True)
    torch.testing.assert_close((x.double() * 0.5 + 0.5) * 255, want, rtol=0, atol=1.0)  # Pillow rounds to integers


def test_a_crop_comes_before_resizing_and_an_image_is_another_one_in_the_next_epoch(tmp_path):
    known = write(tmp_path, each=2, side=9)
    data = open_data(settings(tmp_path, crop={"size": 3}, resize="nearest", val_fraction=0), seed=0)
    first, again, later = (data.train.inputs(np.arange(6) + 6 * epoch)[0] for epoch in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    levels = ((first * 0.5 + 0.5) * 255).round().to(torch.uint8)
    for (pixels, _), x in zip(known, levels, strict=True):
        small = x[:, ::2, ::2].movedim(0, -1).numpy()
        windows = [pixels[r : r + 3, c : c + 3] for r in range(7) for c in range(7)]
        assert any(np.array_equal(small, w) for w in windows)


def test_jpeg_files_are_read_and_the_held_out_images_do_not_depend_on_the_seed(tmp_path):
    known = write(tmp_path / "jpeg", each=4, suffix=".JPG")
    assert check(settings(tmp_path / "jpeg")) == []
    data = open_data(settings(tmp_path / "jpeg", channels=1, val_fraction=0.25), seed=0)
    other = open_data(settings(tmp_path / "jpeg", channels=1, val_fraction=0.25), seed=5)
    assert (len(data.train), len(data.val)) == (9, 3)
    assert torch.equal(data.val.inputs(np.arange(3))[0], other.val.inputs(np.arange(3))[0])
    every = torch.cat([data.train.targets(np.arange(9)), data.val.targets(np.arange(3))])
    assert sorted(every.tolist()) == [y for _, y in known]
    x = data.train.inputs(np.arange(9))[0]
    assert input_specs(settings(tmp_path / "jpeg", channels=1), 9) == (TensorSpec((9, 1, SIDE, SIDE), "float32"),)
    assert target_spec(settings(tmp_path), 9) == TensorSpec((9,), "int64")
    assert (tuple(x.shape), x.dtype) == ((9, 1, SIDE, SIDE), torch.float32)
    few = check_fit(ResNet(name="resnet", classes=2), settings(tmp_path / "jpeg"))
    assert [str(p) for p in few] == [
        "model.classes: 2 are too few for the 3 classes of data images (try: model.classes=3)"
    ]


def bad(root: Path) -> dict[str, tuple[Data, list[str]]]:
    """Return requests, each with all problems that it has."""
    write(root / "good", each=2)
    write(root / "both/train", each=1)
    write(root / "both/test", each=1)
    for name in ("mixed", "empty", "odd"):
        write(root / name, each=1)
    (root / "mixed/cat/notes.txt").write_text("x")
    (root / "mixed/cat/.hidden").write_text("x")
    (root / "mixed/dog/000.png").write_bytes(b"no image")
    (root / "mixed/owl/000.png").write_bytes((root / "good/owl/000.png").read_bytes()[:20])
    (root / "mixed/owl/001.png").write_bytes(b"")
    (root / "empty/cat/000.png").unlink()
    (root / "odd/fox").mkdir()
    Image.fromarray(np.zeros((SIDE, SIDE), np.uint16)).save(root / "odd/fox/000.png")
    Image.fromarray(np.zeros((4, 5), np.uint8)).save(root / "odd/fox/001.png")
    kinds = ".png, .jpg, .jpeg"
    return {
        "no folder": (settings(root / "none"), [f"data.root: {root}/none: there is no such folder"]),
        "no classes": (
            settings(root / "good/cat"),
            [
                f"data.root: {root}/good/cat: no folders in it; put the images of each class into a folder named after "
                "the class"
            ],
        ),
        "splits": (
            settings(root / "both"),
            [
                f"data.root: {root}/both: its folders are train and test, which are not classes "
                f"(try: data.root={root}/both/train data.val={root}/both/test)"
            ],
        ),
        "broken": (
            settings(root / "mixed"),
            [
                f"data.root: {root}/mixed/cat/notes.txt: only {kinds} files are read as images; move others "
                f"out of {root}/mixed",
                f"data.root: {root}/mixed/dog/000.png: is neither PNG nor JPEG",
                f"data.root: {root}/mixed/owl/000.png: broken: Truncated File Read",
                f"data.root: {root}/mixed/owl/001.png: is neither PNG nor JPEG",
            ],
        ),
        "a class without images": (
            settings(root / "empty"),
            [f"data.root: {root}/empty: cat: no image ({kinds}) in it; each folder is a class"],
        ),
        "other classes held out": (
            settings(root / "good", val=str(root / "odd")),
            [f"data.val: {root}/odd: fox: not a class of data.root"],
        ),
        "kinds and sizes": (
            settings(root / "odd"),
            [
                f"data.root: {root}/odd/fox/000.png: pixel mode I;16 is not supported; use eight bits per channel",
                f"data.resize: null: {root}/odd/fox/001.png has 5 x 4 pixels, and data.size is 6; choose how to "
                "resize images (try: data.resize=bilinear)",
            ],
        ),
        "too small to cut": (
            settings(root / "good", crop={"size": 9, "padding": 1}, resize="nearest"),
            [
                f"data.crop.size: 9: {root}/good/cat/000.png has 6 x 6 pixels (one of 6 images that do not fit), "
                "too small with data.crop.padding=1 (try: data.crop.size=8)"
            ],
        ),
        "nothing to train on": (
            settings(root / "good", val_fraction=1),
            ["data.val_fraction: 1.0 leaves none of 6 images to train on (try: data.val_fraction=0.1)"],
        ),
    }


def test_bad_files_are_named_before_anything_starts(tmp_path):
    for name, (request, texts) in bad(tmp_path).items():
        assert [str(p) for p in check(request)] == texts, name


def test_an_image_that_breaks_off_ends_the_run_with_its_path(tmp_path):
    write(tmp_path / "a", each=4)
    path = tmp_path / "a/dog/001.png"
    path.write_bytes(path.read_bytes()[:-30])
    data = {"name": "images", "root": str(tmp_path / "a"), "size": SIDE, "val_fraction": 0.0}
    with pytest.raises(RanksFailed) as failed:
        on_layout(trained(data, "pp2", model=MODEL), tmp_path)
    assert failed.value.fault.message.startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (
            {"normalise": {"mean": [0.1, 0.2]}},
            "data.normalise.mean: 2 numbers for 3 channels; give one, or one for each channel",
        ),
        (
            {"crop": {"size": 4}},
            "data.crop.size=4 is not data.size=6, and data.resize=null keeps its size; use data.resize=bilinear",
        ),
    ],
)
def test_image_settings_that_contradict_each_other_are_refused(more, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        settings(tmp_path, **more)
