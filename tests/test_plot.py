"""The figures: one look for each method, data where it belongs, legible on any page and to any eye."""

import itertools

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy import stats

from samkit import plot
from samkit.claims import Estimate
from samkit.diagonal import critical_scale, phase_diagram
from samkit.landscapes import Line, Plane
from samkit.sharpness import SpectralDensity

SOLUTIONS = ["small batch", "large batch", "poisoned start"]  # chapter 1's, never beside a method
METHODS = [name for name in plot.COLORS if name != "GD" and name not in SOLUTIONS]  # GD: full-batch SGD
FAMILIES = pytest.mark.parametrize("family", [METHODS, SOLUTIONS], ids=["methods", "solutions"])

# Machado, Oliveira and Fernandes 2009, full severity, for linear RGB.
COLOUR_BLIND = {
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
}


@pytest.fixture(autouse=True)
def fresh_figures():
    mpl.use("agg")
    with mpl.rc_context():
        plot.use_style()
        yield
        plt.close("all")


def linear(color):
    rgb = np.array(mpl.colors.to_rgb(color))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb
    f = np.cbrt(xyz / [0.9505, 1.0, 1.089])
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast_with_white(color):
    return 1.05 / (np.array([0.2126, 0.7152, 0.0722]) @ linear(color) + 0.05)


@FAMILIES
def test_each_has_a_colour_and_a_line_style_of_its_own(family):
    assert plot.COLORS.keys() == plot.LINES.keys()
    assert len({plot.COLORS[name] for name in family}) == len(family)
    assert len({str(plot.LINES[name]) for name in family}) == len(family)


@FAMILIES
@pytest.mark.parametrize("kind", COLOUR_BLIND)
def test_colours_differ_to_colour_blind_eyes(kind, family):
    seen = {n: lab(np.clip(COLOUR_BLIND[kind] @ linear(plot.COLORS[n]), 0, 1)) for n in family}
    for a, b in itertools.combinations(family, 2):
        assert np.linalg.norm(seen[a] - seen[b]) > 8, (a, b)  # a difference of 2.3 is just noticeable


def test_every_colour_stands_out_from_the_background():
    for name, color in plot.COLORS.items():
        assert contrast_with_white(color) > 2, name


def test_the_background_is_opaque_and_white_in_every_figure(tmp_path):
    ax = plot.curves([0, 1], {"SAM": [[1, 2], [1, 3]]}, xlabel="x", ylabel="y")
    ax.figure.savefig(tmp_path / "figure.png")
    pixels = plt.imread(tmp_path / "figure.png")
    assert pixels.shape[2] == 3 or (pixels[..., 3] == 1).all()
    assert (pixels[0, 0, :3] == 1).all()


def test_a_method_looks_the_same_in_every_figure():
    first = plot.curves([0, 1], {"SAM": [1, 2], "SGD": [1, 3]}, xlabel="x", ylabel="y")
    second = plot.curves([0, 1], {"other": [0, 0], "SGD": [1, 3], "SAM": [1, 2]}, xlabel="x", ylabel="y")
    for label in ("SAM", "SGD"):
        a, b = (line_of(ax, label) for ax in (first, second))
        assert a.get_color() == b.get_color() == plot.COLORS[label]
        assert a._dash_pattern == b._dash_pattern


def test_labels_of_one_method_share_its_hue_and_differ_in_look():
    labels = ["SAM, ρ = 0.05", "SAM, ρ = 0.1", "SAM, ρ = 0.2", "SGD"]
    ax = plot.curves([0, 1], {label: [0, i] for i, label in enumerate(labels)}, xlabel="x", ylabel="y")
    looks = {(line_of(ax, label).get_color(), str(line_of(ax, label)._dash_pattern)) for label in labels}
    assert len(looks) == 4
    assert line_of(ax, labels[0]).get_color() == plot.COLORS["SAM"]
    hues = [
        mpl.colors.rgb_to_hsv(mpl.colors.to_rgb(line_of(ax, label).get_color()))[0] for label in labels[:3]
    ]
    assert np.ptp(hues) < 0.02


def line_of(ax, label):
    (line,) = [line for line in ax.get_lines() if line.get_label() == label]
    return line


