"""Explains options that do not exist: which one is meant, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.errors import Problem
from launcher.job.cures.keys_of_other_programs import own_class
from launcher.job.overrides import shell
from launcher.job.schema.did_you_mean import nearest, unknown_choice

_MODELS = (
    "bert", "bloom", "deepseek", "deepseek_v3", "falcon", "gemma", "gemma2", "gemma3", "gpt", "gpt2",
    "gpt_neox", "gptj", "llama", "llama2", "llama3", "llama3_1", "llama3_2", "llama4", "mistral", "mixtral",
    "opt", "phi", "phi3",
    "qwen", "qwen2", "qwen2_5", "qwen3", "roberta", "t5", "transformer", "vit",
)  # fmt: skip
_BUILDS = "hf builds a model of transformers from its folder, model.path; lm is a decoder like Llama"
_DATA = "the launcher downloads no data set"
_TEXTS = (
    "c4", "dclm", "fineweb", "fineweb_edu", "imdb", "openwebtext", "owt", "pile", "redpajama", "slimpajama",
    "the_pile", "tinystories", "wikipedia", "wikitext", "wikitext103", "wikitext2",
)  # fmt: skip
_CHATS = ("alpaca", "dolly", "oasst", "openassistant", "openhermes", "sharegpt", "slimorca", "ultrachat")
_RECORDS = ("arrow", "hf", "huggingface", "datasets", "json", "jsonl", "parquet")
_ABSENT = {
    "optim": (
        "adadelta", "adagrad", "adamax", "adan", "asgd", "came", "galore", "lamb", "lars", "lbfgs", "nadam",
        "prodigy",
        "radam", "rmsprop", "rprop", "shampoo", "soap", "sophia", "adamw_8bit", "adamw_bnb_8bit",
        "paged_adamw_8bit", "paged_adamw_32bit", "schedule_free_adamw", "onebitadam", "adamw_torch_8bit",
    ),
    "loss": (
        "contrastive", "ctc", "dice", "focal", "hinge", "huber", "kl", "kl_div", "kldiv", "l1", "mae", "nll",
        "poisson", "smooth_l1", "triplet",
    ),
    "schedule": (
        "cyclic", "exponential", "inverse_sqrt", "lambda", "multistep", "noam", "one_cycle", "onecycle",
        "plateau", "reduce_lr_on_plateau", "step", "step_lr", "steplr",
    ),
}  # fmt: skip
"""Options of other programs that do not exist here; a class of the user's can take their place."""
_SENDERS = ("aim", "clearml", "comet", "comet_ml", "dvclive", "neptune", "swanlab")
_STARTERS = ("accelerate", "deepspeed", "horovod", "mpi", "mpirun", "ray")
_BY_SLURM = "not supported; torchrun, launch=slurm or launch=k8s start ranks on several machines"
_IMAGES = ("cifar100", "coco", "food101", "imagenet", "imagenet1k", "tiny_imagenet")
ALMOST = {
    **{
        ("data", name): (
            f"{_DATA}; data=text data.path=FILES reads its text, data=tokens reads what prepare wrote",
            "",
        )
        for name in _TEXTS
    },
    **{
        ("data", name): (f"{_DATA}; data=chat data.path=FILES reads its conversations", "") for name in _CHATS
    },
    **{
        ("data", name): (f"{_DATA}; data=images data.root=FOLDER reads its images, one folder per class", "")
        for name in _IMAGES
    },
    ("data", "cifar"): (f"{_DATA}; data=cifar10 data.root=FOLDER reads the files of CIFAR-10", ""),
    ("data", "fashion_mnist"): (f"{_DATA}; data=idx data.root=FOLDER reads its files", ""),
    **{("model", name): (_BUILDS, "") for name in _MODELS},
    **{(group, name): (own_class(group), "") for group, names in _ABSENT.items() for name in names},
    **{
        ("data", name): (
            "data=chat data.path=FILES reads conversations, the step prepare tokenizes a column of text",
            "",
        )
        for name in _RECORDS
    },
    ("data", "webdataset"): ("not supported; data=images data.root=FOLDER reads images", ""),
    **{
        ("logger", name): (
            "not supported; write your own class: logger.others=[{_target_: package.module.Class}]",
            "",
        )
        for name in _SENDERS
    },
    **{("launch", name): (_BY_SLURM, "") for name in _STARTERS},
    ("launch", "torchrun"): ("start this command with torchrun; launch=auto joins its ranks", ""),
    **{("launch", name): ("auto starts ranks on this machine", "launch=auto") for name in ("ddp", "local")},
    ("model", "resnet101"): (
        "not supported; write your own class: model={_target_: package.module.Class}",
        "",
    ),
    ("model", "resnet152"): (
        "not supported; write your own class: model={_target_: package.module.Class}",
        "",
    ),
    **{
        ("optim", name): ("it is adamw", "optim=adamw")
        for name in ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "fused_adamw")
    },
    **{
        ("schedule", name): ("it is constant, with schedule.warmup_steps", "schedule=constant")
        for name in ("constant_with_warmup", "warmup_constant", "warmuplr")
    },
    **{
        ("schedule", name): ("it is cosine, with schedule.warmup_steps", "schedule=cosine")
        for name in ("cosine_annealing", "cosine_with_warmup", "warmup_cosine", "cosineannealinglr")
    },
    **{
        ("schedule", name): ("it is linear, with schedule.warmup_steps", "schedule=linear")
        for name in ("linear_with_warmup", "linear_warmup", "warmupdecaylr")
    },
    ("schedule", "none"): ("a learning rate without a schedule is constant", "schedule=constant"),
    ("schedule", "warmup_stable_decay"): ("it is wsd", "schedule=wsd"),
    ("steps", "fit"): ("it is train", ""),
    ("steps", "finetune"): ("steps=[load,train] trains from the weights of steps.load.path", ""),
    ("steps", "generate"): ("it is sample", ""),
    ("steps", "test"): ("evaluate computes the loss of held-out samples", ""),
    ("steps", "validate"): ("it is evaluate", ""),
    ("loss", "bce_with_logits"): ("it is bce", "loss=bce"),
    ("optim", "adam"): ("it is adamw without decay", "optim=adamw optim.weight_decay=0"),
    ("loss", "ce"): ("it is cross_entropy", "loss=cross_entropy"),
    ("loss", "binary_cross_entropy"): ("it is bce", "loss=bce"),
    ("data", "mnist"): ("idx reads its files, mnist5k is 5000 of its digits", ""),
}
"""Options of other programs: an explanation and an override for our counterpart."""


