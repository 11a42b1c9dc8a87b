"""What planning needs to know about a model: names, shapes, ties and the glue between its modules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from launcher.plan.values.operations import NOTHING, Operations
from launcher.plan.values.tensor_spec import TensorSpec

Role = Literal["", "embedding", "head", "adapter"]


@dataclass(frozen=True)
class Param:
    """A parameter or persistent buffer.

    ``same_as`` is its own name or, for a tied tensor, the first of its names. ``role``: "embedding" for the
    weight of an embedding module; "head" for the weight of the last linear module outside of all lists of
    layers; "adapter" for a low-rank weight that is added to a linear module. ``stored``: for a frozen
    parameter, the dtype in the file that its values come from.
    """

    name: str
    spec: TensorSpec
    same_as: str
    trainable: bool = True
    buffer: bool = False
    role: Role = ""
    stored: str = ""


@dataclass(frozen=True)
class ModelTraits:
    """Properties of a model that are lost when its modules or tensors are replaced, by their first names.

    ``hooked``: parameters with hooks. ``backward``: modules with backward hooks. ``synced``: SyncBatchNorm
    modules. ``several_names``: all names of each module that has several. ``shared``: groups of tensors that
    share memory. ``computed``: attributes that are computed from weights. ``compiled``: modules that the
    model itself compiles. ``extra_states``: modules that override ``get_extra_state``. ``fused``: tensors
    that ``eval()`` makes of weights. ``global_hooks``: the functions by which the constructor registered
    global module hooks. ``batch_norms``: modules that normalize over the samples of a batch in training.
    ``instance_norms``: modules of torch that normalize each sample, and keep the mean of all statistics.
    ``world``: the constructor's queries about the distributed processes. ``references``: modules with a
    Python reference to another module, each with a weight that both share. ``foreign_memory``: tensors that
    the constructor made in the memory of something else.
    """

    hooked: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    synced: tuple[str, ...] = ()
    several_names: tuple[tuple[str, ...], ...] = ()
    shared: tuple[tuple[str, ...], ...] = ()
    computed: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    extra_states: tuple[str, ...] = ()
    fused: tuple[str, ...] = ()
    global_hooks: tuple[str, ...] = ()
    batch_norms: tuple[str, ...] = ()
    instance_norms: tuple[str, ...] = ()
    world: tuple[str, ...] = ()
    references: tuple[tuple[str, str], ...] = ()
    foreign_memory: tuple[ForeignMemory, ...] = ()


@dataclass(frozen=True)
class ModelStructure:
    """The structure of a model before tracing: modules in definition order, parameters and module kinds.

    ``containers`` are modules that only hold others (ModuleList, ModuleDict, Sequential): automatic stages
    look inside them. ``lists`` are the containers that cannot be called. ``kinds``: the kind of each module
    that is linear, embedding, norm or elementwise.
    """

    modules: tuple[str, ...]
    params: tuple[Param, ...]
    containers: frozenset[str]
    kinds: tuple[tuple[str, str], ...] = ()
    traits: ModelTraits = ModelTraits()
    lists: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Compiled:
    """What compiling a module avoids: operations of each pass, and bytes that are ``saved`` for backward."""

    forward: Operations = NOTHING
    backward: Operations = NOTHING
    saved: int = 0


@dataclass(frozen=True)
class Backward:
    """The cost of a backward: the bytes that it needs besides those that the forward saved, and its kernels.

    ``work``: bytes at its peak; ``summed``: bytes at its peak including the gradients of its weights, where
    these are allocated. If the backward is split, products with a parameter are ``deferred`` to the second
    half, and their inputs and output gradients, ``kept`` bytes, stay in memory until then. ``again``: flops
    of the forwards that it recomputes; ``spared``: the bytes that recomputation saves. Of these forwards,
    ``sent`` are the collectives over tp, each a kind and its bytes; ``twice`` the modules, each with Python
    state that each of its forwards changes; ``unlike`` the modules whose second forward saved other tensors
    than the first. ``operations``: all its kernels, including those of recomputed forwards. ``compiled``:
    what it avoids when it is compiled.
    """

    work: int = 0
    kept: int = 0
    deferred: Operations = NOTHING
    summed: int = 0
    again: int = 0
    spared: int = 0
    sent: tuple[tuple[str, int], ...] = ()
    twice: tuple[tuple[str, str], ...] = ()
    unlike: tuple[str, ...] = ()
    operations: Operations = NOTHING
    compiled: Compiled = Compiled()


@dataclass(frozen=True)
class Node:
    """One value in the glue between named modules.

    ``kind``: ``input``, ``param`` (a parameter or buffer that glue uses directly), ``module`` (a call of the
    module ``target``), ``glue`` (a function or method call) or ``output``. ``out`` lists the tensors that it
    returns; ``None`` if the value is neither a tensor nor a tuple of tensors. ``packed``: they are returned
    as a tuple.

    For one micro batch, or one sequence chunk of it: ``saved`` is the bytes kept for backward, ``backward``
    the further cost of that, ``flops`` the cost of the forward and ``operations`` its kernels. ``left``: the
    bytes of ``saved`` that later chunks of the sequence read.

    Storages are numbered: ``reads`` are those of its inputs and of the tensors of its module, ``lies``
    those that hold its value, ``writes`` those that it changes in place. ``trains``: the inputs that get
    a gradient through it. ``idle``: the numbers of the tensors of ``out`` that get no gradient. ``text``:
    the call with all its constants. ``keys``: for an output of several tensors, the key of each in the
    dict or tuple; for an output that no loss accepts, a description of it and the Python expression that
    takes a tensor out of it. ``dims``: for each tensor of ``out`` its dimensions in the order in which
    they lie in memory, and () if it is contiguous or has gaps.
    """

    name: str
    kind: str
    target: str
    inputs: tuple[str, ...]
    out: tuple[TensorSpec, ...] | None
    packed: bool = False
    saved: int = 0
    flops: int = 0
    backward: Backward = Backward()
    left: int = 0
    reads: frozenset[int] = frozenset()
    lies: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    trains: frozenset[str] = frozenset()
    idle: tuple[int, ...] = ()
    text: str = ""
    operations: Operations = NOTHING
    keys: tuple[str | int, ...] = ()
    dims: tuple[tuple[int, ...], ...] = ()

    @property
    def label(self) -> str:
        """The value in messages: its module, or its kind and name."""
        return repr(self.target) if self.kind == "module" else f"{self.kind} {self.target or self.name!r}"


@dataclass(frozen=True)
class Segment:
    """A part of a forward: the call of ``module``, or what runs outside of all modules ("").

    ``saved``: bytes kept for backward. ``made``: bytes of its outputs. ``left``: the bytes of ``saved`` that
    later chunks of the sequence read.
    """

    module: str
    saved: int
    backward: Backward = Backward()
    made: int = 0
    left: int = 0


@dataclass(frozen=True)
class StateChange:
    """A parameter or buffer, under all its ``names``, that a forward changes while the modules ``at`` run.

    ``by_data``: its new value depends on the inputs or on random numbers. ``read``: the output depends on its
    old value. ``kept``: it is changed in place, and a backward needs the old value. ``once``: the change is
    idempotent, as with an embedding's ``max_norm``. ``cached``: only the first forward changes it, and not
    depending on data.
    """

    names: tuple[str, ...]
    by_data: bool
    read: bool
    kept: bool
    at: tuple[str, ...]
    once: bool = False
    cached: bool = False

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class MovingAttribute:
    """A non-tensor attribute that each forward changes and reads.

    ``by_data``: the change depends on the inputs. ``by``: what changes it, ``forward`` or ``backward``.
    """

    name: str
    by_data: bool
    by: str = "forward"


@dataclass(frozen=True)
class ForeignMemory:
    """A tensor ``name`` of the model that the constructor made in the memory of ``place``.

    ``place`` is an attribute or variable with an array, such as numpy's, or a variable with a torch tensor.
    ``read``: code other than constructors may read ``place``.
    """

    place: str
    name: str
    read: bool


@dataclass(frozen=True)
class Inner:
    """A gradient that the forward itself computes while ``module`` runs.

    ``backward``: it calls ``backward()``, which adds to the gradients of the weights. ``crosses``: modules
    around it that take another argument computed from the tensor which is differentiated.
    """

    module: str
    backward: bool
    crosses: tuple[str, ...] = ()


@dataclass(frozen=True)
class EmbeddingLookup:
    """An embedding ``module`` with a table of ``rows`` rows that looks up the ids of the input at ``place``.

    Valid ids go from ``first`` up to, but not including, ``end``.
    """

    place: int
    module: str
    rows: int
    first: int
    end: int


DUAL = "a level of forward-mode differentiation"
"""The value in ``Effects.under`` of modules that are called on dual numbers."""


@dataclass(frozen=True)
class Effects:
    """The side effects of a forward.

    Attributes:
        changes: parameters and buffers that it changes.
        inner_gradients: gradients that it computes itself.
        sparse_tables: tables whose gradients would be sparse.
        mixed_dtypes: operations that need one dtype but get tensors of several, in the model without a lower
            ``train.precision``.
        reads: tensors of the model that it reads as the constructor left them.
        foreign: shapes of tensors that belong neither to the model nor to the inputs, and that the forward
            does not create.
        grad_reads: modules that read the gradient that a backward left on a parameter or buffer.
        early_grad_reads: parameters whose gradient is read in the backward itself.
        late_reads: weights and changing attributes that the backward reads by a Python reference of another
            module, each after that module.
        versions: weights of which a module reads the version, which counts their changes, each with the
            module.
        state_dicts: modules whose forward requests or loads a state dict.
        borrowed: modules that use a tensor of the model that is neither theirs nor passed to them, with its
            name.
        inside_modes: modules that are called while the model's code has entered a mode or replaced a function
            of torch, each with a description of it.
        evaluated: what a forward in evaluation mode changes.
        mixed: modules that normalize over the samples of their batch in evaluation mode.
        normalizing: modules that call torch's batch norm with the statistics of their batch in training.
        draws: modules that draw random numbers from a torch generator in training.
        dropouts: modules among these that draw for dropout only, which can be switched off.
        saves_unfilled: modules with an operation that saves a tensor for the backward before it fills it.
        hooks: modules that register a hook that uses weights.
        world: modules that query the distributed processes, each with the query.
        global_draws: whether it draws from the global random stream of Python or numpy.
        seeds: modules that seed torch's global stream, "" for the code between the named modules; known where
            stages run them.
        carried: attributes that carry Python state from one forward or backward to the next.
        late_gradients: values of the code between modules that need a gradient only in early or only in later
            forwards.
        resets: attributes that make a resumed model compute other results, "" for unknown ones.
        mixing: which value of a sample depends on others of its batch, BatchNorm excepted, "" for none;
            ``None`` if that was not tested.
        untested_elements: the number of elements of a model that is too large to test; 0 for one whose
            forward fails in the test or is not repeatable, ``None`` for one that was tested.
        ids_beyond_tables: modules whose table has no row for an id of the data: module, rows of the table,
            the id.
        lookups: inputs that are ids of tables.
        clocks: functions, such as clocks, that return another value at each call and that its output depends
            on.
        eval_changes_state: whether a forward in evaluation mode changes Python state.
        eval_state_reads: attributes and variables of that state that the output of the next such forward
            depends on.
        differ_if_copied: modules that compute other results if their inputs are plain copies, which a stage
            receives.
        differ_if_contiguous: the same for contiguous copies.
        differ_if_separate: the same if inputs that are one object become several.
        differ_if_gathered: the same for inputs as FSDP2 passes them.
        need_other_modules: modules whose result depends on state that other modules leave behind.
    """

    changes: tuple[StateChange, ...] = ()
    inner_gradients: tuple[Inner, ...] = ()
    sparse_tables: tuple[str, ...] = ()
    mixed_dtypes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    foreign: tuple[tuple[int, ...], ...] = ()
    grad_reads: tuple[str, ...] = ()
    early_grad_reads: tuple[str, ...] = ()
    late_reads: tuple[tuple[str, str], ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    state_dicts: tuple[str, ...] = ()
    borrowed: tuple[tuple[str, str], ...] = ()
    inside_modes: tuple[tuple[str, str], ...] = ()
    evaluated: tuple[StateChange, ...] = ()
    mixed: tuple[str, ...] = ()
    normalizing: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()
    dropouts: tuple[str, ...] = ()
    saves_unfilled: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    world: tuple[tuple[str, str], ...] = ()
    global_draws: bool = False
    seeds: tuple[str, ...] = ()
    carried: tuple[MovingAttribute, ...] = ()
    late_gradients: tuple[str, ...] = ()
    resets: tuple[str, ...] = ()
    mixing: str | None = None
    untested_elements: int | None = None
    ids_beyond_tables: tuple[tuple[str, int, int], ...] = ()
    lookups: tuple[EmbeddingLookup, ...] = ()
    clocks: tuple[str, ...] = ()
    eval_changes_state: bool = False
    eval_state_reads: tuple[str, ...] = ()
    differ_if_copied: tuple[str, ...] = ()
    differ_if_contiguous: tuple[str, ...] = ()
    differ_if_separate: tuple[str, ...] = ()
    differ_if_gathered: tuple[str, ...] = ()
    need_other_modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Graph:
    """The glue of a model for one micro batch, in execution order.

    ``scopes``: parameters that are used while their own module is not running, each with the deepest module
    around it that always is; ``None`` for a parameter that is never used. ``chains``: units
    (``uncut_modules.units``) that run once, directly one after the other, and feed each other. ``calls``: the
    number of calls of each module that does not run exactly once. ``segments``: the parts of the only node of
    an untraced model. ``order``: modules in the order in which they begin (True) and end (False).
    ``value_readers``: modules whose own code reads tensor values, so that what runs inside of them may differ
    from rank to rank. ``data_decides_calls``: the values of the data decide which units run, or in which
    order. ``overwrites``: modules that change their inputs in place. ``recomputed``: modules around several
    units that one activation checkpoint recomputes. ``checkpointed``: modules that run inside of a call of
    torch's checkpoint, each with the module whose code makes the outermost such call. ``nested``: modules
    that run inside of themselves. ``inferred``: modules that run in inference mode. ``fills``: modules that
    change a list or dictionary that is passed to them. ``lazy``: modules that return a generator.
    ``strided``: modules that read the memory layout of an argument that is not contiguous; ``gapped``: those
    of them whose argument also has gaps.
    ``requires_grad_changes``: parameters whose ``requires_grad`` the forward sets, each with the module that
    does. ``other_parameters``: modules that are called with other parameters than their own.
    ``memory_writers``: modules that change the memory of their inputs, also by ``.data``. ``sparse``: modules
    that are called with a sparse tensor that needs a gradient. ``aliased``: modules whose result shares
    memory with an input, or with another result, that is changed in place later. ``named``: modules that set
    an attribute on an input, or whose result is an input on which one is set later. ``opaque``: modules whose
    result contains an object of the named class, in which FSDP2 finds no tensors; "" if
    they return none that needs a gradient, but leave one elsewhere. ``detached``: the output
    requires no gradient.
    """

    nodes: tuple[Node, ...]
    scopes: tuple[tuple[str, str | None], ...] = ()
    chains: tuple[tuple[str, str], ...] = ()
    calls: tuple[tuple[str, int], ...] = ()
    segments: tuple[Segment, ...] = ()
    order: tuple[tuple[str, bool], ...] = ()
    value_readers: tuple[str, ...] = ()
    data_decides_calls: bool = False
    effects: Effects = Effects()
    overwrites: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    checkpointed: tuple[tuple[str, str], ...] = ()
    nested: tuple[str, ...] = ()
    inferred: tuple[str, ...] = ()
    fills: tuple[str, ...] = ()
    lazy: tuple[str, ...] = ()
    strided: tuple[str, ...] = ()
    gapped: tuple[str, ...] = ()
    requires_grad_changes: tuple[tuple[str, str], ...] = ()
    other_parameters: tuple[str, ...] = ()
    memory_writers: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    aliased: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    opaque: tuple[tuple[str, str], ...] = ()
    detached: bool = False

    @cached_property
    def _named(self) -> dict[str, Node]:
        return {n.name: n for n in self.nodes}

    def __getitem__(self, name: str) -> Node:
        return self._named[name]
