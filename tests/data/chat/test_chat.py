"""Conversations as tokens and targets: which tokens they have, which of them count, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, processors

from launcher.__main__ import main
from launcher.data.chat import tokens
from launcher.data.chat.checks import check_first_rows, trained_text
from launcher.data.chat.samples import open_chat
from launcher.data.prepare.progress import ProgressReporter
from launcher.errors import RequestError
from launcher.job.schema.data import Chat
from tests.data.chat.chats import (
    CHATML,
    FORGETFUL,
    LLAMA,
    MARKED,
    MISTRAL,
    TURNS,
    expected,
    messages,
    read,
    request_words,
    written,
)
from tests.run.launching import losses, shape

SHAPES: dict[str, tuple[str, list[tuple[str, bool]]]] = {
    "chatml": (CHATML, [
        ("<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n", False), ("Hello, you.<|im_end|>", True),
        ("\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n", False), ("No.<|im_end|>", True),
    ]),
    "llama": (LLAMA, [
        ("<s><|head|>user<|/head|>\n\nHi there<|eot|><|head|>assistant<|/head|>\n\n", False),
        ("Hello, you.<|eot|>", True),
        ("<|head|>user<|/head|>\n\nMore?<|eot|><|head|>assistant<|/head|>\n\n", False), ("No.<|eot|>", True),
    ]),
    "mistral": (MISTRAL, [
        ("<s>[INST] Hi there [/INST]", False), (" Hello, you.</s>", True), ("[INST] More? [/INST]", False),
        (" No.</s>", True),
    ]),
    "marked": (MARKED, [
        ("<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n", False), ("Hello, you.<|im_end|>", True),
        ("\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n", False), ("No.<|im_end|>", True),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("kind", SHAPES)
def test_only_the_assistants_tokens_have_targets(kind: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    template, parts = SHAPES[kind]
    inputs, targets = read(written(tmp_path, template, [messages()]))
    want = expected(tokenizer, parts)
    assert (inputs, targets) == (want[0][: len(inputs)], want[1])


def test_a_template_of_its_own_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """``chat_template.jinja`` beside the tokenizer overrides its config, and ``data.template`` overrides both."""
    settings = written(tmp_path, CHATML, [messages()])
    (tmp_path / "chat_template.jinja").write_text(LLAMA)
    assert read(settings)[1] == expected(tokenizer, SHAPES["llama"][1])[1]
    (tmp_path / "own.jinja").write_text(MISTRAL)
    own = settings.model_copy(update={"template": str(tmp_path / "own.jinja")})
    assert read(own)[1] == expected(tokenizer, SHAPES["mistral"][1])[1]


def test_truncation_and_padding_settings_of_a_tokenizer_are_ignored(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """In GPT-2 and Llama 3 a token of blanks has no offsets; a saved tokenizer may truncate and pad."""
    parts = [("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False), ("  a:   1\n    2<|im_end|>", True)]
    inputs, targets = expected(tokenizer, parts)
    assert tokenizer.encode("a   1").tokens.count("Ġ") > 1
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.enable_truncation(12)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = written(tmp_path, CHATML, [messages([("user", "Hi"), ("assistant", "  a:   1\n    2")])])
    assert read(settings) == (inputs, targets)


def test_a_prompt_and_its_completion(tokenizer: Tokenizer, tmp_path: Path) -> None:
    settings = written(tmp_path, CHATML, [{"prompt": "Hi there", "completion": " Hello"}])
    assert read(settings)[1] == expected(tokenizer, [("Hi there", False), (" Hello", True), ("</s>", True)])[1]

    # as messages: nothing in the prompt is learned, not even the assistant's turns
    row = {"prompt": messages(TURNS[:3])["messages"], "completion": messages(TURNS[3:])["messages"]}
    parts = SHAPES["chatml"][1]
    unlearned = [(text, learned and i == 3) for i, (text, learned) in enumerate(parts)]
    assert read(written(tmp_path, CHATML, [row]))[1] == expected(tokenizer, unlearned)[1]


def test_bytes_bring_a_template(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(messages([("user", "é?"), ("assistant", "ü!")])) + "\n")
    settings = Chat(name="chat", path=str(tmp_path / "rows.jsonl"), val_fraction=0.0, seq_len=128)
    targets = read(settings)[1]
    assert bytes(t for t in targets if t != -100).decode() == "ü!<|im_end|>"


def test_a_template_has_the_tools_and_the_filters_of_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A mark inside a comment is not a mark."""
    shown = "{# {% generation %} #}{% if tools %}{{ tools | tojson(separators=(',', ':'), sort_keys=true) }}{% endif %}"
    row = messages(TURNS[:2]) | {"tools": [{"name": "é", "a": 1}]}
    first, *others = SHAPES["chatml"][1][:2]
    want = expected(tokenizer, [('[{"a":1,"name":"é"}]' + first[0], False), *others])
    assert read(written(tmp_path, shown + CHATML, [row])) == (want[0], want[1])


