"""The command line: verbs such as `lowtide optimize SPEC` and `lowtide report PLAN.json OUT`; `commands.py` names all.

What the commands need takes seconds to import, and is imported only once an interrupt finds somebody to answer it.
"""

from __future__ import annotations

from typing import Any

from lowtide.cli import exit as leaving


def main() -> None:
    """Entry point of the `lowtide` command."""
    leaving.refuse_without_output()
    leaving.quit_on_interrupt()
    from lowtide.cli.commands import run

    leaving.leave_quietly(run)


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lowtide.cli.commands import command_line

    return command_line()
