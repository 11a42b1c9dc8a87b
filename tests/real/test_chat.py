"""Conversations as transformers encodes them, and its mask of the assistant's tokens."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from tokenizers import processors

from launcher.data import train_byte_pairs
from launcher.data.chat.samples import open_chat
from launcher.job.schema.data import Chat

MISSING = [name for name in ("transformers",) if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason="not installed: transformers; make test-real installs it")
TEMPLATE = """\
{%- if messages[0]['role'] == 'system' %}{{ '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
    {%- if m['role'] == 'system' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + m['role'] + '\n' }}
    {%- if m['role'] == 'assistant' %}
        {%- generation %}{{ m['content'] | trim + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
    {%- else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
CHATS = [
    [("user", "Hi there"), ("assistant", "Hello, you."), ("user", "More?"), ("assistant", " Né, non. ")],
    [("system", "Be brief."), ("user", "2 + 2?"), ("assistant", "4:   2 + 2\n    = 4")],
    [("user", "日本?"), ("assistant", "東京です。\n\nOK?"), ("user", "Ja"), ("assistant", "👍🏽")],
]


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "by prefixes"])
def test_tokens_and_the_mask_of_the_assistant(marked: bool, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    path = tmp_path / "tokenizer.json"
    text = "Hi there, you. Hello! More? No. OK you help be brief. " * 9
    tokenizer = train_byte_pairs.train_on([text], 420, ["<|im_start|>", "<|im_end|>"])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # as in GPT-2 and Llama 3
    tokenizer.save(str(path))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token="<|im_end|>", chat_template=TEMPLATE)
    plain = TEMPLATE.replace("generation %}{{ m", "if true %}{{ m").replace("endgeneration", "endif")
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE if marked else plain}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    rows = [[{"role": role, "content": content} for role, content in chat] for chat in CHATS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    settings = Chat(
        name="chat", path=str(tmp_path / "rows.jsonl"), tokenizer="file", tokenizer_file=str(path), val_fraction=0.0
    )
    data = open_chat(settings).train
    for k, row in enumerate(rows):
        want = theirs.apply_chat_template(row, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = want["input_ids"], want["assistant_masks"]
        inputs, targets = data.inputs(np.array([k]))[0][0].tolist(), data.targets(np.array([k]))[0].tolist()
        assert sum(mask) > 0
        assert inputs[: len(ids) - 1] == ids[:-1]
        assert targets[: len(ids) - 1] == [t if m else -100 for t, m in zip(ids[1:], mask[1:], strict=True)]
        assert set(targets[len(ids) - 1 :]) <= {-100}
