"""Peak bytes of a forward and of a backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointError

from launcher.errors import RequestError
from launcher.parallel.cost.fusion_meter import FusionMeter
from launcher.parallel.cost.kernels import FusedKernels, OperationsMeter, flops_of
from launcher.parallel.cost.saved_hooks import AGAIN, PLAIN, SavedHooks, Sent
from launcher.parallel.dispatch import meta_shapes
from launcher.parallel.dispatch.modes import Dispatch, default_dtype, sparse_parts, tree_leaves, tree_map_only
from launcher.parallel.model_state.deep_copy import copied, on_meta
from launcher.parallel.model_state.module_globals import files_of, variables
from launcher.parallel.model_state.python_state import PythonState, changed, snapshot
from launcher.parallel.split_backward import FORMS, Deferral, MatmulCall
from launcher.plan.values.model_graph import Backward, Compiled
from launcher.plan.values.operations import Operations, Product, total


class MemoryMeter(Dispatch):
    """Records in ``peak`` the most bytes in use at the end of any operation while entered.

    Counts every storage once, at its current size, because FSDP2 empties and refills storages without an
    operation. Memory that an operation needs inside is not counted; for CUDA use the allocator's statistics.
    ``before`` has the tensors that exist already.
    """

    kind = "real"
    run: Callable[[Any, Any, Any], Any] = staticmethod(lambda func, args, kwargs: func(*args, **kwargs))

    def __init__(self, before: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        for t in before:
            self._see(t)

    @property
    def now(self) -> int:
        """Bytes in use now."""
        storages = [ref() for ref in list(self._alive.values())]
        return sum(s.nbytes() for s in storages if s is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self.run(func, args, kwargs or {})
        for t in tree_leaves((args, kwargs, out)):
            if isinstance(t, torch.Tensor):
                self._see(t)
        if self.now > self.peak:
            self.settle()
            self.peak = max(self.peak, self.now)
        return out

    def settle(self) -> None:
        """Called before a new peak counts, so that a subclass can wait until other threads free memory."""

    def _see(self, t: torch.Tensor) -> None:
        local = getattr(t, "_local_tensor", t)
        if local.layout is not torch.strided:
            for part in sparse_parts(local):
                self._see(part)
            return
        storage = local.untyped_storage()
        if (storage.device.type == "meta") == (self.kind == "meta"):
            self._track(storage)

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._alive or self._alive[key]() is not storage:
            self._alive[key] = weakref.ref(storage, partial(self._gone, key))

    def _gone(self, key: int, ref: Any) -> None:
        self._alive.pop(key, None)


class MetaMeter(MemoryMeter):
    """Counts meta tensors, except gradients of ``params``, which the plan counts separately.

    A storage on meta changes its size in operations only, so sizes are added up as operations show them.
    ``summed`` is the peak with these gradients included.
    """

    kind = "meta"
    run = staticmethod(meta_shapes.run_cached)

    def __init__(self, params: Iterable[nn.Parameter] = (), before: Iterable[torch.Tensor] = ()) -> None:
        self.params = tuple(params)
        self.summed = 0
        self._sizes: dict[int, int] = {}
        self._bytes = 0
        super().__init__(before)

    @property
    def now(self) -> int:
        grads = sum(p.grad.untyped_storage().nbytes() for p in self.params if p.grad is not None)
        return self._bytes - grads

    def restart(self) -> None:
        """Measures new peaks from here."""
        self.peak = self.now
        self.summed = self._bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.summed = max(self.summed, self._bytes)
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        super()._track(storage)
        key, size = storage._cdata, storage.nbytes()
        self._bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size

    def _gone(self, key: int, ref: Any) -> None:
        if self._alive.get(key) is ref:
            del self._alive[key]
            self._bytes -= self._sizes.pop(key)


class _WorkMeter(MetaMeter):
    """Counts, besides bytes, the operations and what a compiler saves by fusing them.

    ``generators`` has the addresses of the random generators that operations draw from: their state does not
    advance on meta.
    """

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params)
        self.operations = OperationsMeter()
        self.fusion = FusionMeter(params)
        self.entered = False
        self.generators: set[int] = set()

    def keep(self, t: torch.Tensor) -> torch.Tensor:
        """Notes a tensor that autograd saves, for saved-tensor hooks."""
        return self.fusion.keep(t) if self.entered else t

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.generators |= {
            _address(a) for a in (*args, *(kwargs or {}).values()) if isinstance(a, torch.Generator)
        }
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.operations.see(func, args, kwargs or {}, out)
        self.fusion.see(func, args, kwargs or {}, out)
        return out


class _Running(ExitStack):
    """Enters the modes in which the planner runs a forward on meta."""

    def __enter__(self) -> Self:
        super().__enter__()
        for mode in (default_dtype(torch.float32), torch.device("meta"), FusedKernels()):
            self.enter_context(mode)
        return self


@dataclass(frozen=True)
class Measured:
    """The measured backward, and the operations of the forward before it."""

    backward: Backward
    forward: Operations


class BackwardMeter:
    """Measures the backward of modules; equal modules are measured only once."""

    def __init__(self) -> None:
        self._known: dict[Any, Measured | None] = {}

    def measure(self, module: nn.Module, args: Any, kwargs: Any) -> Measured | None:
        """Measures the backward of a call with ``args`` and ``kwargs``; ``None`` if it cannot be run."""
        arguments = tree_leaves((args, kwargs))
        regions = (m.forward.recomputed for m in _regions(module))
        key = (
            type(module),
            _text(module),
            tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in module.named_parameters()),
            tuple((r.keep, r.comm) for r in regions),
            tuple(map(_kind, arguments)),
        )
        known = self._known.get(key)
        if key not in self._known:
            known = self._known[key] = _measure(module, args, kwargs)
        elif known is not None and (known.backward.twice or known.backward.unlike):
            return _measure(module, args, kwargs)  # equal modules may differ in what they do, and are named
        return known


def _text(module: nn.Module) -> object:
    """Returns the text of a module, which equal modules share, or the module itself if ``str`` fails."""
    try:
        return str(module)
    except Exception:
        return module


def _kind(value: Any) -> Any:
    """Returns everything in an argument that the cost of a call depends on."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    values = value.values() if value.is_nested else value  # the sizes of a nested tensor differ by call
    return value.is_nested, values.shape, value.dtype


