"""What a model needs, as a page: one file that asks no network."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import Environment, StrictUndefined

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem; color-scheme: light dark }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .3rem 1rem .3rem 0; border-bottom: 1px solid #8884; text-align: left }
.small { font-size: .85rem; opacity: .8 }
</style>
<h1>{{ title }}</h1>
<p>{{ headline }}</p>
<p>{{ kinds }}</p>
<table>
<tr><th>card<th>memory<th>usable<th>fits<th>a step</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}{% endfor %}</tr>
{% endfor %}</table>
<p class="small">{{ assumed }} Written by lowtide.</p>
</html>
"""


def needs_page(title: str, headline: str, kinds: str, rows: Sequence[Sequence[str]], assumed: str) -> str:
    """The page; all texts are escaped."""
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(_PAGE)
    return template.render(title=title, headline=headline, kinds=kinds, rows=rows, assumed=assumed)
