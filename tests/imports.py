"""What the package's files import and name, found by parsing them: nothing is run, and imports within functions count too."""

import ast
import gc
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lowtide"


@dataclass(frozen=True)
class Mention:
    """A dotted name and where it stands."""

    file: str  # within the package, "cost/memory.py"
    line: int
    name: str  # "torch._ops.OpOverload"

    def __str__(self) -> str:
        return f"lowtide/{self.file}:{self.line} {self.name}"


def parsed(source: str) -> ast.Module:
    """A tree, which nobody should keep: the collector would look at all of its nodes again and again, as it does while it is made."""
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        gc.enable()


@cache  # many tests ask, and parsing takes long
def imports(source: str, file: str) -> tuple[Mention, ...]:
    """What a file imports: `from a.b import c` is a.b.c, and so is the same thing said relatively."""
    return tuple(_imports(parsed(source), file))


def _imports(tree: ast.AST, file: str) -> Iterator[Mention]:
    package = ["lowtide", *Path(file).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Mention(file, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            yield from (Mention(file, node.lineno, f"{module}.{alias.name}") for alias in node.names)


@cache
def names(source: str, file: str) -> tuple[Mention, ...]:
    """What a file imports, and the dotted names that it reads through an import: `np.random.get_state` is numpy.random.get_state."""
    return tuple(_names(parsed(source), file))


def _names(tree: ast.AST, file: str) -> Iterator[Mention]:
    yield from _imports(tree, file)
    bound = _bindings(tree)
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    inner = {id(node.value) for node in attributes}
    for node in attributes:
        if id(node) not in inner and (parts := _chain(node)) and parts[0] in bound:
            yield Mention(file, node.lineno, ".".join([bound[parts[0]], *parts[1:]]))


def is_private(name: str) -> bool:
    """Whether a part of a dotted name starts with one underscore: `torch._C.f`, but not `torch.__version__`."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def in_package(find: Callable[[str, str], Iterable[Mention]], word: str = "") -> list[Mention]:
    """All that `find` finds in the package's files, of those alone in which a word stands."""
    found: list[Mention] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        found += find(source, path.relative_to(PACKAGE).as_posix()) if word in source else []
    return found


def circles(modules: Mapping[str, set[str]]) -> list[list[str]]:
    """The sets of modules that lead to one another, each sorted, of modules and what each imports (Tarjan's algorithm)."""
    number: dict[str, int] = {}
    least: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = least[module] = len(number)
        stack.append(module)
        for other in sorted(modules[module]):
            if other not in number:
                visit(other)
                least[module] = min(least[module], least[other])
            elif other in stack:
                least[module] = min(least[module], number[other])
        if least[module] == number[module]:
            place = stack.index(module)
            if len(stack) - place > 1 or module in modules[module]:
                found.append(sorted(stack[place:]))
            del stack[place:]

    for module in sorted(modules):
        if module not in number:
            visit(module)
    return found


def modules_of(files: Mapping[str, str]) -> dict[str, set[str]]:
    """By module the modules that it imports, of the package's files and their sources."""
    names = {_module(file): file for file in files}
    return {
        module: {other for mention in imports(files[file], file) if (other := _nearest(mention.name, names))}
        for module, file in names.items()
    }


def reached(modules: Mapping[str, set[str]], starts: Iterable[str]) -> set[str]:
    """What is imported from these modules and folders on, with the folders that importing a module runs, of what `modules_of` gives."""
    found: set[str] = set()
    pending = [module for module in modules for start in starts if module == start or module.startswith(f"{start}.")]
    while pending:
        module = pending.pop()
        if module in modules and module not in found:
            found.add(module)
            pending += [*modules[module], module.rpartition(".")[0]]
    return found


def _module(file: str) -> str:
    parts = Path(file).with_suffix("").parts
    return ".".join(["lowtide", *(parts[:-1] if parts[-1] == "__init__" else parts)])


def _nearest(name: str, modules: Container[str]) -> str:
    """The module that a dotted name is of; "" for none of these."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def _bindings(tree: ast.AST) -> dict[str, str]:
    """The names that imports bind, anywhere in a file, and what they stand for."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                bound[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level:
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return bound


def _chain(node: ast.expr) -> list[str]:
    """["a", "b", "c"] for the expression `a.b.c`; [] where it does not start with a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []
