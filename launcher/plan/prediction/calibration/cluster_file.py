"""Writes the text of a file in ``conf/cluster``; that of a calibrated cluster also has its spreads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal

from launcher.job.schema.cluster import Cluster
from launcher.plan.prediction.calibration.constants import Constant, cluster
from launcher.plan.prediction.calibration.timed import Machine

SHARED = "the cores that compute send"
GROUPS = ("kernels", "overheads")
TOGETHER = ("tflops", "links.inside", "links.between")
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
    "kernels.alone": "a block on all cores at once, the slowest of them, and on one",
    "overheads.scatter": "reduce-scatters beside the other collectives",
    "overheads.exposed": "gradients sent beside a product",
    "overheads.exposed_sums": "the same",
    "overheads.exposed_tp": "a product and a collective in turns: ranks wait for the slowest",
    "overheads.slot_ms": "the rest of a tiny step on a pipeline, of whose slot the spread is",
    "overheads.step_ms": "the rest of one on replicas, of which the spread is",
}


ALONE = (
    "memory_gb",
    "devices_per_node",
    "cores_per_node",
    "efficiency",
    "memory_gb_per_s",
)
"""Keys with a single number, which come first in a file. Maps on one line follow, then the groups."""


def cluster_file(found: Sequence[Constant], machine: Machine, heads: Sequence[str], nodes: int) -> str:
    """Returns the file of a calibrated cluster; ``heads``: comments on when and where it was measured."""
    values = {c.key: float(number(c.value)) for c in found}
    whole = cluster(values, replace(machine, memory_gb=float(f"{machine.memory_gb:.3g}")))
    return cluster_text(whole, heads, dict(_comments(found, machine, nodes)))


def _comments(found: Sequence[Constant], machine: Machine, nodes: int) -> Iterator[tuple[str, str]]:
    shared = machine.cores is not None
    yield "memory_gb", f"the machine's, which {machine.per_node} ranks share" if shared else "of a device"
    yield "devices_per_node", "ranks of the run that measured"
    yield "cores_per_node", "that ranks of the run may use, by the threads of each"
    for c in found:
        hidden = "exposed" in c.key and shared
        yield c.key, SHARED if hidden else f"{HOW.get(c.key)}; spread {c.spread:.0%}"
    for above in TOGETHER:
        spreads = ", ".join(f"{c.spread:.0%}" for c in found if c.key.startswith(f"{above}."))
        yield above, f"{HOW[above]}; spreads {spreads}"
    if nodes == 1:
        yield "links.between", "as inside: there is one node"


def cluster_text(whole: Cluster, heads: Sequence[str], comments: Mapping[str, str]) -> str:
    """Returns a file that is read as ``whole``.

    ``heads`` are comments at its top, ``comments`` those of keys. Overheads and kernel settings that have the
    values of ``unknown`` are left out, unless they have a comment.
    """
    return "".join(f"{line}\n" for line in _lines(whole, heads, comments))


def _lines(whole: Cluster, heads: Sequence[str], comments: Mapping[str, str]) -> Iterator[str]:
    def line(key: str, value: str) -> str:
        comment = f"  # {comments[key]}" if key in comments else ""
        return f"{_last(key)}: {value}{comment}"

    data, plain = whole.model_dump(exclude_none=True), Cluster().model_dump()
    yield from (f"# {head}" for head in heads)
    yield from ("defaults:", "  - unknown", "  - _self_", f"name: {json.dumps(whole.name)}")
    yield from (line(key, exact(data[key])) for key in ALONE if key in data)
    yield line("tflops", _map(data["tflops"]))
    yield "links:"
    yield from (f"  {line(f'links.{at}', _map(data['links'][at]))}" for at in ("inside", "between"))
    for group in GROUPS:
        values = {f"{group}.{name}": value for name, value in data[group].items()}
        told = {key: v for key, v in values.items() if v != plain[group][_last(key)] or key in comments}
        if told:
            yield f"{group}:"
        yield from (f"  {line(key, exact(v))}" for key, v in told.items())


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _map(values: Mapping[str, float | bool]) -> str:
    """Returns a map on one line, without ``False`` values, which are the defaults."""
    told = {
        name: "true" if value is True else exact(value)
        for name, value in values.items()
        if value is not False
    }
    return f"{{{', '.join(f'{name}: {value}' for name, value in told.items())}}}"


def exact(value: float) -> str:
    """Returns all digits of ``value`` without an exponent: YAML 1.1 reads ``1e-05`` as a string.

    >>> exact(98.4371), exact(1e-05), exact(3.0), exact(1200)
    ('98.4371', '0.00001', '3', '1200')
    """
    return f"{Decimal(repr(value)).normalize():f}"


def number(value: float) -> str:
    """Returns three digits of ``value``.

    >>> number(98.437), number(0.0001234), number(0.0), number(1234567.0)
    ('98.4', '0.000123', '0', '1230000')
    """
    return f"{Decimal(f'{value:.3g}'):f}"
