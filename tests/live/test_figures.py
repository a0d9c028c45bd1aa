"""The live figures: their numbers against samkit, their pictures, and what Python says of them."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from samkit import live
from samkit.diagonal import critical_scale, flow, linf_limit, regime
from samkit.landscapes import two_basins
from samkit.optim import SAM, XSAM

ROOT = Path(__file__).parents[2]
STARTS = [[-30.0, 20.0], [-40.0, 45.0], [10.0, 12.0], [45.0, 40.0], [-5.0, 25.0]]


class TestPython:
    @pytest.mark.parametrize("name", live.FIGURES)
    def test_a_module_imports_nothing_and_is_at_most_30_kB(self, name):
        text = live.source(name)
        assert not re.search(
            r"^\s*import\b|\bimport\(|https?://(?!www\.w3\.org/2000/svg)", text, re.MULTILINE
        )
        assert len(text.encode()) <= 30_000

    @pytest.mark.parametrize("name", live.FIGURES)
    def test_a_figure_offers_a_widget_and_html(self, name):
        data, _ = live.LiveFigure(name)._repr_mimebundle_()
        assert {"application/vnd.jupyter.widget-view+json", "text/html"} <= data.keys()
        script = data["text/html"].split("<script", 1)[1]
        assert script.count("</") == 1, "something inside the script would end it"
        assert "<svg" in data["text/html"].split("<script", 1)[0], "no static picture"

    def test_html_alone_in_colab_where_a_widget_needs_the_network(self, monkeypatch):
        figure = live.LiveFigure("linf")
        monkeypatch.setitem(__import__("sys").modules, "google.colab", object())
        assert figure._repr_mimebundle_()[0].keys() == {"text/html", "text/plain"}

    def test_two_figures_on_one_page_have_their_own_places(self):
        figure = live.LiveFigure("linf")
        ids = [re.search(r'<div id="(\S+?)">', figure._repr_html_())[1] for _ in range(2)]
        assert ids[0] != ids[1]

    def test_a_state_is_kept_and_an_unknown_part_refused(self):
        assert live.LiveFigure("ball", rho=3.0).state["rho"] == 3.0
        with pytest.raises(ValueError, match=r"'ball' has no 'radius'; it has theta, rho, k"):
            live.LiveFigure("ball", radius=3.0)
        with pytest.raises(ValueError, match="'sphere'"):
            live.LiveFigure("sphere")


# From here on Node runs the modules, as a browser would.


def numbers(value):
    return np.vectorize(lambda v: math.inf if v == "inf" else v, otypes=[float])(
        np.array(value, dtype=object)
    )


@pytest.mark.browser
class TestPictures:
    def test_stored_pictures_and_states_are_those_of_the_modules(self):
        spec = importlib.util.spec_from_file_location("live_pictures", ROOT / "book/tools/live_pictures.py")
        pictures = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(pictures)
        for file, text in pictures.files(pictures.draw()).items():
            stored = (Path(live.__file__).parent / file).read_text(encoding="utf-8")
            assert stored == text, f"{file} is behind its module: run make live"

    @pytest.mark.parametrize("name", live.FIGURES)
    @pytest.mark.parametrize("width", [300, 700])
    def test_no_setting_draws_nonsense(self, evaluate, name, width):
        views = evaluate(
            name,
            """m.figure.controls
            .flatMap((c) => (c.choices?.map(([v]) => v) ?? [c.min, c.max]).map((v) => ({ [c.key]: v })))
            .map((change) => m.figure.view({ ...m.figure.state, ...change }, data))""",
            width,
        )
        assert views
        for view in views:
            assert not re.search(
                r"NaN|undefined|null|[\"( ,]-?Infinity", view["svg"] + view["says"] + view["alt"]
            )
            assert view["says"].endswith(".")
            for handle in view["handles"]:
                assert 0 <= handle["x"] <= width
                assert 0 <= handle["y"] <= view["height"]


@pytest.mark.browser
class TestFlatAndSharp:
    @staticmethod
    def loss(theta):
        """Chapter 1's."""
        return 1 - np.exp(-((theta + 1.5) ** 2) / 0.02) - 0.9 * np.exp(-((theta - 1.5) ** 2) / 0.72)

    def test_worst_points_are_those_of_a_dense_grid(self, evaluate):
        places = [[theta, rho] for theta in (-2.0, -1.5, -0.9, 0.3, 1.5, 3.0) for rho in (0.0, 0.1, 0.5, 1.0)]
        found = evaluate("flat_and_sharp", "data.map((p) => m.loss(m.worst(...p)))", places)
        for (theta, rho), value in zip(places, found, strict=True):
            grid = self.loss(np.linspace(theta - rho, theta + rho, 200_001))
            assert value == pytest.approx(grid.max(), abs=1e-9)

    def test_the_worst_case_prefers_the_narrow_valley_for_the_smallest_radii_alone(self, evaluate):
        for rho in (0.0, 0.02, 0.1, 0.3):
            found = evaluate("flat_and_sharp", "m.preferred(data)", rho)
            for name, bounds in (("narrow", (-1.8, -1.2)), ("wide", (0.5, 2.5))):
                grid = np.linspace(*bounds, 4001)
                worst = np.max(
                    [self.loss(grid + shift) for shift in np.linspace(-rho, rho, 81)], axis=0
                ).min()
                assert found[name] == pytest.approx(worst, abs=1e-4)
            assert (found["narrow"] < found["wide"]) == (rho < 0.05)


