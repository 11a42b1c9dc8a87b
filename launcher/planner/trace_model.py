"""Reads and traces a model, with a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem, RequestError, refuse
from launcher.job.schema.components import foreign
from launcher.job.schema.job import Job
from launcher.job.schema.models import HuggingFace
from launcher.job.schema.user_class import Target
from launcher.plan.cut.sequence_chunks import SequencePieces, grain
from launcher.plan.plan import Plan
from launcher.plan.refusals import evaluation
from launcher.plan.refusals import model as model_refusals
from launcher.plan.resolve import compile, recompute
from launcher.plan.resolve.checkpoint import misnamed
from launcher.plan.resolve.stage_config import StageRequest
from launcher.plan.tensor_parallel import strategies_of_layouts
from launcher.plan.tensor_parallel.module_strategies import Operator, resolve, splits
from launcher.plan.tensor_parallel.sharded_operators import TensorParallelPlan, uncalled
from launcher.plan.values.compilation import STAGE, Compilation
from launcher.plan.values.model_graph import Graph, ModelStructure
from launcher.plan.values.precision import DTYPE
from launcher.plan.values.recomputed_module import Recomputed
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.planner import hugging_face_checks, user_classes
from launcher.planner.device_kernels import planned_kind
from launcher.planner.loaded_param_layouts import laid_out
from launcher.planner.rank_variable_reads import environment_reads
from launcher.untrusted.bounded import TooLong, watched
from launcher.user_errors import first_line, owned

if TYPE_CHECKING:
    from torch import nn

    from launcher.parallel.deferred_init.fill import InitialTensors
    from launcher.parallel.trace.clock_and_host_reads import OutsideReads
    from launcher.parallel.trace.identity_of_inputs import InputIdentity


@dataclass(frozen=True)
class ModelRead:
    """A model without memory, which ``make`` returns.

    ``lost``: why its weights cannot be initialized without building the full model. ``marks``: Python
    attributes of its tensors, each with the names of the tensors that have it. ``initial``: the values that
    the constructor gives its tensors.

    The other fields are caches, filled when a plan needs them. ``flows``: traced operators; the key has the
    operators, tp and the inputs. The next three have the inputs as key. ``mixing``: what depends on other
    samples of the batch, ``None`` if this was not tried. ``outside``: what the output depends on outside of
    the model. ``identity``: modules that depend on more than the numbers of their inputs. ``late_world``:
    what the model read of its process when these three were computed.
    """

    make: Callable[[], nn.Module]
    skeleton: ModelStructure
    lost: str
    marks: dict[str, tuple[str, ...]]
    flows: dict[tuple[tuple[Operator, ...], int, tuple[TensorSpec, ...]], TensorParallelPlan] = field(
        default_factory=dict
    )
    initial: InitialTensors | None = None
    mixing: dict[tuple[TensorSpec, ...], str | None] = field(default_factory=dict)
    outside: dict[tuple[TensorSpec, ...], OutsideReads] = field(default_factory=dict)
    identity: dict[tuple[TensorSpec, ...], InputIdentity] = field(default_factory=dict)
    late_world: dict[str, None] = field(default_factory=dict)

    @cached_property
    def module(self) -> nn.Module:
        """The same module on each access; it is made on the first."""
        return self.make()


def read(job: Job, build: Callable[[], nn.Module]) -> ModelRead:
    """Builds the model without memory. Raises ``RequestError`` for models that no layout can train."""
    from launcher.parallel.deferred_init import fill
    from launcher.parallel.deferred_init.constructor import build_in_memory, record
    from launcher.parallel.dispatch.modes import default_dtype
    from launcher.parallel.model_state.hooks import hooked_for_all
    from launcher.parallel.model_state.module_globals import GlobalsSnapshot, put_back
    from launcher.parallel.model_state.references import held_ties
    from launcher.parallel.trace import model_structure, tensor_specs
    from launcher.parallel.trace.torch_distributed_reads import world_reads

    own_files = user_classes.files(job)
    first = GlobalsSnapshot(own_files)

    def build_again() -> nn.Module:
        """Constructs the model with the Python counters of the first construction, as ranks do."""
        with put_back(own_files):
            first.restore()
            return build()

    dtype = tensor_specs.dtype_of(DTYPE[job.train.precision])
    world: dict[str, None] = {}
    with default_dtype(dtype), hooked_for_all() as for_all:
        reads = world_reads(world.setdefault)
        with _owned(job.model, "model"), _limited(job.model), environment_reads(), reads:
            model, tape = record(build, job.seed)
        lost = tape.why
        if foreign(job.model):
            from launcher.parallel.deferred_init.compare_builds import differing
            from launcher.parallel.deferred_init.uninitialized import problems

            refuse(problems(build_again, model, tape))
            if not lost and job.parallel.deferred_init:
                lost = differing(build_again, model, tape)
        known = model_structure.skeleton(model)
    names = {n: t.detach() for n, t in fill.tensors(model).items()}
    in_memory = (lambda: fill.tensors(build_in_memory(build_again, job.seed))) if lost else None
    initial = fill.InitialTensors(tape, names, in_memory)
    traits = replace(
        known.traits,
        shared=tape.shared,
        computed=tape.computed,
        foreign_memory=tape.foreign_memory,
        global_hooks=tuple(for_all),
        world=tuple(world),
        references=held_ties(model),
    )
    known = replace(known, traits=traits)
    refuse((*model_refusals.unfit(known), *misnamed(known, job.launch.device)))
    known = hugging_face_checks.with_stored(job, known)
    why = lost if job.parallel.deferred_init else ""
    return ModelRead(lambda: model, known, why, tape.marks, initial=initial)


class ReadOnce:
    """Reads a model once for several plans.

    Models of other packages and of the user are read once only if ``own`` is true, else for each plan.
    """

    def __init__(self, own: bool = False) -> None:
        self._own = own
        self._first: ModelRead | None = None

    def __call__(self, job: Job, build: Callable[[], nn.Module]) -> ModelRead:
        """Like ``read``, for jobs that differ only in ``parallel``."""
        from launcher.parallel.model_state.deep_copy import copied

        if foreign(job.model) and not self._own:
            return read(job, build)
        if self._first is None:
            self._first = read(job, build)
        first = self._first
        return replace(first, make=lambda: copied(first.module))


def _owned(settings: object, section: str) -> AbstractContextManager[None]:
    """Turns exceptions of the user's model class into a ``RequestError`` with their message."""
    if isinstance(settings, HuggingFace):
        return owned(f"{section}.path", f"{settings.path}: cannot be built", first_line)
    if not isinstance(settings, Target):
        return nullcontext()
    return owned(f"{section}._target_", f"{settings.target}: cannot be built")


