"""One Slurm for all tests that need it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.run.launching import ROOT
from tests.slurm.cluster import NoSlurm, slurm


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start Slurm, and set the environment that its commands and the jobs of these tests need."""
    with ExitStack() as ends, pytest.MonkeyPatch.context() as patch:
        try:
            conf = ends.enter_context(slurm(tmp_path_factory.mktemp("slurm") / "at"))
        except NoSlurm as error:
            pytest.skip(f"Slurm does not start here: {error}")
        patch.setenv("SLURM_CONF", str(conf))
        patch.setenv("MASTER_ADDR", "127.0.0.1")  # node names are known to Slurm only
        patch.setenv("PYTHONPATH", str(ROOT))
        yield
