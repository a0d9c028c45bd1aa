"""The claims ledger: what the papers say, the rule that judges each claim, the verdict of a measurement."""

from __future__ import annotations

import functools
import html
import math
import numbers
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np
from scipy import stats

from samkit import _arguments

__all__ = ["STATUSES", "Claim", "ClaimError", "Estimate", "Part", "Verdict", "claim", "evidence", "ledger"]

STATUSES = ("reproduced", "reproduced in part", "not reproduced", "needs scale", "planned")
"""What the ledger may say about a claim. The first three are verdicts of a measurement."""


class ClaimError(Exception):
    """A measurement does not give the verdict that the ledger states, or does not fit the claim's rule."""


@dataclass(frozen=True)
class Estimate:
    """A measured value with an interval.

    Parameters
    ----------
    value : float
        The value.
    low, high : float
        Ends of the interval; equal to ``value`` for an exact result.
    n : int
        Number of independent samples (seeds) behind it; 1 for an exact or single result.

    Raises
    ------
    ValueError
        If the interval does not contain the value, or ``n`` is less than 1.
    TypeError
        If value, low or high is not a number.

    Examples
    --------
    >>> from samkit.claims import Estimate
    >>> print(Estimate(1.5, 1.0, 2.0, n=12))
    1.5 [1, 2], n = 12
    """

    value: float
    low: float
    high: float
    n: int = 1

    def __post_init__(self):
        for end in (self.value, self.low, self.high):
            if isinstance(end, bool) or not isinstance(end, numbers.Real):
                raise TypeError(f"an estimate is made of numbers, got {end!r}")
        _arguments.integer("n", self.n, 1)
        if not self.low <= self.value <= self.high:
            raise ValueError(
                "an estimate needs low <= value <= high, and no NaN; "
                f"got low={self.low}, value={self.value}, high={self.high}"
            )

    @classmethod
    def exact(cls, value: float) -> Estimate:
        """An estimate without uncertainty.

        Parameters
        ----------
        value : float
            The value.

        Returns
        -------
        Estimate
            With both ends equal to the value.
        """
        return cls(float(value), float(value), float(value))

    @classmethod
    def from_samples(
        cls, samples: Sequence[float], *, level: float = 0.95, method: str = "t", seed: int = 0
    ) -> Estimate:
        r"""The mean of independent samples with a confidence interval.

        ``method="t"``: :math:`\bar x \pm t_{n-1} s / \sqrt n`. ``method="bootstrap"``: percentiles of the
        means of 10,000 resamples; it assumes no bell shape but is too narrow below about 10 samples.

        Parameters
        ----------
        samples : sequence of float
            One number for each seed, shape ``(n,)``.
        level : float
            Coverage of the interval, between 0 and 1.
        method : str
            ``"t"`` or ``"bootstrap"``.
        seed : int
            Seed of the bootstrap.

        Returns
        -------
        Estimate
            Mean and interval.

        Raises
        ------
        ValueError
            If there are fewer than two samples, one is not finite, or the method is unknown.
        TypeError
            If the seed is not an integer.

        Examples
        --------
        >>> from samkit.claims import Estimate
        >>> print(Estimate.from_samples([1.0, 2.0, 3.0]))
        2 [-0.484, 4.48], n = 3
        """
        x = np.asarray(samples, dtype=np.float64)
        if x.ndim != 1 or len(x) < 2:
            raise ValueError(f"an interval needs at least two samples in one row, got shape {x.shape}")
        if not np.isfinite(x).all():
            raise ValueError(f"samples must be finite, got {x}")
        if not 0 < level < 1:
            raise ValueError(f"level must be between 0 and 1, got {level}")
        mean = float(x.mean())
        if method == "t":
            half = float(stats.t.ppf((1 + level) / 2, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x)))
            return cls(mean, mean - half, mean + half, len(x))
        if method == "bootstrap":
            draws = np.random.default_rng(_arguments.seed(seed)).integers(len(x), size=(10_000, len(x)))
            low, high = np.quantile(x[draws].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
            return cls(mean, min(float(low), mean), max(float(high), mean), len(x))
        raise ValueError(f"unknown method {method!r}; choose 't' or 'bootstrap'")

    @classmethod
    def paired_difference(cls, first: Sequence[float], second: Sequence[float], **options) -> Estimate:
        """The mean of ``first - second``, paired seed by seed.

        Pairing removes what the two methods share, such as a lucky start, and usually narrows the interval.

        Parameters
        ----------
        first, second : sequence of float
            One number for each seed, in the same order, shape ``(n,)`` both.
        **options
            Passed to :meth:`from_samples`.

        Returns
        -------
        Estimate
            Mean difference and interval.

        Raises
        ------
        ValueError
            If the shapes differ.

        Examples
        --------
        >>> from samkit.claims import Estimate
        >>> print(Estimate.paired_difference([2.0, 3.0, 4.0], [1.0, 2.0, 3.0]))
        1, n = 3
        """
        a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
        if a.shape != b.shape:
            raise ValueError(f"pairs need the same seeds on both sides, got shapes {a.shape} and {b.shape}")
        return cls.from_samples(a - b, **options)

    def __str__(self) -> str:
        text = f"{self.value:.3g}"
        if self.low != self.high:
            text += f" [{self.low:.3g}, {self.high:.3g}]"
        return text if self.n == 1 else f"{text}, n = {self.n}"


@dataclass(frozen=True)
class Part:
    """One measurable part of a claim's rule.

    Parameters
    ----------
    name : str
        The keyword by which :func:`claim` takes its measurement.
    says : str
        The quantity in words.
    comparison : str
        ``">"``, ``"<"``, or ``"within"``: where the whole interval must lie.
    threshold : float or tuple of float
        The bound, or for ``"within"`` both ends.
    unit : str
        Unit of the quantity, empty for a pure number.
    condition : bool
        Whether this is no part of the claim but a condition for judging it, such as enough training.
    """

    name: str
    says: str
    comparison: str
    threshold: float | tuple[float, float]
    unit: str = ""
    condition: bool = False

    def holds(self, estimate: Estimate) -> bool:
        """Whether the whole interval lies on the claimed side of the threshold.

        Parameters
        ----------
        estimate : Estimate
            The measurement.

        Returns
        -------
        bool
            ``True`` only if every value in the interval would do.

        Examples
        --------
        >>> from samkit.claims import Estimate, Part
        >>> Part("gain", "gain in accuracy", ">", 0.0).holds(Estimate(1.0, -0.2, 2.2))
        False
        """
        if self.comparison == ">":
            return estimate.low > self.threshold
        if self.comparison == "<":
            return estimate.high < self.threshold
        low, high = self.threshold
        return low <= estimate.low and estimate.high <= high

    @property
    def demand(self) -> str:
        """The comparison as text, such as ``"> 0.5"``."""
        if self.comparison == "within":
            low, high = self.threshold
            return f"within [{low:g}, {high:g}]"
        return f"{self.comparison} {self.threshold:g}"


@dataclass(frozen=True)
class Claim:
    """One row of the ledger.

    Parameters
    ----------
    id : str
        Such as ``"G1"``.
    statement : str
        The claim in our words.
    source : str
        Paper and place.
    chapter : int
        Number of the chapter that settles it.
    status : str
        One of :data:`STATUSES`.
    rule : str
        How a measurement is judged, in words.
    function : str
        Dotted name of the function that recomputes it; empty while the claim is planned.
    parts : tuple of Part
        The rule in a form that :func:`claim` applies.
    full_scale : str
        ``"needs scale"`` when the claim also has a part that is out of reach here.
    measured : str
        What was seen, in words, for the book's page.
    """

    id: str
    statement: str
    source: str
    chapter: int
    status: str
    rule: str = ""
    function: str = ""
    parts: tuple[Part, ...] = ()
    full_scale: str = ""
    measured: str = ""


@functools.cache
def ledger() -> dict[str, Claim]:
    """The ledger, read from ``samkit/claims.toml``.

    Returns
    -------
    dict of str to Claim
        Every claim by its id, in the ledger's order.

    Examples
    --------
    >>> from samkit import claims
    >>> claims.ledger()["G2"].chapter
    2
    """
    text = resources.files("samkit").joinpath("claims.toml").read_text(encoding="utf-8")
    return {name: _claim_from(name, dict(row)) for name, row in tomllib.loads(text).items()}


def _claim_from(name: str, row: dict) -> Claim:
    parts = tuple(
        Part(**part | {"threshold": tuple(part["threshold"])} if part["comparison"] == "within" else part)
        for part in row.pop("parts", [])
    )
    return Claim(id=name, parts=parts, **row)


@dataclass(frozen=True)
class Verdict:
    """What a measurement says about a claim; shows itself in a notebook.

    Parameters
    ----------
    claim : Claim
        The claim.
    measured : tuple of tuple
        ``(Part, Estimate, bool)`` for each measured part: the rule, the measurement, whether it holds.
    status : str
        The verdict, or ``"evidence"`` when the cell only adds to what another chapter settles.
    """

    claim: Claim
    measured: tuple[tuple[Part, Estimate, bool], ...]
    status: str

    def __str__(self) -> str:
        lines = [f"{self.claim.id}: {self.claim.statement}"]
        for part, estimate, holds in self.measured:
            mark = "yes" if holds else "no "
            lines.append(f"  [{mark}] {part.says}: {_with_unit(estimate, part)} ({_rule(part)})")
        lines.append(f"  {self.status}")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [
            [
                part.says,
                _with_unit(estimate, part),
                _rule(part).removeprefix("rule: "),
                "yes" if holds else "no",
            ]
            for part, estimate, holds in self.measured
        ]
        cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
        heads = "".join(f"<th>{head}</th>" for head in ("Quantity", "Measured", "Rule", "Holds"))
        badge = f'<span class="claim-badge {self.status.replace(" ", "-")}">{self.status}</span>'
        return (
            f'<div class="claim"><p><strong>{self.claim.id}</strong> {badge}</p>'
            f"<p>{html.escape(self.claim.statement)}</p>"
            f"<table><thead><tr>{heads}</tr></thead>"
            f"<tbody>{''.join(f'<tr>{row}</tr>' for row in cells)}</tbody></table></div>"
        )


def _with_unit(estimate: Estimate, part: Part) -> str:
    value, comma, n = str(estimate).partition(", n")
    return f"{value} {part.unit}".strip() + comma + n


def _rule(part: Part) -> str:
    return f"condition: {part.demand}" if part.condition else f"rule: {part.demand}"


def claim(id: str, **measured: Estimate | float | tuple[float, float, float]) -> Verdict:
    """Settle a claim: judge measurements by the rule in the ledger.

    A part of the rule holds when its whole interval lies on the claimed side. All parts hold: ``reproduced``;
    some: ``reproduced in part``; none: ``not reproduced``.

    Parameters
    ----------
    id : str
        A claim's id, such as ``"G1"``.
    **measured
        One measurement for each part of the rule, by the part's name: an :class:`Estimate`, a plain number
        (an exact result) or ``(value, low, high)``.

    Returns
    -------
    Verdict
        The verdict, to be shown as the cell's last value.

    Raises
    ------
    ValueError
        If the ledger has no such claim.
    ClaimError
        If a part is missing or unknown, a condition of the rule fails, or the verdict is not the status that
        the ledger states.
    """
    row = _row(id)
    judged = _judge(row, measured)
    missing = [part.name for part in row.parts if part.name not in measured]
    if missing:
        raise ClaimError(f"{id} needs every part of its rule; not measured: {', '.join(missing)}")
    failed = [part for part, _, holds in judged if part.condition and not holds]
    held = [holds for part, _, holds in judged if not part.condition]
    if not held:
        raise ClaimError(f"{id} has no rule yet: write its parts into the ledger before measuring")
    status = STATUSES[0] if all(held) else STATUSES[1] if any(held) else STATUSES[2]
    verdict = Verdict(row, judged, status)
    if failed:
        raise ClaimError(
            f"{id} cannot be judged, a condition of its rule fails ({failed[0].name}):\n{verdict}"
        )
    if status != row.status:
        raise ClaimError(f"the ledger says {row.status!r}, the measurement says {status!r}:\n{verdict}")
    return verdict


def evidence(id: str, **measured: Estimate | float | tuple[float, float, float]) -> Verdict:
    """Show measurements that bear on a claim which another cell settles.

    Parameters
    ----------
    id : str
        A claim's id.
    **measured
        Measurements by the name of a part, as for :func:`claim`; some of the parts are enough.

    Returns
    -------
    Verdict
        The measurements beside the rule, with status ``"evidence"``.

    Raises
    ------
    ValueError
        If the ledger has no such claim.
    ClaimError
        If a part is unknown.
    """
    row = _row(id)
    return Verdict(row, _judge(row, measured), "evidence")


def _row(id: str) -> Claim:
    rows = ledger()
    if id not in tuple(rows):
        raise ValueError(f"the ledger has no claim {id!r}; it has {', '.join(rows)}")
    return rows[id]


def _judge(row: Claim, measured: dict) -> tuple[tuple[Part, Estimate, bool], ...]:
    parts = {part.name: part for part in row.parts}
    unknown = [name for name in measured if name not in parts]
    if unknown:
        known = ", ".join(parts) or "none yet"
        raise ClaimError(f"{row.id} has no part {unknown[0]!r}; the parts of its rule: {known}")
    estimates = {name: _as_estimate(value) for name, value in measured.items()}
    return tuple((parts[n], estimates[n], parts[n].holds(estimates[n])) for n in parts if n in estimates)


def _as_estimate(value: Estimate | float | tuple[float, float, float]) -> Estimate:
    if isinstance(value, Estimate):
        return value
    if isinstance(value, tuple) and len(value) != 3:
        raise ValueError(f"a measurement as a tuple is (value, low, high), got {value!r}")
    return Estimate(*value) if isinstance(value, tuple) else Estimate.exact(value)