BUILD_S, BUILD_BYTES, BUILD_MODULES = 60.0, 512 << 20, 20_000
"""The CPU time, the memory and the modules that a model of a stranger's folder may take to be read.

Without its weights, the largest published model takes 3 s, 100 MB and 2000 modules.
"""


@contextmanager
def _limited(settings: object) -> Iterator[None]:
    """Refuses a ``config.json`` whose model is endless: nobody knows all keys by which a model grows."""
    if not isinstance(settings, HuggingFace):
        yield
        return
    from torch.nn.modules.module import register_module_module_registration_hook

    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1
        if count > BUILD_MODULES:
            raise TooLong(f"more than {BUILD_MODULES} modules")

    hook = register_module_module_registration_hook(counted)
    try:
        with watched(BUILD_S, BUILD_BYTES):
            yield
    except TooLong as error:
        text = f"{settings.path}: its config.json describes a model that takes {error}, without its weights"
        raise RequestError((Problem("model.path", text),)) from None
    finally:
        hook.remove()


def breaks(
    made: Plan, compilation: Compilation, model: ModelRead, specs: tuple[TensorSpec, ...]
) -> dict[str, str]:
    """Returns what breaks the graph of each compiled module.

    For compiled stages, this includes breaks between their modules.
    """
    from launcher.parallel.dispatch.modes import default_dtype
    from launcher.parallel.graph_breaks import graph_breaks
    from launcher.parallel.model_state.references import leaving, unmarked
    from launcher.parallel.trace import tensor_specs

    modules = compilation.modules
    if modules == (STAGE,) and made.leaves is not None:
        modules = tuple(m for s in made.stages for m in s.modules)
    dtype = tensor_specs.dtype_of(DTYPE[made.precision])
    with default_dtype(dtype), unmarked(model.marks), leaving(model.module):
        xs = tensor_specs.meta(specs)
        return graph_breaks(model.module, compilation, modules, xs, tp=made.sizes.grid["tp"])