def _regions(module: nn.Module) -> list[Any]:
    """Returns the submodules that are recomputed."""
    return [m for m in module.modules() if hasattr(m.forward, "recomputed")]


@contextmanager
def _counting(again: _RecomputedFlops, params: list[nn.Parameter]) -> Iterator[None]:
    """Reports recomputed forwards to ``again``; afterwards ``params`` have no gradients."""
    before = AGAIN.set(again.around)
    try:
        yield
    finally:
        AGAIN.reset(before)
        for p in params:
            p.grad = None


def _outputs_with_grad(made: Any) -> list[torch.Tensor]:
    """Returns the outputs of a forward that a backward starts from; the rest can be freed."""
    return [t for t in tree_leaves(made) if isinstance(t, torch.Tensor) and t.requires_grad]


def _measure(module: nn.Module, args: Any, kwargs: Any) -> Measured | None:
    if any(not t.is_meta for t in (*module.parameters(), *module.buffers())):
        module = on_meta(module)  # it is in memory, because its model reads values
    params = [p for p in module.parameters() if p.requires_grad]
    regions = _regions(module)
    twice: tuple[tuple[str, str], ...] = ()

    # outside the modes that trace the forward; the meter sees only what this call allocates
    meter = _WorkMeter(params)
    with _disable_current_modes(), SavedHooks(meter.keep), _Running():
        deferred = _Deferred()
        again = _RecomputedFlops()
        try:
            args, kwargs = tree_map_only(
                torch.Tensor, _leaf, (args, kwargs)
            )  # inside try: some classes of tensors do not exist on meta
            with _counting(again, params):
                saved_bytes = _saved(module, args, kwargs) if regions else 0
                state = [(m, snapshot(m), _around(m), _generator_states(m)) for m in regions]

                # the forward, and the state that it changes although it is recomputed
                with meter, torch.enable_grad():
                    meter.entered = True
                    with deferred.running(tree_leaves((args, kwargs))):
                        out = _outputs_with_grad(module(*args, **kwargs))
                    twice = tuple(n for s in state for n in _changed(*s, meter.generators))

                    # the backward, measured from what the forward keeps
                    before, ended, fused = meter.now, meter.operations.mark(), meter.fusion.mark()
                    made_again = 0 if regions else meter.fusion.made_again(fused, out)
                    meter.restart()
                    torch.autograd.backward(out, [torch.empty_like(t) for t in out])
        except CheckpointError:
            unlike = tuple(m.forward.recomputed.module for m in regions)
            return Measured(Backward(twice=twice, unlike=unlike), Operations())
        except RequestError:
            raise
        except Exception:
            # it reads values, has no backward, needs state that another module leaves, or draws in a way that
            # meta tensors do not support
            twice = twice or tuple(n for m in regions for n in _drawn_from(m, meter.generators))
            seen = Backward(twice=twice) if twice or not regions else _again_in_memory(module, args, kwargs)
            return Measured(seen, Operations()) if seen.twice or seen.unlike else None

    everything, later = meter.operations.since(0), meter.operations.since(ended)
    seen = Backward(
        work=max(0, meter.peak - before),
        summed=max(0, meter.summed - before),
        kept=deferred.kept,
        deferred=total(deferred.products),
        again=again.flops,
        spared=saved_bytes - before if regions else 0,
        sent=tuple(again.sent),
        twice=twice,
        operations=later,
        compiled=Compiled(meter.fusion.spared(0, fused), meter.fusion.spared(fused), made_again),
    )
    return Measured(seen, everything - later)


