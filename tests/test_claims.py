"""The ledger of claims: intervals by formula, verdicts by rule, and errors when the two disagree."""

import importlib
import math

import numpy as np
import pytest
from scipy import stats

from samkit import claims
from samkit.claims import Claim, ClaimError, Estimate, Part, claim, evidence

IDS = [f"G{i}" for i in range(1, 6)] + [f"M{i}" for i in range(1, 18)] + [f"X{i}" for i in range(1, 15)]
ABOVE = Part("above", "what lies above", ">", 1.0, "points")
BELOW = Part("below", "what lies below", "<", 1.0)
BETWEEN = Part("between", "what lies between", "within", (0.9, 1.1))
ENOUGH = Part("enough", "training loss", "<", 0.1, condition=True)


@pytest.fixture
def a_ledger(monkeypatch):
    """A ledger with one claim, whose status the test chooses."""

    def put(status, parts=(ABOVE, BELOW)):
        row = Claim("Z1", "Water is wet.", "folklore", 1, status, parts=parts)
        monkeypatch.setattr(claims, "ledger", lambda: {"Z1": row})

    return put


def test_the_t_interval_is_the_textbook_one():
    x = [2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]
    got = Estimate.from_samples(x, level=0.9)
    # mean 5, s = sqrt(32/7), t_{7, 0.95} = 1.8946
    half = 1.894578605 * math.sqrt(32 / 7) / math.sqrt(8)
    assert (got.value, got.n) == (5.0, 8)
    assert (got.low, got.high) == pytest.approx((5 - half, 5 + half), rel=1e-8)


@pytest.mark.parametrize("method", ["t", "bootstrap"])
def test_a_95_percent_interval_covers_the_true_mean_in_about_95_percent_of_draws(method):
    draws = np.random.default_rng(0).normal(3.0, 2.0, (400, 20))
    intervals = [Estimate.from_samples(row, method=method) for row in draws]
    covered = sum(e.low <= 3.0 <= e.high for e in intervals)
    # 95 % of 400 is 380, standard deviation 4.4; the bootstrap of 20 samples is known to be a little narrow
    assert (360 if method == "t" else 350) <= covered <= 396


def test_the_bootstrap_depends_on_its_seed_alone():
    x = np.random.default_rng(1).normal(size=15)
    first, again, other = (Estimate.from_samples(x, method="bootstrap", seed=s) for s in (0, 0, 1))
    assert first == again
    assert first != other


def test_pairing_removes_what_the_two_sides_share():
    luck = np.random.default_rng(0).normal(0, 10, 12)
    gain = np.random.default_rng(1).normal(1, 0.1, 12)
    paired = Estimate.paired_difference(luck + gain, luck)
    assert (paired.low, paired.high) == pytest.approx(
        stats.t.interval(0.95, 11, gain.mean(), stats.sem(gain))
    )


@pytest.mark.parametrize(
    ("samples", "message"),
    [([1.0], "two samples"), ([[1.0, 2.0]], "one row"), ([1.0, math.nan], "finite")],
)
def test_samples_that_give_no_interval_are_refused(samples, message):
    with pytest.raises(ValueError, match=message):
        Estimate.from_samples(samples)


def test_pairs_of_different_length_are_refused():
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        Estimate.paired_difference([1, 2], [1, 2, 3])


@pytest.mark.parametrize("options", [{"method": "guess"}, {"level": 1.0}, {"level": 95}])
def test_an_interval_of_an_unknown_kind_is_refused(options):
    with pytest.raises(ValueError, match=str(next(iter(options.values())))):
        Estimate.from_samples([1.0, 2.0], **options)


@pytest.mark.parametrize(
    "ends", [(1.0, 1.1, 1.2), (1.0, 0.8, 0.9), (math.nan, 0.0, 1.0), (0.5, math.nan, 1.0)]
)
def test_an_interval_that_misses_its_value_is_refused(ends):
    with pytest.raises(ValueError, match="low <= value <= high"):
        Estimate(*ends)


@pytest.mark.parametrize(
    ("part", "estimate", "holds"),
    [
        (ABOVE, (2.0, 1.1, 3.0), True),
        (ABOVE, (2.0, 1.0, 3.0), False),
        (ABOVE, (2.0, 0.5, 3.0), False),
        (BELOW, (0.0, -1.0, 0.9), True),
        (BELOW, (0.0, -1.0, 1.0), False),
        (BETWEEN, (1.0, 0.9, 1.1), True),
        (BETWEEN, (1.0, 0.89, 1.05), False),
        (BETWEEN, (1.0, 0.95, 1.11), False),
    ],
)
def test_a_part_holds_only_when_its_whole_interval_is_on_the_right_side(part, estimate, holds):
    assert part.holds(Estimate(*estimate)) is holds


