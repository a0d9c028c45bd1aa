// l_2-SAM on a diagonal network of two equal layers: the closed form, and its one differential equation.

// log p_j, where beta_j = p_j^2 / 2, in units of rho.
export const logP = (mu, ratio, s, Q) => mu.map((m) => Math.log(Math.SQRT2 * ratio) + m * s - m * m * Q);
export const norm = (mu, ratio, s, Q) =>
  Math.hypot(...logP(mu, ratio, s, Q).map((l, j) => mu[j] * Math.exp(l)));

// dQ/ds = 1/n, walked in a clock that stands still neither where n is small nor where it is large.
const velocity = (mu, ratio, s, Q) => {
  const n = norm(mu, ratio, s, Q) / mu[0];
  return n === Infinity ? [1, 0] : [n / (1 + n), 1 / (mu[0] * (1 + n))];
};

const advance = (mu, ratio, [s, Q], h) => {
  const at = (k, f) => velocity(mu, ratio, s + f * h * k[0], Q + f * h * k[1]);
  const k1 = velocity(mu, ratio, s, Q);
  const k2 = at(k1, 0.5);
  const k3 = at(k2, 0.5);
  const k4 = at(k3, 1);
  return [0, 1].map((i) => [s, Q][i] + (h / 6) * (k1[i] + 2 * k2[i] + 2 * k3[i] + k4[i]));
};

// Times s and Q until s reaches the end or everything has died; the step is 0.004 of the fastest rate.
export const solve = (mu, ratio, stop) => {
  const h = 0.004 / last(mu);
  const points = [[0, 0]];
  while (last(points)[0] < stop && points.length < 40000) {
    const next = advance(mu, ratio, last(points), h);
    points.push(next);
    if (norm(mu, ratio, ...next) < 1e-7 * mu[0]) break;
  }
  return points;
};

// n falls at most once: as soon as it rises, it rises for ever. Inside the ball of radius rho all dies.
export const collapses = (mu, ratio) => {
  let state = [0, 0];
  for (;;) {
    const squares = logP(mu, ratio, ...state).map((l) => Math.exp(2 * l));
    const n = Math.sqrt(squares.reduce((sum, p, j) => sum + mu[j] ** 2 * p, 0));
    const rate = squares.reduce((sum, p, j) => sum + mu[j] ** 2 * p * (mu[j] - mu[j] ** 2 / n), 0);
    if (rate >= 0) return false;
    if (squares.reduce((a, b) => a + b) <= 1) return true;
    state = advance(mu, ratio, state, 0.02 / last(mu));
  }
};

export const criticalScale = (mu) => {
  let [low, high] = [1 / Math.sqrt(2 * mu.length), Math.SQRT1_2];
  for (let i = 0; i < 30; i++) {
    const middle = (low + high) / 2;
    if (collapses(mu, middle)) low = middle;
    else high = middle;
  }
  return (low + high) / 2;
};

export const majorFirst = (mu) => (mu[mu.length - 2] + last(mu)) / (Math.SQRT2 * Math.hypot(...mu));

const features = (state) => [1, 2, state.major];
const DASHES = ["none", "7 3", "2 3"];
const END = 8;
const known = new Map();
const path_of = (state) => {
  const key = `${state.ratio} ${state.major}`;
  if (!known.has(key)) {
    if (known.size > 20) known.clear();
    const mu = features(state);
    known.set(key, { points: solve(mu, state.ratio, END), c: criticalScale(mu) });
  }
  return known.get(key);
};
const frameOf = (width) =>
  axes({
    x: [0, END],
    y: [1e-4, 1e6],
    logy: true,
    box: [52, 46, width - 14, 230],
    xlabel: "rescaled time s",
    ylabel: "",
    yticks: [1e-4, 1e-2, 1, 100, 1e4, 1e6],
  });

