from __future__ import annotations

import base64
import shutil
from pathlib import Path

import pytest

from launcher.checkpoint.tensorfile.encryption import load_key

KEY = bytes(range(32))


def test_a_key_is_read_in_each_of_its_forms_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    for text in (KEY, KEY.hex().encode() + b"\n", base64.b64encode(KEY)):
        path.write_bytes(text)
        assert load_key(f"file:{path}") == KEY
    for secret in ("hunter2", KEY[:16].hex(), "a phrase of thirty-two letters!!"):  # not a key, nor half of one
        path.write_text(secret)
        monkeypatch.setenv("K", secret)
        for place in ("env:K", f"file:{path}"):
            with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is what is tested
                load_key(place)
            assert str(caught.value) == (
                f"{place}: not an AES-256 key: it has {len(secret)} bytes; give 32 random bytes, as 64 "
                "hexadecimal digits (openssl rand -hex 32), as base64 or, in a file, raw"
            )
    shutil.rmtree(tmp_path)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        load_key(f"file:{path}")
    assert str(caught.value) == f"file:{path}: the key cannot be read: No such file or directory"