def of_other_programs(group: str, option: str) -> tuple[str, str] | None:
    """Returns the explanation and the override of ``ALMOST``; ``None`` for any other option."""
    return ALMOST.get((group, option.lower().rpartition("/")[2].replace("-", "_")))


NAMES = {"fit": "train", "generate": "sample", "validate": "evaluate"}
"""Steps of other programs, and ours."""


def right_name(group: str, option: str, options: Sequence[str]) -> str | None:
    """Returns the one of ``options`` that ``option`` means or misspells; ``None`` if there is none."""
    return (NAMES.get(option) if group == "steps" else None) or nearest(option, options)


def no_option(group: str, option: str, options: Sequence[str]) -> Problem:
    """Returns the problem of an unknown option of a group, with the most similar one as the cure."""
    word, title = ("step", "steps") if group == "steps" else ("option", "options")
    if (known := of_other_programs(group, option)) is not None:
        why, fixed = known
        if group == "steps" and (step := NAMES.get(option)):
            fixed = shell(f"steps=[{step}]")
        return Problem(group, f"unknown {word} {option!r}: {why} ({title}: {', '.join(options)})", fixed)
    text = f"unknown {word} {option!r}{unknown_choice(option, options, title)}"
    hint = nearest(option, options)
    if hint is None:
        return Problem(group, text)
    return Problem(group, text, shell(f"steps=[{hint}]" if group == "steps" else f"{group}={hint}"))
