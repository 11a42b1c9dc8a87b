"""What a run leaves in the variables of a model's files is put back."""

from __future__ import annotations

import numpy as np

from launcher.parallel.model_state.module_globals import files, put_back, variables
from launcher.parallel.model_state.python_state import changed
from tests.parallel import python_state_nets as nets


def test_variables_and_what_they_hold_are_put_back():
    own_files = files(nets.Net)
    assert own_files == [nets.__name__]
    nets.KEPT = {"list": [1, nets.Box()], "array": np.ones(2)}
    try:
        before = variables(own_files)
        with put_back(own_files):
            nets.KEPT["list"][1].steps[0] = 5
            nets.KEPT["list"].append(2)
            nets.KEPT["array"][0] = 7
            nets.NEW, nets.Numbered.more, nets.CALLS = 1, 2, -1
            assert len(changed(before, variables(own_files))) == 6
        assert not changed(before, variables(own_files))
    finally:
        del nets.KEPT
