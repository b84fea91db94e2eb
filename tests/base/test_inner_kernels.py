"""Kernels marked `inner` or `borrows` have nothing by which Python could call them: only kernels speak of them."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.errors import TypingError

from lowtide.base import kernels

ROOT = Path(__file__).parents[2]


@kernels.kernel(inner=True)
def _more(number: int) -> int:
    return number + 1


@kernels.kernel
def _much_more(number: int) -> int:
    return _more(number) * 2


@pytest.mark.skipif(kernels.SWITCHED_OFF, reason="kernels are Python")
def test_one_that_python_calls_all_the_same_says_what_is_wrong() -> None:
    assert _much_more(3) == 8  # now that it is compiled there is something that numba would jump to
    with pytest.raises(TypeError, match="expected _more to be called by kernels only"):
        _more(3)


@kernels.kernel(inner=True, borrows=True)
def _first(numbers: Any) -> Any:
    return numbers[0]


@kernels.kernel
def _first_of_all(rows: Any) -> float:
    total = 0.0
    for row in range(len(rows)):
        total += _first(rows[row])
    return total


@pytest.mark.skipif(kernels.SWITCHED_OFF, reason="kernels are Python")
def test_what_borrows_counts_no_references() -> None:
    _first.compile("float64(float64[::1])")
    assert not any("NRT_incref" in code for code in _first.inspect_llvm().values())
    assert _first_of_all(np.arange(6.0).reshape(2, 3)) == 3.0
    with pytest.raises(TypeError, match="expected _first to be called by kernels only"):
        _first(np.zeros(1))


@kernels.kernel(borrows=True)
def _first_row(rows: Any, times: Any) -> None:
    for row in range(len(rows)):
        rows[row] = rows[0] * times


@pytest.mark.skipif(kernels.SWITCHED_OFF, reason="kernels are Python")
def test_one_that_borrows_and_is_not_inner_is_called_by_python() -> None:
    numbers = np.arange(1.0, 4.0)
    held = sys.getrefcount(numbers)
    for _ in range(3):
        _first_row(numbers, 2)
    assert numbers.tolist() == [8.0, 16.0, 16.0]
    assert sys.getrefcount(numbers) == held


@kernels.kernel(inner=True)
def _halves(number: int, by: int) -> Any:
    return np.full(number // by, by)


@kernels.kernel(inner=True)
def _sum_of_halves(number: int, by: int) -> int:
    return _halves(number, by).sum()


@kernels.kernel
def _one_caller(number: int, by: int) -> int:
    return _sum_of_halves(number, by)


@kernels.kernel
def _another_caller(number: int, by: int) -> int:
    return _sum_of_halves(number, by) + _one_caller(number, by) + max(_halves(number, by))


_SCRIPT = """if True:
    import numba, numpy, pytest, sys
    from tests.base.test_inner_kernels import _another_caller, _one_caller
    assert (_one_caller(6, 2), _another_caller(6, 2)) == (6, 14)
    for function in (_one_caller, _another_caller):
        with pytest.raises(ZeroDivisionError):
            function(6, 0)
        with pytest.raises(ValueError, match="negative dimensions"):
            function(-6, 2)
        print(sum(function._cache_hits.values()))
    assert numba.njit(lambda number: numpy.full(number, 2).sum() + _one_caller(number, 2))(6) == 18
"""


_OTHER_NUMBA = "import lowtide.base.kernels as kernels; kernels.KNOWN = ('none',)\n"


@pytest.mark.skipif(kernels.SWITCHED_OFF, reason="kernels are Python")
def test_another_numba_links_them_in_its_own_way(tmp_path: Path) -> None:
    """Its private names may be others."""
    assert numba.__version__.startswith(kernels.KNOWN), "look at what `base/kernels.py` relies on, and add this version"
    script = f"{_OTHER_NUMBA}{_SCRIPT}".replace("if True:", "if kernels.KNOWN == ('none',):")
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", script], check=False, env=environment, cwd=ROOT, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(kernels.SWITCHED_OFF, reason="kernels are Python")
def test_what_kernels_call_is_kept_with_each_of_them_and_nowhere_else(tmp_path: Path) -> None:
    """With what they raise, and beside what numba compiles for others, which takes the same parts."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    for kept in (0, 1):
        done = subprocess.run([sys.executable, "-c", _SCRIPT], check=False, env=environment, cwd=ROOT, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{kept}\n{kept}\n"
    assert {path.name.split(".")[1] for path in tmp_path.rglob("*.nbc")} == {"_one_caller", "_another_caller"}


@kernels.kernel(inner=True, borrows=True)
def _two_of(number: Any) -> Any:
    return np.full(2, number)


@kernels.kernel
def _sum_of_two(number: Any) -> Any:
    return _two_of(number).sum()


@pytest.mark.skipif(kernels.SWITCHED_OFF, reason="kernels are Python")
def test_what_borrows_makes_no_arrays() -> None:
    with pytest.raises(TypingError, match="_two_of"):
        _sum_of_two(3.0)


def test_only_kernels_call_inner_kernels() -> None:
    rooms = ("lowtide", "research", "tests", "bench")
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for room in rooms for path in (ROOT / room).rglob("*.py")}
    inner = {(path, name) for path, tree in trees.items() for name, settings in _kernels(tree) if settings & {"inner", "borrows"}}
    assert len(inner) > 50
    called = []
    for path, tree in trees.items():
        own = {name for where, name in inner if where == path}
        brought = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
            if (ROOT.joinpath(*node.module.split(".")).with_suffix(".py"), alias.name) in inner
        }
        called += [f"{path}: {name}" for name in _called_by_python(tree) if name in own | brought]
    assert not called


def _kernels(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    """The kernels of a module, with the names of their settings."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            for each in node.decorator_list:
                call = each if isinstance(each, ast.Call) else ast.Call(each, [], [])
                if isinstance(call.func, ast.Name) and call.func.id == "kernel":
                    yield node.name, {keyword.arg for keyword in call.keywords if keyword.arg}


def _called_by_python(tree: ast.Module) -> Iterator[str]:
    """The names that are called outside kernels."""
    kernels = {name for name, _ in _kernels(tree)}
    for node in tree.body:
        if not (isinstance(node, ast.FunctionDef) and node.name in kernels):
            yield from (each.func.id for each in ast.walk(node) if isinstance(each, ast.Call) and isinstance(each.func, ast.Name))
