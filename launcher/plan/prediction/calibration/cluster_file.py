"""The text of a file in ``conf/cluster``: each number, how it was measured, and how far its rounds differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal

from launcher.plan.prediction.calibration.constants import Constant
from launcher.plan.prediction.calibration.timed import Machine

SHARED = "the cores that compute send"
GROUPS = ("kernels", "overheads")
HOW = {
    "tflops": "the fastest products",
    "efficiency": "fitted to products of several sides",
    "memory_gb_per_s": "a large copy, or what others reach if that is more",
    "links.inside": "collectives; a message",
    "links.between": "the same, between nodes",
    "kernels.small": "fitted to products of several sides",
    "kernels.attention": "causal attention, forward and backward",
    "kernels.memory": "norms, activations, rotations, sums and a loss",
    "kernels.launch_us": "a block of tiny tensors, by its kernels",
    "overheads.scatter": "reduce-scatters beside the other collectives",
    "overheads.exposed": "gradients sent beside a product",
    "overheads.exposed_sums": "the same",
    "overheads.exposed_tp": "a product and a collective in turns: ranks wait for the slowest",
    "overheads.slot_ms": "the rest of a tiny step on a pipeline, of whose slot the spread is",
    "overheads.step_ms": "the rest of one on replicas, of which the spread is",
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

    # single numbers, what belongs together on a line, then those of each group
    yield from (_line(c, machine) for c in found if "." not in c.key)
    yield _together("tflops", found, nodes)
    yield from ("links:", *(f"  {_together(f'links.{at}', found, nodes)}" for at in ("inside", "between")))
    for group in GROUPS:
        yield f"{group}:"
        yield from (f"  {_line(c, machine)}" for c in found if c.key.startswith(f"{group}."))


def _together(above: str, found: Sequence[Constant], nodes: int) -> str:
    """Of one map."""
    inner = [c for c in found if c.key.startswith(f"{above}.")]
    each = ", ".join(f"{_last(c.key)}: {number(c.value)}" for c in inner)
    if above == "links.between" and nodes == 1:
        return f"{_last(above)}: {{{each}}}  # as inside: there is one node"
    spreads = ", ".join(f"{c.spread:.0%}" for c in inner)
    return f"{_last(above)}: {{{each}}}  # {HOW[above]}; spreads {spreads}"


def _line(c: Constant, machine: Machine) -> str:
    if "exposed" in c.key and machine.cores is not None:
        return f"{_last(c.key)}: {number(c.value)}  # {SHARED}"
    return f"{_last(c.key)}: {number(c.value)}  # {HOW[c.key]}; spread {c.spread:.0%}"


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def number(value: float) -> str:
    """Three digits, and never as a power: YAML 1.1 reads ``1e-05`` as a word.

    >>> number(98.437), number(0.0001234), number(0.0), number(1234567.0)
    ('98.4', '0.000123', '0', '1230000')
    """
    return f"{Decimal(f'{value:.3g}'):f}"
