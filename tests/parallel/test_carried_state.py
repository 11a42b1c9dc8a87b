"""State that modules carry past their arguments is that of one process in every layout, or is refused."""

from __future__ import annotations

import pytest

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.planner.plan_job import plan_job
from tests.parallel.test_late_reads import LAYOUTS
from tests.parity import assert_parity, own


def carries(layout: str, **layers: str) -> Job:
    model = {"_target_": "tests.parallel.carried_nets.Carries", **layers}
    parallel = LAYOUTS[layout]
    return own("carried_nets.Carries", [6], stages=1, model=model, parallel=parallel, train__batch_size=8)


def refusal(layout: str, **layers: str) -> str:
    with pytest.raises(RequestError) as refused:
        plan_job(carries(layout, **layers))
    return refused.value.problems[0].text


@pytest.mark.parametrize("stream", ["python", "numpy"])
def test_draws_from_a_stream_that_another_module_seeds_are_refused_over_stages(stream: str) -> None:
    text = refusal("apart", b=f"Draws seed {stream}", c=f"Draws draw {stream}")
    assert text.startswith("the forward draws numbers from Python's or numpy's random stream")


@pytest.mark.parametrize("first", ["seed", "seed draw"])
def test_draws_from_torchs_stream_that_another_stage_seeds_are_refused(first: str) -> None:
    text = refusal("apart", b=f"Draws {first} torch", c="Draws draw torch")
    assert text == (
        "b seeds torch's random stream, from which c draws, but each stage has a stream of its own; "
        "pass a torch.Generator to the draw, and seed that"
    )


@pytest.mark.parametrize("stream", ["torch", "numpy", "python"])
@pytest.mark.parametrize("layout", ["apart", "together"])
def test_a_module_that_seeds_its_own_draws_is_exact(stream: str, layout: str) -> None:
    assert_parity(carries(layout, b=f"Draws seed draw {stream}"), parts=2)


@pytest.mark.parametrize("layout", ["one", "together"])
def test_a_seed_reaches_the_draws_of_its_own_stage(layout: str) -> None:
    assert_parity(carries(layout, b="Draws seed torch", c="Draws draw torch"), parts=2 if layout == "together" else 1)


def test_one_generator_of_torch_for_two_modules_is_refused_over_stages() -> None:
    text = refusal("apart", b="Draws draw generator", c="Draws draw generator")
    assert text == (
        "b and c draw from one torch.Generator, of which each stage would have a copy; give each of them its own"
    )


@pytest.mark.parametrize("holder", ["dict", "object", "closure", "partial", "bound", "zip"])
def test_a_generator_that_an_object_holds_is_refused_over_stages(holder: str) -> None:
    text = refusal("apart", b=f"Iterates {holder}")
    cure = "make it in the forward, or use an iterator of itertools"
    assert text == f"b.box cannot be copied, and planning advances it; {cure}"


@pytest.mark.parametrize("layout", ["apart", "together"])
def test_a_module_that_sets_a_weight_of_its_part_is_exact(layout: str) -> None:
    """The attribute is that of the part; the module around it, which runs in one piece, reads it."""
    assert_parity(carries(layout, b="RawWeight lstm"), parts=2)


@pytest.mark.parametrize("layout", ["one", "apart"])
def test_a_number_that_a_hook_of_a_parameter_changes_in_its_module_is_exact(layout: str) -> None:
    assert_parity(carries(layout, b="Decays bias"), parts=2 if layout == "apart" else 1)


def test_a_number_that_a_hook_of_a_parameter_changes_in_the_root_is_refused_over_stages() -> None:
    """The hook refers to the root itself, although another tensor of a copy has the hook."""
    job = own("carried_nets.RootCounts", [6], stages=1, parallel=LAYOUTS["apart"], train__batch_size=8)
    with pytest.raises(RequestError) as refused:
        plan_job(job)
    assert refused.value.problems[0].text == (
        "gradients also changes when a copy of the model runs: a hook or function refers to the model itself; "
        "let it reach the module by its arguments, or use one stage"
    )


@pytest.mark.parametrize("kind", ["lock", "queue", "simple queue", "random"])
def test_counts_in_objects_that_are_not_copied_start_at_zero_on_each_rank(kind: str) -> None:
    assert_parity(carries("apart", b=f"Counts {kind}"), parts=2)


@pytest.mark.parametrize("kind", ["dunder", "imported in the forward"])
def test_planning_undoes_counts_in_variables(kind: str) -> None:
    assert_parity(carries("one", b=f"Counts {kind}"))


@pytest.mark.parametrize("kind", ["dunder", "imported in the forward"])
def test_counts_in_variables_are_refused_over_stages(kind: str) -> None:
    assert refusal("apart", b=f"Counts {kind}").startswith("every call of the forward changes tests.parallel.carried_")


CHANGES = "the backward of b changes state that the next forward uses"
BACKWARDS = {
    "alias": "the backward changes b.number, which the forward reads",
    "reads": "the backward of b uses state that the last forward left behind",
    "function": CHANGES,
    "object": CHANGES,
}


@pytest.mark.parametrize("kind", BACKWARDS)
def test_a_backward_in_code_that_a_module_only_refers_to_is_refused_over_stages(kind: str) -> None:
    assert refusal("apart", b=f"Backwards {kind}").startswith(BACKWARDS[kind])


@pytest.mark.parametrize("kind", BACKWARDS)
def test_such_a_backward_is_exact_on_one_rank(kind: str) -> None:
    assert_parity(carries("one", b=f"Backwards {kind}"))


LATER = {
    "unpack": "the backward changes b.number, which the forward reads",
    "checkpoint": "the backward changes b.number, which the forward reads",
    "checkpointed norm": "the backward changes b.norm.num_batches_tracked, which the forward reads",
    "custom op": CHANGES,
}


@pytest.mark.parametrize("kind", LATER)
def test_state_that_other_code_changes_in_the_backward_is_refused_over_stages(kind: str) -> None:
    """Saved tensors that are unpacked, a checkpoint that runs again, the backward of a custom operator."""
    assert refusal("apart", b=f"RunsLater {kind}").startswith(LATER[kind])


@pytest.mark.parametrize("kind", LATER)
def test_such_state_is_exact_on_one_rank(kind: str) -> None:
    assert_parity(carries("one", b=f"RunsLater {kind}"))


def test_a_checkpoint_without_state_is_exact_over_stages() -> None:
    assert_parity(carries("apart", b="RunsLater checkpointed layer"), parts=2)


HOOKS = ["object", "method", "partial", "defaults", "dict", "pre-hook"]


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_reads_a_weight_is_refused_over_level3(kind: str) -> None:
    text = "b: a tensor hook or backward pre-hook uses weights before level3 has gathered them again"
    assert refusal("level3", b=f"Hooked {kind}") == text


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("layout", ["level2", "apart"])
def test_a_hook_that_reads_a_weight_is_exact_elsewhere(kind: str, layout: str) -> None:
    assert_parity(carries(layout, b=f"Hooked {kind}"))


def test_what_a_module_does_to_another_only_after_many_calls_is_refused_over_stages() -> None:
    text = refusal("apart", b="Late")
    assert text.startswith("after 10 more forwards, cannot trace the code between the named modules of Carries")
    assert "it changes c.number, which c would not see on its stage" in text
