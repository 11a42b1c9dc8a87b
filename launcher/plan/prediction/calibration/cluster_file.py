"""The text of a file in ``conf/cluster``: each number, how it was measured, and how far its rounds differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal

from launcher.plan.prediction.calibration.constants import Constant
from launcher.plan.prediction.calibration.timed import Machine

GROUPS = ("links", "kernels", "overheads")
HOW = {
    "tflops": "10**12 a second, the fastest of its products",
    "efficiency": "fitted to products of several sides",
    "memory_gb_per_s": "a large copy, or what others reach if that is more",
    "links.inside": "fitted to collectives over groups of several sizes",
    "links.between": "fitted to collectives between nodes",
    "links.inside.message_gb_per_s": "a large message",
    "links.between.message_gb_per_s": "a large message",
    "kernels.small": "fitted to products of several sides",
    "kernels.attention": "causal attention, forward and backward",
    "kernels.memory": "norms, activations, rotations, sums and a loss",
    "kernels.launch_us": "a block of tiny tensors, by its kernels",
    "overheads.scatter": "reduce-scatters beside the other collectives",
    "overheads.exposed": "gradients sent beside a product",
    "overheads.exposed_sums": "the same",
    "overheads.exposed_tp": "a product and a collective in turns: ranks wait for the slowest",
    "overheads.slot_ms": "a step of a tiny model on a pipeline, less all the above",
    "overheads.step_ms": "a step of a tiny model on replicas, less all the above",
}


def cluster_file(found: Sequence[Constant], machine: Machine, heads: Sequence[str], nodes: int) -> str:
    """``heads``: comments on when and where it was measured."""
    return "".join(f"{line}\n" for line in _lines(found, machine, heads, nodes))


def _lines(found: Sequence[Constant], machine: Machine, heads: Sequence[str], nodes: int) -> Iterator[str]:
    yield from (f"# {head}" for head in heads)
    yield from ("defaults:", "  - unknown", "  - _self_", f"name: {machine.name}")
    shared = machine.cores is not None
    whose = f"the machine's, which {machine.per_node} ranks share" if shared else "of a device"
    yield f"memory_gb: {machine.memory_gb:.3g}  # {whose}"
    yield f"devices_per_node: {machine.per_node}  # ranks of the run that measured"
    if shared:
        yield f"cores_per_node: {machine.cores}  # that ranks of the run may use, by the threads of each"

    # single numbers, then those of each group
    yield from (_line(c, nodes) for c in found if "." not in c.key)
    peaks = [(c.key.partition(".")[2], c) for c in found if c.key.startswith("tflops.")]
    each = ", ".join(f"{p}: {number(c.value)}" for p, c in peaks)
    spreads = ", ".join(f"{c.spread:.0%}" for _, c in peaks)
    yield f"tflops: {{{each}}}  # {HOW['tflops']}; spreads {spreads}"
    for group in GROUPS:
        yield f"{group}:"
        inner = ""
        for c in (c for c in found if c.key.startswith(f"{group}.")):
            _, *between, _ = c.key.split(".")
            if between and between[0] != inner:
                inner = between[0]
                yield f"  {inner}:"
            yield f"{'  ' * (1 + len(between))}{_line(c, nodes)}"


def _line(c: Constant, nodes: int) -> str:
    name = c.key.rpartition(".")[2]
    return f"{name}: {number(c.value)}  # {_how(c, nodes)}"


def _how(c: Constant, nodes: int) -> str:
    if c.key.startswith("links.between") and nodes == 1:
        return "as inside: there is one node"
    above = c.key.rpartition(".")[0]
    return f"{HOW.get(c.key) or HOW[above]}; spread {c.spread:.0%}"


def number(value: float) -> str:
    """Three digits, and never as a power: YAML 1.1 reads ``1e-05`` as a word.

    >>> number(98.437), number(0.0001234), number(0.0), number(1234567.0)
    ('98.4', '0.000123', '0', '1230000')
    """
    return f"{Decimal(f'{value:.3g}'):f}"
