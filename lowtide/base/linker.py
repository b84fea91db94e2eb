"""Kernels are linked once: what only kernels call is optimised and turned into machine code within those that Python calls.

numba does both for each function with all that it calls, and again within every caller, up to the top: most of what it took was for code
that nothing jumped to. What a kernel calls keeps its code as it was written, and is known to the kernel alone, so that nothing else is
made of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numba
from numba.core import codegen
from numba.core.environment import lookup_environment

# Of numba's private names only those of these versions are known. With any other kernels are linked as numba links them: in more time.
KNOWN = ("0.68.",)

_Library: Any = codegen.JITCodeLibrary  # numba has no types
_environment_of: Any = lookup_environment


@contextmanager
def linked_once(target: Any) -> Iterator[None]:
    """What is compiled meanwhile for a target is linked where Python calls it. Whoever asks holds numba's lock."""
    if not numba.__version__.startswith(KNOWN):
        yield
        return
    target.refresh()  # its own libraries are not ours
    generator = target.codegen()
    before = generator._library_class
    generator._library_class = _LinkedOnce
    try:
        yield
    finally:
        generator._library_class = before


class _NoCode:
    """Stands for the generator of code where none is generated: there is no place to keep what raises exceptions."""

    def set_env(self, *_: Any) -> None:
        pass


class _LinkedOnce(_Library):  # type: ignore[misc]
    """A library that has machine code only once there is something in it for Python to call, and somebody asks for that."""

    _written: Any = None  # the code as it was written, until all is linked; None where it was read from disk
    _to_link: Any = None  # the same, as callers take it

    def finalize(self) -> None:
        self._raise_if_finalized()
        self._finalize_dynamic_globals()
        self._written = self._final_module
        self._finalized = True

    @property
    def codegen(self) -> Any:
        return self._codegen if self._written is None else _NoCode()

    def get_pointer_to_function(self, name: str) -> Any:
        self._ensure_finalized()
        if self._written is not None:
            if not any(each.name == name for each in self.get_defined_functions()):
                return 0
            self._link()
        return super().get_pointer_to_function(name)

    def _get_module_for_linking(self) -> Any:
        """For libraries of numba's own kind, which do not ask what else is called."""
        self._ensure_finalized()
        if self._written is not None:
            self._link()
        return super()._get_module_for_linking()

    def _link(self) -> None:
        self._alone()
        linked, self._written = self._written, None
        for library in reversed(self._called({})):  # callers first: of the others only what is called already is linked
            self._reload_init.update(library._reload_init)
            linked.link_in(library._alone() if isinstance(library, _LinkedOnce) else library._get_module_for_linking(), preserve=True)
        for each in linked.functions:
            if not each.is_declaration and each.linkage.name == "linkonce_odr":
                each.linkage = "internal"
        self._dynamic_globals.clear()  # found again, with those of all that is called
        self._optimize_final_module()
        linked.verify()
        self._finalize_final_module()
        for name in [each.name for each in linked.global_variables]:
            if (environment := _environment_of(name)) is not None:
                self._codegen.set_env(name, environment)

    def _called(self, needed: dict[Any, None]) -> dict[Any, None]:
        """All libraries that this one needs, each once and after those that it needs itself."""
        for library in self._linking_libraries:
            if library is not self and library not in needed:
                if isinstance(library, _LinkedOnce):
                    library._called(needed)
                needed[library] = None
        return needed

    def _alone(self) -> Any:
        """The code without what it calls, as callers may take it: each has its own."""
        if self._to_link is None and self._written is not None:
            self._to_link = self._written.clone()
            for each in self._to_link.functions:
                if not each.is_declaration and each.linkage.name == "external":
                    each.linkage = "linkonce_odr"
        return self._get_module_for_linking() if self._to_link is None else self._to_link