export const figure = {
  title: "l-2 SAM: minor first, major last",
  state: { ratio: 0.5, major: 3, s: 1.5 },
  controls: [
    { key: "ratio", label: "initial scale α/ρ", min: 0.38, max: 1.1, step: 0.002 },
    { key: "major", label: "major feature μ₃", min: 2.2, max: 5, step: 0.1 },
    { key: "s", label: "time s", min: 0, max: END, step: 0.02 },
  ],
  move: (state, key, x, y, width) => ({ s: clamp(frameOf(width).x(x), 0, END) }),
  view(state, width) {
    const mu = features(state);
    const { points, c } = path_of(state);
    const dead = points.length > 1 && last(points)[0] < END && norm(mu, state.ratio, ...last(points)) < 1;
    const frame = frameOf(width);
    const { X, Y } = frame;
    const thin = points.filter((_, i) => i % 8 === 0);
    const beta = (s, Q) => logP(mu, state.ratio, s, Q).map((l) => Math.exp(2 * l) / 2);
    const curves = mu.map((m, j) =>
      path(
        thin.map(([s, Q]) => [X(s), Y(clamp(beta(s, Q)[j], 1e-8, 1e9))]),
        { stroke: `var(--hue${j + 1})`, "stroke-width": 2.5, "stroke-dasharray": DASHES[j] },
      ),
    );
    const gone = dead && state.s >= last(points)[0];
    const now = gone ? last(points) : (points.find(([s]) => s >= state.s) ?? last(points));
    const n = norm(mu, state.ratio, ...now);
    const values = beta(...now);
    const leader = values.indexOf(Math.max(...values));

    // The growth law: rate = mu - mu^2/(n/rho), with the three features on it.
    const top = 300;
    const widest = Math.max(5.2, last(mu) + 0.3);
    const law = axes({
      x: [0, widest],
      y: [-3, 2],
      box: [52, top, width - 14, top + 170],
      xlabel: "feature strength μ",
      ylabel: "",
    });
    const rate = (m) => m - (m * m) / n;
    const parabola = path(
      linspace(0, widest, 200).map((m) => [law.X(m), law.Y(rate(m))]),
      { stroke: "currentColor", "stroke-width": 2 },
    );
    const features_on_it = mu.map(
      (m, j) =>
        dot(law.X(m), law.Y(clamp(rate(m), -3, 2)), 6, { fill: `var(--hue${j + 1})` }) +
        label(law.X(m) + 8, law.Y(clamp(rate(m), -3, 2)) - 8, `μ${"₁₂₃"[j]}`, {
          style: `fill:var(--hue${j + 1})`,
        }),
    );
    const third = majorFirst(mu);
    const regime =
      state.ratio <= c ? "collapse" : state.ratio < third ? "minor first, major last" : "major first";
    const svg =
      frame.svg +
      frame.clip(curves.join(""), "amplification-inside") +
      line(X(state.s), 46, X(state.s), 230, { stroke: "currentColor", "stroke-dasharray": "3 3" }) +
      mu
        .map((m, j) => label(60 + 74 * j, 36, `β${"₁₂₃"[j]}/ρ²`, { style: `fill:var(--hue${j + 1})` }))
        .join("") +
      label(width - 16, 16, regime, { "text-anchor": "end", "font-weight": 700 }) +
      law.svg +
      line(law.X(0), law.Y(0), law.X(widest), law.Y(0), { class: "axis" }) +
      (gone ? "" : law.clip(parabola, "law-inside") + features_on_it.join("")) +
      label(60, top - 8, "growth rate of each weight, d log w / ds");
    const says =
      `α/ρ = ${show(state.ratio)}; collapse up to ${show(c, 4)}, major first from ${show(third, 4)}: ${regime}. ` +
      (gone
        ? `Everything has died, at s = ${show(last(points)[0])}.`
        : `At s = ${show(now[0])}, n/ρ = ${show(n)}` +
          (now[0] > 0 ? ` and feature ${leader + 1} leads.` : " and all weights are equal."));
    return {
      svg,
      says,
      height: top + 214,
      alt: `Above, the three coefficients over rescaled time; below, the growth rate against feature strength, a parabola. ${says}`,
      handles: [{ key: "time", x: X(state.s), y: 230, text: `Time s = ${show(state.s)}` }],
    };
  },
};

export default live(figure);
