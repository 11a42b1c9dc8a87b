"""Which settings may change between a checkpoint and the training that resumes from it.

Every setting is in one class:

- Refused: it decides which samples follow or what a step means, so a change is refused.
- Derived: a change is refused only if a value that is computed from it changes too.
- Noted: people change it on purpose between two runs; a note says so.
- Layout: it says where and how training is computed; the numbers are the same for every value.
- Unrelated: no optimizer step depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from launcher.job.schema import redact
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.plan.values.text import many

SAMPLES = "other samples would follow"
REFUSED = {
    "seed": f"{SAMPLES}, and other random numbers",
    "data": SAMPLES,
    "debug.overfit": SAMPLES,
    "train.batch_size": "steps would use other samples",
    "train.precision": "numbers would be rounded differently",
    "model": "the weights would continue in another model",
    "optim.name": "the state would continue in another optimizer",
    "optim._target_": "the state would continue in another optimizer",
}
"""Each refused key or section, and why it is refused."""

SCALE = ("parallel.pipeline.loss_reduction", "parallel.gradients_mean", "parallel.loss_repeated_mean")
"""Settings that make gradients sums or means; the resulting scale depends on the layout too."""

MICRO = "parallel.pipeline.micro_batch_num"
DERIVED = (*SCALE, MICRO)

NOTED = (
    "loss", "optim", "schedule", "deterministic", "train.steps", "train.loss_scale", "train.clip_norm",
    "train.compile", "train.ema", "parallel.fp32_communication", "parallel.gradient_fp32_sync",
)  # fmt: skip

LAYOUT = (
    "launch", "cluster", "parallel.mode", "parallel.pipeline.stages", "parallel.pipeline.stage_config",
    "parallel.pipeline.scheduler", "parallel.pipeline.interleave", "parallel.pipeline.chunks",
    "parallel.pipeline.less_memory", "parallel.pipeline.seq_chunks", "parallel.pipeline.seq_split",
    "parallel.pipeline.output_broadcast", "parallel.hsdp", "parallel.comm_fusion", "parallel.operators",
    "parallel.recompute",
    "parallel.grid", "parallel.dataset_strategy", "parallel.shared", "parallel.param_strategy",
    "parallel.operator_strategy", "parallel.transformer_opt", "parallel.deferred_init", "debug.onerank",
)  # fmt: skip

UNRELATED = (
    "name", "recipe", "runs", "run_dir", "show", "search", "sweep", "metrics", "train.epochs",
    "train.log_every", "train.eval_every", "train.eval_batches", "train.early_stop", "callbacks",
    "parallel.local_norm", "parallel.group_file", "checkpoint", "steps", "logger", "security", "data.cache",
    "debug.limit", "debug.anomaly", "debug.graphs", "debug.profiler", "debug.drill",
)  # fmt: skip
"""``debug.limit`` and ``train.epochs`` are compared as ``train.steps``, which they determine."""

CHOSEN = ("model", "data", "loss", "optim", "schedule")
UNSET = "not set"
_UNSET = object()


@dataclass(frozen=True)
class Difference:
    """A key whose value differs from the checkpoint's; ``why`` it is refused, or empty if it is allowed."""

    key: str
    old: Any
    new: Any
    why: str = ""


def class_of(key: str) -> tuple[str, ...]:
    """Returns the classes that list ``key`` or, if none does, those that list its innermost section."""
    classes = {
        "refused": REFUSED,
        "derived": DERIVED,
        "noted": NOTED,
        "layout": LAYOUT,
        "unrelated": UNRELATED,
    }
    parts = key.split(".")
    for n in range(len(parts), 0, -1):
        above = ".".join(parts[:n])
        names = tuple(name for name, keys in classes.items() if above in keys)
        if names:
            return names
    return ()


def recorded(job: Job, plan: Plan, contents: str | None = None) -> dict[str, Any]:
    """Returns the training settings that a checkpoint records, with digests of secrets.

    ``job`` must name the data that is actually read; ``contents``: a digest of its files, if known.
    """
    flat = {key: value for key, value in _flat(job) if _compared(key)}
    flat["train.steps"] = plan.sizes.steps
    derived = {**_derived(plan), "contents": contents}
    return {**{key: redact.identified(value, key) for key, value in flat.items()}, "derived": derived}


def _compared(key: str) -> bool:
    return class_of(key)[0] in ("refused", "derived", "noted")


def _flat(job: Job) -> Iterator[tuple[str, Any]]:
    """Yields every key with its value, the arguments of the chosen components included."""
    data = job.model_dump(mode="json", by_alias=True)
    for section, value in data.items():
        if section in (*CHOSEN, "train", "debug"):
            yield from ((f"{section}.{key}", below) for key, below in value.items())
        elif section == "parallel":
            yield from ((f"{section}.{key}", below) for key, below in value.items() if key != "pipeline")
            yield from ((f"{section}.pipeline.{key}", below) for key, below in value["pipeline"].items())
        else:
            yield section, value


