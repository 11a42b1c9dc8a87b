"""Makes a plan from a request: builds the model without memory, reads it, and lets ``plan`` decide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from launcher.data.checks import check
from launcher.data.cifar10_fallback import resolve as resolve_data
from launcher.data.cifar10_fallback import with_data_read
from launcher.data.spec import check_fit, classes, vocab
from launcher.data.tokens.vocab_range_check import partly_checked
from launcher.data.vocab_size import with_vocabulary
from launcher.errors import Problem, RequestError, refuse
from launcher.job.schema.components import foreign
from launcher.job.schema.data import Chat, Tokens
from launcher.job.schema.job import Job
from launcher.job.schema.parallel import Parallel, Pipeline
from launcher.job.schema.user_class import Target
from launcher.models.defaults import resolve as resolve_model
from launcher.optional import matrices
from launcher.plan import drill, outputs_and_targets, recompute_auto
from launcher.plan.cut.traced_model import TracedModel
from launcher.plan.plan import Plan, ask, leaves, plan
from launcher.plan.refusals import optimizer
from launcher.plan.resolve import compile, dataset_strategy, device_matrix, recompute, stage_config
from launcher.plan.resolve.device_matrix import over_slices
from launcher.plan.resolve.stage_config import StageRequest
from launcher.plan.sizes import Sizes
from launcher.plan.values.model_graph import ModelStructure
from launcher.plan.values.module_names import STAGE_CONFIG, listed
from launcher.plan.values.note import Note
from launcher.plan.values.optimizer import OptimizerTraits
from launcher.plan.values.precision import COMPUTE, DTYPE
from launcher.plan.values.resolved import EngineChoice, Resolved
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.planner import (
    device_kernels,
    extrapolated_layers,
    hugging_face_checks,
    hugging_face_operators,
    hugging_face_stale_config,
    router_losses,
    train_steps,
    user_classes,
    user_data,
)
from launcher.planner.loaded_param_layouts import check_stored_layouts, with_threshold
from launcher.planner.rank_variable_reads import same_on_all_ranks
from launcher.planner.recompute_trial_plans import drawn_graph, solved
from launcher.planner.request_files import inlined
from launcher.planner.trace_model import (
    ModelRead,
    TracedForward,
    Traces,
    breaks,
    follow,
    keeps_messages,
    read,
)
from launcher.planner.trial_samples import sample_values, try_samples

if TYPE_CHECKING:
    from torch import nn

Build = Callable[[], "nn.Module"]


def inputs(job: Job, batch: int) -> tuple[TensorSpec, ...]:
    """Returns the inputs of the forward for ``batch`` samples; floating inputs have the compute dtype."""
    from launcher.data.spec import input_specs

    specs = input_specs(job.data, batch, job.security.allow)
    compute = COMPUTE[job.train.precision]
    return tuple(TensorSpec(s.shape, compute) if s.dtype.startswith("float") else s for s in specs)


def builder(job: Job) -> Build:
    """Returns a function that builds the model on the default device, in the default dtype."""
    from launcher.models.build import build_model

    return lambda: build_model(job.model, job.security.allow)


def resolve_job(job: Job) -> Resolved:
    """Resolves the vocabulary from the data, and for ``debug.onerank`` the settings of one rank.

    One rank trains on the same batches: micro batches and the loss stay the same.
    """
    job, source = with_vocabulary(job)
    if not job.debug.onerank:
        return Resolved(job, vocabulary_from=source)
    pipe = job.parallel.pipeline
    pipeline = Pipeline(
        micro_batch_num=pipe.micro_batch_num or pipe.stages, loss_reduction=pipe.loss_reduction
    )
    launch = job.launch.model_copy(update={"nproc": 1, "nnodes": 1})
    parallel = Parallel(pipeline=pipeline, deferred_init=job.parallel.deferred_init)
    job = job.model_copy(update={"parallel": parallel, "launch": launch})
    return Resolved(job, vocabulary_from=source)


@dataclass(frozen=True)
class CheckedRequest:
    """A request whose settings are compatible and whose files have been read.

    ``stage_request``: everything that is decided before the model is read.
    """

    resolved: Resolved
    stage_request: StageRequest

    @property
    def job(self) -> Job:
        return self.resolved.job


def check_without_torch(resolved: Resolved, problems: Sequence[Problem] = ()) -> CheckedRequest:
    """Reads the files of a resolved job. ``problems``: those that are known already.

    Raises ``RequestError`` with all problems that can be detected without torch.
    """
    resolved, wrong = inlined(resolved)
    job = resolved.job
    problems = [
        *problems,
        *check(job.data),
        *check_fit(job.model, job.data),
        *_dataset_strategy_problems(job, own=False),
    ]
    problems += wrong
    problems += [
        *hugging_face_checks.check(job, vocab(job.data), classes(job.data)),
        *recompute_auto.memory_not_stated(job),
    ]
    problems += [*hugging_face_operators.problems(job), *user_classes.missing_modules(job)]
    supposed = train_steps.with_placeholder_steps(hugging_face_operators.with_placeholder_operators(job))
    return CheckedRequest(resolved, _ask(resolved.with_job(supposed), problems))


def _ask(resolved: Resolved, problems: Sequence[Problem] = ()) -> StageRequest:
    request = ask(resolved.job, problems, resolved.switches_file, resolved.engine)
    return replace(request, strategies=resolved.strategies)


@contextmanager
def planning() -> Iterator[None]:
    """Marks a ``RequestError`` of the block as raised while planning."""
    try:
        yield
    except RequestError as error:
        error.planned = True
        raise


def _dataset_strategy_problems(job: Job, own: bool) -> list[Problem]:
    """Returns problems of a dataset strategy that does not fit the tensors of a sample.

    ``own``: checks only data of a user's class, which this opens; otherwise checks only built-in data.
    """
    strategy = job.parallel.dataset_strategy
    if isinstance(strategy, str) or isinstance(job.data, Target) is not own:
        return []
    if not dataset_strategy.formed(strategy):
        return []
    from launcher.data.spec import input_specs, target_spec

    allow = job.security.allow
    specs = (*input_specs(job.data, 1, allow), target_spec(job.data, 1, allow))
    problem = dataset_strategy.batch_shape_problem(strategy, tuple(len(s.shape) for s in specs))
    return [problem] if problem else []


def plan_job(job: Job, traces: Traces | None = None) -> Plan:
    """Returns the plan of ``job``.

    Raises ``RequestError``; starts no process, writes nothing, allocates no model. ``traces``: traces that
    other plans have made already.
    """
    return plan_like(job, None, traces)


def plan_like(
    job: Job,
    stages: dict[str, int] | None,
    traces: Traces | None = None,
    engine: EngineChoice | None = None,
) -> Plan:
    """Returns a plan that repeats choices of another plan where the request leaves them open.

    ``stages``: the stage of each module in the other plan; ``engine``: how it cuts operators.
    """
    checked = check_without_torch(replace(resolve_job(job), engine=engine))
    checked = replace(checked, stage_request=replace(checked.stage_request, like=stages))
    with planning():
        return plan_checked(checked, traces)


def plan_checked(checked: CheckedRequest, traces: Traces | None = None) -> Plan:
    """Returns the plan of a request that has passed all earlier checks.

    Planning runs the user's code in a copy of the context: only a copy can be without a value again that a
    ``ContextVar`` had not.
    """
    return copy_context().run(_plan_checked, checked, traces)


def _plan_checked(checked: CheckedRequest, traces: Traces | None) -> Plan:
    resolved, job, request = checked.resolved, checked.job, checked.stage_request
    if hugging_face_operators.operators_are_open(job) or train_steps.steps_are_open(job):
        written = (
            hugging_face_operators.written(job) if hugging_face_operators.operators_are_open(job) else job
        )
        resolved = train_steps.with_steps(resolved.with_job(written))
        job = resolved.job
        request = replace(_ask(resolved), like=request.like)
    refuse(_dataset_strategy_problems(job, own=True))
    refuse([*_backend(job), *user_classes.callback_problems(job), *user_classes.logger_problems(job)])
    refuse(_schedule_problems(job, request.sizes.steps, traces))
    noted = user_data.data_notes(job, request.sizes)
    from launcher.parallel.dispatch.without_dynamo import without_dynamo
    from launcher.parallel.model_state.module_globals import put_back

    with without_dynamo(), put_back(user_classes.files(job)), device_kernels.counted(job, request.sizes):
        made = _decide_recompute_and_engine(resolved, request, traces)
    check_stored_layouts(job, made)
    refuse([*_target_problems(job, made), *hugging_face_checks.misfits(job, made)])
    return replace(made, notes=(*made.notes, *noted)) if noted else made


def _backend(job: Job) -> list[Problem]:
    """Checks the compile backend: only torch knows which backends exist."""
    if job.train.compile is None:
        return []
    from launcher.parallel.compile import backends

    return list(compile.unknown_backend(job, backends()))


def _decide_recompute_and_engine(resolved: Resolved, request: StageRequest, traces: Traces | None) -> Plan:
    """Returns the plan.

    Decides what is recomputed, and uses device matrices if operators do not fit one tp axis.
    """
    if recompute_auto.is_requested(resolved.job):
        once = traces or Traces(own=False)

        def planned(job: Job, like: dict[str, int] | None = None) -> Plan:
            changed = resolved.with_job(job)
            return _read_and_cut(changed, replace(_ask(changed), like=like), once)

        return solved(resolved.job, planned)
    try:
        return _read_and_cut(resolved, request, traces)
    except RequestError as error:
        made = _over_slices(resolved, request.sizes.engine, error)
        if made is None:
            raise
        return made


def _over_slices(resolved: Resolved, engine: EngineChoice, error: RequestError) -> Plan | None:
    """Returns the plan over device matrices, if the only problem is that operators do not fit one tp axis."""
    slices = over_slices(resolved.job, engine)
    if slices is None or any(not p.key.startswith(device_matrix.OPERATORS) for p in error.problems):
        return None
    other = replace(resolved, engine=slices)
    try:
        made = _read_and_cut(other, _ask(other))
    except RequestError:
        return None
    text = f"uses device matrices, because the strategies do not fit one tp axis: {error.problems[0].text}"
    return replace(made, notes=(*made.notes, Note(device_matrix.OPERATORS, text)))


def _read_and_cut(resolved: Resolved, request: StageRequest, traces: Traces | None = None) -> Plan:
    """Returns the plan; stacks of blocks that cannot be cut stay on one stage each."""
    from launcher.parallel.model_state.module_globals import files_of, put_back

    reading = read if traces is None else traces.read
    model = reading(resolved.job, builder(resolved.job))
    with put_back(files_of(model.module)):  # the model's attributes may be functions of further files
        return _cut_at_leaves_or_stacks(resolved, request, model, traces)


def _cut_at_leaves_or_stacks(
    resolved: Resolved, request: StageRequest, model: ModelRead, traces: Traces | None
) -> Plan:
    reading = read if traces is None else traces.read
    refuse([*user_classes.document_problems(resolved.job, lambda: model.module)])
    resolved = with_threshold(resolved, model.skeleton, request.sizes.grid)
    job = resolved.job
    traits = _tried(job, model, request.sizes.grid.size)
    request, more = _unwrapped(request, model.skeleton)
    fine, kept = _undivided(job, request, model.skeleton, leaves(request, model.skeleton))
    more += kept
    try:
        return _trace_and_plan(resolved, request, model, fine, traits=traits, more=more, traces=traces)
    except RequestError as error:
        coarse, _ = _undivided(job, request, model.skeleton, leaves(request, model.skeleton, stacks=False))
        if coarse == fine:
            raise
        more = [*more, _uncut_note(coarse or (), fine or (), error.problems[0])]
        again = reading(job, builder(job))
        return _trace_and_plan(resolved, request, again, coarse, traits=traits, more=more, traces=traces)


def _undivided(
    job: Job, request: StageRequest, skeleton: ModelStructure, leaves: tuple[str, ...] | None
) -> tuple[tuple[str, ...] | None, list[Note]]:
    """Returns ``leaves``; for automatic stages, a module that is recomputed as one becomes one leaf."""
    if leaves is None or request.config is not None:
        return leaves, []
    out, undivided = recompute.undivided(job.parallel.recompute, skeleton, leaves, request.sizes.virtual)
    text = f"auto: {listed(undivided)} stay on one stage each, because recomputed modules are not cut"
    return out, [Note(STAGE_CONFIG, text)] if undivided else []


def _unwrapped(request: StageRequest, skeleton: ModelStructure) -> tuple[StageRequest, list[Note]]:
    """Removes the prefix of MindSpore's wrapper from module names in the request."""
    if request.config is None:
        return request, []
    names = stage_config.unwrapped(request.config, skeleton, request.sizes.virtual)
    if names == request.config:
        return request, []
    text = f"{stage_config.BACKBONE}.NAME -> NAME: the names are those of a WithLossCell around the model"
    return replace(request, config=names), [Note(STAGE_CONFIG, text)]