@pytest.mark.parametrize(
    ("above", "below", "status"),
    [
        (2.0, 0.0, "reproduced"),
        (2.0, 2.0, "reproduced in part"),
        (0.0, 0.0, "reproduced in part"),
        (0.0, 2.0, "not reproduced"),
    ],
)
def test_the_verdict_counts_the_parts(a_ledger, above, below, status):
    a_ledger(status)
    assert claim("Z1", above=above, below=below).status == status


@pytest.mark.parametrize("said", [s for s in claims.STATUSES if s != "reproduced"])
def test_a_verdict_that_is_not_the_ledgers_status_raises_and_shows_the_measurement(a_ledger, said):
    a_ledger(said)
    with pytest.raises(ClaimError, match=rf"(?s)ledger says '{said}'.*'reproduced'.*12 \[11, 13\] points"):
        claim("Z1", above=(12.0, 11.0, 13.0), below=0.0)


def test_a_failed_condition_judges_nothing_and_a_met_one_does_not_count(a_ledger):
    a_ledger("not reproduced", (ENOUGH, ABOVE))
    assert claim("Z1", enough=0.01, above=0.0).status == "not reproduced"
    with pytest.raises(ClaimError, match=r"cannot be judged.*enough"):
        claim("Z1", enough=0.5, above=0.0)


def test_a_part_left_out_or_unknown_is_named(a_ledger):
    a_ledger("reproduced")
    with pytest.raises(ClaimError, match="not measured: below"):
        claim("Z1", above=2.0)
    with pytest.raises(ClaimError, match=r"no part 'beside'.*above, below"):
        claim("Z1", above=2.0, below=0.0, beside=1.0)


def test_a_claim_without_a_rule_cannot_be_settled(a_ledger):
    a_ledger("planned", ())
    with pytest.raises(ClaimError, match="no rule yet"):
        claim("Z1")


def test_a_measurement_of_nan_is_refused(a_ledger):
    a_ledger("not reproduced")
    with pytest.raises(ValueError, match="nan"):
        claim("Z1", above=math.nan, below=0.0)


def test_evidence_takes_some_parts_and_gives_no_verdict(a_ledger):
    a_ledger("not reproduced")
    shown = evidence("Z1", above=(12.0, 11.0, 13.0))
    assert shown.status == "evidence"
    assert "12 [11, 13] points" in str(shown)
    assert "what lies below" not in str(shown)


def test_the_verdict_shows_id_value_interval_rule_and_status_as_text_and_as_html(a_ledger):
    a_ledger("reproduced in part")
    verdict = claim("Z1", above=Estimate(0.5, 0.25, 0.75, n=12), below=Estimate(0.0, -1.0, 0.5, n=12))
    for text in (repr(verdict), verdict._repr_html_()):
        for piece in ("Z1", "Water is wet.", "0.5 [0.25, 0.75] points, n = 12", "1", "reproduced in part"):
            assert piece in text
    assert "rule: > 1" in repr(verdict)
    assert "<td>&gt; 1</td>" in verdict._repr_html_()


def test_html_cannot_be_broken_by_a_statement(monkeypatch):
    row = Claim("Z1", "a < b & <script>", "folklore", 1, "reproduced", parts=(ABOVE,))
    monkeypatch.setattr(claims, "ledger", lambda: {"Z1": row})
    shown = claim("Z1", above=2.0)._repr_html_()
    assert "<script>" not in shown
    assert "a &lt; b &amp; &lt;script&gt;" in shown


def test_the_ledger_has_every_claim_once_and_in_order():
    assert list(claims.ledger()) == IDS


@pytest.mark.parametrize("id", IDS)
def test_a_row_of_the_ledger_is_well_formed(id):
    row = claims.ledger()[id]
    assert row.status in claims.STATUSES
    assert row.full_scale in ("", "needs scale")
    assert 1 <= row.chapter <= 11
    assert len({part.name for part in row.parts}) == len(row.parts)
    for part in row.parts:
        assert part.name.isidentifier()
        assert part.comparison in (">", "<", "within")
        assert isinstance(part.threshold, tuple) == (part.comparison == "within")
        assert part.demand.split()[0] == part.comparison


@pytest.mark.parametrize("id", IDS)
def test_a_settled_claim_names_a_function_that_exists(id):
    row = claims.ledger()[id]
    if row.status in ("planned", "needs scale"):
        return
    module, name = row.function.rsplit(".", 1)
    assert callable(getattr(importlib.import_module(module), name))
    assert row.rule
    assert any(not part.condition for part in row.parts)


def test_the_claims_of_the_first_four_chapters_have_their_rules():
    for id in ("G1", "G2", "G3", "G4", "G5"):
        row = claims.ledger()[id]
        assert row.rule
        assert any(not part.condition for part in row.parts)