@pytest.mark.browser
class TestLandscape:
    def test_loss_and_gradient(self, evaluate):
        theta = torch.tensor(STARTS, dtype=torch.float64, requires_grad=True)
        loss = two_basins(theta)
        loss.sum().backward()
        np.testing.assert_allclose(
            evaluate("landscape", "data.map(m.loss)", STARTS), loss.detach(), rtol=1e-12
        )
        np.testing.assert_allclose(
            evaluate("landscape", "data.map(m.gradient)", STARTS), theta.grad, rtol=1e-10, atol=1e-15
        )

    @pytest.mark.parametrize("start", STARTS)
    @pytest.mark.parametrize(("method", "rho", "k"), [("GD", 5, 1), ("SAM", 5, 1), ("SAM", 5, 3)])
    def test_a_walk_is_the_optimizers_own(self, evaluate, method, rho, k, start):
        settings = {"rho": rho, "k": k, "learningRate": 20, "momentum": 0.9}
        call = "m.walk(...data).map((v) => v.theta)"
        walked = np.array(evaluate("landscape", call, [method, start, settings, 60]))
        theta = torch.tensor(start, dtype=torch.float64, requires_grad=True)
        radius = 0.0 if method == "GD" else float(rho)
        optimizer = SAM([theta], torch.optim.SGD, rho=radius, ascent_steps=k, lr=20.0, momentum=0.9)
        assert len(walked) == 61
        np.testing.assert_allclose(walked, self.follow(theta, optimizer, 60), rtol=1e-9, atol=1e-9)

    @pytest.mark.filterwarnings("ignore:XSAM's search ended at alpha_max")  # the page shows alpha* itself
    @pytest.mark.parametrize("start", STARTS)
    @pytest.mark.parametrize("k", [1, 3])
    def test_a_step_of_xsam_is_the_optimizers_own(self, evaluate, start, k):
        settings = {"rho": 6, "k": k, "learningRate": 20, "momentum": 0.9}
        walked = evaluate("landscape", "m.walk(...data).map((v) => v.theta)", ["XSAM", start, settings, 8])
        for here in walked:
            there = evaluate(
                "landscape", "m.step(data[0], data[1], [0, 0], data[2])[0]", ["XSAM", here, settings]
            )
            theta = torch.tensor(here, dtype=torch.float64, requires_grad=True)
            optimizer = XSAM([theta], search_every=1, rho=6.0, ascent_steps=k, lr=20.0, momentum=0.9)
            np.testing.assert_allclose(there, self.follow(theta, optimizer, 1)[1], rtol=1e-9)

    @staticmethod
    def follow(theta, optimizer, steps):
        def closure():
            optimizer.zero_grad()
            loss = two_basins(theta, outside="nan").sum()
            if loss.requires_grad:
                loss.backward()
            return loss

        path = [theta.detach().clone().numpy()]
        for _ in range(steps):
            optimizer.step(closure)
            path.append(theta.detach().clone().numpy())
        return np.array(path)

    def test_a_walk_that_leaves_the_domain_ends_there(self, evaluate):
        settings = {"rho": 12, "k": 1, "learningRate": 400, "momentum": 0.9}
        walked = evaluate("landscape", "m.walk(...data)", ["SAM", [-20.0, 3.0], settings, 150])
        assert len(walked) < 151
        assert min(walked[-1]["theta"][1], walked[-1]["away"][1]) <= 0
        assert all(min(visit["theta"][1], visit["away"][1]) > 0 for visit in walked[:-1])


