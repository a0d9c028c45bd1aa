"""The figures of the book: one style, and verbs that take results.

Each method has one colour and one line style through the whole book, so a reader who has learnt them once
can read every figure. The colours are those of Okabe and Ito, which people with the common kinds of colour
blindness can tell apart; the line style says the same again. The background is opaque, so that a figure
looks the same on a light and on a dark page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

__all__ = ["COLORS", "LINES", "accuracy_against_rho", "curves", "dots", "style", "use_style"]

COLORS = {
    "SGD": "#000000",
    "GD": "#000000",
    "SAM": "#0072B2",
    "l2-SAM": "#0072B2",
    "l_inf-SAM": "#E69F00",
    "m-SAM": "#009E73",
    "multi-step SAM": "#56B4E9",
    "ASAM": "#009E73",
    "Lookbehind-SAM": "#CC79A7",
    "XSAM": "#D55E00",
    "exact worst case": "#CC79A7",
}
"""One colour for each method."""

LINES = {
    "SGD": "--",
    "GD": "--",
    "SAM": "-",
    "l2-SAM": "-",
    "l_inf-SAM": "-.",
    "m-SAM": (0, (5, 1, 1, 1, 1, 1)),
    "multi-step SAM": (0, (3, 1)),
    "ASAM": (0, (6, 2)),
    "Lookbehind-SAM": ":",
    "XSAM": (0, (8, 1, 2, 1)),
    "exact worst case": (0, (1, 1)),
}
"""One line style for each method."""

_OTHERS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_OTHER_LINES = ("-", "--", "-.", ":", (0, (8, 1, 2, 1)), (0, (3, 1)), (0, (1, 1)))


def use_style() -> None:
    """Set matplotlib's defaults to the book's style, for this session."""
    mpl.rcParams.update(
        {
            "figure.figsize": (6.4, 3.8),
            "figure.dpi": 110,
            "savefig.dpi": 150,
            "figure.facecolor": "white",
            "axes.facecolor": "white",
            "savefig.facecolor": "white",
            "savefig.transparent": False,
            "figure.constrained_layout.use": True,
            "font.size": 11,
            "axes.titlesize": 11,
            "axes.labelsize": 11,
            "legend.fontsize": 10,
            "legend.frameon": False,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#dddddd",
            "grid.linewidth": 0.6,
            "axes.axisbelow": True,
            "lines.linewidth": 1.8,
            "axes.prop_cycle": mpl.cycler(color=_OTHERS),
            "image.cmap": "viridis",
        }
    )


def style(method: str, index: int = 0) -> dict:
    """Colour and line style of a method, as keyword arguments for matplotlib.

    Parameters
    ----------
    method : str
        A key of :data:`COLORS`; a longer label such as ``"SAM, rho = 0.1"`` counts as the method before the
        comma.
    index : int
        Position in the figure, which picks a style for anything that is not a method.

    Returns
    -------
    dict
        ``color`` and ``linestyle``.

    Examples
    --------
    >>> from samkit import plot
    >>> plot.style("SAM") == plot.style("SAM, rho = 0.1")
    True
    """
    method = method.split(",")[0]
    return {
        "color": COLORS.get(method, _OTHERS[index % len(_OTHERS)]),
        "linestyle": LINES.get(method, _OTHER_LINES[index % len(_OTHER_LINES)]),
    }


def curves(
    x: Sequence[float],
    groups: Mapping[str, np.ndarray],
    *,
    xlabel: str,
    ylabel: str,
    level: float = 0.95,
    logx: bool = False,
    logy: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """One curve for each group: the mean over seeds with a band around it.

    Parameters
    ----------
    x : sequence of float
        Shared horizontal positions ``(k,)``.
    groups : mapping of str to array
        Label to values, ``(seeds, k)`` or, for a single curve, ``(k,)``.
    xlabel, ylabel : str
        Axis labels, with symbol and unit.
    level : float
        Coverage of the t-interval of the mean that the band shows.
    logx, logy : bool
        Logarithmic axes.
    ax : matplotlib.axes.Axes or None
        Where to draw; ``None`` makes a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes.
    """
    ax = _axes(ax, xlabel, ylabel, logx, logy)
    for index, (label, values) in enumerate(groups.items()):
        values = np.atleast_2d(np.asarray(values, dtype=float))
        look = style(label, index)
        ax.plot(x, values.mean(axis=0), label=label, **look)
        if len(values) > 1:
            half = _half_width(values, level)
            ax.fill_between(
                x,
                values.mean(axis=0) - half,
                values.mean(axis=0) + half,
                color=look["color"],
                alpha=0.18,
                lw=0,
            )
    if len(groups) > 1:
        ax.legend()
    return ax


def accuracy_against_rho(
    rhos: Sequence[float],
    groups: Mapping[str, np.ndarray],
    *,
    reference: Mapping[str, Sequence[float]] | None = None,
    ylabel: str = "test accuracy (%)",
    ax: Axes | None = None,
) -> Axes:
    """Accuracy of each method against its radius, all on one axis, with what needs no radius as horizontal
    lines.

    Parameters
    ----------
    rhos : sequence of float
        The radii ``(k,)``.
    groups : mapping of str to array
        Method to accuracies ``(seeds, k)``.
    reference : mapping of str to sequence of float
        Method to accuracies ``(seeds,)``, drawn as its mean.
    ylabel : str
        Label of the vertical axis.
    ax : matplotlib.axes.Axes or None
        Where to draw; ``None`` makes a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes.
    """
    ax = curves(rhos, groups, xlabel="radius ρ", ylabel=ylabel, logx=True, ax=ax)
    for index, (label, values) in enumerate((reference or {}).items(), start=len(groups)):
        values = np.asarray(values, dtype=float)
        look = style(label, index)
        ax.axhline(values.mean(), label=label, **look)
        if values.size > 1:
            half = float(_half_width(values[:, None], 0.95)[0])
            ax.axhspan(values.mean() - half, values.mean() + half, color=look["color"], alpha=0.1, lw=0)
    ax.legend()
    return ax


def dots(
    groups: Mapping[str, Sequence[float]],
    *,
    xlabel: str,
    reference: float | None = None,
    level: float = 0.95,
    ax: Axes | None = None,
) -> Axes:
    """One row of dots for each group, a dot for each seed, with the mean and its interval.

    Parameters
    ----------
    groups : mapping of str to sequence of float
        Label to one value for each seed.
    xlabel : str
        Axis label, with symbol and unit.
    reference : float or None
        Position of a vertical line, such as 0 for differences.
    level : float
        Coverage of the t-interval of the mean.
    ax : matplotlib.axes.Axes or None
        Where to draw; ``None`` makes a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes.
    """
    if ax is None:
        _, ax = plt.subplots(figsize=(6.4, 1.0 + 0.55 * len(groups)))
    ax.set_xlabel(xlabel)
    for row, (label, values) in enumerate(groups.items()):
        values = np.asarray(values, dtype=float)
        color = style(label, row)["color"]
        spread = np.linspace(-0.12, 0.12, len(values)) if len(values) > 1 else [0.0]
        ax.plot(
            values, row + np.asarray(spread), "o", color=color, alpha=0.45, markersize=4, linestyle="none"
        )
        half = float(_half_width(values[:, None], level)[0]) if len(values) > 1 else 0.0
        ax.errorbar(values.mean(), row, xerr=half, fmt="D", color=color, capsize=4, markersize=6)
    if reference is not None:
        ax.axvline(reference, color="#555555", linewidth=1)
    ax.set_yticks(range(len(groups)), list(groups))
    ax.set_ylim(len(groups) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    return ax


def _axes(ax: Axes | None, xlabel: str, ylabel: str, logx: bool, logy: bool) -> Axes:
    if ax is None:
        _, ax = plt.subplots()
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    if logx:
        ax.set_xscale("log")
    if logy:
        ax.set_yscale("log")
    return ax


def _half_width(values: np.ndarray, level: float) -> np.ndarray:
    from scipy import stats

    n = len(values)
    return stats.t.ppf((1 + level) / 2, n - 1) * values.std(axis=0, ddof=1) / np.sqrt(n)
