"""Opens a user's own data set."""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch.utils import data as torch_data

from launcher.data.shuffle import permutation
from launcher.data.source import Dataset, Source
from launcher.data.torch_datasets.readers import ENDLESS, IndexedStream, MapStyle, global_generators
from launcher.errors import Problem, RequestError
from launcher.job.schema.user_class import Target
from launcher.job.targets import build, factory
from launcher.user_errors import owned

KEY = "data._target_"
FRACTION = 0.1
"""The fraction of samples used for validation if the request does not set one."""
SPLIT_SEED = 0  # not the job's: every run is validated on the same samples
TRAIN, VAL = 0, 1


class UserData(ABC):  # noqa: B024 (the classes are registered below)
    """A user's own data set: a ``Source``, a torch ``Dataset`` or an ``IterableDataset``."""


UserData.register(Source)  # type: ignore[type-abstract]
UserData.register(torch_data.Dataset)


@dataclass(frozen=True)
class TrainValSplit:
    """The targets that build the training and the validation data.

    ``val`` is ``None`` if a ``fraction`` of the training data is used for validation.
    """

    train: Target
    val: Target | None
    fraction: float


def halves(settings: Target, allow: tuple[str, ...]) -> TrainValSplit:
    """Determines how validation samples are obtained. Raises ``RequestError``.

    ``val`` and ``val_fraction`` are settings of launcher unless the constructor has such parameters. If it
    has a parameter ``split`` or ``train`` that the request does not set, this parameter selects the data.
    """
    made, takes = _made(settings, allow)
    if inspect.isclass(made) and issubclass(made, Source):
        return TrainValSplit(_with(settings, split="train"), _with(settings, split="val"), FRACTION)
    arguments = settings.arguments
    ours = {k: v for k, v in arguments.items() if k in ("val", "val_fraction") and k not in takes}
    train = Target.model_validate(
        {"_target_": settings.target} | {k: v for k, v in arguments.items() if k not in ours}
    )

    # the request says how, or the constructor's parameters do
    if len(ours) == 2:
        raise _error(
            "val_fraction",
            f"{ours['val_fraction']}: data.val already names the validation data; give only one of them",
            "~data.val_fraction",
        )
    if "val" in ours:
        return TrainValSplit(train, _other(train, ours["val"]), FRACTION)
    named = {"split": ("train", "val"), "train": (True, False)}
    for name, (to_train, to_hold) in named.items():
        if name in takes and name not in arguments:
            val = None if "val_fraction" in ours else _with(train, **{name: to_hold})
            return TrainValSplit(_with(train, **{name: to_train}), val, _fraction(ours))
    return TrainValSplit(train, None, _fraction(ours))


def _made(settings: Target, allow: tuple[str, ...]) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """Returns the class or function of ``settings``, and its parameters by name. Raises ``RequestError``."""
    target: Any = factory(settings.target, allow, object, key=KEY)
    if inspect.isclass(target) and issubclass(target, torch_data.DataLoader | torch_data.Sampler):
        text = (
            f"{settings.target}: is a {target.__name__}, but launcher makes batches, their order and workers"
        )
        raise RequestError((Problem(KEY, f"{text} itself; name the data set"),))
    made = factory(settings.target, allow, UserData, key=KEY)
    return made, inspect.signature(made).parameters


def _with(settings: Target, **arguments: Any) -> Target:
    return settings.model_copy(update=arguments)


def _other(train: Target, arguments: Any) -> Target:
    """Returns the validation target.

    ``arguments`` are a class with its own arguments, or only the arguments that differ for validation.
    """
    if not isinstance(arguments, Mapping):
        text = f"{arguments}: must be the arguments that differ for validation, as {{split: test}}"
        raise _error("val", text)
    if "_target_" in arguments:
        return Target.model_validate(dict(arguments))
    return _with(train, **arguments)


def _fraction(ours: Mapping[str, Any]) -> float:
    fraction = ours.get("val_fraction", FRACTION)
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction < 1:
        text = f"{fraction}: must be a share of the samples, at least 0 and below 1"
        raise _error("val_fraction", text, f"data.val_fraction={FRACTION}")
    return fraction