def _target_problems(job: Job, made: Plan) -> list[Problem]:
    """Returns the targets that do not fit the model's output, and samples that cannot be evaluated."""
    from launcher.data.spec import target_spec

    target = target_spec(job.data, made.sizes.micro_batch, job.security.allow)
    problems = [*outputs_and_targets.multiple_output_problems(job, made)]
    problems += outputs_and_targets.sample_problems(made, target, own=foreign(job.model))
    if not problems and made.objective.needs_full_output:
        problems += user_classes.objective_problems(job, made, target)

    # only for a user's class: opening other data to count its samples would read its files
    if made.observed.mixed and isinstance(job.data, Target):
        from launcher.data.open import open_data

        samples = len(open_data(job.data, seed=job.seed, allow=job.security.allow).val)
        problems += [p for p in [outputs_and_targets.uneven_held_out(job, made, samples)] if p]
    return problems


def _uncut_note(coarse: Sequence[str], fine: Sequence[str], why: Problem) -> Note:
    shut = ", ".join(u for u in coarse if u not in fine)
    return Note(STAGE_CONFIG, f"auto: {shut} stays in one piece, because it cannot be cut: {why.text}")


def _tried(job: Job, model: ModelRead, ranks: int) -> OptimizerTraits | None:
    """Returns what the user's optimizer class does; ``None`` for built-in ones or if nothing is trained."""
    skeleton = model.skeleton
    shapes = [p.spec.shape for p in skeleton.params if p.trainable and not p.buffer and p.same_as == p.name]
    if not isinstance(job.optim, Target) or not shapes:
        return None
    from torch.optim import Optimizer

    from launcher.job.targets import factory
    from launcher.optim.build import build_own
    from launcher.optim.dry_run import probe
    from launcher.parallel.model_state.module_globals import files, put_back
    from launcher.parallel.model_state.python_state import library
    from launcher.parallel.model_state.references import unmarked

    build = partial(build_own, job.optim, job.security.allow)
    cure = "give weights their own settings by name, with optim.groups of a built-in optimizer"
    made = factory(job.optim.target, job.security.allow, Optimizer, key="optim._target_")
    names = [] if library(made.__module__) else files(made)
    alike = same_on_all_ranks("optim._target_", job.optim.target, ranks)
    with alike, unmarked(model.marks, job.optim.target, cure, "optim._target_"), put_back(names):
        return probe(
            build,
            job.optim.target,
            shapes,
            device=device_kernels.planned_kind(),
            dtype=DTYPE[job.train.precision],
            watch=partial(_changes, names),
        )


