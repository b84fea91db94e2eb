"""The import direction, and who may touch torch: see docs/architecture.md."""

import ast
import re
from pathlib import Path, PurePosixPath

import pytest

from tests.imports import PACKAGE, Mention, circles, imports, in_package, is_private, modules_of, names, parsed, reached

pytestmark = pytest.mark.xdist_group("source")  # one process parses all files, once

ROWS = (
    {"errors"},
    {"base"},
    {"ir", "problems", "kernels"},
    {"plan"},
    {"capture", "cost", "runtime"},
    {"schedule", "placement", "rewrite", "lower"},
    {"cpu", "cuda", "edge"},
    {"regions", "remat", "report"},
    {"split"},
    {"planning"},
    {"ranges"},
    {"api"},
    {"integrations"},
    {"cli"},
    {"__init__", "__main__"},  # the public names and the script: nobody within imports the package itself
)
TESTS = Path(__file__).parent
RESEARCH = PACKAGE.parent / "research"
TEST_MODULES = {path.stem for path in TESTS.rglob("test_*.py")}
ROW_OF = {member: row for row, members in enumerate(ROWS) for member in members}

VERBS = ("lowtide.api", "lowtide.cli", "lowtide.integrations")

# What only some may import: folders and files of the package.
PLACES = {
    "torch": {
        "kernels", "capture", "cost/laboratory.py", "cost/operators.py", "cost/profiler.py", "cost/timings.py", "cost/trial.py",
        "cost/trials.py", "cost/trial_process.py", "runtime", "cpu/comparison.py", "cpu/recipes.py", "cpu/executable.py", "cpu/trial.py",
        "cuda", "edge/aten.py", "regions", "lower", "api", "integrations",
    },
    "ml_dtypes": {"edge/graph.py"},
    "onnx": set(),  # asked for where it is needed, by `need`
    "onnxruntime": set(),
    "ortools": set(),  # research asks for it
    "matplotlib": {"placement/picture.py", "report/exports.py"},
    "numba": {"base/kernels.py"},
    "transformers": {"integrations/transformers.py"},
    "accelerate": {"integrations"},
    "lightning": {"integrations/lightning.py", "integrations/lightning_notes.py"},
    "executorch": {"integrations/executorch.py"},
}  # fmt: skip
PRIVATE_TORCH = {
    "capture", "cost/trials.py", "cost/trial.py", "cost/operators.py", "cost/profiler.py", "runtime", "regions", "lower",
    "kernels/layers.py",
}  # fmt: skip


def test_a_module_imports_only_from_rows_below_or_from_its_own_folder():
    assert [complaint for mention in in_package(imports) if (complaint := misdirected(mention))] == []