def test_curves_show_the_mean_and_the_t_interval_over_seeds():
    values = np.random.default_rng(0).normal(size=(6, 4))
    ax = plot.curves([1, 2, 3, 4], {"SAM": values}, xlabel="epoch", ylabel="loss")
    assert np.allclose(line_of(ax, "SAM").get_ydata(), values.mean(axis=0))
    low, high = stats.t.interval(0.95, 5, values.mean(axis=0), stats.sem(values, axis=0))
    edge = ax.collections[0].get_paths()[0].vertices
    for column in range(4):
        at = edge[np.isclose(edge[:, 0], column + 1), 1]
        assert (at.min(), at.max()) == pytest.approx((low[column], high[column]))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("epoch", "loss")


def test_a_single_curve_has_no_band_and_no_legend():
    ax = plot.curves([1, 2], {"SAM": [1.0, 2.0]}, xlabel="x", ylabel="y")
    assert len(ax.collections) == 0
    assert ax.get_legend() is None


def test_accuracy_against_rho_has_a_logarithmic_axis_and_a_line_for_what_has_no_radius():
    accuracy = np.random.default_rng(0).normal(70, 1, (3, 2))
    ax = plot.accuracy_against_rho([0.1, 0.2], {"SAM": accuracy}, reference={"SGD": [68.0, 69.0, 70.0]})
    assert ax.get_xscale() == "log"
    assert set(line_of(ax, "SGD").get_ydata()) == {69.0}
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["SAM", "SGD"]


def test_dots_show_every_seed_and_the_interval_of_the_mean():
    values = np.array([1.0, 2.0, 4.0])
    ax = plot.dots({"SAM": values, "SGD": values - 1}, xlabel="gain", reference=0)
    shown = [line.get_xdata() for line in ax.get_lines() if len(line.get_xdata()) == 3]
    assert [sorted(x) for x in shown] == [[1, 2, 4], [0, 1, 3]]
    (bar,) = ax.containers[0].lines[2][0].get_segments()
    low, high = stats.t.interval(0.95, 2, values.mean(), stats.sem(values))
    assert bar[:, 0] == pytest.approx([low, high])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["SAM", "SGD"]


def test_slices_draw_each_line_through_its_points():
    t = np.linspace(-1, 1, 5)
    ax = plot.slices({"small batch": Line(t, t**2), "large batch": Line(2 * t, 4 * t**2)})
    assert np.array_equal(line_of(ax, "large batch").get_xdata(), 2 * t)
    assert np.array_equal(line_of(ax, "small batch").get_ydata(), t**2)


def test_a_plane_carries_its_paths_and_points():
    x, y = np.linspace(-2, 2, 9), np.linspace(-1, 1, 5)
    bowl = Plane(x, y, x**2 + y[:, None] ** 2)
    walk = np.array([[2.0, 1.0], [1.0, 0.5], [0.0, 0.0]])
    ax = plot.plane(bowl, trajectories={"SGD": walk}, points={"minimum": (0, 0)}, xlabel="a", ylabel="b")
    assert np.array_equal(line_of(ax, "SGD").get_xydata(), walk)
    assert "minimum" in [text.get_text() for text in ax.texts]
    assert ax.get_xlim() == (-2, 2)


def test_spectra_are_cut_at_the_floor_of_the_logarithmic_axis():
    grid = np.linspace(-1, 1, 5)
    value = np.array([0.0, 1.0, 100.0, 1.0, 0.0])
    density = SpectralDensity(value, 0.1 * value, True, grid, 0.1, grid, grid, 10)
    ax = plot.spectra({"SGD": density, "SAM": density}, floor=1e-3)
    assert ax.get_yscale() == "log"
    assert ax.get_ylim()[0] == pytest.approx(0.1)
    assert line_of(ax, "SAM").get_ydata().min() == pytest.approx(0.1)


@pytest.mark.parametrize(("axis", "along"), [("y", "get_ydata"), ("x", "get_xdata")])
def test_a_reference_line_says_what_it_is(axis, along):
    _, ax = plt.subplots()
    plot.reference(ax, 0.5, "2/η", axis=axis)
    assert set(getattr(ax.get_lines()[0], along)()) == {0.5}
    assert [text.get_text() for text in ax.texts] == ["2/η"]