def keeps_messages() -> bool:
    """Returns true if torch keeps messages between stages until the step ends, as it did before 2.15."""
    import torch

    return torch.__version__ < "2.15"  # torch compares versions here, not strings


@dataclass(frozen=True)
class TracedForward:
    """One forward as a rank of ``tp`` runs it; ``pieces``: the forwards of sequence chunks, if any."""

    operators: TensorParallelPlan
    recomputed: tuple[Recomputed, ...]
    graph: Graph
    pieces: SequencePieces | None = None


def _with_recomputation(
    operators: TensorParallelPlan,
    recomputed: tuple[Recomputed, ...],
    graph: Graph,
    skeleton: ModelStructure,
    tried: dict[str, str],
) -> TracedForward:
    """Returns a traced forward with the recomputation that ``graph`` permits. Raises ``RequestError``.

    ``tried``: the modules that could not be recomputed on a few samples, and why.
    """
    recomputed = recompute.with_restored(recomputed, graph)
    wrong = tried | recompute.not_repeatable(recomputed, graph, skeleton)
    refuse(recompute.problems(recomputed, wrong, graph, skeleton))
    together = dict.fromkeys((*graph.recomputed, *(r.module for r in recomputed)))
    return TracedForward(operators, recomputed, replace(graph, recomputed=tuple(together)))


def _operators(
    job: Job, skeleton: ModelStructure, request: StageRequest
) -> tuple[tuple[Operator, ...], list[Problem]]:
    """Returns the operators that the request shards, and those that follow from parameter layouts."""
    grid = request.sizes.grid
    if request.sizes.engine.over_matrices:
        return (), []
    file = laid_out(job, skeleton, grid.size)
    if file is None:
        return resolve(job.parallel.operators, skeleton, grid, request.strategies)
    return strategies_of_layouts.resolved(job.parallel.operators, skeleton, grid, file, request.strategies)


def follow(
    job: Job,
    request: StageRequest,
    built: ModelRead,
    *,
    uncut: tuple[str, ...] | None,
    specs: tuple[TensorSpec, ...],
) -> TracedForward:
    """Traces the operators and the forward of one rank of ``tp``; the model keeps that rank's shards."""
    from launcher.parallel import recompute as recomputation
    from launcher.parallel import sequence_chunks
    from launcher.parallel.model_state.deep_copy import copied
    from launcher.parallel.tensor_parallel import apply, propagate
    from launcher.parallel.tensor_parallel.collectives import Axis
    from launcher.parallel.trace import build_graph

    model, skeleton = built.module, built.skeleton
    tp, count = request.sizes.grid["tp"], request.sizes.pieces

    # resolve the request against this model
    operators, problems = _operators(job, skeleton, request)
    problems = problems or uncalled(operators, uncut)
    recomputed, wrong = recompute.resolve(job.parallel.recompute, skeleton, uncut)
    problems += wrong
    if problems := problems or (sequence_chunks.problems(model, specs, count) if count > 1 else []):
        raise RequestError(tuple(problems))

    # run the traced forward on values before operators are cut; refuse later, as the trace may say why better
    tried = uncut is not None and isinstance(job.model, Target)
    mistraced = _mistraced(model, frozenset(uncut or ()), specs) if tried else []
    not_repeated = _not_repeated(job, model, recomputed, specs)

    # shard the model as for one rank of tp; sequence chunks are traced on an unsharded copy
    bare = copied(model) if count > 1 else model
    out = built.flows.get((operators, tp, specs)) or propagate.follow(model, operators, tp, specs)
    built.flows[operators, tp, specs] = out
    apply.cut(model, splits([s.operator for s in out.spreads]), Axis(tp, planned=True))
    axis = Axis(tp, planned=True)
    apply.install(model, out.spreads, axis)
    recomputation.install(model, recomputed, axis)

    # trace one forward of full sequences
    leaves = None if uncut is None else frozenset(uncut)
    ours = not foreign(job.model)
    if leaves is None:
        graph = build_graph.single_node_graph(model, specs, ours=ours)
    else:
        graph = build_graph.graph(model, leaves, specs, ours=ours)
    refuse(mistraced)
    refuse(compile.in_place_problems(job, axis.overwritten))
    if isinstance(job.loss, Target) and isinstance(job.model, Target):
        more = build_graph.one_sample_more(model, leaves, specs)
        refuse([*evaluation.shared(graph, more, request.sizes.micro_batch)])
    if leaves is None or count == 1:
        return _with_recomputation(out, recomputed, graph, skeleton, not_repeated)

    # trace one forward of each piece
    split = job.parallel.pipeline.seq_split
    lengths = sequence_chunks.cut(model, leaves, specs, count, split=split, step=grain(out, tp))
    out = propagate.flow_of_chunks(bare, out, tp, specs, lengths=lengths)
    forward = _with_recomputation(out, recomputed, graph, skeleton, not_repeated)
    return replace(forward, pieces=sequence_chunks.graphs(model, leaves, specs, graph, lengths=lengths))


