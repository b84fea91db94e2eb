"""What the package's files import and name, found by parsing them: nothing is run, and imports within functions count too."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


def imports(source: str, file: str) -> Iterator[Mention]:
    """What a file imports: `from a.b import c` is a.b.c, and so is the same thing said relatively."""
    package = ["lowtide", *Path(file).parent.parts]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Mention(file, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            yield from (Mention(file, node.lineno, f"{module}.{alias.name}") for alias in node.names)


def names(source: str, file: str) -> Iterator[Mention]:
    """What a file imports, and the dotted names that it reads through an import: `np.random.get_state` is numpy.random.get_state."""
    yield from imports(source, file)
    tree = ast.parse(source)
    bound = _bindings(tree)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner and (parts := _chain(node)) and parts[0] in bound:
            yield Mention(file, node.lineno, ".".join([bound[parts[0]], *parts[1:]]))


def is_private(name: str) -> bool:
    """Whether a part of a dotted name starts with one underscore: `torch._C.f`, but not `torch.__version__`."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def in_package(find: Callable[[str, str], Iterator[Mention]]) -> list[Mention]:
    """All that `find` finds in the package's files."""
    found: list[Mention] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        found += find(path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix())
    return found


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
