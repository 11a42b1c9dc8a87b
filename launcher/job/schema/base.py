"""The base class of all settings, frozen and strict, and the paths of a run.

A request is made before its run folder has a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic._internal._model_construction import ModelMetaclass  # pydantic's own advice to derive from it

from launcher.errors import Problem, RequestTypeError
from launcher.job.schema.python_errors import request_error

T = TypeVar("T")

LARGEST = 2**63 - 1
"""The largest integer that torch takes, as a seed for one."""
Count = Annotated[int, Field(ge=1, le=LARGEST, strict=True)]
Index = Annotated[int, Field(ge=0, le=LARGEST, strict=True)]
Size = Annotated[int, Field(ge=1, le=1 << 24, strict=True)]
"""The length of a tensor along one dim, or the size of a batch."""
Ranks = Annotated[int, Field(ge=1, le=100_000, strict=True)]
"""A number of ranks or of pieces of work: a plan lists each."""
Many = Annotated[int, Field(ge=1, le=10_000, strict=True)]
"""A number of processes or runs, which are made one by one."""
MOST_LAYERS = 1000
"""The depth of DeepNet, the deepest model that has been published."""


def _few_layers(layers: int) -> int:
    """Refuses more layers than a plan follows in seconds."""
    if layers > MOST_LAYERS:
        raise ValueError(f"should be at most {MOST_LAYERS}: a plan follows each layer")
    return layers


Layers = Annotated[int, Field(ge=1, strict=True), AfterValidator(_few_layers)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(ge=0)]
Flag = Annotated[bool, Field(strict=True)]
Goal = Literal["min", "max"]


def _switched(value: Any) -> Any:
    """``true`` means all defaults, ``false`` means None."""
    if isinstance(value, bool):
        return {} if value else None
    return value


Switch = BeforeValidator(_switched)
"""Marks settings that are a mapping, true for all defaults, or left out."""


class _Loud(ModelMetaclass):
    """Raises our error for wrong settings made in Python; nested settings are validated without this call."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return _together(super().__call__(*args, **kwargs))
        except ValidationError as error:
            raise request_error(error, kwargs) from error


class Settings(BaseModel, metaclass=_Loud):
    """Frozen settings without unknown names. Fields are in the order of reports and ``config.yaml``.

    In Python, a wrong value raises ``RequestError``, a ``ValueError``; a wrong type raises
    ``RequestTypeError``, which is also a ``TypeError``.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), validate_default=True, allow_inf_nan=False
    )

    @classmethod
    def model_validate(cls, obj: Any, **how: Any) -> Self:
        """Makes settings from plain data. Raises the same errors as the constructor."""
        try:
            return _together(super().model_validate(obj, **how))
        except ValidationError as error:
            raise request_error(error, obj) from error

    def unfit(self) -> Iterable[Problem]:
        """Problems with values of the right type that their key does not accept; ``compose`` adds origins."""
        return ()


def _together(made: T) -> T:
    """Returns ``made``, unless it has ``unfit`` values. Raises ``RequestTypeError``."""
    if isinstance(made, Settings) and (problems := tuple(made.unfit())):
        raise RequestTypeError(problems)
    return made


RUN = "run:"
BEST = "best"
"""Stands for the checkpoint that ``checkpoint.best`` keeps; a folder of that name is ./best."""
TAKEN = (
    "certificate.json", "certify", "checkpoints", "command.txt", "config.yaml", "drill", "drill.json",
    "errors", "exports", "graphs", "job.sbatch", "job.yaml", "loggers", "logs", "memory.svg",
    "metrics.csv", "metrics.jsonl", "plan.json", "plan.txt", "profile", "report.html", "request.yaml",
    "sky.yaml", "status.json", "strategy", "tensorboard", "timeline.json", "timeline.svg",
    "transformed", "versions.json",
)  # fmt: skip
"""Names in the run folder that the run and its steps use."""


LONGEST_NAME, LONGEST_PATH = 255, 4000
"""The most bytes of a name, and of a path, that file systems take."""
_UNEXPANDED = re.compile(r"~[\w.-]*(/|$)|\$\w+(/|$)")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def local(path: str) -> str:
    """Returns ``path``; raises ``ValueError`` if it is none that this machine could have as it is written.

    URLs such as ``s3://``, ``~`` and ``$HOME`` would name new folders of these names. A line break would
    begin a line of its own in a batch file.
    """
    if not path.strip():
        raise ValueError("should not be empty")
    if any(ord(c) < 32 or ord(c) == 127 for c in path):
        raise ValueError("should be a path without line breaks and other control characters")
    try:
        longest = max(len(name.encode()) for name in path.split("/"))
    except UnicodeEncodeError:
        raise ValueError("should be a path in UTF-8") from None
    if longest > LONGEST_NAME or len(path) > LONGEST_PATH:
        raise ValueError(f"should be a path of at most {LONGEST_PATH} letters, and names of {LONGEST_NAME}")
    if _UNEXPANDED.match(path):
        why = f"should be a path: {path.partition('/')[0]} is a word of the shell"
        raise ValueError(f"{why}; write the folder that it stands for, or ./{path} for one of this name")
    if (match := _SCHEME.match(path)) is None:
        return path
    if match[1] == "file":
        raise ValueError(f"should be a path: write {path[len(match[0]) :]} without file://")
    raise ValueError(
        f"should be a path of this machine: {match[1]}:// is not read or written; "
        "mount it, or copy the files, and name the folder"
    )


FilePath = Annotated[str, AfterValidator(local)]
"""The type of every setting that names a file or a folder."""


def checked(path: str) -> str:
    """Returns ``path``; raises ``ValueError`` if ``run:`` has an invalid name, or one that the run uses."""
    parts = local(path).removeprefix(RUN).split("/")
    if path.startswith(RUN):
        if any(not part or part.startswith(".") for part in parts):
            raise ValueError(f"should be {RUN}NAME, a name in the run folder")
        if parts[0] in TAKEN:
            raise ValueError(f"the run itself writes {parts[0]} in its folder")
    return path


def place(path: str, run: str) -> str:
    """The path of ``path`` if the run folder is ``run``.

    >>> place("run:norms", "runs/digits/0001"), place("/data/norms", "runs/digits/0001")
    ('runs/digits/0001/norms', '/data/norms')
    """
    return f"{run}/{path.removeprefix(RUN)}" if path.startswith(RUN) else path
