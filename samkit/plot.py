"""The figures of the book: one style, and verbs that take results.

Each method has one colour and one line style through the whole book, so a reader who has learnt them once
can read every figure. The colours are those of Okabe and Ito, which people with the common kinds of colour
blindness can tell apart; the line style says the same again. The background is opaque, so that a figure
looks the same on a light and on a dark page.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator
from scipy import ndimage, stats
from torch import Tensor

from samkit.claims import Estimate
from samkit.diagonal import PhaseDiagram
from samkit.landscapes import Line, Plane
from samkit.sharpness import SpectralDensity

__all__ = [
    "COLORS",
    "FEATURES",
    "LINES",
    "accuracy_against_rho",
    "against_theory",
    "balls",
    "circle",
    "cloud",
    "composition",
    "curves",
    "dots",
    "ends",
    "layer_plane",
    "leaders",
    "mark",
    "means",
    "nearest_solutions",
    "panels",
    "plane",
    "ranked",
    "reference",
    "scan",
    "shares",
    "slices",
    "spectra",
    "style",
    "trails",
    "travelling_bump",
    "use_style",
    "winning_features",
    "worst_case_maps",
]

COLORS = {
    "SGD": "#000000",
    "GD": "#000000",
    "SAM": "#0072B2",
    "linf-SAM": "#E69F00",
    "m-SAM": "#882255",
    "multi-step SAM": "#56B4E9",
    "averaged SAM": "#117733",
    "ASAM": "#009E73",
    "Lookbehind-SAM": "#CC79A7",
    "XSAM": "#D55E00",
    "exact worst case": "#777777",
    "small batch": "#332288",
    "large batch": "#999933",
    "poisoned start": "#AA4499",
}
"""One colour for each method, and for the three solutions that chapter 1 compares; gradient descent is SGD on
the full batch and shares its colour."""

LINES = {
    "SGD": "--",
    "GD": "--",
    "SAM": "-",
    "linf-SAM": "-.",
    "m-SAM": (0, (5, 1, 1, 1, 1, 1)),
    "multi-step SAM": (0, (3, 1)),
    "averaged SAM": (0, (3, 1, 1, 1)),
    "ASAM": (0, (8, 3)),
    "Lookbehind-SAM": ":",
    "XSAM": (0, (8, 1, 2, 1)),
    "exact worst case": (0, (1, 3)),
    "small batch": "-",
    "large batch": "--",
    "poisoned start": "-.",
}
"""One line style for each method."""

FEATURES = ("#FFD24D", "#F28E3C", "#D1495B", "#8E4A9E", "#2D3E8C")
"""One colour for each feature of a diagonal network, from the minor one, light, to the fifth, dark."""

# For what is no method: layers, seeds, radii.
_OTHERS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_VARIANT_LINES = ("-", (0, (4, 1, 1, 1)), (0, (2, 1)), (0, (1, 1)))
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
            "legend.frameon": True,
            "legend.framealpha": 0.85,
            "legend.facecolor": "white",
            "legend.edgecolor": "none",
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


def style(method: str, index: int = 0, variant: int = 0) -> dict:
    """Colour and line style of a method, as keyword arguments for matplotlib.

    Parameters
    ----------
    method : str
        A key of :data:`COLORS`; a longer label such as ``"SAM, rho = 0.1"`` counts as the method before the
        comma.
    index : int
        Position in the figure, which picks a style for anything that is not a method.
    variant : int
        Counts the labels of one method in a figure: 0 is the method itself, the next ones are paler and have
        line styles of their own.

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
    color = mpl.colors.to_rgb(COLORS.get(method, _OTHERS[index % len(_OTHERS)]))
    line = LINES.get(method, _OTHER_LINES[index % len(_OTHER_LINES)])
    if variant:
        paler = 1 - 0.75**variant
        color = tuple(channel + paler * (1 - channel) for channel in color)
        line = _VARIANT_LINES[variant % len(_VARIANT_LINES)]
    return {"color": mpl.colors.to_hex(color).upper(), "linestyle": line}


def _styles(labels: Iterable[str]) -> list[dict]:
    """One style for each label of a figure, so that no two look alike."""
    seen: Counter[str] = Counter()
    styles = []
    for index, label in enumerate(labels):
        method = label.split(",")[0]
        styles.append(style(label, index, seen[method] if method in COLORS else 0))
        seen[method] += 1
    return styles


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
    ax = _axes(ax, xlabel, ylabel, logx=logx, logy=logy)
    if not logx and np.equal(np.mod(x, 1), 0).all():
        ax.xaxis.set_major_locator(mpl.ticker.MaxNLocator(integer=True))  # ranks and epochs have no halves
    for (label, values), look in zip(groups.items(), _styles(groups), strict=True):
        values = np.atleast_2d(np.asarray(values, dtype=float))
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
    _legend(ax, groups)
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
    _plain_ticks(ax)
    flat = reference or {}
    looks = _styles([*groups, *flat])[len(groups) :]
    for (label, values), look in zip(flat.items(), looks, strict=True):
        values = np.asarray(values, dtype=float)
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
        values, color = np.asarray(values, dtype=float), style(label, row)["color"]
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


