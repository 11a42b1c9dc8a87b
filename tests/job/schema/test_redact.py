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


COUNTS = [
    "num_key_value_heads=2",
    "model={pad_token_id: 50256, key_dim: 8, on_key: true}",
    "a.num_key_value_heads=1,2,4",
]
COUNTS += [
    "a.head_key=choice(1,2)",
    "a.keys=[1,2]",
    "parallel.operators.*.key=colwise",
    "optim.groups.a.query_key.lr=1e-4",
]


@pytest.mark.parametrize("line", [*COUNTS, "data.mask_token='<mask>'"])
def test_counts_indices_special_tokens_and_module_names_are_no_secrets(line):
    assert (redact.text(line), redact.typed([line])) == (line, frozenset())


@pytest.mark.parametrize(
    "line", ["db.password=12345", "hub.token=12345678901", "x.token=[1,abcdef]", "x.api_key='12345'"]
)
def test_numbers_that_may_be_a_password_and_long_ones_are_secrets(line):
    assert redact.text(line) == line.partition("=")[0] + "=***"


def test_a_number_at_a_key_ends_its_value_and_hides_no_later_key():
    one, other = (f"model.config={{num_key_value_heads: 2, hidden_size: {size}}}" for size in (32, 64000))
    assert redact.identity(one) != redact.identity(other)
    assert redact.typed([other, "seed=12345"]) == frozenset()


def test_identities_differ_as_the_secrets_do_and_do_not_contain_them():
    identities = {
        redact.identity(line): line
        for line in ("a.token=abcde", "a.token=abcdf", "u=http://me:pw1@h", "u=http://me:pw2@h")
    }
    assert len(identities) == 4
    assert not [text for text, line in identities.items() if line.partition("=")[2] in text or "pw" in text]
    assert all(text.startswith(("a.token=***", "u=http://***@h***")) for text in identities)


def test_identified_data_is_equal_for_equal_data_only():
    data = {"token": "x1", "key": 200, "url": "http://me:pw@h/a", "keys": ["p"]}
    found = redact.identified(data)
    assert redact.without_digests(str(found)) == str(redact.values(data))
    assert redact.same(found, redact.identified({**data}))
    for key, other in (("token", "x2"), ("key", 1), ("url", "http://me:pv@h/a"), ("keys", ["q"])):
        assert not redact.same(found, redact.identified(data | {key: other})), key


def test_what_an_older_version_has_hidden_is_no_difference():
    assert redact.same({"token": "***", "n": 1}, redact.identified({"token": "x", "n": 1}))
    assert redact.same("http://***@h", redact.identified("http://me:pw@h"))
