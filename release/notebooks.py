"""The notebooks of the documentation: runs their cells in order, keeps what they show, and makes pages of the site of them.

    python -m release.notebooks            # run all of docs/notebooks, and write what they show into them
    python -m release.notebooks FILE ...

It needs no Jupyter, which shows the same: text that is printed, a last expression's `_repr_html_` or text, figures of matplotlib.
mkdocs loads this file as a hook, and has neither torch nor matplotlib then.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
Notebook = dict[str, Any]  # as the file holds it, nbformat 4.5
_HEAD_OF_SVG = re.compile(r"^.*?(?=<svg)", re.DOTALL)


def main() -> None:
    for path in map(Path, sys.argv[1:] or sorted(map(str, FOLDER.glob("*.ipynb")))):
        path.write_text(text(ran(json.loads(path.read_text(encoding="utf-8")), path.name)), encoding="utf-8")
        print(path, flush=True)


def text(notebook: Notebook) -> str:
    """As the file holds it."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def ran(notebook: Notebook, name: str) -> Notebook:
    """The same with what its cells show now. What a cell raises goes through, with the cell's number in its traceback."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, number = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            cell = cell | {"execution_count": number, "outputs": _shown("".join(cell["source"]), f"{name}, cell {number}", names, number)}
        cells.append(cell)
    return notebook | {"cells": cells}


def _shown(source: str, where: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run one cell."""
    body = ast.parse(source, where).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    value = None
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.Module(body, []), where, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), where, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())})
    if value is not None:
        outputs.append({"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": _forms(value)})
    return outputs


def _forms(value: object) -> dict[str, list[str]]:
    """By type, as Jupyter shows a value."""
    forms = {"text/plain": _lines(repr(value))}
    if hasattr(value, "savefig"):
        forms = {"text/plain": ["a figure"], "image/svg+xml": _lines(_drawn(value))}
    elif (as_html := getattr(value, "_repr_html_", None)) is not None:
        forms["text/html"] = _lines(as_html())
    return forms


def _drawn(figure: Any) -> str:
    """A figure, the same each time."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "lowtide"}):
        figure.savefig(file := io.StringIO(), format="svg", metadata={"Date": None}, transparent=True)
    return file.getvalue()


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def page(notebook: Notebook, name: str) -> str:
    """A page of the site, in Markdown."""
    parts = [_part(cell) for cell in notebook["cells"]]
    return "\n\n".join([parts[0], f"[This page as a notebook]({name})", *parts[1:]]) + "\n"


def _part(cell: Mapping[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return source
    return "\n\n".join([f"```python\n{source}\n```", *map(_output, cell["outputs"])])


def _output(output: Mapping[str, Any]) -> str:
    if output["output_type"] == "stream":
        return _as_text(output["text"])
    data = output["data"]
    for form in ("image/svg+xml", "text/html"):
        if form in data:
            return f"<div>{_HEAD_OF_SVG.sub('', ''.join(data[form])) if 'svg' in form else ''.join(data[form])}</div>"
    return _as_text(data["text/plain"])


def _as_text(lines: Sequence[str]) -> str:
    return f"```text\n{''.join(lines).rstrip()}\n```"


def on_files(files: Any, config: Any) -> Any:
    """mkdocs' hook: a page for each notebook, beside the file itself."""
    from mkdocs.structure.files import File

    for file in [each for each in files if each.src_uri.endswith(".ipynb")]:
        notebook = json.loads(Path(file.abs_src_path).read_text(encoding="utf-8"))
        content = page(notebook, Path(file.src_uri).name)
        files.append(File.generated(config, f"{file.src_uri.removesuffix('.ipynb')}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs' hook: what leads to another notebook in the files leads to its page on the site; a page's own notebook stays a file."""
    own = re.escape(Path(page.file.src_uri).stem)
    return re.sub(rf"(\]\((?!{own}\.)[\w/.]+)\.ipynb\)", r"\1.md)", markdown)


if __name__ == "__main__":
    main()
