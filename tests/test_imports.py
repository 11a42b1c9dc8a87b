"""Which layer may import which: a table that is checked against every import in the package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A module belongs to the layer with the longest prefix; modules directly in launcher/ are wiring.
LAYERS = {
    "launcher.errors": "errors",
    "launcher.user_counters": "errors",
    "launcher.user_errors": "errors",
    "launcher.optional": "errors",
    "launcher.untrusted": "untrusted",
    "launcher.process_pool": "process pool",
    "launcher.job.schema": "schema",
    "launcher.job.targets": "targets",
    "launcher.job": "job",
    "launcher.plan.values.class_dims": "facts",
    "launcher.plan.values.dtypes": "facts",
    "launcher.plan.values.model_graph": "facts",
    "launcher.plan.values.grid": "facts",
    "launcher.plan.values.layout": "facts",
    "launcher.plan.values.module_names": "facts",
    "launcher.plan.values.operations": "facts",
    "launcher.plan.values.precision": "facts",
    "launcher.plan.values.optimizer": "facts",
    "launcher.plan.values.tensor_spec": "facts",
    "launcher.plan": "plan",
    "launcher.checkpoint": "checkpoint",
    "launcher.parallel": "parallel",
    "launcher.parallel.local_tensors": "shards",
    "launcher.parallel.model_state.process_state": "process",
    "launcher.runtime": "runtime",
    "launcher.models": "models",
    "launcher.data": "data",
    "launcher.data.prepare.__main__": "wiring",  # a command
    "launcher.optim": "optim",
    "launcher.objective": "objective",
    "launcher.planner.hugging_face_checks": "request files",
    "launcher.planner.loaded_param_layouts": "request files",
    "launcher.planner.request_files": "request files",
    "launcher.planner": "planner",
    "launcher.steps": "steps",
    "launcher.testing": "testing",
    "launcher.extras": "extras",
    "launcher.extras.mindspore": "rank files",
    "launcher.extras.mindspore.merge_step": "extras",  # a step
    "launcher.extras.device_matrix": "matrices",
    "launcher.extras.device_matrix.operator_sharding": "extras",
    "launcher.extras.device_matrix.onto_plan": "extras",
    "launcher.extras.device_matrix.run": "extras",
    "launcher": "wiring",
}

RECIPE_PARTS = {"errors", "schema", "targets", "facts"}  # what a model, a data set or an optimizer may import
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "untrusted": set(),
    "process pool": {"errors"},  # not in runtime, because child processes of data use it and must not load torch
    "schema": {"errors"},
    "targets": {"errors", "schema"},
    "job": {"errors", "schema", "targets"},
    "facts": {"errors", "schema"},
    "plan": {"errors", "schema", "facts"},
    "checkpoint": {"errors", "plan", "facts", "untrusted"},
    "process": set(),
    "shards": {"facts"},  # an optimizer and the layout read the same shards
    "parallel": {"errors", "plan", "facts", "process", "shards"},
    "runtime": {"errors", "plan", "facts", "parallel", "shards", "checkpoint", "optim", "objective", "untrusted"},
    "models": RECIPE_PARTS,
    "data": RECIPE_PARTS | {"untrusted", "process pool"},
    "optim": RECIPE_PARTS | {"shards"},
    "objective": RECIPE_PARTS,
    "request files": {"errors", "schema", "plan", "facts", "checkpoint", "untrusted"},
    "planner": {"request files", "untrusted", "plan", "parallel", "models", "data", "optim", "objective"}
    | RECIPE_PARTS,
    "steps": {"plan", "checkpoint", "parallel", "shards", "runtime", "models", "data", "optim", "objective", "planner"}
    | RECIPE_PARTS,
    "testing": {"parallel"},
    "rank files": {"checkpoint", "plan", "facts", "errors", "untrusted", "matrices"},
    "matrices": {"plan", "facts", "schema", "errors"},
    "wiring": set(LAYERS.values()) - {"testing", "extras", "rank files", "matrices"},
    "extras": set(LAYERS.values()) - {"testing"},
}

TORCH, DISTRIBUTED, HYDRA = ("torch",), ("torch.distributed",), ("hydra", "omegaconf")
FILES = ("pathlib", "shutil", "tempfile", "glob", "open()")  # io is allowed: it also has texts in memory
MUST_NOT_TOUCH = {
    "errors": TORCH + HYDRA + FILES,
    "untrusted": TORCH + HYDRA,
    "process pool": TORCH + HYDRA + FILES,
    "schema": TORCH + HYDRA + FILES,
    "targets": TORCH + HYDRA,
    "job": TORCH,
    "facts": TORCH + HYDRA + FILES + ("os",),
    "plan": TORCH + HYDRA + FILES + ("os",),
    "checkpoint": TORCH + HYDRA,
    "shards": HYDRA + FILES + ("os",),
    "process": DISTRIBUTED + HYDRA + FILES,  # it reads and restores what a model may have changed
    "parallel": HYDRA + FILES + ("os",),
    "runtime": HYDRA,
    "models": DISTRIBUTED + HYDRA + FILES,
    "data": DISTRIBUTED + HYDRA,
    "optim": HYDRA + FILES,  # it may check for DTensors, which must not share a group with plain parameters
    "objective": DISTRIBUTED + HYDRA + FILES,
    "request files": TORCH + HYDRA,
    "planner": HYDRA + FILES,
    "steps": HYDRA,
    "testing": HYDRA,
    "rank files": TORCH + HYDRA,
    "matrices": TORCH + HYDRA + FILES + ("os",),
    "extras": HYDRA,
    "wiring": HYDRA,
}
# The modules that others may import from folders whose ``__all__`` has names for users; else see ``__all__``.
OPEN = {
    "launcher.checkpoint": {
        "box_bytes", "cast", "export_one_file", "full_tensors", "manifest", "read", "store", "transform", "verify",
        "write",
    },
    "launcher.parallel": {
        "broadcast", "byte_collectives", "compile", "compile_times", "digests", "grad_norm", "graph_breaks",
        "half_precision", "local_tensors", "mesh",
        "output_share", "parallel_model", "recompute", "sequence_chunks", "split_backward", "stages",
        "forward_comparison",
    },
}  # fmt: skip
WITHOUT_TORCH = ("launcher.job", "launcher.plan", "launcher.checkpoint", "launcher.extras.mindspore")


OPTIONAL, EXTRAS = "launcher.optional", "launcher.extras"


@dataclass(frozen=True)
class Import:
    """``what`` is the module imported by ``module`` at ``where`` (path:line); ``open()`` counts as one."""

    module: str
    what: str
    where: str


@cache
def files() -> dict[str, Path]:
    paths = sorted((ROOT / "launcher").rglob("*.py"))
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


@cache
def trees() -> dict[str, ast.Module]:
    return {module: ast.parse(path.read_text()) for module, path in files().items()}


def imported(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the modules that a node imports, with the line."""
    if isinstance(node, ast.Import):
        yield from ((a.name, node.lineno) for a in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide who imports whom"
        for a in node.names:
            inner = f"{node.module}.{a.name}"
            yield (inner if inner in files() or inner == "torch.distributed" else str(node.module)), node.lineno
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
        yield "open()", node.lineno


@cache
def imports() -> tuple[Import, ...]:
    """Return every import of the package, also those inside functions and for types only.

    The imports by which ``launcher.optional`` gives a type checker the names of its tables do not count.
    """
    found = []
    for module, tree in trees().items():
        path = files()[module].relative_to(ROOT)
        for node in ast.walk(tree):
            if module == OPTIONAL and isinstance(node, ast.ImportFrom) and str(node.module).startswith(EXTRAS):
                continue
            found += [Import(module, what, f"{path}:{line}") for what, line in imported(node)]
    return tuple(found)


def inside(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")


def layer(module: str) -> str:
    return LAYERS[max((p for p in LAYERS if inside(module, p)), key=len)]


def rooms(depth: int) -> Callable[[str], str]:
    """Return a function from a module to its folder at ``depth``; a file higher up is a folder of its own."""
    return lambda module: ".".join(module.split(".")[: depth + 1])


@cache
def edges() -> tuple[tuple[str, str], ...]:
    return tuple((i.module, i.what) for i in imports() if inside(i.what, "launcher"))


def test_every_layer_imports_only_those_below_it() -> None:
    wrong = [
        f"{i.where}: {layer(i.module)} imports {i.what} ({layer(i.what)})"
        for i in imports()
        if inside(i.what, "launcher") and layer(i.what) not in {layer(i.module), *MAY_IMPORT[layer(i.module)]}
    ]
    assert not wrong, "\n".join(wrong)


def test_every_layer_leaves_alone_what_it_must_not_touch() -> None:
    wrong = [
        f"{i.where}: {layer(i.module)} touches {i.what}"
        for i in imports()
        if any(inside(i.what, banned) for banned in MUST_NOT_TOUCH[layer(i.module)])
    ]
    assert not wrong, "\n".join(wrong)


def offered(package: str) -> set[str]:
    """Return the modules of a folder that other folders of ``launcher/`` may import."""
    if package in OPEN:
        return OPEN[package]
    assigned = [node for node in trees()[package].body if isinstance(node, ast.Assign)]
    said = [ast.literal_eval(n.value) for n in assigned if ast.unparse(n.targets[0]) == "__all__"]
    return {name for names in said for name in names if f"{package}.{name}" in files()}


def test_a_folder_is_entered_by_what_it_offers() -> None:
    """Other folders import exactly the modules that ``__all__`` of a folder names."""
    entered: dict[str, set[str]] = {}
    for module, what in edges():
        package, _, name = what.rpartition(".")
        if package.count(".") and package.split(".")[1] != module.partition(".")[2].split(".")[0] and what in files():
            entered.setdefault(package, set()).add(name)
    packages = [m for m, path in files().items() if path.name == "__init__.py" and m != "launcher"]
    assert {p: offered(p) for p in packages if offered(p)} == entered


@pytest.mark.parametrize("grain", [rooms(1), rooms(2), rooms(3), str], ids=["folders", "shelves", "inner", "modules"])
def test_nothing_imports_itself_in_a_circle(grain: Callable[[str], str]) -> None:
    """So no two folders import each other, and no two subfolders of one folder do."""
    left: dict[str, set[str]] = {}
    for a, b in edges():
        left.setdefault(grain(a), set()).update({grain(b)} - {grain(a)})
    while loose := [a for a, bs in left.items() if not bs & left.keys() or not any(a in cs for cs in left.values())]:
        left = {a: bs for a, bs in left.items() if a not in loose}
    assert not left, "\n".join(f"{a} imports {', '.join(sorted(bs & left.keys()))}" for a, bs in left.items())


def test_a_request_is_read_planned_and_its_files_rewritten_without_torch() -> None:
    modules = [m for m in files() if m == "launcher" or any(inside(m, p) for p in WITHOUT_TORCH)]
    code = f"import sys\nfor m in {modules!r}: __import__(m)\nprint(sorted({{'torch'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_core_imports_no_extra() -> None:
    wrong = [i.where for i in imports() if inside(i.what, EXTRAS) and not inside(i.module, EXTRAS)]
    typed = [n for n in trees()[OPTIONAL].body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    named = {node for block in typed for node in ast.walk(block)}
    wrong += [
        f"{OPTIONAL}:{node.lineno}"
        for node in ast.walk(trees()[OPTIONAL])
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(EXTRAS) and node not in named
    ]
    assert not wrong, "\n".join(wrong)


def test_the_tables_name_what_a_type_checker_sees() -> None:
    from launcher import optional

    block = next(n for n in trees()[OPTIONAL].body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    seen = {
        a.asname or a.name: f"{n.module}.{a.name}" for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names
    }
    assert seen == optional.PARTS
    assert set(optional.PARTS.values()) <= set(files())