def test_a_reference_line_along_no_axis_is_refused():
    with pytest.raises(ValueError, match="'z'"):
        plot.reference(plt.figure().gca(), 0.0, "nothing", axis="z")


def test_panels_stand_side_by_side_under_their_titles():
    left, right = plot.panels("raw", "normalised")
    assert (left.get_title(), right.get_title()) == ("raw", "normalised")
    assert left.figure is right.figure
    assert len(plot.panels("alone")) == 1


def test_means_mark_each_group_at_its_means_with_both_intervals():
    x, y = np.array([1.0, 2.0, 3.0]), np.array([10.0, 20.0, 60.0])
    ax = plot.means({"a, 1": (x, y), "b": (y, x), "a, 2": (x + 1, y)}, xlabel="x", ylabel="y")
    first, other, related = ax.containers
    assert np.allclose(first.lines[0].get_xydata(), [[2, 30]])
    across, along = (bars.get_segments()[0] for bars in first.lines[2])
    for values, ends in ((x, across[:, 0]), (y, along[:, 1])):
        assert np.allclose(ends, stats.t.interval(0.95, 2, values.mean(), stats.sem(values)))
    assert [text.get_text() for text in ax.texts] == ["a, 1", "b", "a, 2"]
    looks = [(c.lines[0].get_color(), c.lines[0].get_marker()) for c in (first, other, related)]
    assert looks[0] == looks[2] != looks[1]


def test_whole_numbers_on_the_horizontal_axis_get_whole_ticks():
    ax = plot.curves(range(1, 6), {"SAM": np.arange(5.0)}, xlabel="rank", ylabel="y")
    assert all(float(tick).is_integer() for tick in ax.get_xticks())


def test_the_predicted_slope_of_a_convergence_is_the_rate():
    ax = plot.convergence({"a": [1.0, 0.2, 0.04, 0.008]}, {"a": 0.5}, ylabel="error")
    measured, predicted = (line.get_ydata() for line in ax.lines)
    np.testing.assert_allclose(measured, [1.0, 0.2, 0.04, 0.008])
    np.testing.assert_allclose(predicted[1:] / predicted[:-1], 0.5)
    assert predicted[2] == measured[2]


def test_each_edge_of_stability_is_drawn_once_and_named():
    path = {"time": np.arange(3.0), "loss": np.ones(3), "top_eigenvalue": np.full(3, 19.0)}
    labels = {"GD, η = 0.1": 20.0, "SAM, η = 0.1": 20.0, "GD, η = 0.2": 10.0}
    top, bottom = plot.edge_of_stability({k: path | {"edge": np.array(v)} for k, v in labels.items()})
    assert sorted(text.get_text() for text in bottom.texts) == ["2/η = 10", "2/η = 20"]
    assert [text.get_text() for text in top.get_legend().get_texts()] == list(labels)


def test_marks_stand_where_they_belong_each_with_its_own_symbol_and_named_once():
    ax = plot.curves([0.0, 1.0], {"a": [0.0, 1.0], "b": [1.0, 0.0]}, xlabel="x", ylabel="y")
    plot.mark(ax, {"here": (0.25, 0.5), "there": (0.75, 0.5)})
    plot.mark(ax, {"here": (0.5, 0.1)}, names=False)
    here, there, again = ax.lines[-3:]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in (here, there)] == [
        (0.25, 0.5),
        (0.75, 0.5),
    ]
    assert here.get_marker() == again.get_marker() != there.get_marker()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b", "here", "there"]


def test_the_nearest_solutions_lie_on_the_line_of_equal_loss_where_ball_and_diamond_touch_it():
    ax = plot.nearest_solutions({"L = 1": np.array([[0.0, 0.0], [0.4, 0.8]])}, [1.0, 2.0], z=2.0)
    stars = [line.get_xydata()[0] for line in ax.lines if line.get_marker() == "*"]
    np.testing.assert_allclose(stars, [[0.4, 0.8], [0.0, 1.0]])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["L = 1"]


