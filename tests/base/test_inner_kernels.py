"""Kernels marked `inner` have nothing by which Python could call them: only kernels speak of them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def test_only_kernels_call_inner_kernels() -> None:
    trees = {
        path: ast.parse(path.read_text(encoding="utf-8")) for room in ("lowtide", "tests", "bench") for path in (ROOT / room).rglob("*.py")
    }
    inner = {(path, name) for path, tree in trees.items() for name, settings in _kernels(tree) if "inner" in settings}
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
