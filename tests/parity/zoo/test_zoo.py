"""A sample of the zoo that includes every layout; ``make test-zoo`` tries all of it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.parity.zoo import oracle, table
from tests.parity.zoo.case import all_cases, chosen
from tests.parity.zoo.layouts import LAYOUTS
from tests.tiers import some

PAGE = Path(__file__).parents[3] / "docs" / "zoo.md"
CUT, HALVED, THREE = "pp2 shard2 level3", "zero_bubble_v shard2 level2", "pp3 zero_bubble_h1"
LEVEL3, AGAIN, SELECTIVE = "shard2 level3", "pp2 recompute", "shard2 level3 selective"
REPLICAS, SHARDS, BUCKETS = "replicate2 shard2", "shard4 level2", "pp2 shard2 level1"
WHOLE, STAGES, CHUNKS = "searched", "pp2 searched level2", "interleaved searched"
SAMPLE = {
    "FrozenMiddle": (HALVED,), "GradientReversal": (CUT, BUCKETS), "MaskedGradient": (REPLICAS,),
    "BaseChangedAcross": (THREE,), "TeacherInGlue": (CUT,), "SharedBuffer": (REPLICAS,),
    "IgnoredTied": (REPLICAS,), "IdleExperts": (SHARDS, HALVED), "UNet": (THREE,), "FrozenStage": ("pp2", HALVED),
    "LayerDrop": (AGAIN, SELECTIVE), "GumbelHard": (AGAIN,), "Gru": (SELECTIVE,), "FunctionalCall": (LEVEL3,),
    "Force": (AGAIN,), "FuncGrad": (AGAIN,), "FuncJacobian": ("pp2",), "FuncVjp": ("pp2",),
    "VmapGlue": (SELECTIVE,), "PixelShuffle": (WHOLE,),
    "SpectralNormNew": (WHOLE,), "SharedBiasAcross": (STAGES,), "TensorHook": (WHOLE,), "RootHook": (THREE, WHOLE),
    "TiedThrice": (CUT, HALVED, CHUNKS), "DetachedInPlace": (STAGES,), "ParameterHook": (WHOLE,),
    "Recursive": (SELECTIVE,), "VmapInside": (SELECTIVE,), "ScriptedGlue": (CUT,), "CompiledModule": ("pp2", REPLICAS),
}  # fmt: skip
"""For each kind of error, models and layouts in which it would occur: stages, split backwards, shards, replicas."""


@pytest.mark.parametrize(("name", "layouts"), some(SAMPLE.items()), ids=some(SAMPLE))
def test_a_model_is_exact_or_refused_with_a_way_out(name: str, layouts: tuple[str, ...]) -> None:
    found = table.run(chosen([name]), layouts, jobs=1)
    said = {layout: f"{v.kind}: {v.text}" for layout, v in found[name].items()}
    assert found[name].keys() == set(layouts)
    assert all(v.fine for v in found[name].values()), said
    assert all(v.kind == "exact" or v.helps for v in found[name].values()), said


def test_the_sample_has_every_layout() -> None:
    assert {layout for layouts in SAMPLE.values() for layout in layouts} == LAYOUTS.keys() - {"one rank"}


OTHERS = {"__future__", "collections", "dataclasses", "multiprocessing", "numpy", "pickle", "torch", "typing"}


def test_the_oracle_imports_nothing_of_the_project() -> None:
    folder = Path(oracle.__file__).parent
    for path in (folder / "oracle.py", folder / "samples.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {n.split(".")[0] for n in names} <= OTHERS, names


def test_the_models_import_nothing_of_the_launcher() -> None:
    for path in (Path(oracle.__file__).parent / "models").glob("*.py"):
        assert "launcher" not in path.read_text(), path


def test_the_page_in_the_docs_has_every_model_and_nothing_that_failed() -> None:
    page = PAGE.read_text()
    rows = dict(re.findall(r"^\| `(\w+)`: [^|]*((?:\| [^|\n]* )+)\|$", page, re.MULTILINE))
    assert all_cases().keys() <= rows.keys(), "make test-zoo"
    cells = {cell.split(" ")[0] for row in rows.values() for cell in row.strip("| ").split(" | ")}
    assert cells == {"exact", "refused"}


def test_there_are_a_hundred_models_and_more_that_say_what_is_odd() -> None:
    cases = all_cases()
    assert len(cases) > 200
    assert all(c.about for c in cases.values())
    assert len({c.about for c in cases.values()}) == len(cases)