def nearest_solutions(paths: Mapping[str, np.ndarray], mu: Sequence[float], z: float) -> Axes:
    """Paths in the plane of two coefficients, across the lines on which the loss is constant.

    On one of these lines the points nearest to the origin are marked, in the l_2 and in the l_1 norm, with
    the quarter of the circle and the side of the diamond that touch the line there.

    Parameters
    ----------
    paths : mapping of str to array
        Label to coefficients ``(steps, 2)``; a dot marks the start.
    mu : sequence of float
        The example ``(2,)``, with 0 < mu_1 < mu_2.
    z : float
        The prediction on the marked line, > 0.

    Returns
    -------
    matplotlib.axes.Axes
        The axes.
    """
    mu = np.asarray(mu, dtype=float)
    _, ax = plt.subplots(figsize=(5.6, 4.6))
    size = 1.6 * z / mu[1]
    x = np.array([0, 2 * size])
    for level in z * np.array([0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]):
        chosen = level == z
        ax.plot(
            x, (level - mu[0] * x) / mu[1], color="#333333" if chosen else "#bbbbbb", lw=1.6 if chosen else 1
        )
    near_l2, near_l1 = z * mu / (mu @ mu), np.array([0, z / mu[1]])
    turn = np.linspace(0, np.pi / 2, 100)
    ax.plot(
        *np.linalg.norm(near_l2) * np.stack([np.cos(turn), np.sin(turn)]), color="#777777", ls=":", lw=1.5
    )
    ax.plot([0, near_l1[1]], [near_l1[1], 0], color="#777777", ls=(0, (4, 2)), lw=1.5)
    for (label, path), look in zip(paths.items(), _styles(paths), strict=True):
        path = np.asarray(path, dtype=float)
        ax.plot(*path.T, label=label, **look)
        ax.plot(*path[0], "o", color=look["color"], markersize=5)
    halo = [patheffects.withStroke(linewidth=3, foreground="white")]
    for text, point, offset in (("nearest in ℓ₂", near_l2, (24, 12)), ("nearest in ℓ₁", near_l1, (50, 64))):
        ax.plot(*point, "*", color="black", markersize=11, markeredgecolor="white", zorder=4, clip_on=False)
        ax.annotate(
            text,
            point,
            offset,
            textcoords="offset points",
            path_effects=halo,
            arrowprops={"arrowstyle": "-", "color": "#777777", "lw": 0.8},
        )
    ax.annotate(
        "equal loss", (0.75 * size, (z - mu[0] * 0.75 * size) / mu[1]), (4, 4), textcoords="offset points"
    )
    ax.set(xlabel="coefficient β₁ (minor)", ylabel="coefficient β₂ (major)", aspect="equal")
    ax.set(xlim=(0, size), ylim=(0, size))
    ax.grid(visible=False)
    ax.legend(loc="upper right")
    return ax


