"""Tries a user's optimizer, to find what its step depends on."""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from launcher.errors import RequestError
from launcher.optim.build import keep_rates, scale_lr
from launcher.optim.state_packing import pack, unpack, unpackable
from launcher.plan.values.optimizer import OptimizerTraits
from launcher.user_errors import user_error

Build = Callable[[list[nn.Parameter]], Optimizer]
Shape = tuple[int, ...]
Watch = Callable[[], Callable[[], Sequence[str]]]
"""Returns a function that names the variables of the user's files that have changed since."""

STEPS, RESUMED, MIDDLE = 24, 11, 16
"""Number of steps of a trial, the step at which its state moves to another instance, and one after that."""
SCALES = (1.0, 1e3, 1e-3, 30.0, 0.1)
"""Factors of the gradients, step by step, so that some norms pass a limit and others do not."""
SPIKES = {1: slice(0, 1), 4: slice(-1, None)}
RATES = (1.0, 0.5, 0.25, 1.0)
LONGEST_DIM = {1: 6000, 2: 136, 3: 24}
"""The longest dim by the number of dims, else 8: some classes treat 128 rows or 4096 values differently."""
OURS = frozenset({"params", "param_names", "lr", "initial_lr"})
LATER = (1000, 8_064_000)
"""The counts that a class which counts its steps reaches in the middle of further trials.

They are multiples of most periods in use (8064000 of all up to 16 except 11 and 13, of 20, 50, 64, 100, 128,
200, 250, 500, 1000, 1024, 2000), and the last is beyond most warm-ups.
"""


class UnusableOptimizer(Exception):
    """Raised with the reason if the class cannot train."""


class ForbiddenStep(UnusableOptimizer):
    """Raised if a step does what no step may do, early or late."""


