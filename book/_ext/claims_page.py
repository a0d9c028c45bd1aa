"""The claims page: ``{claims}`` becomes one card for each row of the ledger ``samkit/claims.toml``.

A card ends with the verdict that the claim's chapter showed in this very build, so the page repeats what was
measured and cannot disagree with it.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective


class verdict(nodes.General, nodes.Element):
    """Stands where the chapter's verdict goes until all chapters have run."""


def badge(status: str) -> str:
    return f"[{status}]{{.claim-badge .{status.replace(' ', '-')}}}"


def typeset(words: str) -> str:
    """The ledger's plain words with the norms as mathematics, and with links to the papers."""
    words = re.sub(r"\bl_(\d|inf)\b", lambda found: f"$\\ell_{found[1]}$".replace("inf", "\\infty"), words)
    words = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", words)
    return words.replace("[M]", "{cite:t}`moon2026minor`").replace("[X]", "{cite:t}`chen2026revisiting`")


def card(name: str, row: dict, chapter: str) -> str:
    """One claim in Markdown; ``chapter`` is a link to the notebook that settles it."""
    scale = f" at full scale: {badge(row['full_scale'])}" if "full_scale" in row else ""
    facts = {
        "Source": typeset(row["source"]),
        "Chapter": chapter,
        "Decision rule": typeset(row["rule"]),
        "Computed by": f"{{py:func}}`{row['function']}`" if "function" in row else "",
        "Seen": typeset(row.get("measured", "")),
    }
    listed = "\n\n".join(f"{label}\n: {value}" for label, value in facts.items() if value)
    body = "\n\n".join((f"**{name}** {badge(row['status'])}{scale}", typeset(row["statement"]), listed))
    return f"::::{{div}} claim\n:name: ledger-{name.lower()}\n\n{body}\n::::\n"


class Claims(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        path = Path(self.env.srcdir) / "samkit" / "claims.toml"
        self.env.note_dependency(str(path))
        claims = tomllib.loads(path.read_text(encoding="utf-8"))
        counts = Counter(row["status"] for row in claims.values())
        summary = ", ".join(f"{number} {badge(status)}" for status, number in counts.most_common())
        shown = self.parse_text_to_nodes(f"{len(claims)} claims: {summary}")
        chapters = {
            int(name[10:12]): name for name in self.env.found_docs if re.match(r"notebooks/\d\d_", name)
        }
        planned = ["| id | planned claim | source |", "|---|---|---|"]
        for name, row in claims.items():
            if row["status"] == "planned" or row["chapter"] not in chapters:
                planned.append(f"| {name} | {typeset(row['statement'])} | {typeset(row['source'])} |")
                continue
            chapter = chapters[row["chapter"]]
            box = self.parse_text_to_nodes(card(name, row, f"[](/{chapter}.ipynb)"))[0]
            box += verdict(name=name, chapter=chapter)
            shown.append(box)
        if len(planned) > 2:
            shown += self.parse_text_to_nodes("\n".join(planned))
        return shown


class ShowVerdicts(SphinxPostTransform):
    default_priority = 3  # before myst-nb chooses one form of each output

    def run(self, **kwargs: object) -> None:
        for node in list(self.document.findall(verdict)):
            start = f'<div class="claim"><p><strong>{node["name"]}</strong>'
            outputs = [
                raw.deepcopy()
                for raw in self.env.get_doctree(node["chapter"]).findall(nodes.raw)
                if raw.astext().startswith(start) and ">evidence<" not in raw.astext()
            ]
            node.replace_self(outputs)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_node(verdict)
    app.add_directive("claims", Claims)
    app.add_post_transform(ShowVerdicts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