FEW = 1 << 24
"""A module with more elements than this is not run in memory."""


def _again_in_memory(module: nn.Module, args: Any, kwargs: Any) -> Backward:
    """Returns how the recomputation of a module that reads values differs from its forward.

    It runs with zero weights and random inputs. If it fails with them, no difference is reported.
    """
    if sum(t.numel() for t in (*module.parameters(), *module.buffers())) > FEW:
        return Backward()
    twice: tuple[tuple[str, str], ...] = ()
    stream = torch.Generator().manual_seed(0)

    def value(t: torch.Tensor) -> torch.Tensor:
        if not t.is_floating_point():
            return torch.zeros(t.shape, dtype=t.dtype)
        return torch.randn(t.shape, generator=stream).to(t.dtype).requires_grad_()

    module = copied(module).to_empty(device="cpu")
    regions, params = _regions(module), [p for p in module.parameters() if p.requires_grad]
    with ExitStack() as around, suppress(Exception):  # the user's code may raise anything for drawn values
        for each in (torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad()):
            around.enter_context(each)
        for mode in (default_dtype(torch.float32), _counting(_RecomputedFlops(), params)):
            around.enter_context(mode)
        with torch.no_grad():
            for t in (*module.parameters(), *module.buffers()):
                t.zero_()
        args, kwargs = tree_map_only(torch.Tensor, value, (args, kwargs))
        module(*args, **kwargs)  # to fill caches
        state = [(m, snapshot(m), _around(m), _generator_states(m)) for m in regions]
        out = _outputs_with_grad(module(*args, **kwargs))
        twice = tuple(n for s in state for n in _changed(*s, ()))
        try:
            torch.autograd.backward(out, [torch.zeros_like(t) for t in out])
        except CheckpointError:
            return Backward(twice=twice, unlike=tuple(m.forward.recomputed.module for m in regions))
    return Backward(twice=twice)


def _around(region: nn.Module) -> PythonState:
    """Returns the state around a module: variables of its files, and of the process."""
    return variables(files_of(region))