def open_own(settings: Target, seed: int, allow: tuple[str, ...]) -> Dataset:
    """Opens the data. Raises ``RequestError``, and any error of the user's constructor."""
    splits = halves(settings, allow)
    train = _opened(splits.train, seed, allow, TRAIN)
    if isinstance(train, Source):
        val = _opened(splits.val, seed, allow, VAL) if splits.val is not None else _no_split(settings)
        return Dataset(train, _source(val, splits.val, seed, allow, part=VAL))
    if isinstance(train, torch_data.IterableDataset):
        source = _source(train, splits.train, seed, allow, part=TRAIN)
        return Dataset(source, _beside_stream(settings, splits, seed, allow), reading="in order")

    # a data set with an index
    if splits.val is not None:
        val = _opened(splits.val, seed, allow, VAL)
        return Dataset(
            _source(train, splits.train, seed, allow, part=TRAIN),
            _source(val, splits.val, seed, allow, part=VAL),
            reading="in epochs",
        )
    n = _length(train, settings)
    order = permutation(SPLIT_SEED, 0, n)
    cut = n - round(n * splits.fraction)
    name, mine = settings.target, (seed, TRAIN)
    return Dataset(
        MapStyle(train, np.sort(order[:cut]), name, mine),
        MapStyle(train, np.sort(order[cut:]), name, mine),
        reading="in epochs",
        fraction=splits.fraction,
    )


def opened(settings: Target, seed: int, allow: tuple[str, ...]) -> Dataset:
    """Opens as ``open_own`` does, for planning: errors of the user's code become a ``RequestError``."""
    with owned(KEY, f"{settings.target}: cannot be opened"):
        return open_own(settings, seed, allow)


def _opened(settings: Target, seed: int, allow: tuple[str, ...], part: int) -> Any:
    """Calls the constructor. It draws the same random numbers on all ranks."""
    with global_generators() as put:
        put(seed, part)
        return build(settings, allow, UserData, key=KEY)


def _source(made: Any, settings: Target | None, seed: int, allow: tuple[str, ...], *, part: int) -> Source:
    """Wraps ``made``, which ``settings`` built, as a ``Source``."""
    assert settings is not None
    if isinstance(made, Source):
        return made
    if isinstance(made, torch_data.IterableDataset):
        anew = partial(_opened, settings, seed, allow, part)
        request = f"{settings.model_dump_json(by_alias=True)}, seed {seed}, part {part}"
        return IndexedStream(anew, settings.target, (seed, part), _said_length(made), request)
    return MapStyle(made, np.arange(_length(made, settings)), settings.target, (seed, part))


def _beside_stream(settings: Target, split: TrainValSplit, seed: int, allow: tuple[str, ...]) -> Source:
    """Returns the validation data of a stream, which must have a length; empty if the request names none."""
    if split.val is None:
        if "val_fraction" in settings.arguments:
            text = f"{split.fraction}: {settings.target} is an IterableDataset, which has no indices"
            raise _error("val_fraction", f"{text}; name validation data as data.val", "~data.val_fraction")
        return _none(settings.target)
    val = _source(_opened(split.val, seed, allow, VAL), split.val, seed, allow, part=VAL)
    if len(val) < ENDLESS:
        return val
    if "val" in settings.arguments:
        text = f"{split.val.target}: an IterableDataset without __len__, but validation samples are counted"
        raise _error("val", f"{text}; give it a __len__, or name a Dataset")
    return _none(settings.target)


def _none(name: str) -> Source:
    return MapStyle((), np.arange(0), name, ())


def _said_length(stream: Any) -> int:
    return len(stream) if hasattr(stream, "__len__") else ENDLESS


def _length(dataset: Any, settings: Target) -> int:
    if not hasattr(dataset, "__len__"):
        text = f"{settings.target}: this Dataset has no __len__; its len() must be the number of items"
        raise RequestError((Problem(KEY, text),))
    return len(dataset)


def _no_split(settings: Target) -> Source:
    text = f'{settings.target}: makes a Source but has no parameter split; add one for "train" and "val"'
    raise RequestError((Problem(KEY, text),))


def _error(name: str, text: str, cure: str = "") -> RequestError:
    return RequestError((Problem(f"data.{name}", text, cure),))