@dataclass(frozen=True)
class TrialCut:
    """Splits every tensor in two along ``dim``: a third and the rest; if ``empty``, all and nothing."""

    dim: int | None = None
    empty: bool = False

    def pieces(self, t: Tensor) -> tuple[Tensor, ...]:
        if self.dim is None or self.dim >= t.ndim:
            return (t,)
        n = t.shape[self.dim]
        fewest = 1 if self.empty else 2
        if n < fewest:
            return (t,)
        first = n if self.empty else -(-n // 3)
        return t.narrow(self.dim, 0, first), t.narrow(self.dim, first, n - first)

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        return pieces[0] if self.dim is None or len(pieces) == 1 else torch.cat([*pieces], self.dim)


@dataclass
class Observation:
    """The result of a run: tensors, the optimizer, and the group values that the optimizer changed itself.

    ``first`` has the keys of its state after one step; ``paths`` has the distance that each value moved,
    summed over all steps. ``variables`` are those of the class and its file that later steps changed.
    """

    params: list[nn.Parameter]
    optimizer: Optimizer
    counters: tuple[str, ...]
    first: tuple[str, ...]
    paths: list[Tensor]
    variables: tuple[str, ...]


def small(shapes: Sequence[Shape]) -> list[Shape]:
    """Returns the largest and the smallest shape of each number of dims, made small; at least two shapes."""
    out: list[Shape] = []
    for dims in sorted({len(s) for s in shapes}, reverse=True):
        alike = sorted((s for s in shapes if len(s) == dims), key=prod)
        longest = LONGEST_DIM.get(dims, 8)
        out += dict.fromkeys(tuple(min(n, longest) for n in s) for s in (alike[-1], alike[0]))
    return out if len(out) > 1 else out * 2


@dataclass
class OptimizerTrial:
    """A trial of ``build`` on the CPU; ``device`` is the device of the run.

    With ``later`` the class counts as if it had taken more steps: it reaches that count after ``MIDDLE``
    steps.
    """

    build: Build
    shapes: list[Shape]
    device: str = "cpu"
    dtype: torch.dtype = torch.float64
    later: int = 0
    watch: Watch = lambda: tuple
    starts: list[Tensor] = field(init=False)
    _gradients: dict[int, list[Tensor]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        self.starts = [torch.randn(s, generator=g, dtype=self.dtype) for s in self.shapes]

    def gradients(self, step: int) -> list[Tensor]:
        """Returns random gradients whose sizes differ between steps, tensors and positions.

        Sizes grow from the beginning of a tensor to its end, and change with steps and tensors, each in its
        own way; now and then the first or the last value is far larger than the rest.
        """
        if step not in self._gradients:
            self._gradients[step] = self._draw(step)
        return self._gradients[step]

    def _draw(self, step: int) -> list[Tensor]:
        g = torch.Generator().manual_seed(1 + step)
        out = []
        for i, s in enumerate(self.shapes):
            size = torch.linspace(0.1, 2.0, prod(s), dtype=self.dtype)
            size = size * SCALES[(step + 2 * i) % len(SCALES)] * (1 + i)
            if spike := SPIKES.get((step + i) % 6):
                size[spike] *= 1e4
            out.append(torch.randn(s, generator=g, dtype=self.dtype) * size.reshape(s))
        return out

    def made(self, tensors: Sequence[Tensor]) -> tuple[list[nn.Parameter], Optimizer]:
        params = [nn.Parameter(t.clone(memory_format=torch.contiguous_format)) for t in tensors]
        try:
            optimizer = self.build(params)
        except RequestError:
            raise
        except Exception as error:
            raise UnusableOptimizer(
                f"it cannot be constructed for this model's parameters: {user_error(error)}"
            ) from error
        if wrong := _unusable(optimizer):
            raise UnusableOptimizer(wrong)
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in params):
            why = "it registers hooks on parameters, which would see gradients of micro batches and ranks"
            raise UnusableOptimizer(f"{why}, not of the batch; use p.grad in its step()")

        # as in a run
        keep_rates(optimizer)
        torchs = type(optimizer).__module__.startswith("torch.optim.")
        for group in optimizer.param_groups:
            if group.get("capturable") and self.device == "cpu" and torchs:
                why = "capturable=True is for graphs of an accelerator, and torch refuses it on CPUs"
                raise UnusableOptimizer(f"{why}; set optim.capturable=false")
            if self.device != "cpu" and group.get("capturable"):
                group["capturable"] = False  # no CPU supports it
        return params, optimizer

    def run(self, cut: TrialCut = TrialCut(), seed: int = 0) -> list[Tensor]:
        """Trains tensors that are split by ``cut``, and returns them joined again."""
        torch.manual_seed(seed)
        lengths = [len(cut.pieces(t)) for t in self.starts]
        params, optimizer = self.made([p for t in self.starts for p in cut.pieces(t)])
        for step in range(STEPS):
            grads = [p for g in self.gradients(step) for p in cut.pieces(g)]
            self.advance(params, optimizer, grads, step)
        trained = iter(params)
        return [cut.joined([next(trained).detach() for _ in range(n)]) for n in lengths]

    def alone(self) -> list[Tensor]:
        """Trains each tensor in an optimizer of its own."""
        torch.manual_seed(0)
        made = [self.made([t]) for t in self.starts]
        for step in range(STEPS):
            for (params, optimizer), g in zip(made, self.gradients(step), strict=True):
                self.advance(params, optimizer, [g], step)
        return [p.detach() for params, _ in made for p in params]

    def observed(self) -> Observation:
        """Trains as ``run`` does, and compares the groups after every step."""
        torch.manual_seed(0)
        params, optimizer = self.made(self.starts)
        before = [_values(g) for g in optimizer.param_groups]
        changed: dict[str, None] = {}
        first: tuple[str, ...] = ()
        paths = [torch.zeros_like(t) for t in self.starts]
        for step in range(STEPS):
            were = [p.detach().clone() for p in params]
            self.advance(params, optimizer, self.gradients(step), step)
            if step == 0:
                first = keys(params, optimizer)
            if step == RESUMED:
                now_changed = self.watch()

            # how far each value moved, and which group values changed
            for path, p, old in zip(paths, params, were, strict=True):
                path += (p.detach() - old).abs()
            for was, group in zip(before, optimizer.param_groups, strict=True):
                now = _values(group)
                changed |= dict.fromkeys(k for k in now if k not in was or not _same(was[k], now[k]))
        outside = tuple(now_changed())
        return Observation(
            params, optimizer, tuple(sorted(changed)), first=first, paths=paths, variables=outside
        )

    def resumed(self, counters: tuple[str, ...]) -> list[Tensor]:
        """Trains as ``run`` does, but moves the state to another instance after ``RESUMED`` steps."""
        torch.manual_seed(0)
        params, optimizer = self.made(self.starts)
        for step in range(STEPS):
            if step == RESUMED:
                after, other = self.made([p.detach() for p in params])
                for p, q in zip(params, after, strict=True):
                    unpack(other, q, {n: t.clone() for n, t in pack(optimizer, p, counters).items()})
                params, optimizer = after, other
            self.advance(params, optimizer, self.gradients(step), step)
        return [p.detach() for p in params]

    def advance(
        self, params: Sequence[nn.Parameter], optimizer: Optimizer, grads: Sequence[Tensor], step: int
    ) -> None:
        """Takes a step; the second one also advances what the optimizer counts, with ``later``."""
        if not self.later or step != 1:
            advance(params, optimizer, grads, step)
            return
        for home, key, by in self._counted(params, optimizer, grads, step):
            home[key] = home[key] + by * (self.later - MIDDLE)

    @staticmethod
    def _counted(
        params: Sequence[nn.Parameter], optimizer: Optimizer, grads: Sequence[Tensor], step: int
    ) -> list[tuple[Any, Any, int]]:
        """Takes a step, and returns the counts: numbers that it has raised, each with by how many.

        A class may count steps, or the updates of all tensors.
        """
        before = {(id(home), key): number for home, key, number in _numbers(optimizer)}
        advance(params, optimizer, grads, step)
        out = []
        for home, key, now in _numbers(optimizer):
            by = now - before.get((id(home), key), now)
            if by in range(1, len(params) + 1):
                out.append((home, key, int(by)))
        return out

    def counts(self) -> bool:
        """Returns true if the class counts its steps; torch's own do nothing else after many of them."""
        params, optimizer = self.made(self.starts)
        if type(optimizer).__module__.startswith("torch.optim."):
            return False
        advance(params, optimizer, self.gradients(0), 0)
        return bool(self._counted(params, optimizer, self.gradients(1), 1))

    def unused(self) -> None:
        """Trains without a gradient of the first tensor, and once without one of the last."""
        params, optimizer = self.made(self.starts)
        for step in range(4):
            grads: list[Tensor | None] = [*self.gradients(step)]
            grads[0] = None
            if step == 1:
                grads[-1] = None
            advance(params, optimizer, grads, step)


def advance(
    params: Sequence[nn.Parameter], optimizer: Optimizer, grads: Sequence[Tensor | None], step: int
) -> None:
    """Takes one step with ``grads``, at the rate that a schedule sets. Raises ``UnusableOptimizer``."""
    try:
        optimizer.zero_grad(set_to_none=True)
    except Exception as error:
        raise UnusableOptimizer(f"its zero_grad(set_to_none=True) fails: {user_error(error)}") from error
    for p, g in zip(params, grads, strict=True):
        p.grad = None if g is None else g.clone(memory_format=torch.contiguous_format)
    scale_lr(optimizer, RATES[step % len(RATES)])

    # the step may change the parameters and its own state, nothing else
    rates, theirs = _rates(optimizer), _members(optimizer)
    try:
        optimizer.step()
    except RequestError:
        raise
    except Exception as error:
        text = f"its step() without a closure fails on dense gradients: {user_error(error)}"
        raise UnusableOptimizer(text) from error
    if theirs != _members(optimizer):
        raise ForbiddenStep("it puts other tensors into its groups in place of the parameters")
    if not all(p.requires_grad for p in params):
        why = "it freezes parameters (requires_grad), but shards and a resumed run would go on training them"
        raise ForbiddenStep(f"{why}; leave out their update instead, or freeze them in the model")
    if rates != _rates(optimizer):
        raise ForbiddenStep("it changes the lr of its groups, which the schedule sets before every step")


def _numbers(optimizer: Optimizer) -> list[tuple[Any, Any, float]]:
    """Returns the numbers that may be counts of steps, each with the dictionary that has it and its key.

    They are in attributes of the object, in its groups and in its state, or one dictionary deeper.
    """
    homes: list[Any] = [vars(optimizer), *optimizer.param_groups, *optimizer.state.values()]
    homes = [home for home in homes if isinstance(home, dict)]
    homes += [v for home in homes for v in home.values() if isinstance(v, dict)]
    out = []
    for home in {id(home): home for home in homes}.values():
        for key, value in home.items():
            number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if type(number) in (int, float) and key not in OURS:
                out.append((home, key, number))
    return out


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(g["lr"]) for g in optimizer.param_groups]


