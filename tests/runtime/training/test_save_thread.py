"""A thread writes copies of the values at the moment of the request."""

from __future__ import annotations

import torch

from launcher.runtime.cluster.world import World
from launcher.runtime.training.save_thread import Saver
from tests.ranks import on_ranks


def on_a_rank(act):
    def work(_: World) -> None:
        act(Saver())

    on_ranks(1, work)


def test_changes_after_the_copy_are_not_written():
    def act(saver: Saver) -> None:
        t, found = torch.arange(6.0).reshape(2, 3), []
        copy = saver.host("t", t)
        t.zero_()
        saver.start(lambda: found.append(copy.clone()))
        saver.wait()
        assert torch.equal(found[0], torch.arange(6.0).reshape(2, 3))

    on_a_rank(act)


def test_the_next_copy_of_a_name_uses_the_memory_of_the_last():
    def act(saver: Saver) -> None:
        first = saver.host("t", torch.zeros(3))
        saver.start(lambda: None)
        saver.wait()
        assert saver.host("t", torch.ones(3)).data_ptr() == first.data_ptr()
        assert saver.host("t", torch.ones(3, dtype=torch.float64)).dtype == torch.float64

    on_a_rank(act)


def test_memory_is_not_pinned_for_what_is_on_the_cpu():
    """The thread does not wait for a device in this case either."""

    def act(saver: Saver) -> None:
        assert not saver.host("t", torch.zeros(3)).is_pinned()
        saver.start(lambda: None)
        saver.wait()

    on_a_rank(act)


def test_a_strided_tensor_is_copied_in_order():
    def act(saver: Saver) -> None:
        copy = saver.host("t", torch.arange(6).reshape(2, 3).t())
        assert copy.is_contiguous()
        assert copy.tolist() == [[0, 3], [1, 4], [2, 5]]

    on_a_rank(act)
