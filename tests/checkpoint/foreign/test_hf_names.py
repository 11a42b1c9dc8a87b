"""Names in folders of transformers, compared with those of its models."""

from __future__ import annotations

from launcher.checkpoint.foreign.hugging_face import names_in_folder, unknown, written
from launcher.checkpoint.foreign.names import renamed

HEAD = ("lm_head.weight",)
GPT2 = ("transformer.wte.weight", "transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.bias")


def test_a_folder_has_the_names_of_the_model() -> None:
    assert names_in_folder(GPT2 + HEAD, GPT2 + HEAD) == {n: n for n in GPT2 + HEAD}


def test_a_folder_of_a_base_model_is_without_its_prefix() -> None:
    bare = {n: n.removeprefix("transformer.") for n in GPT2}
    assert names_in_folder([*bare.values()], GPT2 + HEAD) == bare


def test_the_head_of_a_gpt_neox_folder_has_another_name() -> None:
    assert names_in_folder(["gpt_neox.embed_in.weight", "embed_out.weight"], ["gpt_neox.embed_in.weight", *HEAD]) == {
        "gpt_neox.embed_in.weight": "gpt_neox.embed_in.weight",
        "lm_head.weight": "embed_out.weight",
    }


def test_gpt_neox_is_written_as_its_folder_is() -> None:
    ours = ["gpt_neox.embed_in.weight", *HEAD]
    table = written("gpt_neox", ["gpt_neox.embed_in.weight", "embed_out.weight"])
    assert [*renamed(ours, table).names.values()] == ["gpt_neox.embed_in.weight", "embed_out.weight"]
    assert written("gpt_neox", ()) == table  # what every version of transformers reads
    assert written("gpt_neox", ours) is None
    assert written("llama", ["embed_out.weight"]) is None


def test_a_name_that_a_folder_already_has_is_not_given_to_another_tensor() -> None:
    both = ["embed_out.weight", *HEAD]
    found = names_in_folder(both, HEAD)
    assert found == {"lm_head.weight": "lm_head.weight"}
    assert unknown(both, found) == ["embed_out.weight"]


def test_masks_and_angles_that_were_saved_are_no_weights_but_biases_are() -> None:
    old = ["h.0.attn.bias", "h.0.attn.masked_bias", "layers.0.self_attn.rotary_emb.inv_freq"]
    assert unknown([*old, "h.0.attn.c_attn.bias"], {}) == ["h.0.attn.c_attn.bias"]
