"""Which texts count as secrets, and how they are hidden."""

from __future__ import annotations

import pytest

from launcher.job.schema import redact


@pytest.mark.parametrize(
    "key",
    ["api_key", "logger.hf_token", "apikey", "hubToken", "db.password", "secret.name", "API-KEY", "checkpoint.encrypt"],
)
def test_these_keys_name_secrets(key):
    assert redact.secret(key)


@pytest.mark.parametrize(
    "key", ["data.tokenizer", "steps.sample.tokens", "keyboard", "keep", "model.name", "random_tokens"]
)
def test_these_keys_name_none(key):
    assert not redact.secret(key)


@pytest.mark.parametrize(
    ("line", "hidden"),
    [
        ("logger.api_key=abc", "logger.api_key=***"),
        ("  token: abc # c", "  token: ***"),
        ("x={a: 1, password: abc, b: 2}", "x={a: 1, password: ***"),
        ("x={'api_key':abc}", "x={'api_key':***"),
        ("token: null", "token: null"),
        ("data.tokenizer=bpe", "data.tokenizer=bpe"),
        ("url=a:b", "url=a:b"),
    ],
)
def test_a_line_is_cut_at_its_first_secret(line, hidden):
    assert redact.text(line) == hidden


def test_data_keeps_its_shape():
    data = {"a": {"token": "x", "n": 1}, "secrets": ["p", {"q": 1}], "key": None}
    assert redact.values(data) == {"a": {"token": "***", "n": 1}, "secrets": ["***", {"q": "***"}], "key": None}