def _derived(plan: Plan) -> dict[str, Any]:
    sz = plan.sizes
    summed = sz.micros if plan.loss_reduction == "sum" else 1
    scale = plan.loss_repeats * summed * (1 if plan.gradients_mean else sz.replicas)
    micro_batches = [sz.micros, sz.micro_batch] if plan.observed.batch_dependent else None
    return {"gradient_scale": scale, "micro_batches": micro_batches}


def differences(
    saved: Mapping[str, Any], job: Job, plan: Plan, contents: str | None = None
) -> list[Difference]:
    """Returns the settings that differ from ``saved``, in the order of the schema.

    Data files whose contents have changed count as a difference of the setting that names them.

    Raises ``ValueError`` unless ``saved`` has the form that ``recorded`` returns.
    """
    if not isinstance(saved.get("derived"), dict):
        raise ValueError("its settings cannot be read")
    mine = recorded(job, plan)

    # a section with another choice is one difference: settings of different choices cannot be compared
    other = [section for section in CHOSEN if _kind(saved, section) != _kind(mine, section)]
    changes: list[Difference] = []
    for section in other:
        key = _chosen(section, mine)
        changes.append(Difference(key, _kind(saved, section), _kind(mine, section), _why(key)))

    # all other sections are compared setting by setting
    choices = (f"{section}.{key}" for section in CHOSEN for key in ("name", "_target_"))
    compared_elsewhere = {"derived", *DERIVED, *choices}
    for key in dict.fromkeys((*mine, *saved)):
        if key not in compared_elsewhere and key.partition(".")[0] not in other:
            changes += _one(key, saved, mine, job)
    changes += _contents(saved["derived"].get("contents"), contents, job, changes)
    return [*changes, *_scale(saved, mine), *_micro(saved["derived"], mine["derived"])]


def _kind(data: Mapping[str, Any], section: str) -> Any:
    """Returns what ``section`` chooses; ``momentum`` is another name for ``sgd`` with momentum.

    Old checkpoints record no loss, because it was always ``cross_entropy``.
    """
    default = "cross_entropy" if section == "loss" else None
    kind = data.get(f"{section}._target_", data.get(f"{section}.name", default))
    return "sgd" if (section, kind) == ("optim", "momentum") else kind


def _chosen(section: str, mine: Mapping[str, Any]) -> str:
    """Returns the key that makes the choice.

    This is the section itself, except for an optimizer or schedule: its other settings may change.
    """
    if section not in ("optim", "schedule"):
        return section
    return f"{section}._target_" if f"{section}._target_" in mine else f"{section}.name"


def _one(key: str, saved: Mapping[str, Any], mine: Mapping[str, Any], job: Job) -> Iterator[Difference]:
    old, new = saved.get(key, _UNSET), mine.get(key, _UNSET)
    if old is _UNSET and new == _default(job, key):
        return  # the key did not exist when the checkpoint was written
    if not redact.same(old, new):
        begins = key == "model.lora" and old in (None, _UNSET)  # LoRA starts; the saved weights stay as is
        yield Difference(key, _shown(old), _shown(new), "" if begins else _why(key))


def _shown(value: Any) -> Any:
    return UNSET if value is _UNSET else value


def _why(key: str) -> str:
    return REFUSED.get(key) or REFUSED.get(key.partition(".")[0], "")


def _default(job: Job, key: str) -> Any:
    """Returns the schema's default of ``key``, or ``_UNSET``."""
    value: Any = job
    *above, last = key.split(".")
    for name in above:
        value = getattr(value, name, None)
    fields = type(value).model_fields if isinstance(value, BaseModel) else {}
    return next((f.default for n, f in fields.items() if last in (n, f.alias)), _UNSET)


def _contents(old: Any, new: str | None, job: Job, changes: list[Difference]) -> Iterator[Difference]:
    places = [field for field in ("sources", "path", "root") if getattr(job.data, field, None)]
    key = f"data.{places[0]}" if places else "data.path" if hasattr(job.data, "path") else "data"
    if old is not None and new is not None and old != new and not {key, "data"} & {d.key for d in changes}:
        yield Difference(key, old, new, SAMPLES)


def _scale(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> Iterator[Difference]:
    old, new = (data["derived"].get("gradient_scale") for data in (saved, mine))
    if old != new:
        unlike = [key for key in SCALE if saved.get(key) != mine[key]]
        special = [key for key, usual in zip(SCALE, ("mean", True, True), strict=True) if mine[key] != usual]
        key = [*unlike, *special, SCALE[0]][0]
        of = "times the mean gradient"
        yield Difference(key, f"{old} {of}", f"{new} {of}", "steps would have another size")


def _micro(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> Iterator[Difference]:
    old, new = saved.get("micro_batches"), mine["micro_batches"]
    if old != new and isinstance(old, list) and len(old) == 2 and new is not None:
        texts = [f"{many(n, 'micro batch')} of {many(size, 'sample')}" for n, size in (old, new)]
        why = "the model's output depends on the samples of a micro batch"
        yield Difference(MICRO, texts[0], texts[1], why)