def test_every_member_has_a_row():
    members = {path.stem if path.suffix == ".py" else path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert members - {"py.typed"} <= ROW_OF.keys()


def test_only_public_names_and_the_command_line_know_the_reference_solvers():
    found = [mention for mention in in_package(imports, "research") if mention.name.startswith("research")]
    assert [str(mention) for mention in found if not lies_in(mention.file, {"cli"})] == []


def test_the_package_knows_nothing_of_the_bench():
    assert [str(mention) for mention in in_package(imports) if mention.name.split(".")[0] in ("bench", "tests")] == []
    saying_so = [source for source in sources().values() if re.search(r"\bbench\b", source)]
    texts = (node for source in saying_so for node in ast.walk(parsed(source)))
    found = [node.value for node in texts if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert [text for text in found if re.fullmatch(r"bench(\.\w+)*", text)] == []


def test_every_module_is_reached_from_a_verb():
    modules = modules_of(sources())
    assert sorted(set(modules) - reached(modules, VERBS) - {"lowtide", "lowtide.__main__"}) == []


def test_a_module_that_no_verb_reaches_is_found():
    files = {
        "api/__init__.py": "def f():\n    from lowtide.a.used import g",
        "a/__init__.py": "import lowtide.c",
        "a/used.py": "",
        "a/unused.py": "from lowtide.a import used",
        "c.py": "",
    }
    modules = modules_of(files)
    assert sorted(set(modules) - reached(modules, ["lowtide.api"])) == ["lowtide.a.unused"]


def test_no_imports_go_in_a_circle():
    """Not even those that only type checkers see, nor those within functions."""
    assert circles(modules_of(sources())) == []


def test_a_circle_is_found():
    files = {
        "a/__init__.py": "",
        "a/one.py": "from lowtide.a import two",
        "a/two.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lowtide.a.three import Three",
        "a/three.py": "class Three:\n    def f(self):\n        import lowtide.a.one",
        "b.py": "import lowtide.a.one",
        "c.py": "from .c import itself",
    }
    assert circles(modules_of(files)) == [["lowtide.a.one", "lowtide.a.three", "lowtide.a.two"], ["lowtide.c"]]


def test_tests_import_no_tests():
    """What several tests need lies in modules that are none."""
    files = {path.relative_to(TESTS).as_posix(): path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")}
    naming = {file: source for file, source in files.items() if not TEST_MODULES.isdisjoint(re.findall(r"\btest_\w+", source))}
    assert [str(mention) for file, source in naming.items() for mention in imports(source, file) if names_a_test(mention)] == []


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("from tests.api.test_order import c", True),
        ("from tests.api import test_order", True),
        ("import tests.test_layers", True),
        ("def f():\n    from .test_order import b", True),
        ("from tests.api.networks import squares", False),
        ("from elsewhere import test_everything", False),
    ],
)
def test_an_import_of_a_test_is_found(source: str, wrong: bool):
    (mention,) = imports(source, "api/c.py")
    assert names_a_test(mention) == wrong


def test_libraries_are_imported_only_where_they_have_their_place():
    assert [str(mention) for mention in in_package(imports) if misplaced(mention)] == []


def test_private_names_of_torch_are_used_only_where_they_have_their_place():
    found = [mention for mention in in_package(names, "torch") if mention.name.startswith("torch.") and is_private(mention.name)]
    assert [str(mention) for mention in found if not lies_in(mention.file, PRIVATE_TORCH)] == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("cost/memory.py", "from lowtide.schedule.base import Schedule"),  # a row above
        ("cost/memory.py", "from lowtide.runtime import program"),  # a member of the same row
        ("cost/memory.py", "import lowtide.capture.recorder"),
        ("cost/memory.py", "from lowtide import planning"),
        ("cost/memory.py", "from lowtide import optimize"),  # the package itself
        ("cost/memory.py", "import lowtide"),
        ("cost/memory.py", "from ..planning import planner"),
        ("errors.py", "def f():\n    if True:\n        from lowtide.ir import graph"),
        ("cost/memory.py", "from lowtide.nowhere import x"),
    ],
)
def test_a_wrong_import_is_found(file: str, source: str):
    (mention,) = imports(source, file)
    assert misdirected(mention)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("cost/memory.py", "from lowtide.ir.graph import Graph"),
        ("cost/memory.py", "from lowtide.cost.cache import Cache"),
        ("cost/memory.py", "from .cache import Cache"),
        ("cost/memory.py", "from lowtide import errors"),
        ("__init__.py", "from lowtide.api import optimize"),
        ("cost/memory.py", "import numpy"),
    ],
)
def test_a_right_import_is_let_through(file: str, source: str):
    (mention,) = imports(source, file)
    assert not misdirected(mention)


def test_torch_out_of_its_place_is_found():
    (inside,) = imports("from torch.nn import functional", "cost/profiler.py")
    (outside,) = imports("def f():\n    import torch.nn", "cost/memory.py")
    assert not misplaced(inside)
    assert misplaced(outside)


def sources() -> dict[str, str]:
    """The package's files."""
    return {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}


def misdirected(mention: Mention) -> str:
    """What is wrong with an import; "" where nothing is."""
    package, *target = mention.name.split(".")
    if package != "lowtide":
        return ""
    mine = mention.file.split("/")[0].removesuffix(".py")
    theirs = target[0] if target and (target[0] in ROW_OF or len(target) > 1) else "__init__"
    if theirs not in ROW_OF:
        return f"{mention}: {theirs} has no row"
    if mine != theirs and ROW_OF[theirs] >= ROW_OF[mine]:
        return f"{mention}: {mine} is in row {ROW_OF[mine]}, {theirs} in row {ROW_OF[theirs]}"
    return ""


def names_a_test(mention: Mention) -> bool:
    """Whether an import is of a module of tests, or from one."""
    return not TEST_MODULES.isdisjoint(mention.name.split("."))


def misplaced(mention: Mention) -> bool:
    """Whether a file imports a library that has its place elsewhere."""
    places = PLACES.get(mention.name.split(".")[0])
    return places is not None and not lies_in(mention.file, places)


def lies_in(file: str, places: set[str]) -> bool:
    """Whether a file is one of `places` or in a folder that is."""
    return not places.isdisjoint([file, *map(str, PurePosixPath(file).parents)])
