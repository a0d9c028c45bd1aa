"""Live figures: drag, choose and watch, with the mathematics computed in the page.

The same object is a widget where a kernel runs (JupyterLab, through anywidget) and plain HTML everywhere
else: in the built book, opened from a file, offline, and in Colab. Each figure is one JavaScript module that
imports nothing; the files beside this one are its parts.
"""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path
from typing import Any

import anywidget
import traitlets

__all__ = ["FIGURES", "LiveFigure", "source"]

FIGURES = {
    "flat_and_sharp": ("kit", "flat_and_sharp"),
    "landscape": ("kit", "two_basins", "landscape"),
    "ball": ("kit", "two_basins", "ball"),
    "amplification": ("kit", "amplification"),
    "linf": ("kit", "linf"),
}
"""The figures, and the files of which each module is made."""

_FOLDER = Path(__file__).parent

# The page's own model of the widget protocol: a state, and nobody else who listens.
_PAGE = """
<div id="{id}">{picture}</div>
<script type="module">
const url = URL.createObjectURL(new Blob([{source}], {{ type: "text/javascript" }}));
const {{ default: figure }} = await import(url);
URL.revokeObjectURL(url);
let state = {state};
const model = {{ get: () => state, set: (_, value) => (state = value), save_changes() {{}}, on() {{}} }};
figure.render({{ model, el: document.getElementById("{id}") }});
</script>
"""


def source(name: str) -> str:
    """The JavaScript module of a figure, whole: it imports nothing.

    Parameters
    ----------
    name : str
        A key of :data:`FIGURES`.

    Returns
    -------
    str
        The module. Its default export has ``render({model, el})``; its named exports are the figure's
        mathematics and ``figure``, which draws a state as SVG.

    Raises
    ------
    ValueError
        If there is no such figure.

    Examples
    --------
    >>> from samkit import live
    >>> "import " in live.source("linf")
    False
    """
    if name not in FIGURES:
        raise ValueError(f"name must be one of {', '.join(map(repr, FIGURES))}; got {name!r}")
    parts = [
        f"const STYLE = {json.dumps(_read('style.css'))};",
        *(_read(f"{part}.js") for part in FIGURES[name]),
    ]
    return "\n".join(parts)


def _read(file: str) -> str:
    return (_FOLDER / file).read_text(encoding="utf-8")


class LiveFigure(anywidget.AnyWidget):
    """A figure that answers: at most three controls, and handles to drag.

    The keyboard reaches everything, and a static picture stands where no script runs.

    Parameters
    ----------
    name : str
        A key of :data:`FIGURES`.
    **state
        Where it starts, in place of the figure's own defaults, such as ``rho=0.5``.

    Attributes
    ----------
    state : dict
        What the reader has set. With a kernel it follows the figure, and setting it moves the figure.

    Raises
    ------
    ValueError
        If there is no such figure, or it has no such control.

    Examples
    --------
    >>> from samkit.live import LiveFigure
    >>> LiveFigure("amplification", ratio=0.9).state
    {'ratio': 0.9, 'major': 3, 's': 1.5}
    """

    state = traitlets.Dict().tag(sync=True)

    def __init__(self, name: str, **state: Any):
        self._esm = source(name)
        defaults = json.loads(_read("states.json"))[name]
        unknown = state.keys() - defaults.keys()
        if unknown:
            raise ValueError(
                f"{name!r} has no {', '.join(sorted(map(repr, unknown)))}; it has {', '.join(defaults)}"
            )
        self._picture = f"<style>{_read('style.css')}</style>{_read(f'{name}.html')}"
        super().__init__(state=defaults | state)

    def _repr_html_(self) -> str:
        # In a script "</" may not occur, and JSON can say it otherwise.
        def literal(value: Any) -> str:
            return json.dumps(value).replace("</", "<\\/")

        return _PAGE.format(
            id=f"samkit-live-{uuid.uuid4().hex[:12]}",
            picture=self._picture,
            source=literal(self._esm),
            state=literal(self.state),
        )

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        html = {"text/html": self._repr_html_(), "text/plain": repr(self)}
        if (
            "google.colab" in sys.modules
        ):  # there a widget needs a manager from the network, and HTML does not
            return html, {}
        data, metadata = super()._repr_mimebundle_(**kwargs)
        return data | html, metadata