def _changes(names: Sequence[str]) -> Callable[[], list[str]]:
    """Returns a function that names the variables of these Python modules that have changed since."""
    from launcher.parallel.model_state.module_globals import variables
    from launcher.parallel.model_state.python_state import changed

    before = variables(names)
    return lambda: [*dict.fromkeys(name for name, _ in changed(before, variables(names)))]


def _schedule_problems(job: Job, steps: int, traces: Traces | None) -> list[Problem]:
    """Returns problems with the learning rates that the user's schedule class returns."""
    if not isinstance(job.schedule, Target):
        return []
    from launcher.optim import schedule
    from launcher.parallel.model_state.module_globals import files, put_back

    def undone(made: object) -> AbstractContextManager[None]:
        return put_back(files(type(made)))

    rate = partial(schedule.problem, job.schedule, job.security.allow, steps, undone)
    problem = rate() if traces is None else traces.rated((job.schedule, steps), rate)
    return [problem] if problem else []


def _followed(
    job: Job,
    request: StageRequest,
    model: ModelRead,
    uncut: tuple[str, ...] | None,
    specs: tuple[TensorSpec, ...],
) -> TracedForward:
    """Traces one forward, in the precision that the model computes in."""
    from launcher.parallel.dispatch.modes import default_dtype
    from launcher.parallel.half_precision import cast_weights
    from launcher.parallel.model_state.references import leaving, unmarked
    from launcher.parallel.trace import tensor_specs

    dtype, compute = DTYPE[job.train.precision], COMPUTE[job.train.precision]
    kept = default_dtype(tensor_specs.dtype_of(dtype)), unmarked(model.marks)
    with kept[0], kept[1], try_samples(job, model, specs) as finished:
        if compute != dtype:
            cast_weights(model.module, compute)
        with leaving(model.module, restores=uncut is None):
            return finished(follow(job, request, model, uncut=uncut, specs=specs))