def test_theory_is_a_line_and_a_measurement_dots_in_its_colour():
    x = np.linspace(0, 1, 200)
    ax = plot.against_theory(
        {"GD": (x, x), "linf-SAM": (x, x**2)}, {"GD": (x, x)}, xlabel="s", ylabel="w", logy=True
    )
    line, dots, other = ax.lines
    assert line.get_color() == dots.get_color() != other.get_color()
    assert dots.get_marker() == "o"
    assert 10 <= len(dots.get_xdata()) <= 20
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["GD", "linf-SAM"]


def test_winning_features_are_areas_with_dots_of_their_own_in_each_panel():
    x, at = np.linspace(0, 2, 11), np.array([0.5, 1.5])
    names = ["GD, L = 2", "GD, L = 3", "linf-SAM, L = 2", "linf-SAM, L = 3"]
    dots = np.array([[-1, 0], [1, 1]])
    axes = plot.winning_features(
        x, dict.fromkeys(names, np.ones((11, 11))), dict.fromkeys(names, dots), at, 1
    )
    assert [ax.get_title() for ax in axes.flat] == names
    none, minor, major = axes[0, 0].lines
    assert (list(none.get_xdata()), list(none.get_ydata())) == ([0.5], [0.5])
    assert (list(minor.get_xdata()), list(minor.get_ydata())) == ([1.5], [0.5])
    assert (list(major.get_xdata()), list(major.get_ydata())) == ([0.5, 1.5], [1.5, 1.5])
    assert len(axes[1, 0].lines) == 3 + 2


def test_the_plane_of_two_layers_shows_each_path_from_its_start():
    x = np.linspace(-1, 2, 7)
    path = np.array([[0.5, 0.2], [0.3, 0.1]])
    ax = plot.layer_plane(x, x[:, None] + x > 2, [path], 1.0)
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), path)
    np.testing.assert_array_equal(ax.lines[1].get_xydata(), path[:1])
    assert ax.get_xlim() == ax.get_ylim() == (-1, 2)


def test_a_trail_goes_through_the_means_with_a_name_at_each_point():
    y = np.array([[1.0, 2.0], [3.0, 4.0]])
    ax = plot.trails({"SAM": (np.array([[1.0, 10.0], [4.0, 10.0]]), y)}, [0.1, 0.25], xlabel="x", ylabel="y")
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [[2, 2], [10, 3]])
    assert [text.get_text() for text in ax.texts] == ["0.1", "0.25"]
    assert ax.get_xscale() == "log"


def test_ranked_estimates_rise_and_those_away_from_zero_have_colours_of_their_own():
    estimates = [Estimate(1, 0.5, 1.5), Estimate(-2, -3, -1), Estimate(0.1, -1, 2)]
    ax = plot.ranked(estimates, xlabel="x", ylabel="y")
    marks = [container.lines[0] for container in ax.containers]
    assert [tuple(line.get_xydata()[0]) for line in marks] == [(1, -2), (2, 0.1), (3, 1)]
    assert len({line.get_color() for line in marks}) == 3
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["below zero", "zero inside", "above zero"]


def test_panels_fill_the_rows_from_left_to_right():
    axes = plot.panels("a", "b", "c", "d", rows=2)
    assert [ax.get_title() for ax in axes] == ["a", "b", "c", "d"]
    tops = [round(ax.get_position().y0, 2) for ax in axes]
    assert tops[0] == tops[1] > tops[2] == tops[3]


def test_means_can_name_their_marks_in_a_legend():
    points = {"SAM": ([1.0, 2.0], [3.0, 5.0]), "SAM, 3 steps": ([3.0, 4.0], [3.0, 5.0])}
    ax = plot.means(points, xlabel="x", ylabel="y", legend=True)
    assert not ax.texts
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(points)
    marks = [container.lines[0] for container in ax.containers]
    assert len({mark.get_marker() for mark in marks}) == 2
    assert [tuple(mark.get_xydata()[0]) for mark in marks] == [(1.5, 4), (3.5, 4)]