def _changed(
    region: nn.Module,
    before: PythonState,
    around: PythonState,
    streams: dict[str, bytes],
    generators: Container[int],
) -> Iterator[tuple[str, str]]:
    """Yields the name of ``region`` with each attribute, variable or generator that its forward changed."""
    forward: Any = region.forward
    name = forward.recomputed.module
    yield from _drawn_from(region, generators)
    yield from ((name, f"{name}.{attribute}") for attribute, _ in changed(before, snapshot(region)))
    yield from ((name, variable) for variable, _ in changed(around, _around(region)))
    yield from (
        (name, f"{name}.{n}") for n, state in _generator_states(region).items() if state != streams.get(n)
    )


def _address(generator: Any) -> int:
    """Returns the address of a generator in torch; each call of an operation wraps it in another object."""
    address: int = generator._cdata
    return address


def _drawn_from(region: nn.Module, generators: Container[int]) -> Iterator[tuple[str, str]]:
    """Yields the name of ``region`` with each of its generators whose address is among ``generators``."""
    forward: Any = region.forward
    top = forward.recomputed.module
    for path, m in region.named_modules(prefix=top):
        for name, value in vars(m).items():
            if isinstance(value, torch.Generator) and _address(value) in generators:
                yield top, f"{path}.{name}"


def _saved(module: nn.Module, args: Any, kwargs: Any) -> int:
    """Returns the bytes in use after a forward that keeps all that its backward needs."""
    meter = MetaMeter()
    token = PLAIN.set(True)
    try:
        with meter, torch.enable_grad():
            made = [t for t in tree_leaves(module(*args, **kwargs)) if isinstance(t, torch.Tensor)]
            out = [t for t in made if t.requires_grad]
            del made
            return meter.now if out else 0
    finally:
        PLAIN.reset(token)


class _RecomputedFlops(Dispatch):
    """Counts the flops of recomputed forwards."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.sent: Sent = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, out)
        return out

    @contextmanager
    def around(self, sent: Callable[[], Sent]) -> Iterator[None]:
        """Counts while a module is recomputed; afterwards ``sent`` returns what the module sent over tp."""
        try:
            with self, torch.device("meta"), FusedKernels():  # torch left these modes for the backward
                yield
        finally:
            self.sent += sent()


def _generator_states(module: nn.Module) -> dict[str, bytes]:
    """Returns the states of the random generators among the attributes of modules."""
    return {
        f"{path}.{name}".lstrip("."): value.get_state().numpy().tobytes()
        for path, m in module.named_modules()
        for name, value in vars(m).items()
        if isinstance(value, torch.Generator)
    }


class _Deferred(Deferral):
    """Runs everything unchanged, and counts what a split backward would defer.

    The gradient of an output is as large as the output.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Operations] = []
        self.outputs = 0
        self.taken: dict[int, int] = {}

    @property
    def kept(self) -> int:
        """The bytes of inputs, each storage once, and of gradients of outputs."""
        return sum(self.taken.values()) + self.outputs

    def apply(self, call: MatmulCall, leaf: nn.Parameter, turned: bool) -> Any:
        out = call.run(call.x, call.weight, call.bias)
        storage = call.x.untyped_storage()
        width = call.x.shape[-1]
        made = Product(out.shape[-1], width, call.x.numel() // max(width, 1), 1, call.x.dtype.itemsize)
        self.products.append(Operations(((made, 1),), kernels=1))
        self.outputs += out.nbytes
        self.taken[storage._cdata] = 0 if isinstance(call.x, nn.Parameter) else storage.nbytes()
        return out


def product(func: Any, args: Any, kwargs: Any) -> Backward:
    """Returns the cost of a function that the glue calls with meta tensors."""
    if func not in FORMS:
        return Backward()
    seen = _Deferred()
    with _disable_current_modes(), torch.enable_grad(), seen.running(tree_leaves((args, kwargs))):
        func(*args, **kwargs)
    return Backward(kept=seen.kept, deferred=total(seen.products))


def _leaf(t: torch.Tensor) -> torch.Tensor:
    if t.is_inference():
        t = t.clone()
    return t.detach().to("meta").requires_grad_(t.is_floating_point())
