"""Conversations, templates and settings of tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from launcher.data.chat.samples import open_chat
from launcher.job.schema.data import Chat

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|head|>", "<|/head|>", "<|eot|>", "<s>", "</s>"]
CHATML = """\
{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA = """\
{{ bos_token }}{% for m in messages %}
{{ '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim + '<|eot|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"""
MISTRAL = """\
{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}
{%- elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}
{%- else %}{{ raise_exception('only user and assistant roles are known') }}{% endif %}{% endfor %}"""
MARKED = """\
{% for m in messages %}{% if m['role'] == 'assistant' %}
{{- '<|im_start|>assistant\n' }}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"""
FORGETFUL = """\
{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}
{%- if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% else %}{{ '...' }}{% endif %}{{ '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TURNS = [("user", "Hi there"), ("assistant", "Hello, you."), ("user", "More?"), ("assistant", "No.")]


def written(folder: Path, template: str, rows: list[Any]) -> Chat:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Chat(
        name="chat", path=str(folder / "rows.jsonl"), tokenizer="file", val_fraction=0.0, seq_len=64,
        tokenizer_file=str(folder / "tokenizer.json"),
    )  # fmt: skip


def messages(turns: list[tuple[str, str]] = TURNS) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def expected(tokenizer: Tokenizer, parts: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """Inputs and targets of successive texts, each of which is learned or not."""
    ids, counted = [], []
    for text, learned in parts:
        found = tokenizer.encode(text, add_special_tokens=False).ids
        ids += found
        counted += [learned] * len(found)
    targets = [t if c else -100 for t, c in zip(ids[1:], counted[1:], strict=True)]
    return ids[:-1], targets


def read(settings: Chat) -> tuple[list[int], list[int]]:
    """The first sample without its padding, which is asserted to be padding."""
    data = open_chat(settings).train
    (inputs,), targets = data.inputs(np.array([0])), data.targets(np.array([0]))
    last = int((targets[0] != -100).nonzero().max()) + 1
    assert inputs.shape == targets.shape == (1, settings.seq_len)
    assert not inputs[0, last + 2 :].any()
    return inputs[0, :last].tolist(), targets[0, :last].tolist()


def request_words(settings: Chat) -> list[str]:
    return [
        "recipe=chat_lm_pp2", f"data.path={settings.path}", "data.tokenizer=file", "data.val_fraction=0",
        f"data.tokenizer_file={settings.tokenizer_file}", "data.seq_len=64", "train.steps=2", "steps=[train]",
    ]  # fmt: skip
