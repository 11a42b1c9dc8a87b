"""These tests need a process in which torch has fake devices; ``tests/fake_accelerator`` starts one."""

from __future__ import annotations

import os
from pathlib import Path


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if os.environ.get("FAKE_DEVICES") else True