def _members(optimizer: Optimizer) -> list[int]:
    return [id(p) for g in optimizer.param_groups for p in g["params"]]


def keys(params: Sequence[nn.Parameter], optimizer: Optimizer) -> tuple[str, ...]:
    """Returns the keys in the state of any of ``params``, sorted."""
    return tuple(sorted({key.split("/")[0] for p in params for key in pack(optimizer, p)}))


def _unusable(optimizer: Optimizer) -> str:
    """Returns why the optimizer cannot be used, as far as that is known without a step."""
    needed = [
        n for n, p in inspect.signature(optimizer.step).parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]  # fmt: skip
    if needed:
        return (
            f"its step() needs {', '.join(needed)}, but loss and gradients are computed once, before step()"
        )
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        return (
            "it requires train() and eval() calls around validation and saving, which "
            "the launcher does not make"
        )
    if any(not _number(g.get("lr")) for g in optimizer.param_groups):
        return "its groups have no numeric lr, which the schedule sets before every step"
    return ""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _values(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _kept(value) for key, value in group.items() if key not in OURS}


def _kept(value: Any) -> Any:
    """Returns a copy of the value as it is now."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [_kept(v) for v in value] if isinstance(value, list | tuple) else value


def _same(a: Any, b: Any) -> bool:
    """Compares two values from ``_kept``.

    Objects other than numbers and strings are equal if they are identical.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or (type(a) is type(b) and isinstance(a, int | float | str) and a == b)


