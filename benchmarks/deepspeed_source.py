"""Writes a DeepSpeed checkpoint of the model of ``bad_inputs``: ZeRO stage 2 on torchrun's ranks."""

from __future__ import annotations

import sys
from typing import Any


def main(folder: str, values: str) -> None:
    """Save the checkpoint in ``folder``; ``values`` is the path of a file with the tensors by name."""
    import deepspeed
    import torch

    class Net(torch.nn.Module):
        def __init__(self, tensors: dict[str, Any]) -> None:
            super().__init__()
            for name, tensor in tensors.items():
                setattr(self, name, torch.nn.Parameter(tensor))

    # DeepSpeed would first compile an extension that only makes it faster
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo")
    net = Net(torch.load(values, weights_only=True))
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    engine.save_checkpoint(folder, tag="step")


if __name__ == "__main__":
    main(*sys.argv[1:])
