"""Reads off torch's headers what a CUDA allocator has to do, as C++ that hands each of it on to another.

The class changes from one version of torch to the next. What the planned allocator does by itself is named in `OWN`.
"""

from __future__ import annotations

import re
from pathlib import Path

OWN = frozenset({
    "allocate", "raw_alloc", "raw_alloc_with_stream", "raw_delete", "recordStream", "getBaseAllocation", "shareIpcHandle", "name",
})  # fmt: skip
_CLASSES = (
    ("c10/cuda/CUDACachingAllocator.h", "class CUDAAllocator : public"),
    ("c10/core/CachingDeviceAllocator.h", "struct C10_API DeviceAllocator"),
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_VIRTUAL = re.compile(r"virtual\s+([\w:<>,\s*&]+?)\s*\b(\w+)\(((?:[^()]|\([^()]*\))*)\)\s*(const)?\s*(?:=\s*0\s*;|\{)")
_NAMED = re.compile(r"(.*[\s*&>])(\w+)$", re.S)


class UnknownHeadersError(Exception):
    """They are not as expected."""


def forwarders(include: Path) -> str:
    """One function a line. Raises UnknownHeadersError, and OSError."""
    lines: dict[tuple[str, str], str] = {}
    for file, head in _CLASSES:
        text = (include / file).read_text(encoding="utf-8")
        start = text.find(head)
        if start < 0:
            raise UnknownHeadersError(f"{file} has no {head!r}")
        for result, name, parameters, const in _VIRTUAL.findall(_COMMENT.sub(" ", text[start : text.index("\n};", start)])):
            types = [_type_of(each) for each in _split(parameters)]
            if name not in OWN:
                lines.setdefault((name, " ".join(types)), _forwarder(" ".join(result.split()), name, types, const))
    return "\n".join(lines.values()) + "\n"


def _forwarder(result: str, name: str, types: list[str], const: str) -> str:
    declared = ", ".join(f"{each} a{at}" for at, each in enumerate(types))
    passed = ", ".join(f"static_cast<{each}&&>(a{at})" if _by_value(each) else f"a{at}" for at, each in enumerate(types))
    return f"  {result} {name}({declared}) {const} override {{ return inner->{name}({passed}); }}"


def _by_value(kind: str) -> bool:
    """Whether an argument is an object of its own, which is moved on."""
    return "<" in kind and not kind.endswith(("&", "*"))


def _type_of(parameter: str) -> str:
    """A parameter without its name and what it is by default."""
    words = " ".join(re.sub(r"=.*$", "", parameter, flags=re.S).split())
    named = _NAMED.match(words)
    return named[1].strip() if named is not None and named[1].strip() not in ("const", "unsigned") else words


def _split(parameters: str) -> list[str]:
    """At the commas that lie in no brackets."""
    parts, depth = [""], 0
    for letter in parameters:
        depth += (letter in "<({") - (letter in ">)}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]