def panels(*titles: str, rows: int = 1) -> np.ndarray:
    """Empty axes side by side, to be filled by the verbs that take ``ax``.

    Parameters
    ----------
    *titles : str
        The title of each panel, from left to right.
    rows : int
        The number of rows, which divides that of the panels.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes
        The panels.
    """
    _, axes = plt.subplots(rows, len(titles) // rows, figsize=(8.0, 3.4 * rows), squeeze=False)
    for ax, title in zip(axes.flat, titles, strict=True):
        ax.set_title(title)
    return axes.ravel()


def means(
    points: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    xlabel: str,
    ylabel: str,
    level: float = 0.95,
    logx: bool = False,
    logy: bool = False,
    legend: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Two quantities against each other: a named mark at each group's means, with intervals both ways.

    Parameters
    ----------
    points : mapping of str to tuple of sequences of float
        Label to the values of both quantities, one for each seed. Labels that agree before the comma share a
        colour and a mark.
    xlabel, ylabel : str
        Axis labels, with symbol and unit.
    level : float
        Coverage of the t-intervals of the means.
    logx, logy : bool
        Logarithmic axes.
    legend : bool
        Whether the labels stand in a legend beside the axes, each with a mark of its own; otherwise they are
        written at the marks.
    ax : matplotlib.axes.Axes or None
        Where to draw; ``None`` makes a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes.
    """
    ax = _axes(ax, xlabel, ylabel, logx=logx, logy=logy)
    kinds = list(dict.fromkeys(label.split(",")[0] for label in points))
    for row, (label, values) in enumerate(points.items()):
        kind = kinds.index(label.split(",")[0])
        x, y = np.asarray(values, dtype=float)
        xerr, yerr = _half_width(np.stack([x, y], axis=1), level)
        look = {"color": style(label, kind)["color"], "fmt": "osD^vPX*<>"[row if legend else kind % 5]}
        ax.errorbar(x.mean(), y.mean(), xerr=xerr, yerr=yerr, capsize=2, label=label, **look)
        if not legend:
            ax.annotate(label, (x.mean(), y.mean()), (4, 11), textcoords="offset points", fontsize=9)
    if legend:
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    if logx:
        _plain_ticks(ax)
    ax.margins(x=0.1 if legend else 0.25, y=0.15)
    return ax


def slices(
    lines: Mapping[str, Line],
    *,
    xlabel: str = "distance along the direction",
    ylabel: str = "training loss",
    logy: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """The loss along lines through the weights, one curve for each.

    Parameters
    ----------
    lines : mapping of str to samkit.landscapes.Line
        Label to slice.
    xlabel, ylabel : str
        Axis labels, with symbol and unit.
    logy : bool
        Logarithmic vertical axis.
    ax : matplotlib.axes.Axes or None
        Where to draw; ``None`` makes a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes.
    """
    ax = _axes(ax, xlabel, ylabel, logy=logy)
    for (label, line), look in zip(lines.items(), _styles(lines), strict=True):
        ax.plot(line.t, line.loss, label=label, **look)
    _legend(ax, lines)
    return ax


def plane(
    surface: Plane,
    *,
    trajectories: Mapping[str, np.ndarray] | None = None,
    points: Mapping[str, Sequence[float]] | None = None,
    xlabel: str,
    ylabel: str,
    label: str = "loss",
    levels: int | Sequence[float] = 20,
    ax: Axes | None = None,
) -> Axes:
    """Contours of the loss on a plane, with paths across it and marked points.

    Parameters
    ----------
    surface : samkit.landscapes.Plane
        The loss on a grid.
    trajectories : mapping of str to array
        Method to its path ``(steps, 2)``, in the plane's coordinates; a dot marks the start, a square
        the end.
    points : mapping of str to sequence of float
        Label to a point ``(x, y)``, marked and named.
    xlabel, ylabel : str
        Axis labels, with symbol and unit.
    label : str
        Label of the colour bar.
    levels : int or sequence of float
        Number of contours, or their heights.
    ax : matplotlib.axes.Axes or None
        Where to draw; ``None`` makes a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes.
    """
    ax = _axes(ax, xlabel, ylabel)
    filled = ax.contourf(surface.x, surface.y, surface.loss, levels=levels, cmap="Greys", alpha=0.65)
    ax.contour(surface.x, surface.y, surface.loss, levels=filled.levels, colors="#666666", linewidths=0.5)
    ax.figure.colorbar(filled, ax=ax, label=label)
    ax.grid(visible=False)
    halo = [patheffects.withStroke(linewidth=3, foreground="white")]
    paths = trajectories or {}
    for (name, path), look in zip(paths.items(), _styles(paths), strict=True):
        path = np.asarray(path, dtype=float)
        ax.plot(path[:, 0], path[:, 1], label=name, path_effects=halo, **look)
        ax.plot(*path[0], "o", color=look["color"], markersize=5)
        ax.plot(*path[-1], "s", color=look["color"], markersize=6, markeredgecolor="white")
    for name, (x, y) in (points or {}).items():
        ax.plot(x, y, "*", color="black", markersize=11, markeredgecolor="white")
        ax.annotate(name, (x, y), xytext=(6, 6), textcoords="offset points", path_effects=halo)
    if trajectories:
        ax.legend()
    return ax


def circle(ax: Axes, center: Sequence[float], radius: float, text: str) -> Axes:
    """Add a labelled circle to a plane, such as SAM's ball.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
        Where to draw.
    center : sequence of float
        Its centre ``(x, y)``.
    radius : float
        Its radius, in the units of both axes, which are given equal scales.
    text : str
        What it means, written above it.

    Returns
    -------
    matplotlib.axes.Axes
        The axes.
    """
    ax.add_patch(plt.Circle(center, radius, fill=False, edgecolor="#333333", linestyle=(0, (4, 2))))
    above = (center[0], center[1] + radius)
    halo = [patheffects.withStroke(linewidth=3, foreground="white")]
    ax.annotate(text, above, (0, 5), textcoords="offset points", ha="center", path_effects=halo)
    ax.set_aspect("equal")
    return ax


def spectra(densities: Mapping[str, SpectralDensity], *, floor: float = 1e-6, ax: Axes | None = None) -> Axes:
    """Spectral densities of Hessians on one logarithmic axis, with bands of one standard error.

    Parameters
    ----------
    densities : mapping of str to samkit.sharpness.SpectralDensity
        Label to density.
    floor : float
        Densities below this share of the highest one are cut off.
    ax : matplotlib.axes.Axes or None
        Where to draw; ``None`` makes a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes.
    """
    ax = _axes(ax, "eigenvalue λ of the Hessian", "density", logy=True)
    bottom = floor * max(density.value.max() for density in densities.values())
    for (label, density), look in zip(densities.items(), _styles(densities), strict=True):
        ax.plot(density.grid, np.maximum(density.value, bottom), label=label, **look)
        low, high = density.value - density.error, density.value + density.error
        ax.fill_between(
            density.grid,
            np.maximum(low, bottom),
            np.maximum(high, bottom),
            color=look["color"],
            alpha=0.18,
            lw=0,
        )
    ax.set_ylim(bottom=bottom)
    _legend(ax, densities)
    return ax


def reference(ax: Axes, value: float, text: str, *, axis: str = "y", side: str = "right") -> Axes:
    """Add a labelled reference line, such as 2/η.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
        Where to draw.
    value : float
        Where the line crosses the axis.
    text : str
        What it means, written beside it.
    axis : str
        ``"y"`` for a horizontal line, ``"x"`` for a vertical one.
    side : str
        The end of a horizontal line at which the text stands, ``"left"`` or ``"right"``.

    Returns
    -------
    matplotlib.axes.Axes
        The axes.

    Raises
    ------
    ValueError
        If ``axis`` is neither.
    """
    if axis == "y":
        ax.axhline(value, color="#555555", linewidth=1, linestyle=(0, (4, 2)))
        ax.annotate(
            text,
            (0 if side == "left" else 1, value),
            xycoords=("axes fraction", "data"),
            xytext=(4 if side == "left" else -4, 3),
            textcoords="offset points",
            ha=side,
            color="#333333",
            fontsize=10,
        )
    elif axis == "x":
        ax.axvline(value, color="#555555", linewidth=1, linestyle=(0, (4, 2)))
        ax.annotate(
            text,
            (value, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -4),
            textcoords="offset points",
            va="top",
            color="#333333",
            fontsize=10,
        )
    else:
        raise ValueError(f"axis must be 'x' or 'y', got {axis!r}")
    return ax


def mark(ax: Axes, points: Mapping[str, Sequence[float]], *, names: bool = True) -> Axes:
    """Mark points on axes that are drawn already, each with a symbol of its own.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
        Where to draw.
    points : mapping of str to sequence of float
        Label to a point ``(x, y)``. The order chooses the symbols.
    names : bool
        Whether the labels go into a legend of the points.

    Returns
    -------
    matplotlib.axes.Axes
        The axes.
    """
    for symbol, (label, (x, y)) in zip(itertools.cycle("osD*^v"), points.items(), strict=False):
        size = 11 if symbol == "*" else 7
        ax.plot(
            x,
            y,
            symbol,
            color="black",
            markersize=size,
            markeredgecolor="white",
            zorder=4,
            label=label if names else f"_{label}",
        )
    if names:
        ax.legend()
    return ax


def against_theory(
    predicted: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    measured: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    xlabel: str,
    ylabel: str,
    logy: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Predictions as lines and measurements as dots, in one colour for each label.

    Parameters
    ----------
    predicted : mapping of str to tuple of sequences of float
        Label to ``(x, y)`` of its line.
    measured : mapping of str to tuple of sequences of float
        The same labels, or some of them, to ``(x, y)`` of the dots; of many dots, about 15 evenly spaced ones
        are drawn.
    xlabel, ylabel : str
        Axis labels, with symbol and unit.
    logy : bool
        Logarithmic vertical axis.
    ax : matplotlib.axes.Axes or None
        Where to draw; ``None`` makes a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes.
    """
    ax = _axes(ax, xlabel, ylabel, logy=logy)
    for (label, line), look in zip(predicted.items(), _styles(predicted), strict=True):
        ax.plot(*line, label=label, **look)
        if label in measured:
            x, y = (np.asarray(values)[:: max(1, len(values) // 15)] for values in measured[label])
            ax.plot(x, y, "o", color=look["color"], markersize=4.5, markeredgecolor="white", zorder=3)
    _legend(ax, predicted)
    return ax


def winning_features(
    x: np.ndarray, maps: Mapping[str, np.ndarray], dots: Mapping[str, np.ndarray], at: np.ndarray, rho: float
) -> np.ndarray:
    """Who wins, over the starts of two weights: areas as foretold, dots as found, a panel for each label.

    Parameters
    ----------
    x : numpy.ndarray
        Starts of either weight, ``(k,)``.
    maps : mapping of str to numpy.ndarray
        Label to the winner of each start, ``(k, k)``: 0 the minor feature, 1 the major one, -1 none. Rows
        belong to starts of the second weight. The first half of the labels makes the upper row of panels.
    dots : mapping of str to numpy.ndarray
        The same labels to the winners that were found, ``(n, n)``.
    at : numpy.ndarray
        Starts of either weight at the dots, ``(n,)``.
    rho : float
        The radius, drawn as a line for each weight in the lower row.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes
        The panels ``(2, len(maps) // 2)``.
    """
    names, colors = ("none", "minor", "major"), ("#555555", "#E69F00", "#0072B2")
    faint = mpl.colors.ListedColormap([mpl.colors.to_rgba(color, 0.35) for color in colors])
    columns = len(maps) // 2
    _, axes = plt.subplots(2, columns, figsize=(7.4, 5.6), sharex=True, sharey=True)
    first, second = np.meshgrid(at, at)
    for ax, (label, winner) in zip(axes.flat, maps.items(), strict=True):
        ax.pcolormesh(x, x, winner, cmap=faint, vmin=-1, vmax=1, rasterized=True)
        for value, (name, color) in enumerate(zip(names, colors, strict=True), start=-1):
            here = dots[label] == value
            marker = "x^o"[value + 1]
            ax.plot(first[here], second[here], marker, color=color, markersize=4.5, label=name)
        ax.set(title=label, aspect="equal")
        ax.grid(visible=False)
    for ax in axes[1]:
        ax.axhline(rho, color="#333333", linewidth=0.8, linestyle=":")
        ax.axvline(rho, color="#333333", linewidth=0.8, linestyle=":")
        ax.set_xlabel("α₁ (minor)")
    for ax in axes[:, 0]:
        ax.set_ylabel("α₂ (major)")
    axes[0, 0].figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, title="winner"
    )
    return axes


def layer_plane(
    x: np.ndarray, grows: np.ndarray, paths: Sequence[np.ndarray], rho: float, *, ax: Axes | None = None
) -> Axes:
    """Two weights of one coordinate, one in each layer: the starts that grow, and paths between them.

    Parameters
    ----------
    x : numpy.ndarray
        Values of either weight, ``(k,)``.
    grows : numpy.ndarray of bool
        Whether a start grows for ever, ``(k, k)``; rows belong to the second weight.
    paths : sequence of numpy.ndarray
        Paths ``(steps, 2)``; a dot marks the start.
    rho : float
        The radius, marked where both weights have it.
    ax : matplotlib.axes.Axes or None
        Where to draw; ``None`` makes a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes.
    """
    if ax is None:
        _, ax = plt.subplots(figsize=(5.2, 4.6))
    _axes(ax, "weight w¹ in the first layer", "weight w² in the second layer")
    ax.pcolormesh(x, x, grows, cmap=mpl.colors.ListedColormap(["#dddddd", "#fbe3bd"]), rasterized=True)
    look = style("linf-SAM")
    for path in paths:
        ax.plot(*path.T, color=look["color"], linewidth=1.5)
        ax.plot(*path[0], "o", color="black", markersize=4.5)
    ax.plot(rho, rho, "s", color="black", markersize=6)
    halo = [patheffects.withStroke(linewidth=3, foreground="white")]
    ax.annotate("(ρ, ρ)", (rho, rho), (7, 5), textcoords="offset points", path_effects=halo)
    ax.set(xlim=x[[0, -1]], ylim=x[[0, -1]], aspect="equal")
    ax.grid(visible=False)
    return ax


def balls(
    loss: Callable[[Tensor], Tensor],
    theta: Sequence[float],
    perturbations: Mapping[str, Sequence[float]],
    rho: float,
) -> Axes:
    """SAM's step up in two dimensions: the ball of each norm around the weights, and the point it picks.

    Parameters
    ----------
    loss : callable
        Maps points ``(..., 2)`` to losses ``(...)``.
    theta : sequence of float
        The weights ``(2,)``.
    perturbations : mapping of str to sequence of float
        Method, ``"SAM"`` or ``"linf-SAM"``, to its perturbation ``(2,)``.
    rho : float
        The radius of both balls.

    Returns
    -------
    matplotlib.axes.Axes
        The axes.
    """
    center = np.asarray(theta, dtype=float)
    _, ax = plt.subplots(figsize=(5.6, 4.4))
    x, y = (np.linspace(c - 1.6 * rho, c + 1.6 * rho, 121) for c in center)
    heights = loss(torch.from_numpy(np.stack(np.meshgrid(x, y), axis=-1))).numpy()
    filled = ax.contourf(x, y, heights, levels=14, cmap="Greys", alpha=0.55)
    ax.figure.colorbar(filled, ax=ax, label="loss L")
    outlines = {
        "SAM": plt.Circle(center, rho),
        "linf-SAM": plt.Rectangle(center - rho, 2 * rho, 2 * rho),
    }
    for method, epsilon in perturbations.items():
        look = style(method)
        outlines[method].set(fill=False, edgecolor=look["color"], linestyle=look["linestyle"], linewidth=1.8)
        ax.add_patch(outlines[method])
        end = center + np.asarray(epsilon, dtype=float)
        ax.annotate("", end, center, arrowprops={"arrowstyle": "-|>", "color": look["color"], "lw": 2})
        ax.plot(*end, "o", color=look["color"], markersize=8, label=method)
    ax.plot(*center, "ko", markersize=6)
    ax.annotate("θ", center, (-14, -4), textcoords="offset points", fontsize=13)
    ax.set(xlabel="first weight θ₁", ylabel="second weight θ₂", aspect="equal")
    ax.grid(visible=False)
    ax.legend(loc="lower right", frameon=True)
    return ax


def worst_case_maps(
    maps: Mapping[float, Plane],
    paths: Mapping[float, np.ndarray],
    points: Mapping[str, Sequence[float]],
) -> np.ndarray:
    """The worst loss in the ball around each point, a panel for each radius, with SAM's path on it.

    Parameters
    ----------
    maps : mapping of float to samkit.landscapes.Plane
        Radius to the worst loss on a grid.
    paths : mapping of float to array
        Radius to the points of a path, ``(steps, 2)``; a dot marks the start, a square the end.
    points : mapping of str to sequence of float
        Points to mark in every panel, by name.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes
        The panels.
    """
    _, panels = plt.subplots(1, len(maps), figsize=(7.6, 3.0), sharey=True)
    lowest = min(surface.loss.min() for surface in maps.values())
    levels = np.arange(np.floor(20 * lowest) / 20, 0.9, 0.05)
    halo = [patheffects.withStroke(linewidth=3, foreground="white")]
    for ax, (rho, surface) in zip(panels, maps.items(), strict=True):
        filled = ax.contourf(
            surface.x, surface.y, surface.loss, levels=levels, cmap="Greys", alpha=0.7, extend="max"
        )
        look = style("SAM" if rho else "SGD")
        ax.plot(*paths[rho].T, color=look["color"], linewidth=1.4, path_effects=halo)
        ax.plot(*paths[rho][0], "o", color=look["color"], markersize=5)
        ax.plot(*paths[rho][-1], "s", color=look["color"], markersize=8, markeredgecolor="white", zorder=4)
        for name, point in points.items():
            ax.plot(*point, "*", color="black", markersize=9, markeredgecolor="white", zorder=3)
            ax.annotate(name, point, (0, -17), textcoords="offset points", ha="center", path_effects=halo)
        limits = {"xlim": surface.x[[0, -1]], "ylim": surface.y[[0, -1]]}
        ax.set(title=f"ρ = {rho:g}", xlabel="m", **limits)
        ax.grid(visible=False)
    panels[0].set_ylabel("s")
    panels[0].figure.colorbar(filled, ax=panels, label="worst loss within ρ", format="%.1f")
    return panels


def convergence(errors: Mapping[str, Sequence[float]], rates: Mapping[str, float], *, ylabel: str) -> Axes:
    """Errors of an iteration on a logarithmic axis, each with the slope that theory predicts for it.

    Parameters
    ----------
    errors : mapping of str to sequence of float
        Label to the errors after 1, 2, ... iterations.
    rates : mapping of str to float
        Label to the factor by which theory says the error shrinks in each iteration. Only the slope of the
        dashed line is predicted; its height is that of the error after two thirds of the iterations.
    ylabel : str
        Axis label, with symbol and unit.

    Returns
    -------
    matplotlib.axes.Axes
        The axes.
    """
    ax = _axes(None, "iteration", ylabel, logy=True)
    for index, (label, values) in enumerate(errors.items()):
        iterations = np.arange(1, len(values) + 1)
        anchor = 2 * len(values) // 3
        color = style(label, index)["color"]
        ax.plot(iterations, values, color=color, label=label)
        predicted = values[anchor] * rates[label] ** (iterations - iterations[anchor])
        ax.plot(iterations, predicted, color=color, linestyle="--", linewidth=1)
    ax.set_ylim(bottom=min(min(values) for values in errors.values()) / 3)
    ax.legend()
    return ax


def edge_of_stability(paths: Mapping[str, Mapping[str, np.ndarray]]) -> np.ndarray:
    """Training loss and top eigenvalue over time, with the edge of stability 2/η of each learning rate.

    Parameters
    ----------
    paths : mapping of str to mapping
        Label, such as ``"GD, η = 0.1"``, to arrays ``time``, ``loss`` and ``top_eigenvalue`` (k,) and to
        ``edge``, the number 2/η.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes
        The panel of the loss above that of the eigenvalue.
    """
    _, (top, bottom) = plt.subplots(2, 1, figsize=(6.4, 5.6), sharex=True, height_ratios=(2, 3))
    _axes(top, "", "training loss")
    _axes(bottom, "time: η × steps", "top eigenvalue λ₁")
    for (label, path), look in zip(paths.items(), _styles(paths), strict=True):
        top.plot(path["time"], path["loss"], label=label, **look)
        bottom.plot(path["time"], path["top_eigenvalue"], **look)
    for edge in {float(path["edge"]) for path in paths.values()}:
        reference(bottom, edge, f"2/η = {edge:.3g}", side="left")
    bottom.set_ylim(bottom=0)
    top.legend(ncols=2)
    return np.array([top, bottom])


def cloud(values: np.ndarray, *, step: float, single: Sequence[float] | None = None, ylabel: str) -> Axes:
    """How often each position was found in each epoch, with the epoch's mean.

    Parameters
    ----------
    values : numpy.ndarray
        Positions on a grid that starts at 0, one row for each epoch, shape ``(epochs, n)``.
    step : float
        The distance of the grid's points.
    single : sequence of float or None
        One position for each epoch, drawn as circles, such as that of a run which looks once an epoch.
    ylabel : str
        Axis label, with symbol.

    Returns
    -------
    matplotlib.axes.Axes
        The axes.
    """
    values = np.asarray(values, dtype=float)
    bins = np.rint(values / step).astype(int)
    shares = np.stack([(bins == k).mean(axis=1) for k in range(bins.max() + 1)])
    _, ax = plt.subplots(figsize=(6.8, 3.6))
    epochs = np.arange(1, len(values) + 1)
    edges = (np.arange(len(epochs) + 1) + 0.5, step * (np.arange(len(shares) + 1) - 0.5))
    filled = ax.pcolormesh(*edges, 100 * shares, cmap="Greys")
    ax.figure.colorbar(filled, ax=ax, label="share of the epoch's searches (%)")
    ax.plot(epochs, values.mean(axis=1), label="mean of the epoch", color=COLORS["XSAM"], lw=2)
    if single is not None:
        look = {"markerfacecolor": "white", "markeredgecolor": COLORS["SAM"], "markersize": 5}
        ax.plot(epochs, single, "o", label="searched once an epoch", **look)
    ax.set(xlabel="epoch", ylabel=ylabel, ylim=(values.min() - 4 * step, values.max() + 0.5 * step))
    ax.grid(visible=False)
    ax.legend(loc="lower right", frameon=True)
    return ax


def ends(
    places: Mapping[str, np.ndarray],
    names: Sequence[str],
    x: Sequence[float],
    y: Sequence[float],
    *,
    points: Mapping[str, Sequence[float]],
    xlabel: str,
    ylabel: str,
) -> np.ndarray:
    """Where walks end, by where they start: a map for each method.

    Parameters
    ----------
    places : mapping of str to numpy.ndarray
        Method to the index of the place where each start ends, shape ``(len(y), len(x))``.
    names : sequence of str
        The places, at most four.
    x, y : sequence of float
        The starts.
    points : mapping of str to sequence of float
        Points to mark in every map, by name.
    xlabel, ylabel : str
        Axis labels, with symbol and unit.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes
        The maps.
    """
    colors = ("#332288", "#F0E0A0", "#D55E00", "#BBBBBB")[: len(names)]
    rows = -(-len(places) // 2)
    figure, axes = plt.subplots(
        rows, 2, figsize=(7.2, 0.4 + 2.3 * rows), sharex=True, sharey=True, squeeze=False
    )
    halo = [patheffects.withStroke(linewidth=2.5, foreground="white")]
    for ax, (method, where) in zip(axes.flat, places.items(), strict=False):
        ax.pcolormesh(
            x, y, where, cmap=mpl.colors.ListedColormap(colors), vmin=-0.5, vmax=len(colors) - 0.5, alpha=0.9
        )
        for name, point in points.items():
            ax.plot(*point, "*", color="black", markersize=9, markeredgecolor="white")
            ax.annotate(
                name, point, (0, 7), textcoords="offset points", ha="center", fontsize=9, path_effects=halo
            )
        ax.set_title(method)
        ax.grid(visible=False)
    for ax in axes[-1]:
        ax.set_xlabel(xlabel)
    for ax in axes[:, 0]:
        ax.set_ylabel(ylabel)
    keys = [mpl.patches.Patch(color=color, label=name) for color, name in zip(colors, names, strict=True)]
    figure.legend(handles=keys, loc="outside upper center", ncols=len(names))
    return axes


def scan(
    x: Sequence[float],
    rows: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]],
    *,
    xlabel: str,
) -> np.ndarray:
    """Curves of several methods in a table of panels: a row for each quantity, a column for each setting.

    Parameters
    ----------
    x : sequence of float
        Shared horizontal positions ``(k,)``.
    rows : mapping of str to mapping of str to mapping of str to array
        Quantity to setting to method to values, as :func:`~samkit.plot.curves` takes them.
    xlabel : str
        Axis label, with symbol and unit.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes
        The panels.
    """
    columns = max(len(settings) for settings in rows.values())
    figure, axes = plt.subplots(
        len(rows), columns, figsize=(8.0, 0.6 + 2.1 * len(rows)), sharex=True, sharey="row", squeeze=False
    )
    for line, (quantity, settings) in zip(axes, rows.items(), strict=True):
        for ax, (setting, groups) in zip(line, settings.items(), strict=True):
            curves(x, groups, xlabel="", ylabel="", ax=ax)
            handles, labels = ax.get_legend_handles_labels()
            if ax.get_legend() is not None:
                ax.get_legend().remove()
            if quantity == next(iter(rows)):
                ax.set_title(setting)
        line[0].set_ylabel(quantity)
    for ax in axes[-1]:
        ax.set_xlabel(xlabel)
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return axes


def trails(
    groups: Mapping[str, tuple[np.ndarray, np.ndarray]],
    names: Sequence[float],
    *,
    xlabel: str,
    ylabel: str,
    ax: Axes | None = None,
) -> Axes:
    """Two quantities against each other while a third one changes: a line through the means, named along it.

    Parameters
    ----------
    groups : mapping of str to tuple of arrays
        Label to the values of both quantities, ``(seeds, k)`` each.
    names : sequence of float
        The third quantity, such as the radius, ``(k,)``; written beside the points.
    xlabel, ylabel : str
        Axis labels, with symbol and unit; the horizontal axis is logarithmic.
    ax : matplotlib.axes.Axes or None
        Where to draw; ``None`` makes a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes.
    """
    ax = _axes(ax, xlabel, ylabel, logx=True)
    for row, ((label, (x, y)), look) in enumerate(zip(groups.items(), _styles(groups), strict=True)):
        x, y = np.exp(np.log(x).mean(axis=0)), np.asarray(y)
        ax.errorbar(x, y.mean(axis=0), yerr=_half_width(y, 0.95), marker="o", capsize=2, label=label, **look)
        offset = (3, -13 if row % 2 else 7)
        for place, name in zip(zip(x, y.mean(axis=0), strict=True), names, strict=True):
            ax.annotate(
                f"{name:g}", place, offset, textcoords="offset points", color=look["color"], fontsize=8
            )
    _plain_ticks(ax)
    ax.legend()
    return ax


def ranked(estimates: Sequence[Estimate], *, xlabel: str, ylabel: str, ax: Axes | None = None) -> Axes:
    """Many estimates of one difference, from the lowest to the highest, with their intervals and zero.

    Parameters
    ----------
    estimates : sequence of samkit.claims.Estimate
        The estimates; those whose interval lies below or above zero get a colour of their own.
    xlabel, ylabel : str
        What one estimate belongs to, and the difference, with its unit.
    ax : matplotlib.axes.Axes or None
        Where to draw; ``None`` makes a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes.
    """
    ax = _axes(ax, xlabel, ylabel)
    ordered = sorted(estimates, key=lambda e: e.value)
    sides = {
        "below zero": (COLORS["SAM"], "v", lambda e: e.high < 0),
        "zero inside": ("#777777", "o", lambda e: e.low <= 0 <= e.high),
        "above zero": (COLORS["XSAM"], "^", lambda e: e.low > 0),
    }
    for label, (color, mark, belongs) in sides.items():
        here = [(rank, e) for rank, e in enumerate(ordered, start=1) if belongs(e)]
        if here:
            ranks, own = zip(*here, strict=True)
            ends = [[e.value - e.low for e in own], [e.high - e.value for e in own]]
            ax.errorbar(
                ranks, [e.value for e in own], yerr=ends, fmt=mark, color=color, markersize=5, label=label
            )
    ax.axhline(0, color="#555555", linewidth=1)
    ax.legend()
    return ax


def travelling_bump(
    mu: Sequence[float], s: np.ndarray, Q: np.ndarray, times: Sequence[float], ax: Axes
) -> Axes:
    """The weights of l_2-SAM over the strength of their features, row by row in time: a bump that walks.

    Parameters
    ----------
    mu : sequence of float
        The features, at most five, drawn as dots on the bump; the leader is ringed.
    s, Q : numpy.ndarray
        Rescaled times and the integral of rho/n up to them, ``(T,)``.
    times : sequence of float
        The times to draw, from the bottom up.
    ax : matplotlib.axes.Axes
        Where to draw.

    Returns
    -------
    matplotlib.axes.Axes
        The axes.
    """
    mu = np.asarray(mu, dtype=float)
    grid = np.linspace(0, mu[-1] + 1, 400)
    for row, time in enumerate(times):
        q = np.interp(time, s, Q)
        center = time / (2 * q)

        def height(x: np.ndarray, q: float = q, center: float = center, row: int = row) -> np.ndarray:
            return row + 0.85 * np.exp(-q * (x - center) ** 2)

        ax.fill_between(grid, row, height(grid), color="#e3e3e3", lw=0, zorder=2 * len(times) - 2 * row)
        ax.plot(grid, height(grid), color="#555555", linewidth=1, zorder=2 * len(times) - 2 * row)
        leads = np.abs(mu - center).argmin()
        for j, x in enumerate(mu):
            edge = {"markeredgecolor": "black", "markersize": 10} if j == leads else {"markersize": 6}
            ax.plot(x, height(x), "o", color=FEATURES[j], zorder=2 * len(times) - 2 * row + 1, **edge)
        ax.plot(center, row - 0.07, "^", color="black", markersize=5, zorder=99, clip_on=False)
    ax.set(xlabel="strength μ of a feature", ylabel="time s", xlim=(grid[0], grid[-1]))
    ax.set_yticks(range(len(times)), [f"{time:g}" for time in times])
    ax.set_xticks(mu)
    ax.grid(axis="y", visible=False)
    return ax


def leaders(
    wide: PhaseDiagram, near: PhaseDiagram, c: float, marks: Mapping[str, float], slope: float
) -> np.ndarray:
    """Who leads under l_2-SAM, over initial scale and time: all scales, and close to the critical one.

    Parameters
    ----------
    wide : samkit.diagonal.PhaseDiagram
        Over all initial scales. What collapses later is drawn paler, what has collapsed is grey.
    near : samkit.diagonal.PhaseDiagram
        Over scales above ``c``, evenly spaced in the logarithm of their distance from it.
    c : float
        The critical scale, in units of rho.
    marks : mapping of str to float
        Labels and positions of vertical lines in the wide diagram.
    slope : float
        Predicted slope, against log(1/distance), of the border at which the minor feature hands over near the
        critical scale, drawn as a dashed line beside it.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes
        Both panels.
    """
    _, axes = plt.subplots(1, 2, figsize=(8.4, 4.4), width_ratios=(3, 2))
    white = np.ones(3)
    for ax, found, x in zip(axes, (wide, near), (wide.ratios, near.ratios - c), strict=True):
        dies = found.outcome == "collapses"
        gone = dies[:, None] & (found.s >= found.s_end[:, None])
        picture = np.array([mpl.colors.to_rgb(color) for color in FEATURES])[np.maximum(found.leader, 0)]
        picture[dies] = 0.4 * picture[dies] + 0.6 * white
        picture[gone] = 0.8 * white
        ax.pcolormesh(x, found.s, picture.swapaxes(0, 1), shading="nearest", rasterized=True)
        ax.contour(x, found.s, found.leader.T, np.arange(0.5, 5), colors="white", linewidths=0.8)
        for j in range(found.beta.shape[-1]):
            inside = (found.leader == j) & ~dies[:, None]
            deep = ndimage.distance_transform_edt(np.pad(inside, 1))[1:-1, 1:-1]
            at = np.unravel_index(deep.argmax(), deep.shape)
            _on_patch(ax, str(j + 1), (x[at[0]], found.s[at[1]]))
        if gone.any():
            deep = ndimage.distance_transform_edt(np.pad(gone, 1))[1:-1, 1:-1]
            at = np.unravel_index(deep.argmax(), deep.shape)
            _on_patch(ax, "collapsed", (x[at[0]], found.s[at[1]]))
        ax.grid(visible=False)
    axes[0].set(xlabel="initial scale α/ρ", ylabel="rescaled time s")
    for row, (text, value) in enumerate(marks.items()):
        axes[0].axvline(value, color="black", linewidth=1, linestyle=(0, (4, 2)))
        top, side = axes[0].get_xaxis_transform(), "left" if row else "right"
        axes[0].annotate(text, (value, 1), (0, 4), xycoords=top, textcoords="offset points", ha=side)
    axes[1].set(xscale="log", xlabel="distance α/ρ − c from the critical scale")
    minor = near.leader == 0
    ends = near.s[minor.shape[1] - 1 - minor[:, ::-1].argmax(axis=1)]  # when the minor feature hands over
    anchor = int(np.abs(np.where(minor.any(axis=1), ends, np.inf) - near.s[-1] / 2).argmin())
    x = near.ratios - c
    line = ends[anchor] - 0.04 * near.s[-1] - slope * np.log(x / x[anchor])
    inside = (line > 0.1 * near.s[-1]) & (line < 0.95 * near.s[-1])
    axes[1].plot(x[inside], line[inside], color="black", linestyle="--", linewidth=1.2)
    at = (x[anchor], line[anchor])
    axes[1].annotate("predicted slope", at, (-24, -34), textcoords="offset points", ha="center")
    return axes


def _on_patch(ax: Axes, text: str, at: tuple[float, float]) -> None:
    halo = [patheffects.withStroke(linewidth=3, foreground="white")]
    ax.annotate(text, at, ha="center", va="center", fontsize=12, path_effects=halo)


def shares(z: Sequence[float], groups: Mapping[str, np.ndarray]) -> np.ndarray:
    """What each feature contributes to the prediction while it grows, a panel for each method.

    Parameters
    ----------
    z : sequence of float
        Predictions, increasing, ``(k,)``; equal ones have equal z.
    groups : mapping of str to array
        Title of the panel to shares, ``(k, d)``, each row of which adds up to 1.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes
        The panels.
    """
    _, axes = plt.subplots(1, len(groups), figsize=(8.0, 3.4), sharey=True)
    halo = [patheffects.withStroke(linewidth=3, foreground="white")]
    for ax, (title, values) in zip(axes, groups.items(), strict=True):
        values = np.asarray(values, dtype=float)
        _axes(ax, "prediction z (loss log(1 + exp(−z)))", "", logx=True)
        ax.stackplot(z, values.T, colors=FEATURES[: values.shape[1]], lw=0)
        lower = np.cumsum(values, axis=1) - values
        for j in range(values.shape[1]):
            at = min(max(int(values[:, j].argmax()), len(values) // 5), len(values) - 1 - len(values) // 5)
            middle = (z[at], lower[at, j] + values[at, j] / 2)
            if values[at, j] > 0.08:
                ax.annotate(f"feature {j + 1}", middle, ha="center", va="center", path_effects=halo)
        ax.set(title=title, ylim=(0, 1), xlim=(z[0], z[-1]))
        ax.grid(visible=False)
    axes[0].set_ylabel("share of the prediction")
    return axes


def composition(groups: Mapping[str, Sequence[float]], names: Sequence[str], *, xlabel: str) -> Axes:
    """What each feature contributes at one moment, a bar for each method.

    Parameters
    ----------
    groups : mapping of str to sequence of float
        Label of the bar to shares, ``(d,)``, which add up to 1.
    names : sequence of str
        The features, from the minor one, at most five.
    xlabel : str
        Axis label: of what, and when.

    Returns
    -------
    matplotlib.axes.Axes
        The axes.
    """
    _, ax = plt.subplots(figsize=(7.0, 1.2 + 0.45 * len(groups)))
    values = np.array(list(groups.values()), dtype=float)
    starts = np.cumsum(values, axis=1) - values
    halo = [patheffects.withStroke(linewidth=3, foreground="white")]
    for j, name in enumerate(names):
        ax.barh(range(len(groups)), values[:, j], 0.7, starts[:, j], color=FEATURES[j], label=name)
        for row, value in enumerate(values[:, j]):
            if value > 0.05:
                at = (starts[row, j] + value / 2, row)
                ax.annotate(f"{value:.0%}", at, ha="center", va="center", path_effects=halo)
    ax.set(xlabel=xlabel, xlim=(0, 1), ylim=(len(groups) - 0.5, -0.5))
    ax.set_yticks(range(len(groups)), list(groups))
    ax.grid(visible=False)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(names))
    return ax


def _axes(ax: Axes | None, xlabel: str, ylabel: str, *, logx: bool = False, logy: bool = False) -> Axes:
    if ax is None:
        _, ax = plt.subplots()
    ax.set(xlabel=xlabel, ylabel=ylabel)
    if logx:
        ax.set_xscale("log")
    if logy:
        ax.set_yscale("log")
    return ax


def _plain_ticks(ax: Axes) -> None:
    """0.05, 0.1, 0.2 below a logarithmic axis that spans a decade or two."""
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter("")


def _legend(ax: Axes, groups: Mapping) -> None:
    if len(groups) > 1:
        ax.legend()


def _half_width(values: np.ndarray, level: float) -> np.ndarray:
    n = len(values)
    return stats.t.ppf((1 + level) / 2, n - 1) * values.std(axis=0, ddof=1) / np.sqrt(n)
