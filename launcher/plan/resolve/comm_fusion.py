"""``parallel.comm_fusion``: how many bytes one collective carries."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.job.schema.parallel import CommFusion, Fusion, FusionIndex, Network
from launcher.plan.communication.buckets_and_gathers import Communication, Limits
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.sizes import Sizes
from launcher.plan.values.setting import ALONE, Setting
from launcher.plan.values.text import bytes_text, many

KEY = "parallel.comm_fusion"
MB = 1 << 20
DEFAULT = 64 * MB
BEGINNING = 20
"""How many times its latency a collective should take: then the latency is 5 % of its time."""


def limits(job: Job) -> Limits:
    """Returns the limits in bytes that ``comm_fusion`` requests."""
    fusion, hsdp = job.parallel.comm_fusion, job.parallel.hsdp
    if not fusion.openstate:
        return Limits(each=True, gather=None, reduce=0)
    fitted = None if fusion.network is None else knee(fusion.network)

    # except at level1, FSDP2 scatters the gradients of a gather group together, so one size limits both
    gather, scatter = size(fusion.allgather), size(fusion.reducescatter)
    if hsdp is not None and hsdp.optimizer_level != "level1":
        sizes = [n for n in (gather, scatter) if n is not None]
        gather, scatter = min(sizes, default=None), None
    gather = fitted if gather is None else gather

    if fusion.allreduce is not None and isinstance(fusion.allreduce.config, tuple):
        cuts = fusion.allreduce.config
        return Limits(each=False, gather=gather, reduce=DEFAULT, cuts=cuts, scatter=scatter)
    reduce = size(fusion.allreduce)
    if reduce is None:
        reduce = fitted or DEFAULT
    return Limits(each=False, gather=gather, reduce=reduce, scatter=scatter)


def size(fusion: Fusion | FusionIndex | None) -> int | None:
    """Returns the number of bytes that mode ``size`` requests; ``None`` for any other mode."""
    if fusion is None or fusion.mode != "size" or isinstance(fusion.config, tuple):
        return None
    return DEFAULT if fusion.config is None else int(fusion.config * MB)


def knee(network: Network) -> int:
    """Returns the number of bytes whose transfer takes ``BEGINNING`` times the latency of ``network``.

    >>> knee(Network(latency_us=50, gb_per_s=1))
    1000000
    """
    return round(BEGINNING * network.latency_us * network.gb_per_s * 1e3)


def param_problems(job: Job, params: tuple[Placed, ...]) -> list[Problem]:
    """Returns a problem if ``allreduce.config`` has a parameter number that the model does not have."""
    allreduce = job.parallel.comm_fusion.allreduce
    if allreduce is None or not isinstance(allreduce.config, tuple):
        return []
    count = sum(p.trainable for p in params)
    beyond = [number for number in allreduce.config if number >= count]
    if not beyond:
        return []
    key = f"{KEY}.allreduce.config"
    kept = ", ".join(str(number) for number in allreduce.config if number < count)
    text = f"{beyond[0]}: the model has {many(count, 'trainable parameter')}, numbered 0 to {count - 1}"
    return [Problem(key, text, f"{key}=[{kept}]")]


def rows(job: Job, sizes: Sizes, fused: Communication | None) -> Iterator[Setting]:
    """Yields the settings that are not at their default."""
    fusion = job.parallel.comm_fusion
    if not fusion.openstate:
        yield _nothing_fused(sizes, fused)
        return
    if fusion.network is not None:
        yield _network(fusion, fusion.network, sizes, fused)
    shards = sizes.grid["dp_shard"] > 1 if fused is None else bool(fused.groups)
    yield from _gathers(job, shards)
    yield from _reduces(fusion, sizes, fused)


def _nothing_fused(sizes: Sizes, fused: Communication | None) -> Setting:
    key = f"{KEY}.openstate"
    if sizes.replicas == 1:
        return Setting(key, "false", "satisfied", ALONE)
    if fused is None or (fused.groups and fused.buckets and not fused.rest):
        why = "every module is gathered and every unsharded parameter reduced by itself"
        return Setting(key, "false", "applied", why)

    parts = []
    if fused.groups and fused.rest:
        rest = many(fused.rest, "parameter")
        parts.append(f"every module is gathered by itself, except {rest} that no module uses alone")
    elif fused.groups:
        parts.append("every module is gathered by itself")
    if fused.buckets:
        parts.append("every unsharded parameter is reduced by itself")
    why = "; ".join(parts) or "no parameter is trained, so nothing is summed or gathered"
    return Setting(key, "false", "applied", why)


def _network(fusion: CommFusion, network: Network, sizes: Sizes, fused: Communication | None) -> Setting:
    key, value = f"{KEY}.network", f"{network.latency_us:g} us + {network.gb_per_s:g} GB/s"
    if sizes.replicas == 1:
        return Setting(key, value, "satisfied", ALONE)
    if fused is not None and not _fitted(fusion, fused):
        return Setting(key, value, "satisfied", "auto sets the size of no collective in this plan")
    why = f"auto is {bytes_text(knee(network))}: at this size the latency is 5 % of a collective's time"
    return Setting(key, value, "applied", why)


def _fitted(fusion: CommFusion, fused: Communication) -> bool:
    """Returns true if ``auto`` decides the size of any collective of this plan."""
    both = size(fusion.reducescatter) if fused.limits.scatter is None else None
    gathers = size(fusion.allgather) is None and both is None
    reduces = fusion.allreduce is None or fusion.allreduce.mode == "auto"
    return bool((gathers and fused.groups) or (reduces and fused.buckets))


def _gathers(job: Job, shards: bool) -> Iterator[Setting]:
    """Yields the settings of gathers and scatters; ``shards``: whether anything is sharded."""
    fusion, effective = job.parallel.comm_fusion, limits(job)
    limit = effective.gather
    for name, settings in (("allgather", fusion.allgather), ("reducescatter", fusion.reducescatter)):
        nbytes = size(settings)
        if nbytes is None:
            continue

        # except at level1, gathers and scatters share the smaller limit
        key, value = f"{KEY}.{name}", f"size {bytes_text(nbytes)}"
        if not shards:
            yield Setting(key, value, "satisfied", "nothing is sharded, so nothing is gathered or scattered")
        elif name == "reducescatter" and effective.scatter is not None:
            why = "gradients that are finished consecutively are scattered together up to this size"
            yield Setting(key, value, "applied", why)
        elif limit is not None and nbytes > limit:
            why = "the smaller size: except at level1, FSDP2 scatters together what it gathered together"
            yield Setting(key, value, "degraded", f"{bytes_text(limit)}, {why}")
        else:
            why = "units that feed each other are sent together up to this size"
            yield Setting(key, value, "applied", why)


def _reduces(fusion: CommFusion, sizes: Sizes, fused: Communication | None) -> Iterator[Setting]:
    """Yields the setting of all-reduces."""
    allreduce = fusion.allreduce
    if allreduce is None or allreduce.mode == "auto":
        return

    key = f"{KEY}.allreduce"
    value = _written(allreduce)
    sharded = sizes.grid["dp_shard"] > 1 if fused is None else bool(fused.groups)
    if sizes.replicas == 1:
        yield Setting(key, value, "satisfied", ALONE)
    elif fused is not None and not fused.buckets:
        yield Setting(key, value, "satisfied", "there are no unsharded gradients")
    elif sizes.grid["dp_replicate"] > 1 and sharded:
        why = "gradients of sharded parameters are summed over replicas in the groups that scattered them"
        yield Setting(key, value, "degraded", f"only for unsharded parameters; {why}")
    else:
        yield Setting(key, value, "applied", "gradients of unsharded parameters are summed in buckets")


def _written(allreduce: FusionIndex) -> str:
    nbytes = size(allreduce)
    if nbytes is not None:
        return f"size {bytes_text(nbytes)}"
    assert isinstance(allreduce.config, tuple), allreduce
    return f"index {list(allreduce.config)}"