CLOSE = {torch.float64: 1e-7, torch.float32: 1e-3}
"""The tolerance as a fraction of the distance that a value has moved.

The same sums in another order differ by less, different sums by more.
"""
DTYPES = {"float64": (torch.float64,), "float32": (torch.float64, torch.float32)}
"""The dtypes to try for weights of a dtype: fp64 first, which shows more if the class supports it."""


def probe(
    build: Build,
    name: str,
    shapes: Sequence[Shape],
    device: str = "cpu",
    dtype: str = "float64",
    *,
    watch: Watch = lambda: tuple,
) -> OptimizerTraits:
    """Returns what the class at ``name`` does to tensors of ``shapes``.

    ``build`` makes the optimizer of a list of tensors; ``device`` and ``dtype`` are those of the weights.
    ``watch`` finds state that the class keeps in variables of its file. Raises ``RequestError`` if no such
    class exists, or its arguments do not fit.
    """
    why = ""
    with _isolated():
        for kind in DTYPES[dtype]:
            try:
                return _traits(OptimizerTrial(build, small(shapes), device, kind, watch=watch), name)
            except UnusableOptimizer as error:
                why = str(error)
    return OptimizerTraits(name, broken=why)


@contextmanager
def _isolated() -> Iterator[None]:
    """Isolates the trial: threads, random streams and devices are as before afterwards.

    Ranks are forked later, when no thread may run and no device may be in use.
    """
    threads, stream = torch.get_num_threads(), random.getstate()
    torch.set_num_threads(1)

    try:
        with torch.random.fork_rng(devices=[]), _no_accelerator(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        random.setstate(stream)


def _no_accelerator() -> AbstractContextManager[object]:
    """Hides the accelerator: torch's optimizers query and start it before they take a step on the CPU."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        return nullcontext()
    return mock.patch.object(torch.get_device_module(device), "is_available", return_value=False)


def _traits(trial: OptimizerTrial, name: str) -> OptimizerTraits:
    """Returns what the class does in its first steps and, if it counts them, in later ones."""
    traits = _of(trial, name)
    for count in LATER if trial.counts() else ():
        try:
            later = _of(replace(trial, later=count), name)
        except ForbiddenStep:
            raise
        except UnusableOptimizer:  # it cannot count so far, or has nothing left to change
            continue
        traits = replace(
            traits,
            rows=traits.rows and later.rows,
            elements=traits.elements and later.elements,
            alone=traits.alone and later.alone,
            empty=traits.empty and later.empty,
            draws=max(traits.draws, later.draws, key=DRAWS.index),
            keys=tuple(sorted({*traits.keys, *later.keys})),
            odd=traits.odd or later.odd,
            counters=tuple(sorted({*traits.counters, *later.counters})),
            lost=traits.lost or later.lost,
            copies=max(traits.copies, later.copies),
        )
    return traits


DRAWS = ("", "torch", "elsewhere")


def _of(trial: OptimizerTrial, name: str) -> OptimizerTraits:
    """Returns what the class does in this trial."""
    observation = trial.observed()
    expected = [p.detach() for p in observation.params]
    if _alike(expected, trial.starts) and any(g["initial_lr"] for g in observation.optimizer.param_groups):
        raise UnusableOptimizer("its step() changes no parameter")

    # split along the first dim, then along each other dim
    rows = _same_if_split(trial, observation, TrialCut(0))
    others = range(1, max(map(len, trial.shapes)))

    return OptimizerTraits(
        name,
        rows=rows,
        elements=rows and all(_same_if_split(trial, observation, TrialCut(dim)) for dim in others),
        alone=_close(trial.alone(), observation),
        empty=_same_if_split(trial, observation, TrialCut(0, empty=True)),
        unused=_works(trial),
        draws=_draws(trial, expected),
        first=observation.first,
        keys=keys(observation.params, observation.optimizer),
        odd=_odd(observation),
        counters=observation.counters,
        lost=_lost(trial, observation, expected),
        copies=_copies(observation),
    )


def _same_if_split(trial: OptimizerTrial, seen: Observation, cut: TrialCut) -> bool:
    """Returns true if a split run ends with the same values as the unsplit run."""
    try:
        return _close(trial.run(cut), seen)
    except UnusableOptimizer:
        return False


def _close(actual: Sequence[Tensor], observation: Observation) -> bool:
    """Compares value by value: a large value must not hide a wrong one next to it."""
    for a, p, path in zip(actual, observation.params, observation.paths, strict=True):
        expected = p.detach()
        rounding = 500 * torch.finfo(expected.dtype).eps * (expected.abs() + path)
        near = (a - expected).abs() <= CLOSE[expected.dtype] * path + rounding
        if not (near | (a == expected) | (a.isnan() & expected.isnan())).all():
            return False
    return True


def _alike(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Returns true if the tensors are bit-equal, except for NaN."""
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True))