def test_a_cloud_shades_shares_and_follows_the_mean():
    ax = plot.cloud(np.array([[0.0, 0.1], [0.1, 0.1]]), step=0.1, single=[0.1, 0.0], ylabel="α*")
    shares = np.asarray(ax.collections[0].get_array()).reshape(2, 2)
    assert shares.tolist() == [[50, 0], [50, 100]]  # a row for each position, a column for each epoch
    assert np.allclose(line_of(ax, "mean of the epoch").get_ydata(), [0.05, 0.1])
    assert np.allclose(line_of(ax, "searched once an epoch").get_ydata(), [0.1, 0.0])


def test_ends_give_each_method_a_map_and_each_place_one_colour():
    places = {"SGD": np.array([[0, 1], [1, 1]]), "SAM": np.array([[0, 0], [1, 1]])}
    axes = plot.ends(
        places, ["sharp", "flat"], [0, 1], [2, 3], points={"here": (0, 2)}, xlabel="m", ylabel="s"
    )
    assert [ax.get_title() for ax in axes.flat] == ["SGD", "SAM"]
    for ax, where in zip(axes.flat, places.values(), strict=True):
        mesh = ax.collections[0]
        assert np.asarray(mesh.get_array()).ravel().tolist() == where.ravel().tolist()
        assert len({tuple(mesh.to_rgba(place)) for place in (0, 1)}) == 2
    assert [text.get_text() for text in axes[0, 0].figure.legends[0].get_texts()] == ["sharp", "flat"]


def test_a_scan_names_its_rows_columns_and_methods_once():
    settings = {"η = 1": {"SGD": [1, 2], "SAM": [2, 3]}, "η = 2": {"SGD": [1, 1], "SAM": [2, 2]}}
    axes = plot.scan([5, 6], {"flat": settings, "sharp": settings}, xlabel="radius ρ")
    assert [ax.get_title() for ax in axes[0]] == ["η = 1", "η = 2"]
    assert [ax.get_ylabel() for ax in axes[:, 0]] == ["flat", "sharp"]
    assert all(ax.get_legend() is None for ax in axes.flat)
    assert [text.get_text() for text in axes[0, 0].figure.legends[0].get_texts()] == ["SGD", "SAM"]


def test_shares_fill_each_panel_from_0_to_1():
    values = np.array([[0.7, 0.3], [0.5, 0.5], [0.2, 0.8]])
    axes = plot.shares([0.1, 1.0, 10.0], {"SAM": values, "GD": values})
    assert [ax.get_title() for ax in axes] == ["SAM", "GD"]
    top = axes[0].collections[-1].get_paths()[0].vertices[:, 1]
    assert top.max() == pytest.approx(1)


def test_a_composition_lays_the_shares_of_each_bar_end_to_end():
    ax = plot.composition({"SAM": [0.3, 0.7], "GD": [0.04, 0.96]}, ["minor", "major"], xlabel="share")
    minor, major = ax.containers
    assert [(bar.get_x(), bar.get_width()) for bar in minor] == [(0, 0.3), (0, 0.04)]
    assert [bar.get_x() for bar in major] == pytest.approx([0.3, 0.04])
    assert [text.get_text() for text in ax.texts] == ["30%", "70%", "96%"]  # too thin for a number: none
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["minor", "major"]


def test_leaders_name_every_region_and_mark_the_thresholds():
    mu = [1.0, 2.0, 3.0]
    c = critical_scale(mu)
    wide = phase_diagram(mu, np.linspace(0.3, 1.0, 40), np.linspace(0.1, 5, 30))
    near = phase_diagram(mu, c + np.geomspace(1e-5, 0.5, 40), np.linspace(0.1, 20, 30))
    left, right = plot.leaders(wide, near, c, {"c(μ)": c}, slope=3.0)
    assert {"1", "2", "3", "collapsed", "c(μ)"} <= {text.get_text() for text in left.texts}
    assert {"1", "2", "3", "predicted slope"} == {text.get_text() for text in right.texts}


def test_a_travelling_bump_rings_the_feature_nearest_to_its_centre():
    s = np.linspace(0, 2, 21)
    _, ax = plt.subplots()
    plot.travelling_bump([1.0, 2.0], s, s / 3.6, [1.0], ax)  # the centre stays at 1.8
    (ringed,) = (line for line in ax.lines if line.get_markersize() == 10)
    assert ringed.get_xdata()[0] == 2