@pytest.mark.browser
class TestBall:
    @pytest.mark.parametrize("theta", STARTS)
    @pytest.mark.parametrize("rho", [2.0, 8.0])
    def test_the_marked_angles(self, evaluate, theta, rho):
        found = evaluate("ball", "m.directions(...data)", [theta, rho, 1])

        def gradient(point):
            point = torch.tensor(point, dtype=torch.float64, requires_grad=True)
            (g,) = torch.autograd.grad(two_basins(point), point)
            return g.numpy()

        g0 = gradient(theta)
        g1 = gradient(theta + rho * g0 / np.linalg.norm(g0))
        for key, g in (("g0", g0), ("g1", g1)):
            assert math.remainder(found[key] - math.atan2(g[1], g[0]), math.tau) == pytest.approx(0, abs=1e-9)

        def depth(angle):
            return -two_basins(
                theta + rho * np.array([math.cos(angle), math.sin(angle)]), outside="nan"
            ).item()

        best = min(
            (minimize_scalar(depth, (a, a + 0.1)) for a in np.linspace(0, math.tau, 12)), key=lambda r: r.fun
        )
        assert -depth(found["top"]) == pytest.approx(-best.fun, rel=1e-9)


@pytest.mark.browser
class TestAmplification:
    @pytest.mark.parametrize("mu", [[1.0, 2.0, 3.0], [1.0, 2.0, 2.2], [1.0, 2.0, 5.0]])
    @pytest.mark.parametrize("ratio", [0.4, 0.45, 0.5, 0.8, 1.1])
    def test_the_path_is_that_of_the_flow(self, evaluate, mu, ratio):
        points = np.array(evaluate("amplification", "m.solve(...data)", [mu, ratio, 8.0]))
        s = points[::50, 0]
        logs = np.array(
            evaluate(
                "amplification",
                "data[2].map(([s, Q]) => m.logP(data[0], data[1], s, Q))",
                [mu, ratio, points[::50].tolist()],
            )
        )
        result = flow(mu, ratio, 1.0, s=s)
        alive = s < (0.95 * result.s_end if result.outcome == "collapses" else math.inf)
        # The flow itself interpolates to a few parts in 1e9.
        error = np.abs(np.exp(2 * logs) / 2 - result.beta)[alive].max(axis=1)
        assert (error / result.beta[alive].max(axis=1)).max() < 1e-8
        if result.outcome == "collapses":
            assert points[-1, 0] == pytest.approx(result.s_end, abs=1e-6)

    @pytest.mark.parametrize("mu", [[1.0, 2.0, 3.0], [1.0, 2.0, 5.0], [1.0, 2.0, 2.2]])
    def test_the_borders_of_the_regimes(self, evaluate, mu):
        c, third = evaluate("amplification", "[m.criticalScale(data), m.majorFirst(data)]", mu)
        assert c == pytest.approx(critical_scale(mu), abs=1e-6)
        assert [regime(mu, third + shift, 1.0) for shift in (-1e-9, 1e-9)] == ["minor-first", "major-first"]


@pytest.mark.browser
class TestLinf:
    @pytest.mark.parametrize("depth", [1, 2, 3, 4])
    def test_weights_are_those_of_the_flow_until_the_first_blow_up(self, evaluate, depth):
        rng = np.random.default_rng(depth)
        for alpha in [*rng.uniform(0.1, 1.9, (6, 3)).round(2), np.array([1.0, 1.5, 0.5])]:
            end = float(numbers(evaluate("linf", "m.end(...data)", [alpha.tolist(), depth])))
            s = np.linspace(0, min(0.99 * end, 3.0), 60)
            mine = numbers(
                evaluate(
                    "linf",
                    "data[2].map((s) => m.mu.map((v, j) => m.weight(v, data[0][j], data[1], s)))",
                    [alpha.tolist(), depth, s.tolist()],
                )
            )
            result = flow([1.0, 2.0, 3.0], alpha, 1.0, method="linf-sam", depth=depth, s=s)
            np.testing.assert_allclose(mine, result.layers[0], rtol=1e-9, atol=1e-9)
            if depth > 2 and end < math.inf:
                assert end == pytest.approx(result.s_end, rel=1e-12)
            if depth > 1:
                assert evaluate("linf", "m.winner(...data)", [alpha.tolist(), depth]) == linf_limit(
                    [1.0, 2.0, 3.0], alpha, 1.0, depth
                )
