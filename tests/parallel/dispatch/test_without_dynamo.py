"""Meta kernels of torch in Python are called without the import of torch._dynamo, and are left as they were."""

from __future__ import annotations

import subprocess
import sys
from types import FunctionType

import pytest
import torch

from launcher.parallel.dispatch.without_dynamo import UNTRACED, _disabled, without_dynamo

PLAIN = "torch.pow(torch.empty(4, device='meta'), 2)"
BESIDE = "from launcher.parallel.dispatch.without_dynamo import without_dynamo\nwith without_dynamo():\n    "


@pytest.mark.parametrize("call", [PLAIN, "torch.rms_norm(torch.empty(4, 8, device='meta'), [8])"], ids=["pow", "norm"])
def test_a_kernel_imports_no_dynamo(call: str) -> None:
    script = f"import sys, torch\n{BESIDE}{call}\nprint('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_torch_marks_kernels_as_this_version_expects() -> None:
    """torch imports dynamo only if it marks kernels; if it marks none, this module is useless."""
    script = f"import sys, torch\n{PLAIN}\nprint('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout == "True\n") == bool(_disabled())


def test_the_marks_are_gone_after_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)

    def marked() -> list[FunctionType]:
        return [f for f in _disabled() if getattr(f, UNTRACED, None) is f]

    assert marked() == []
    with without_dynamo():
        assert all(hasattr(f, UNTRACED) for f in _disabled())
        given = torch.pow(torch.empty(4, device="meta"), 2)
    assert (given.shape, given.dtype, given.device.type) == ((4,), torch.float32, "meta")
    assert marked() == []


def test_dynamo_that_is_there_already_keeps_its_own_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo", torch)
    with without_dynamo():
        assert not [f for f in _disabled() if getattr(f, UNTRACED, None) is f]
