"""Small files, short functions, few parameters: what `docs/architecture.md` calls the house stays one."""

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

from tests.imports import PACKAGE

TESTS = Path(__file__).parent
MOST_LINES = 60  # of a function
MOST_PARAMETERS = 8
MEDIAN_LINES = 120  # of a file

# Functions whose keyword-only arguments are the settings that a user may give: each stands for itself, and has its line in the docstring.
VERBS = {
    "api/optimize.py:optimize": "the one verb",
    "api/explain.py:explain": "the same questions, asked before",
    "cli/optimize.py:optimize_command": "the verb's options, as typer reads them from parameters",
    "cli/explain.py:explain_command": "the same",
    "cli/place.py:place_command": "the same",
}


def functions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions of a file, kernels left out: those get arrays one by one, as numba wants them."""
    found = (node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    yield from (each for each in found if not any("kernel" in ast.unparse(decorator) for decorator in each.decorator_list))


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many a function has, `self` aside."""
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def complaints(source: str, file: str) -> list[str]:
    """The functions of a file that are too long, or have too many parameters."""
    found = []
    for function in functions(source):
        lines = (function.end_lineno or 0) - function.lineno + 1
        if lines > MOST_LINES or parameters(function) > MOST_PARAMETERS:
            found.append(f"{file}:{function.name}")
    return found


def test_functions_are_short_and_have_few_parameters():
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert {each for file, source in files.items() for each in complaints(source, file)} == VERBS.keys()


def test_a_long_function_and_one_of_many_parameters_are_found():
    long = "def long():\n" + "    pass\n" * MOST_LINES
    wide = f"class A:\n    def wide(self, {', '.join(f'p{each}' for each in range(MOST_PARAMETERS))}, *, one_more): ..."
    assert complaints(long, "a.py") == ["a.py:long"]
    assert complaints(wide, "a.py") == ["a.py:wide"]
    assert complaints(wide.replace(", *, one_more", ""), "a.py") == []
    assert complaints("@kernel\n" + long, "a.py") == []


def test_files_are_small():
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    assert statistics.median(lines) <= MEDIAN_LINES


def test_test_files_have_names_of_their_own():
    """pytest imports them by name: of two that are called alike it collects one."""
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