def test_a_conversation_that_is_too_long_is_cut_or_skipped(tokenizer: Tokenizer, tmp_path: Path) -> None:
    settings = written(tmp_path, CHATML, [messages(), messages(TURNS[:2])])
    inputs, targets = expected(tokenizer, SHAPES["chatml"][1])
    length = len(inputs) - 4
    short = settings.model_copy(update={"seq_len": length, "too_long": "cut"})
    data = open_chat(short).train
    assert len(data) == 2
    assert data.inputs(np.array([0]))[0][0].tolist() == inputs[:length]
    assert data.targets(np.array([0]))[0].tolist() == targets[:length]
    assert len(open_chat(short.model_copy(update={"too_long": "skip"})).train) == 1


def _bytes_of(tmp_path: Path, seq_len: int, too_long: str) -> Chat:
    """Two conversations as bytes: the assistant's first turn begins at token 58 of the first, 55 of the second."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(messages(t)) + "\n" for t in (TURNS, TURNS[2:])))
    return Chat.model_validate(
        {"name": "chat", "path": str(tmp_path / "rows.jsonl"), "seq_len": seq_len, "too_long": too_long}
    )


@pytest.mark.parametrize(("seq_len", "cure"), [(20, ""), (55, "data.too_long=cut"), (60, "data.too_long=cut")])
def test_a_way_to_fit_is_one_that_leaves_tokens_to_train_on(tmp_path: Path, seq_len: int, cure: str) -> None:
    (problem,) = check_first_rows(_bytes_of(tmp_path, seq_len, "error"))
    assert (problem.key, problem.cure) == ("data.seq_len", cure)


@pytest.mark.parametrize("too_long", ["cut", "skip"])
def test_a_length_that_leaves_no_token_to_train_on_is_refused_before_the_start(tmp_path: Path, too_long: str) -> None:
    (problem,) = check_first_rows(_bytes_of(tmp_path, 20, too_long))
    why = f"20: data.too_long={too_long} leaves no token to train on: {tmp_path}/rows.jsonl:1: "
    assert problem.text.startswith(why)
    assert trained_text(_bytes_of(tmp_path, 20, too_long)) == ""


def test_the_plan_shows_what_is_left_of_a_conversation_that_is_cut(tmp_path: Path) -> None:
    assert trained_text(_bytes_of(tmp_path, 61, "cut")) == "in rows.jsonl:1 the model is trained on 'Hell'"


def test_held_out_conversations_are_the_last_ones(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [messages([("user", f"{n}"), ("assistant", f"{n}")]) for n in range(10)]
    data = open_chat(written(tmp_path, CHATML, rows).model_copy(update={"val_fraction": 0.2}))
    assert (len(data.train), len(data.val)) == (8, 2)
    targets = [data.val.targets(np.array([k])) for k in range(2)]
    assert [tokenizer.decode(t[t != -100].tolist()) for t in targets] == ["8", "9"]


def test_tokens_that_are_kept_are_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    settings = written(tmp_path, CHATML, [messages(), messages(TURNS[:2])])
    kept = settings.model_copy(update={"cache": str(tmp_path / "kept")})
    said: list[str] = []
    for _ in range(2):
        with ProgressReporter("off", said.append) as speed:
            tokens.make(kept, said.append, speed)
    (line,) = said
    assert line.startswith("data: 2 conversations, tokenized once into ")
    parts = tokens.opened(kept)
    assert parts is not None
    assert isinstance(parts["train"].tokens, np.memmap)
    at = np.arange(2)
    for one, other in ((open_chat(settings).train, open_chat(kept).train),):
        assert torch.equal(one.inputs(at)[0], other.inputs(at)[0])
        assert torch.equal(one.targets(at), other.targets(at))
    (tmp_path / "rows.jsonl").write_text(json.dumps(messages(TURNS[:2])) + "\n")
    assert tokens.opened(kept) is None  # the cache of other conversations


BAD = {
    "not JSON": ('{"messages": ', "not JSON: Expecting value at character 14"),
    "keys": ('{"talk": []}', "a row must have 'messages', or 'prompt' and 'completion' (keys: talk)"),
    "no list": ('{"messages": "hi"}', "'messages' is not a list of messages"),
    "from": (
        '{"messages": [{"from": "human", "value": "hi"}]}', "messages[0] has no text 'role' (keys: from, value)",
    ),
    "role": (
        json.dumps(messages([("user", "Hi"), ("asistant", "Hello")])),
        "messages[1] has the role 'asistant'; roles are system, developer, user, assistant, tool",
    ),
    "tools": (json.dumps(messages() | {"tools": "search"}), "'tools' is not a list"),
    "no text": (
        json.dumps(messages([("user", "Hi"), ("assistant", "\ud800")])),
        "it has half a surrogate pair, which UTF-8 cannot encode",
    ),
    "no answer": (json.dumps(messages(TURNS[:1])), "it has no assistant tokens to train on"),
    "no question": (
        json.dumps(messages(TURNS[1:2])), "the first message is the assistant's, so it has no prompt",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_named_or_left_out(
    kind: str, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line, why = BAD[kind]
    settings = written(tmp_path, CHATML, [messages()])
    path = Path(str(settings.path))
    path.write_text(path.read_text() + line + "\n")
    words = request_words(settings)
    assert main([*words, "show=plan"]) == 2
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        f"  data.path: {path}:2: {why}; data.on_bad=skip leaves out bad rows and counts them\n"
        f"    set by: data.path={path} (command line)\n"
        f"    try:    data.path={path} data.on_bad=skip\n"
    )
    assert len(open_chat(settings.model_copy(update={"on_bad": "skip"})).train) == 1


CALL = {"type": "function", "function": {"name": "get", "arguments": {"city": "Rome"}}}
CALLING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ONLY_WITHOUT_CONTENT = CALLING.replace("m.tool_calls or []", "((m.tool_calls or []) if m.content is none else [])")


def calling(content: str | None, arguments: Any = CALL["function"]["arguments"]) -> dict[str, Any]:  # type: ignore[index]
    """Return a row whose last message calls a function."""
    call = {"type": "function", "function": {"name": "get", "arguments": arguments}}
    row = messages(TURNS[:1])
    return {"messages": [*row["messages"], {"role": "assistant", "content": content, "tool_calls": [call]}]}


@pytest.mark.parametrize("template", [CALLING, ONLY_WITHOUT_CONTENT], ids=["calls", "calls without content"])
def test_calls_of_functions_are_learned_without_content(template: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    targets = read(written(tmp_path, template, [calling(None)]))[1]
    question = SHAPES["chatml"][1][0]
    assert targets == expected(tokenizer, [question, ('<call>get {"city": "Rome"}<|im_end|>', True)])[1][: len(targets)]


@pytest.mark.parametrize(("template", "row", "why"), [
    (CHATML, calling("I look."), "message 1: the template does not write its tool_calls"),
    (ONLY_WITHOUT_CONTENT, calling("I look."), "message 1: the template does not write its tool_calls"),
    (CALLING, calling(None, '{"city": "Rome"}'), "message 1: the template encodes the arguments of a call, which"),
    (CALLING.replace("{% if m.content %}", "{% if True %}"), calling(None), "message 1: the template writes None for"),
], ids=["no calls", "no calls beside content", "encoded twice", "None"])  # fmt: skip
def test_a_template_that_loses_or_changes_calls_is_refused(
    template: str, row: dict[str, Any], why: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=re.escape(why)):
        read(written(tmp_path, template, [row]))


THINKING = CALLING.replace("m.content }}", "m.content ~ (m.thinking or '') }}")


@pytest.mark.parametrize(("template", "left"), [(CHATML, True), (THINKING, False)], ids=["left out", "written"])
def test_reasoning_that_the_template_leaves_out_is_noted(
    template: str, left: bool, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    row = messages(TURNS[:2])
    row["messages"][1]["thinking"] = "They greet me."
    said = trained_text(written(tmp_path, template, [row]))
    assert ("; the template leaves out thinking" in said) == left
    texts = {"prompt": "Hi there", "completion": " Hello"}
    assert "leaves out" not in trained_text(written(tmp_path, "{{ messages[0].content }}", [texts]))


OTHERS = {
    "ShareGPT": {"conversations": [{"from": "human", "value": 'say "hi"'}, {"from": "gpt", "value": "hi"}]},
    "Alpaca": {"instruction": 'say "hi"', "input": "", "output": "hi"},
}


@pytest.mark.parametrize("form", OTHERS)
def test_rows_of_another_known_form_are_told_with_a_command_that_rewrites_them(
    form: str, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = written(tmp_path, CHATML, [OTHERS[form]])
    assert main([*request_words(settings), "show=plan"]) == 2
    said = capsys.readouterr().err
    assert f"a row in {form} form; " in said
    assert "on_bad" not in said

    # the command, as the message shows it
    line = next(line for line in said.splitlines() if "python -c" in line)
    command = line[line.index("python -c") :].replace("python", quote(sys.executable), 1)
    assert subprocess.run(command, shell=True).returncode == 0
    (new,) = tmp_path.glob("*-messages.jsonl")
    turns = [("user", 'say "hi"'), ("assistant", "hi")]
    assert [json.loads(row) for row in new.read_text().splitlines()] == [messages(turns)]
    assert len(open_chat(settings.model_copy(update={"path": str(new)})).train) == 1


@pytest.mark.parametrize(
    ("template", "turns", "why"),
    [
        (
            MISTRAL, [("system", "Be kind."), *TURNS],
            "the template raises an error: only user and assistant roles are known",
        ),
        (
            FORGETFUL, TURNS,
            "message 1: the template renders it differently when other messages follow; mark it in the template with "
            "{% generation %}",
        ),
        (
            CHATML.replace("assistant\n' }}{% endif", "model\n' }}{% endif"), TURNS,
            ("message 1: the template renders this turn differently from its generation "
             "prompt (add_generation_prompt); mark it in the template with "
             "{% generation %}"),
        ),
        ("{{ 1 / 0 }}", TURNS, "the template raises an error: division by zero"),
        (
            "{% set x %}{% generation %}{{ messages[1]['content'] }}{% endgeneration %}{% endset %}{{ x | length }}",
            TURNS, "the template changes the text that it has written in {% generation %}",
        ),
    ],
    ids=["raises", "rewrites", "asks otherwise", "fails", "changes what is marked"],
)  # fmt: skip
def test_a_template_that_does_not_mark_the_assistants_tokens_is_refused(
    template: str,
    turns: list[tuple[str, str]],
    why: str,
    tokenizer: Tokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = written(tmp_path, template, [messages(turns)])
    assert main([*request_words(settings), "show=plan"]) == 2
    assert f"  data.path: {settings.path}:1: {why}\n    set by" in capsys.readouterr().err  # skipped, so no row is left


def test_files_that_are_no_tokenizer_or_no_template_are_refused(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = written(tmp_path, "{% for m in messages %}", [messages()])
    assert main([*request_words(settings), "show=plan"]) == 2
    assert "data.tokenizer_file: not a template: Unexpected end of template." in capsys.readouterr().err
    settings = written(tmp_path, "", [messages()])
    assert main([*request_words(settings), "show=plan"]) == 2
    assert (
        f"data.path: {settings.path}:1: it has messages, but the tokenizer has no chat template; give "
        "data.template=FILE\n"
    ) in capsys.readouterr().err
    settings = written(tmp_path, CHATML, [messages()])
    size = tokenizer.get_vocab_size()
    words = [*request_words(settings), "data.vocab_size=200", "show=plan"]
    assert main(words) == 2
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        f"  data.vocab_size = 200: the tokenizer has {size} tokens\n"
        "    set by: data.vocab_size=200 (command line)\n"
        f"    try:    data.vocab_size={size}\n"
    )
    assert main([*request_words(settings), "model.vocab_size=100", "show=plan"]) == 2
    assert f"model.vocab_size: 100 are too few for the {size} tokens of data chat" in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text("\n")
    assert main([*request_words(settings), "show=plan"]) == 2
    assert f"data.path: {settings.path}: it has no rows" in capsys.readouterr().err


def test_a_bad_row_far_down_ends_the_run_by_its_line(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = written(tmp_path, CHATML, [messages()] * 60 + [{"messages": []}])
    assert main([*request_words(settings), f"run_dir={tmp_path}/run"]) == 1
    assert capsys.readouterr().err.splitlines()[0] == (
        f"error: data.path: {settings.path}:61: 'messages' is not a list of messages; "
        "data.on_bad=skip leaves out bad rows and counts them"
    )


def test_where_no_row_is_left_nothing_starts(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = written(tmp_path, CHATML, [{"messages": []}] * 3)
    words = [*request_words(settings), "data.on_bad=skip", f"run_dir={tmp_path}/run"]
    first = f"{settings.path}:1: 'messages' is not a list of messages"
    assert main(words) == 2
    assert f"  data.path: none of its rows can be trained on: {first}\n" in capsys.readouterr().err

    # a problem that the first rows do not show
    written(tmp_path, CHATML, [{"messages": []}] * 60)
    assert main(words) == 1
    assert capsys.readouterr().err.splitlines()[0] == (
        f"error: data.path: nothing is left to train on: 0 conversations, 60 bad rows left out (the first: {first})"
    )


def test_layouts_train_the_same(tmp_path: Path) -> None:
    """Each micro batch has a different number of tokens that count."""
    words = ["recipe=chat_lm_pp2", "train.precision=fp64", "train.steps=3", "steps=[train]", "logger=plain"]
    found = []
    for name, layout in {"one": shape(), "two": shape(pp=2), "four": shape(pp=2, shard=2)}.items():
        assert main([*words, *layout, f"run_dir={tmp_path}/{name}"]) == 0
        found.append(losses(tmp_path / name))
    assert found[1] == pytest.approx(found[0], rel=1e-12)
    assert found[2] == pytest.approx(found[0], rel=1e-12)