def _mistraced(model: nn.Module, leaves: frozenset[str], specs: tuple[TensorSpec, ...]) -> list[Problem]:
    """Returns a problem if the traced code between the modules does something else than the model's own."""
    from launcher.parallel.forward_comparison import traced_difference
    from launcher.parallel.trace.tensor_specs import meta

    what = traced_difference(model, leaves, meta(specs))
    if not what:
        return []
    text = f"the code between the named modules of {type(model).__name__} {what}"
    cure = "name a larger module in stage_config, so that this code runs inside it"
    return [Problem("parallel.pipeline.stage_config", f"{text}; {cure}")]


def _not_repeated(
    job: Job, model: nn.Module, recomputed: tuple[Recomputed, ...], specs: tuple[TensorSpec, ...]
) -> dict[str, str]:
    """Returns the modules that cannot be recomputed on a few samples, and why."""
    if not recomputed or not isinstance(job.model, Target):
        return {}
    from launcher.parallel.forward_comparison import not_repeatable
    from launcher.parallel.trace.tensor_specs import meta

    return not_repeatable(model, recomputed, meta(specs))


class Traces:
    """Caches what many plans have in common; the requests may differ in anything.

    ``own``: a user's class is also read only once. ``keeps_messages``: as in ``TracedModel``, to plan for
    another torch than the installed one. ``shallow``: equal layers of a deep model are extrapolated.
    """

    def __init__(self, own: bool = True, keeps_messages: bool | None = None, shallow: bool = False) -> None:
        self._own = own
        self.shallow = shallow
        self.keeps_messages = keeps_messages
        self._reads: dict[str, ReadOnce] = {}
        self._followed: dict[Any, TracedForward] = {}
        self._rated: dict[str, Problem | None] = {}

    def rated(self, key: Any, rate: Callable[[], Problem | None]) -> Problem | None:
        """Returns the problem that ``rate`` reports; ``key``: everything that it depends on."""
        key = repr(key)
        if key not in self._rated:
            self._rated[key] = rate()
        return self._rated[key]

    def read(self, job: Job, build: Callable[[], nn.Module]) -> ModelRead:
        """Like ``trace_model.read``."""
        key = repr((job.model, job.seed, job.train.precision, job.parallel.deferred_init))
        return self._reads.setdefault(key, ReadOnce(self._own))(job, build)

    def followed(self, key: Any, job: Job, follow: Callable[[], TracedForward]) -> TracedForward:
        """Returns the result of ``follow``.

        ``key``: what it depends on besides the settings that are added here. Full compiler graphs are not
        cached: they need the traced model itself.
        """
        if job.train.compile is not None:
            return follow()
        model_settings = (
            job.model,
            job.seed,
            job.train.precision,
            job.parallel.operators,
            job.parallel.recompute,
        )
        key = (model_settings, job.parallel.param_strategy, job.parallel.pipeline.seq_split, key)
        key = repr((*key, planned_kind()))
        if key not in self._followed:
            self._followed[key] = follow()
        return self._followed[key]
