"""What becomes of the settings about how numbers travel: their dtypes, and what travels together."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.job.schema.parallel import CommFusion
from launcher.plan.cost.fusion import Fused, knee, limits, size
from launcher.plan.cost.memory import bytes_text
from launcher.plan.partition.params import Placed
from launcher.plan.partition.sizes import Sizes
from launcher.plan.settings.settings import Setting
from launcher.plan.values.precision import Precision
from launcher.plan.values.text import many

KEY = "parallel.comm_fusion"


def problems(job: Job, params: tuple[Placed, ...]) -> list[Problem]:
    """Parameter numbers that there are not, and a loss scale for what needs none."""
    found = []
    asked, count = job.parallel.comm_fusion.allreduce, sum(p.trainable for p in params)
    cuts = asked.config if asked is not None and isinstance(asked.config, tuple) else ()
    if beyond := [c for c in cuts if c >= count]:
        text = f"{beyond[0]}: the model has {many(count, 'trainable parameter')}, numbered 0 to {count - 1}"
        kept = ", ".join(str(c) for c in cuts if c < count)
        found.append(Problem(f"{KEY}.allreduce.config", text, f"{KEY}.allreduce.config=[{kept}]"))
    return found


def settings(job: Job, sizes: Sizes, dtypes: Precision, fused: Fused | None = None) -> Iterator[Setting]:
    """One row for each setting that is not at its default; ``fused``: as ``settings.resolve`` has it."""
    yield from _dtypes(job, sizes, dtypes, fused)
    fusion = job.parallel.comm_fusion
    shards = sizes.grid["dp_shard"] > 1 if fused is None else bool(fused.groups)
    if not fusion.openstate:
        what = _apart(fused)
        done = sizes.replicas > 1
        yield Setting(f"{KEY}.openstate", "false", "applied" if done else "satisfied", what if done else ALONE)
        return
    if fusion.network is not None:
        yield _network(fusion, sizes, fused)
    yield from _gathers(fusion, shards)
    yield from _reduces(fusion, sizes, fused)


ALONE = "one data-parallel rank, nothing to sum or to gather"


def _apart(fused: Fused | None) -> str:
    """Of a plan that fuses nothing."""
    if fused is None or (fused.groups and fused.buckets and not fused.rest):
        return "every module is gathered and every whole parameter reduced by itself"
    gathered = "every module is gathered by itself"
    if fused.rest:
        gathered += f", but for {many(fused.rest, 'parameter')} that no module uses alone"
    parts = [gathered] if fused.groups else []
    if fused.buckets:
        parts.append("every whole parameter is reduced by itself")
    return "; ".join(parts) or "no parameter learns, nothing to sum or to gather"


def _network(fusion: CommFusion, sizes: Sizes, fused: Fused | None) -> Setting:
    assert fusion.network is not None
    text = f"{fusion.network.latency_us:g} us + {fusion.network.gb_per_s:g} GB/s"
    if sizes.replicas == 1:
        return Setting(f"{KEY}.network", text, "satisfied", ALONE)
    if fused is not None and not _fitted(fusion, fused):
        return Setting(f"{KEY}.network", text, "satisfied", "nothing that this plan sends is left to auto")
    why = f"auto is {bytes_text(knee(fusion.network))}, where the latency is 5 % of a collective"
    return Setting(f"{KEY}.network", text, "applied", why)


def _fitted(fusion: CommFusion, fused: Fused) -> bool:
    """Whether ``auto`` sizes anything."""
    gathers = size(fusion.allgather) is None and size(fusion.reducescatter) is None
    reduces = fusion.allreduce is None or fusion.allreduce.mode == "auto"
    return bool((gathers and fused.groups) or (reduces and fused.buckets))


def _gathers(fusion: CommFusion, shards: bool) -> Iterator[Setting]:
    asked = {"allgather": size(fusion.allgather), "reducescatter": size(fusion.reducescatter)}
    limit = limits(fusion).gather
    for name, n in asked.items():
        if n is None:
            continue
        key, value = f"{KEY}.{name}", f"size {bytes_text(n)}"
        if not shards:
            yield Setting(key, value, "satisfied", "nothing is sharded, nothing to gather or to scatter")
        elif limit is not None and n > limit:
            why = f"{bytes_text(limit)}, as the other: torch scatters the gradients of what it gathered together"
            yield Setting(key, value, "degraded", why)
        else:
            yield Setting(key, value, "applied", "units that feed each other travel together up to this size")


def _reduces(fusion: CommFusion, sizes: Sizes, fused: Fused | None) -> Iterator[Setting]:
    asked, n = fusion.allreduce, size(fusion.allreduce)
    if asked is None or asked.mode == "auto":
        return
    value = f"size {bytes_text(n)}" if n is not None else f"index {list(asked.config or ())}"  # type: ignore[arg-type]
    if sizes.replicas == 1:
        yield Setting(f"{KEY}.allreduce", value, "satisfied", ALONE)
    elif fused is not None and not fused.buckets:
        yield Setting(f"{KEY}.allreduce", value, "satisfied", "no gradient is summed whole")
    elif sizes.grid["dp_replicate"] > 1 and (sizes.grid["dp_shard"] > 1 if fused is None else fused.groups):
        why = "of whole parameters; gradients of shards are summed over replicas in the groups that scattered them"
        yield Setting(f"{KEY}.allreduce", value, "degraded", why)
    else:
        yield Setting(f"{KEY}.allreduce", value, "applied", "gradients of whole parameters, in buckets")


def _dtypes(job: Job, sizes: Sizes, dtypes: Precision, fused: Fused | None) -> Iterator[Setting]:
    kind, par = job.train.precision, job.parallel
    if dtypes.mixed:
        why = f"the model runs in {dtypes.compute}; weights, gradients, optimizer state and loss stay {dtypes.kept}"
        yield Setting("train.precision", kind, "applied", why)
    if dtypes.scale is not None:
        how = "halved at an overflow, doubled after 2000 steps without" if dtypes.dynamic else "fixed"
        value = "null" if dtypes.dynamic else f"{dtypes.scale:g}"
        yield Setting("train.loss_scale", value, "applied", f"{dtypes.scale:g}, {how}; an overflow skips the step")
    elif job.train.loss_scale is not None:
        yield Setting("train.loss_scale", f"{job.train.loss_scale:g}", "satisfied", f"{kind} gradients need no scaling")
    for name, on, default in (
        ("fp32_communication", par.fp32_communication, False),
        ("gradient_fp32_sync", par.gradient_fp32_sync, True),
    ):
        if on == default:
            continue
        key, value = f"parallel.{name}", str(on).lower()
        if not dtypes.mixed:
            what = "they travel as they are" if on else "nothing to lower"
            yield Setting(key, value, "satisfied", f"gradients are {kind} already; {what}")
        elif sizes.replicas == 1:
            yield Setting(key, value, "satisfied", ALONE)
        elif not on and dtypes.reduce != dtypes.compute:
            why = f"gradients travel in {dtypes.reduce}: parallel.fp32_communication=true asks for it"
            yield Setting(key, value, "satisfied", why)
        else:
            yield Setting(key, value, "applied", f"gradients travel in {dtypes.reduce}{_but(dtypes, fused)}")


def _but(dtypes: Precision, fused: Fused | None) -> str:
    """Which gradients are summed in the dtype that they are kept in: those not over data-parallel ranks."""
    if fused is None or dtypes.reduce == dtypes.kept:
        return ""
    rest = [*(["of tied parameters over stages"] if fused.tied else []), *(["over tp"] if fused.terms else [])]
    return f"; those {' and '.join(rest)} in {dtypes.kept}" if rest else ""
