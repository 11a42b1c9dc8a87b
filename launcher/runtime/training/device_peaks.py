"""Peak floating-point operations per second of known devices; ``mfu`` is relative to them."""

from __future__ import annotations

from collections.abc import Mapping

Peaks = Mapping[str, float]

# TFLOP/s, dense (without sparsity). Half precision: tensor cores with sums in fp32. float32 and float64: what
# torch uses by default, the vector units and, for float64, the tensor cores if there are any; tf32: if
# torch.set_float32_matmul_precision allows it. The numbers are from NVIDIA's data sheets for the named model
# (SXM if none is named); sparse numbers are halved if only these are given.
_HOPPER_SXM = {"bfloat16": 989.4, "float16": 989.4, "tf32": 494.7, "float32": 66.9, "float64": 66.9}
PEAKS: tuple[tuple[str, Peaks], ...] = (
    # NVIDIA Blackwell datasheet (HGX B200, a GPU)
    ("B200", {"bfloat16": 2250.0, "float16": 2250.0, "tf32": 1100.0, "float32": 75.0, "float64": 37.0}),
    # NVIDIA H200 Tensor Core GPU datasheet (SXM; compute as H100)
    ("H200", _HOPPER_SXM),
    # NVIDIA H100 Tensor Core GPU datasheet, columns NVL and PCIe
    ("H100 NVL", {"bfloat16": 835.5, "float16": 835.5, "tf32": 417.5, "float32": 60.0, "float64": 60.0}),
    ("H100 PCIe", {"bfloat16": 756.0, "float16": 756.0, "tf32": 378.0, "float32": 51.0, "float64": 51.0}),
    # NVIDIA H100 Tensor Core GPU Architecture (white paper), table of SXM5
    ("H100", _HOPPER_SXM),
    # NVIDIA A100 Tensor Core GPU datasheet; the same for PCIe and SXM, 40 and 80 GB
    ("A100", {"bfloat16": 312.0, "float16": 312.0, "tf32": 156.0, "float32": 19.5, "float64": 19.5}),
    # NVIDIA L40S datasheet
    ("L40S", {"bfloat16": 362.0, "float16": 362.0, "tf32": 183.0, "float32": 91.6}),
    # NVIDIA L4 Tensor Core GPU datasheet (sparse numbers halved)
    ("L4", {"bfloat16": 121.0, "float16": 121.0, "tf32": 60.0, "float32": 30.3}),
    # NVIDIA A10 Tensor Core GPU datasheet
    ("A10", {"bfloat16": 125.0, "float16": 125.0, "tf32": 62.5, "float32": 31.2}),
    # NVIDIA V100 Tensor Core GPU datasheet (SXM2, PCIe); it has no bf16 in tensor cores
    ("V100-SXM", {"float16": 125.0, "float32": 15.7, "float64": 7.8}),
    ("V100-PCIE", {"float16": 112.0, "float32": 14.0, "float64": 7.0}),
    # NVIDIA T4 Tensor Core GPU datasheet
    ("T4", {"float16": 65.0, "float32": 8.1}),
)
"""Peaks by a part of the device name that torch reports; the first match counts."""


def peak_flops(device: str, dtype: str, tf32: bool = False) -> float | None:
    """FLOP/s of a ``device`` in ``dtype``; ``None`` if the table has no number.

    ``tf32``: float32 products are computed in it.

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bfloat16"), peak_flops("NVIDIA H100 PCIe", "float16")
    (989400000000000.0, 756000000000000.0)
    >>> peak_flops("NVIDIA A100-SXM4-80GB", "float32", tf32=True)
    156000000000000.0
    >>> peak_flops("Tesla T4", "bfloat16"), peak_flops("cpu", "float32")
    (None, None)
    """
    words = device.replace("-", " ").split()
    if "MIG" in words:  # a slice of a device
        return None
    for name, peaks in PEAKS:
        if _within(name.replace("-", " ").split(), words):
            tera = peaks.get("tf32" if tf32 and dtype == "float32" else dtype)
            return None if tera is None else tera * 1e12
    return None


def _within(name: list[str], words: list[str]) -> bool:
    """Whether the words of ``name`` appear in a row; a number may follow the last one, as in SXM2.

    >>> _within(["V100", "SXM"], ["Tesla", "V100", "SXM2", "16GB"]), _within(["L4"], ["NVIDIA", "L40S"])
    (True, False)
    """
    for start in range(len(words) - len(name) + 1):
        here = words[start : start + len(name)]
        if here[:-1] == name[:-1] and (here[-1] == name[-1] or _numbered(name[-1], here[-1])):
            return True
    return False


def _numbered(name: str, word: str) -> bool:
    """Whether only a number follows: ``SXM``, ``SXM4``; not ``L4``, ``L40``, which ends in a number."""
    return word.startswith(name) and word[len(name) :].isdecimal() and not name[-1].isdecimal()
