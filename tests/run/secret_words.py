"""Keys typed in wrong places: secrets, names for the setting, and the ways to write both."""

from __future__ import annotations

import base64

KEYS = {
    "hex": "a5" * 32,
    "base64": base64.b64encode(bytes(range(7, 39))).decode(),
    "words": "hunter2correcthorse",
    "digits first": "5a" * 32,
    "capitals": "A5" * 32,
}
RIGHT = "encrypt"
NAMES = (
    RIGHT, "encryptt", "encrpyt", "Encrypt", "encryption", "encrypt_key", "encryption_key", "crypt", "ecrypt", "key",
    "passphrase",
)  # fmt: skip
FORMS = (
    "checkpoint.{name}={key}", "checkpoint.{name}=env:{key}", "checkpoint.{name}=file:{key}", "{name}={key}",
    "+checkpoint.{name}={key}", "++{name}={key}", "checkpoint={{{name}: {key}}}", "checkpoint={{{name}: '{key}'}}",
    "checkpoint.{name}='{key}'", 'checkpoint.{name}="{key}"', "checkpoint.{name}=[{key}]",
    "checkpoint.{name}={{env: {key}}}", "checkpoint.{name}={key},{key}x", "checkpoint.{name}.key={key}",
    "checkpoint.{name}:{key}", "checkpoint.{name} {key}", "checkpoint.{name} = {key}", "checkpoint.{name}= {key}",
    "--checkpoint.{name}={key}", "--{name} {key}", "--{name}={key}", "checkpoint.{name}={key} x",
    "checkpoint.{name}={key}}}", "checkpoint.{name}=env:{key}]", "checkpoint.{name}=ENV:{key}",
    "checkpoint.{name}=env: {key}", "checkpoint.{name}=$env:{key}", "checkpoint.{name}=${{oc.env:{key}}}",
    "checkpoint.{name}==\t{key}", "chekpoint.{name}={key}", "train.{name}={key}", "~checkpoint.{name}={key}",
    "model={{_target_: nowhere.M, {name}: {key}}}", "checkpoint.{name}@x={key}", "checkpoint.{name}={key} seed=1",
    "seed=1 checkpoint.{name}={key}", "checkpoint.{name}==={key}",
)  # fmt: skip
FILES = (
    "checkpoint:\n  {name}: {key}\n", "checkpoint: {{{name}: {key}}}\n", "checkpoint:\n  {name}: 'env:{key}'\n",
    "{name}: {key}\n", "checkpoint:\n  {name}: [{key}\n", "checkpoint:\n  {name}: {key}: x\n",
    "checkpoint:\n  {name}: |\n    {key}\n", "checkpoint:\n\t{name}: {key}\n", "checkpoint:\n  {name}:\n    {key}\n",
    "checkpoint:\n  {name}: {{env: {key}}}\n", "checkpoint:\n  {name}: ${{oc.env:{key}}}\n",
    "checkpoint:\n  {name}: !x {key}\n", "checkpoint.{name}: {key}\n",
)  # fmt: skip


def typed(form: str, name: str, key: str) -> list[list[str]]:
    """Return the words as one argument, and split as a shell would split them."""
    text = form.format(name=name, key=key)
    return [[text], text.split(" ")] if " " in text else [[text]]
