from __future__ import annotations

import pytest

from launcher.checkpoint.foreign.mismatches import problems
from launcher.checkpoint.foreign.names import NameTable
from launcher.checkpoint.layout.strategy import Entry, Strategy
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from launcher.plan.values.tensor_spec import TensorSpec

WHOLE = Entry(Layout(Grid(()), (), ()), "float32")
TABLE = Entry(Layout(Grid(()), (), ()), "float32", "param", ("head.weight",))
MODEL = Strategy(Grid(()), {"embed.weight": TABLE, **{f"layers.{k}.attn_norm.weight": WHOLE for k in range(8)}})
LLAMA = ["model.embed_tokens.weight", *(f"model.layers.{k}.input_layernorm.weight" for k in range(8))]
NORMS = [f"layers.{k}.attn_norm.weight" for k in range(8)]
BELOW = (
    "they are below 'model', a prefix that a table of names removes "
    "(try: 'steps.import.names={model:\"\",optim:null,step:null}')"
)
PLACE = "steps.import.names: x: the model has no place for"


def problem_texts(
    names: list[str], table: NameTable, *, strict: bool = True, spec: TensorSpec | None = None
) -> list[str]:
    specs = dict.fromkeys(names, spec or TensorSpec((), "float32"))
    return [str(p) for p in problems("steps.import", "x", specs, table, MODEL, strict=strict)]


@pytest.mark.parametrize(
    ("names", "texts"),
    [
        (["head.weight", *NORMS], []),
        (["head.weight", "embed.weight", *NORMS], []),
        (
            LLAMA,
            [
                f"{PLACE} model.embed_tokens.weight, model.layers.0.input_layernorm.weight, "
                "model.layers.1.input_layernorm.weight, model.layers.2.input_layernorm.weight, "
                "model.layers.3.input_layernorm.weight, model.layers.4.input_layernorm.weight and 3 more; "
                "these are Llama names as transformers writes them (try: steps.import.names=llama)",
                "steps.import.names: x: it has no tensor for the model's embed.weight, layers.0.attn_norm.weight, "
                "layers.1.attn_norm.weight, layers.2.attn_norm.weight, layers.3.attn_norm.weight, "
                "layers.4.attn_norm.weight and 3 more; "
                "these are Llama names as transformers writes them (try: steps.import.names=llama)",
            ],
        ),
        (
            ["model.head.weight", *(f"model.{n}" for n in NORMS), "optim.lr", "step"],
            [
                f"{PLACE} model.head.weight, model.layers.0.attn_norm.weight, model.layers.1.attn_norm.weight, "
                "model.layers.2.attn_norm.weight, model.layers.3.attn_norm.weight, model.layers.4.attn_norm.weight "
                f"and 5 more; {BELOW}",
                "steps.import.names: x: it has no tensor for the model's embed.weight, layers.0.attn_norm.weight, "
                "layers.1.attn_norm.weight, layers.2.attn_norm.weight, layers.3.attn_norm.weight, "
                f"layers.4.attn_norm.weight and 3 more; {BELOW}",
            ],
        ),
        (
            ["wte.weight", *NORMS],
            [
                f"{PLACE} wte.weight; map them with names, a table {{theirs: ours}}",
                "steps.import.names: x: it has no tensor for the model's embed.weight; "
                "map them with names, a table {theirs: ours}",
            ],
        ),
        (
            ["embed.weight", *NORMS[:-1]],
            [
                "steps.import.names: x: it has no tensor for the model's layers.7.attn_norm.weight; "
                "the model must have the sizes of the source"
            ],
        ),
        (
            ["embed.weight", *NORMS, "bias"],
            [f"{PLACE} bias; null in a table of names leaves them out (try: steps.import.strict=false)"],
        ),
    ],
    ids=[
        "another name of a tie",
        "both names of a tie",
        "a Llama",
        "below a module",
        "a name unlike ours",
        "too few",
        "too many",
    ],
)
def test_names_that_do_not_match_the_model_are_listed_with_a_cure(names: list[str], texts: list[str]) -> None:
    assert problem_texts(names, None) == texts


def test_every_problem_of_a_table_is_reported_at_once_at_its_row() -> None:
    table = {"wte": "embed", "w2": "embed", "n": "layers.0.attn_norm", "b": "bias", "gone": "layers.1", "h": None}
    assert problem_texts(["wte.weight", "w2.weight", "n.weight", "b.weight", "h.weight", "odd"], table) == [
        "steps.import.names.w2: wte.weight and w2.weight would both become embed.weight; "
        "set one to null to leave it out",
        "steps.import.names: no row of the table matches odd of x; add rows, with null to leave a tensor out "
        "(try: steps.import.strict=false)",
        "steps.import.names.b: x: the model has no place for bias.weight; set this row to null to leave them out",
        "steps.import.names: x: it has no tensor for the model's layers.1.attn_norm.weight, layers.2.attn_norm.weight, "
        "layers.3.attn_norm.weight, layers.4.attn_norm.weight, layers.5.attn_norm.weight, layers.6.attn_norm.weight "
        "and 1 more; map them with names, a table {theirs: ours}",
        "steps.import.names.gone: this row matches no tensor of x",
    ]


def test_names_that_are_ours_already_need_no_table() -> None:
    own = "x: it has no tensor for the model's embed.weight; these are the model's own names, which need no table"
    assert problem_texts(["embed.weight", *NORMS], {"layers": "layers"}) == [
        "steps.import.names: no row of the table matches embed.weight of x; add rows, with null to leave a tensor out "
        "(try: steps.import.names=null)",
        f"steps.import.names: {own} (try: steps.import.names=null)",
    ]


def test_a_row_for_another_model_does_no_harm() -> None:
    assert problem_texts(["embed.weight", *NORMS], {"": "", "lm_head": "head"}) == []


def test_without_strict_tensors_that_the_model_lacks_are_left_out() -> None:
    assert problem_texts(["embed.weight", *NORMS, "bias"], None, strict=False) == []
    assert problem_texts(["embed.weight", *NORMS, "bias"], {"embed": "embed", "layers": "layers"}, strict=False) == []


def test_different_shapes_and_dtypes_that_cannot_be_cast_are_reported() -> None:
    few = ["embed.weight", *NORMS[:1]]
    assert problem_texts(few, None, spec=TensorSpec((), "bfloat16"))[1:] == []
    assert problem_texts(few, None, spec=TensorSpec((2,), "float32"))[1:] == [
        "steps.import.src: x: embed.weight is float32[2], the model's embed.weight is float32[]; "
        "layers.0.attn_norm.weight is float32[2], the model's layers.0.attn_norm.weight is float32[]"
    ]
    assert problem_texts(few[:1], None, spec=TensorSpec((), "int64"))[1:] == [
        "steps.import.src: x: embed.weight is int64[], the model's embed.weight is float32[]"
    ]


def test_a_row_that_gives_an_empty_name_is_reported() -> None:
    assert problem_texts(["embed"], {"embed": ""}) == ["steps.import.names: embed: it gives embed an empty name"]
