"""The end of a turn is learned, or the request is refused; the plan shows what is learned of the first row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from launcher.data.chat.chat_tokenizer import chat_tokenizer
from launcher.data.chat.checks import check_first_rows, trained_text
from launcher.data.chat.conversation_files import conversation
from launcher.data.chat.tokens import _folder
from launcher.job.schema.data import Chat

SPECIAL = ["<|user|>", "<|assistant|>", "<|im_start|>", "<|im_end|>", "<|eos|>"]
IM = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
NEXT = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
ENDED = {
    "inside": f"{IM}{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}{ASKED}",
    "marked": IM + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
              "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}" + ASKED,
}  # fmt: skip
ENDLESS = {
    "the next marker ends it": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + NEXT,
    "the next turn writes it": "{% for m in messages %}{% if m.role == 'user' and not loop.first %}<|eos|>{% endif %}"
                               "<|{{ m.role }}|>{{ m.content }}" + NEXT,
    "outside of the marks": IM + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
                            "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + ASKED,
}  # fmt: skip


def settings(home: Path, template: str) -> Chat:
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    t.train_from_iterator(["a"], trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=SPECIAL,
                                                     show_progress=False))  # fmt: skip
    t.save(str(home / "tokenizer.json"))
    config = {"chat_template": template, "eos_token": "<|im_end|>" if "im_end" in template else "<|eos|>"}
    (home / "tokenizer_config.json").write_text(json.dumps(config))
    turns = [("user", "hi"), ("assistant", "one"), ("user", "and"), ("assistant", "two")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    (home / "c.jsonl").write_text(json.dumps(row) + "\n")
    file = str(home / "tokenizer.json")
    return Chat(name="chat", path=str(home / "c.jsonl"), tokenizer="file", tokenizer_file=file, seq_len=128)


@pytest.mark.parametrize("template", ENDED.values(), ids=[*ENDED])
def test_a_turn_that_ends_with_a_special_token_is_taken_and_told(template: str, tmp_path: Path) -> None:
    of = settings(tmp_path, template)
    assert [*check_first_rows(of)] == []
    assert trained_text(of) == "in c.jsonl:1 the model is trained on 'one<|im_end|>' and 'two<|im_end|>'"


def test_the_plan_says_what_is_learned_of_the_first_row_with_an_answer(tmp_path: Path) -> None:
    of = settings(tmp_path, next(iter(ENDED.values())))
    rows = Path(of.path).read_text()
    Path(of.path).write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n" + rows)
    assert trained_text(of) == "in c.jsonl:2 the model is trained on 'one<|im_end|>' and 'two<|im_end|>'"


@pytest.mark.parametrize("template", ENDLESS.values(), ids=[*ENDLESS])
def test_turns_of_which_none_ends_with_a_special_token_are_refused(template: str, tmp_path: Path) -> None:
    (problem,) = check_first_rows(settings(tmp_path, template))
    assert problem.key == "data.template"
    assert f"never learn to stop: in {tmp_path}/c.jsonl:1 it is trained on 'one' and 'two'" in problem.text


BOTH = "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
BOTH += "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}" + NEXT


@pytest.mark.parametrize(("decoder", "begins"), [({}, "<|im_start|>"), ({"added_tokens_decoder": {}}, "<|user|>")])
def test_special_tokens_that_an_older_folder_has_in_a_file_of_their_own(
    decoder: dict[str, object], begins: str, tmp_path: Path
) -> None:
    of = settings(tmp_path, BOTH)
    config = {"chat_template": BOTH, "bos_token": "<|user|>", "eos_token": "<|eos|>", **decoder}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    older = {"bos_token": {"content": "<|im_start|>"}, "additional_special_tokens": ["<|user|>"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    by = chat_tokenizer(of)
    assert by.tokenizer is not None
    ids, _ = by.labeled(conversation(json.loads(Path(str(of.path)).read_text())))
    assert by.tokenizer.id_to_token(int(ids[0])) == begins
    assert trained_text(of) == "in c.jsonl:1 the model is trained on 'one<|eos|>' and 'two<|eos|>'"


def test_tokens_are_made_again_where_special_tokens_have_changed(tmp_path: Path) -> None:
    of = settings(tmp_path, BOTH).model_copy(update={"cache": str(tmp_path / "cache")})
    before = _folder(of)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|im_start|>"}))
    assert _folder(of) != before