def _shallow(
    job: Job,
    request: StageRequest,
    model: ModelRead,
    uncut: tuple[str, ...] | None,
    specs: tuple[TensorSpec, ...],
    traces: Traces,
) -> TracedForward:
    """Traces a forward; a deep model with equal layers is extrapolated from two shallow ones."""
    two = extrapolated_layers.shallow(job, uncut) if traces.shallow else None
    if two is not None:
        read = [traces.read(one.job, builder(one.job)) for one in (two.first, two.second)]
        one = _followed(two.first.job, request, read[0], two.first.uncut, specs)
        other = _followed(two.second.job, request, read[1], two.second.uncut, specs)
        with suppress(extrapolated_layers.Unlike):
            return two.deeper(one, other)
    return _followed(job, request, model, uncut, specs)


def _notes_on_settings(resolved: Resolved, sizes: Sizes) -> Iterator[Note]:
    """Yields notes on settings that were resolved before the model is traced."""
    job = resolved.job
    yield from (Note(*n.split(" ", 1)) for n in resolve_model(job.model)[1])
    fallback = resolve_data(job.data)[1]
    if fallback:
        yield Note(*fallback.split(" ", 1))
    if isinstance(job.data, Chat):
        from launcher.data.chat.checks import trained_text

        if text := trained_text(job.data):
            yield Note("data.path", text)
    if isinstance(job.data, Tokens) and (text := partly_checked(job.data)):
        yield Note("data.vocab_size", text)
    if resolved.vocabulary_from:
        yield Note("data.vocab_size", f"null -> {vocab(job.data)}: {resolved.vocabulary_from}")
    if job.debug.onerank:
        text = "true: launch.nproc and launch.nnodes are 1; of parallel.* only deferred_init, "
        text += "pipeline.micro_batch_num and pipeline.loss_reduction are kept"
        yield Note("debug.onerank", text)
    if (fault := drill.fault(job, sizes)) is not None:
        yield Note("debug.drill", str(fault))


