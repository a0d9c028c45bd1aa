"""Docutils tables and links for the pages that the build writes itself."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence

from docutils import nodes
from sphinx.addnodes import pending_xref


def table(header: Sequence[str], rows: Iterable[Sequence[str | nodes.Node]]) -> nodes.table:
    """A table of text and inline nodes."""

    def row(cells: Sequence[str | nodes.Node]) -> nodes.row:
        inline = [nodes.Text(cell) if isinstance(cell, str) else cell for cell in cells]
        return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", cell)) for cell in inline))

    group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in header), cols=len(header))
    group += nodes.thead("", row(header))
    group += nodes.tbody("", *map(row, rows))
    return nodes.table("", group, classes=["colwidths-auto"])


def link(here: str, there: str, text: str | None = None) -> pending_xref:
    """A link between two pages, by default under the target's title."""
    return pending_xref(
        "",
        nodes.inline(text=text or there),
        refdoc=here,
        reftarget=posixpath.relpath(there, posixpath.dirname(here)),
        reftype="doc",
        refdomain="std",
        refexplicit=text is not None,
        refwarn=True,
    )
