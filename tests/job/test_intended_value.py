"""A value in another notation is read as the user means it, or it is refused."""

from __future__ import annotations

import pytest

from launcher.job.intended_value import number_of, readings
from launcher.job.schema import keys

READ = [
    ("train.steps", "1M", 1e6), ("train.steps", "2k", 2000), ("seed", "0x10", 16), ("train.batch_size", "2x8", 16),
    ("launch.timeout_s", "5m", 300), ("parallel.hsdp.threshold", "1M", 1024), ("optim.eps", "1e-10", 1e-10),
    ("parallel.comm_fusion.network.gb_per_s", "100Gbps", 12.5),
    ("parallel.comm_fusion.network.gb_per_s", "100GBps", 100),
    ("parallel.comm_fusion.network.gb_per_s", "100 GB/s", 100),
]  # fmt: skip
UNCLEAR = [
    ("checkpoint.every", "30m"),  # minutes
    ("train.steps", "10m"),
    ("seed", "010"),  # in YAML 8
    ("parallel.comm_fusion.network.gb_per_s", "100Gb"),  # bits or bytes
    ("parallel.comm_fusion.network.gb_per_s", "100gb"),
]


@pytest.mark.parametrize(("key", "text", "number"), READ)
def test_a_number_with_a_unit_is_read(key: str, text: str, number: float) -> None:
    assert number_of(key, text) == number


@pytest.mark.parametrize(("key", "text"), UNCLEAR)
def test_a_number_that_may_be_two_is_none(key: str, text: str) -> None:
    assert number_of(key, text) is None


@pytest.mark.parametrize(
    ("key", "bad", "meant"),
    [
        ("parallel.hsdp", -1, {"shard_size": -1}),
        ("train.clip_norm", float("inf"), None),
        ("name", 7, "7"),
    ],
)
def test_the_first_reading(key: str, bad: object, meant: object) -> None:
    assert next(readings(key, keys.at(key.split("."), {}), bad)) == meant


def test_a_name_that_yaml_read_as_a_number_is_not_guessed() -> None:
    assert list(readings("name", keys.at(["name"], {}), 1.1)) == []  # of 1.10