def _trace_and_plan(
    resolved: Resolved,
    request: StageRequest,
    model: ModelRead,
    uncut: tuple[str, ...] | None,
    traits: OptimizerTraits | None,
    more: Sequence[Note] = (),
    traces: Traces | None = None,
) -> Plan:
    """Returns the plan that does not cut the modules ``uncut``.

    Use ``model`` only once: cutting changes it.
    """
    from launcher.parallel.model_state.references import unmarked

    job = resolved.job
    specs = inputs(job, request.sizes.micro_batch)
    if traces is None or request.sizes.engine.over_matrices:  # matrices need the traced model itself
        forward = _followed(job, request, model, uncut, specs)
    else:
        followed = partial(_shallow, job, request, model, uncut, specs, traces)
        grid = request.sizes.grid
        laid_out = job.parallel.param_strategy.load is not None  # the layouts are for this number of ranks
        cache_key = (uncut, specs, grid if laid_out else grid["tp"], request.sizes.pieces)
        forward = traces.followed(cache_key, job, followed)

    notes = [*_notes_on_settings(resolved, request.sizes)]
    notes += [*train_steps.steps_note(resolved), *hugging_face_checks.note(job), *optimizer.note(traits)]
    notes += device_kernels.notes(job, forward.graph)
    notes += [*router_losses.untrained_losses(job), *hugging_face_stale_config.notes(job)]
    note = None
    if model.lost:
        text = f"true -> false: the constructor {model.lost}"
        note = Note("parallel.deferred_init", f"{text}; every rank builds the full model once")
    kept = None if traces is None else traces.keeps_messages
    traced = TracedModel(
        model.skeleton,
        forward.graph,
        uncut,
        built_unsharded=note,
        operators=forward.operators,
        recomputed=forward.recomputed,
        pieces=forward.pieces,
        keeps_messages=kept if kept is not None else keeps_messages(),
    )
    made = plan(with_data_read(job), request, traced, [*notes, *more], traits=traits)
    drawn = drawn_graph(job, model, uncut, specs, forward.graph)
    made = replace(made, graph=drawn, drill=drill.fault(job, made.sizes))
    if made.sizes.engine.over_matrices:
        with unmarked(model.marks), sample_values(job, model):
            made = matrices.shard_operators(resolved, made, model, specs)
    if made.compilation is not None and made.compilation.fullgraph and not forward.graph.value_readers:
        refuse(compile.broken(breaks(made, made.compilation, model, specs)))
    return made