def _works(trial: OptimizerTrial) -> bool:
    try:
        trial.unused()
    except UnusableOptimizer:
        return False
    return True


def _draws(trial: OptimizerTrial, expected: Sequence[Tensor]) -> Literal["", "torch", "elsewhere"]:
    """Returns "" if the values do not depend on the seed, and "torch" if torch's generator alone decides."""
    if _alike(trial.run(seed=1), expected):
        return ""
    return "torch" if _alike(trial.run(seed=0), expected) else "elsewhere"


def _odd(seen: Observation) -> str:
    """Describes the first state that has neither its parameter's shape nor zero dims."""
    for p in seen.params:
        for key, t in pack(seen.optimizer, p).items():
            if t.ndim and t.shape != p.shape:
                return f"{key} of shape {list(t.shape)} for a parameter of shape {list(p.shape)}"
    return ""


def _lost(trial: OptimizerTrial, observation: Observation, expected: Sequence[Tensor]) -> str:
    known = {id(p) for p in observation.params}
    if any(id(key) not in known for key in observation.optimizer.state):
        return "it keeps state under keys that are not parameters"
    if observation.variables:
        return f"it keeps state in {observation.variables[0]}, outside of the object"
    if texts := [
        text
        for p in observation.params
        for text in unpackable(observation.optimizer, p, observation.counters)
    ]:
        return f"it keeps {texts[0]}, which checkpoints cannot store"
    if _alike(trial.resumed(observation.counters), expected):
        return ""
    return "after its state and groups are restored, it gives different results, so it keeps state elsewhere"


def _copies(observation: Observation) -> int:
    """Returns the number of state tensors of a parameter's size per parameter, on average, rounded."""
    elements = sum(
        t.numel() for p in observation.params for t in pack(observation.optimizer, p).values() if t.ndim
    )
    return round(elements / max(sum(p.numel() for p in observation.params), 1))
