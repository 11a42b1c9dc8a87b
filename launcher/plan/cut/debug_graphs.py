"""The calls that each stage runs, as ``debug.graphs`` lists them; ``show/graphs_svg`` draws them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.plan.cut.stages import BoundaryTensor, Stage, around
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.values.model_graph import Graph, Node, Segment
from launcher.plan.values.module_names import owner
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.plan.values.text import bytes_text, many, scaled, spans

RECEIVED = "received"
SHAPES = "Shapes, FLOPs of the forward and bytes saved for the backward are for one micro batch on one rank."
ORDER_ONLY = (
    "The code between the modules could not be traced: the modules are listed in the order in which they run."
)


@dataclass(frozen=True)
class Call:
    """A value, the call that computes it, and the values that the call takes.

    ``kind`` is ``received`` (from the stage before), ``input``, ``module``, ``glue`` or ``output``. ``call``
    is the name of the module, or of the function between modules; ``text`` is the call with its constants.
    ``weights``: bytes that one rank of tp uses. ``again``: it runs again in the backward. ``sent``: the next
    stage receives it.
    """

    name: str
    kind: str
    call: str
    inputs: tuple[str, ...] = ()
    out: tuple[TensorSpec, ...] = ()
    text: str = ""
    weights: int = 0
    flops: int = 0
    saved: int = 0
    again: bool = False
    sent: bool = False


@dataclass(frozen=True)
class StageGraph:
    """The calls of stage ``index`` of ``count`` on ``ranks``, and the tensors of the model that it holds.

    ``linked``: the trace shows which value goes where, not only the order of modules.
    """

    index: int
    count: int
    ranks: tuple[int, ...]
    calls: tuple[Call, ...]
    params: tuple[Placed, ...]
    linked: bool = True

    @property
    def title(self) -> str:
        on = f"on rank{'s' if len(self.ranks) > 1 else ''} {spans(self.ranks)}"
        return f"stage {self.index} of {self.count} {on}: {many(len(self.calls), 'call')}"


@dataclass(frozen=True)
class Staged:
    """A model cut into stages; ``uncut``: its only stage runs the model as it is."""

    stages: Sequence[Stage]
    boundaries: Sequence[Sequence[BoundaryTensor]]
    params: Sequence[Placed]
    uncut: bool


def stage_graph(model: Staged, graph: Graph, index: int, ranks: tuple[int, ...]) -> StageGraph:
    """Returns the graph of stage ``index`` on ``ranks``.

    If the model is ``uncut`` and ``graph`` has segments, the calls are these segments.
    """
    stage, count = model.stages[index], len(model.stages)
    params = tuple(p for p in model.params if index in p.stages)
    nbytes = {n: p.nbytes for p in params for n in p.names}
    if model.uncut and graph.segments:
        calls = [_part(s, nbytes) for s in graph.segments if s.module or s.saved]
        return StageGraph(index, count, ranks, tuple(calls), params, linked=False)

    sent = frozenset(c.name for c in model.boundaries[index]) if index + 1 < count else frozenset()
    calls = [
        Call(c.name, RECEIVED, f"stage {index - 1}", out=c.specs, sent=c.name in sent)
        for c in (model.boundaries[index - 1] if index else ())
    ]
    nodes = graph.nodes if model.uncut else [graph[n] for n in stage.nodes]
    calls += [_call(graph, n, nbytes, n.name in sent) for n in nodes if n.kind != "param"]
    return StageGraph(index, count, ranks, tuple(calls), params)


def _call(graph: Graph, node: Node, nbytes: Mapping[str, int], sent: bool) -> Call:
    """Returns the call of ``node``; parameters that glue uses count as weights, not as inputs."""
    own = [m for m in node.inputs if graph[m].kind == "param"]
    weights = _below(node.target, nbytes) if node.kind == "module" else 0
    return Call(
        node.name,
        node.kind,
        node.target if node.kind in ("module", "glue") else "",
        inputs=tuple(m for m in node.inputs if m not in own),
        out=node.out or (),
        text=node.text,
        weights=weights + sum(nbytes.get(graph[m].target, 0) for m in own),
        flops=node.flops,
        saved=node.saved,
        again=node.backward.again > 0,
        sent=sent,
    )


def _part(part: Segment, nbytes: Mapping[str, int]) -> Call:
    if not part.module:
        return Call("rest", "glue", "code outside of these modules", saved=part.saved)
    again = part.backward.again > 0
    return Call(
        part.module, "module", part.module, weights=_below(part.module, nbytes), saved=part.saved, again=again
    )


def _below(module: str, nbytes: Mapping[str, int]) -> int:
    return sum(n for name, n in nbytes.items() if module in around(owner(name)))


def text(stage: StageGraph) -> str:
    """Returns one line per call, then one line per tensor of the model; ends with a newline."""
    lines = [stage.title, SHAPES if stage.linked else ORDER_ONLY, ""]
    head = ("value", "made by", "inputs", "shape", "weights", "FLOPs", "saved")
    lines += _table([head, *(_row(c) for c in stage.calls)])
    lines += ["", "The tensors of this stage, and the part that each rank keeps:", ""]
    lines += _table([_kept(p, stage.ranks) for p in stage.params])
    return "\n".join(lines) + "\n"


def _row(c: Call) -> tuple[str, ...]:
    marks = "".join([", runs again in the backward" if c.again else "", ", sent on" if c.sent else ""])
    return (
        c.name,
        f"{c.kind} {c.call}".strip(),
        ", ".join(c.inputs),
        f"{shapes(c.out)}{marks}",
        bytes_text(c.weights) if c.weights else "",
        "".join(scaled(c.flops)) if c.flops else "",
        bytes_text(c.saved) if c.saved else "",
    )


def shapes(specs: Sequence[TensorSpec]) -> str:
    """
    >>> shapes((TensorSpec((4, 128), "int64"),))
    'int64[4, 128]'
    """
    return ", ".join(f"{t.dtype}{list(t.shape)}" for t in specs)


def _kept(p: Placed, ranks: Sequence[int]) -> tuple[str, ...]:
    """Returns the cells of a tensor: names, full shape, cuts, and the largest piece that a rank keeps."""
    boxes = [box for r in ranks if (box := p.layout.box(r)) is not None]
    cut = [f"dim {d} over {', '.join(axes)}" for d, axes in enumerate(p.layout.split) if axes]
    largest = max(boxes, key=lambda b: b.shape) if boxes else None
    here = f"a rank keeps {list(largest.shape)}" if cut and largest is not None else ""
    kind = "buffer" if p.buffer else "" if p.trainable else "frozen"
    return " = ".join(p.names), shapes((p.spec,)), ", ".join(cut) or "full on each rank", here, kind


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(["", *(f"{cell:<{n}}" for cell, n in zip(row, wide, strict=True))]).rstrip()
