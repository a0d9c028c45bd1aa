// l_inf-SAM on a diagonal network: every coordinate is gradient descent, moved by rho.

export const mu = [1, 2, 3];
const rho = 1;

// When a coordinate meets its fate: at 0 if it starts below rho, at infinity if above (depth >= 3).
export const blowUp = (m, alpha, depth) =>
  depth > 2 && alpha > rho ? 1 / ((depth - 2) * m * (alpha - rho) ** (depth - 2)) : Infinity;

export const death = (m, alpha, depth) => {
  const below = rho - alpha;
  if (below <= 0 || depth === 1 || (depth > 2 && depth % 2)) return Infinity;
  if (depth === 2) return Math.log(rho / below) / m;
  return (below ** (2 - depth) - rho ** (2 - depth)) / ((depth - 2) * m);
};

// The weight of each layer at rescaled time s, before any blow-up of the others.
export const weight = (m, alpha, depth, s) => {
  const u = alpha - rho;
  if (depth === 1) return alpha + m * s;
  if (s >= blowUp(m, alpha, depth)) return Infinity;
  if (s >= death(m, alpha, depth)) return 0;
  if (depth === 2) return rho + u * Math.exp(m * s);
  if (u === 0) return rho;
  // u^(2 - L) falls at the rate (L - 2) mu; below rho only an odd depth lets u rise towards 0.
  const power = Math.abs(u) ** (2 - depth) - Math.sign(u) ** depth * (depth - 2) * m * s;
  return rho + Math.sign(u) * power ** (1 / (2 - depth));
};

// The first blow-up ends time: the others freeze where they are then.
export const end = (alpha, depth) => Math.min(...mu.map((m, j) => blowUp(m, alpha[j], depth)));

export const winner = (alpha, depth) => {
  if (depth === 1) return 2;
  const strength = mu.map((m, j) => (alpha[j] > rho ? m * (alpha[j] - rho) ** (depth - 2) : 0));
  const best = Math.max(...strength);
  return best > 0 ? strength.indexOf(best) : null;
};

const horizon = (state) => Math.min(end(state.alpha, state.depth), 2.5);
const frameOf = (state, width) =>
  axes({
    x: [0, horizon(state) * 1.02],
    y: [0, 3],
    box: [44, 26, width - 14, 270],
    xlabel: "rescaled time s",
    ylabel: "weight w of each layer",
  });
const DASHES = ["none", "7 3", "2 3"];

export const figure = {
  title: "l-infinity SAM: the start decides",
  state: { alpha: [1.4, 1.2, 0.8], depth: 2 },
  controls: [
    { key: "depth", label: "depth L", choices: [1, 2, 3, 4].map((depth) => [depth, String(depth)]) },
  ],
  move(state, key, x, y, width) {
    const alpha = [...state.alpha];
    alpha[Number(key)] = Math.round(clamp(frameOf(state, width).y(y), 0.05, 2) * 100) / 100;
    return { alpha };
  },
  view(state, width) {
    const { alpha, depth } = state;
    const frame = frameOf(state, width);
    const { X, Y } = frame;
    const stop = horizon(state);
    const times = linspace(0, stop, 400);
    const curves = mu.map((m, j) =>
      path(
        times.map((s) => [X(s), Y(Math.min(weight(m, alpha[j], depth, s), 50))]),
        { stroke: `var(--hue${j + 1})`, "stroke-width": 2.5, "stroke-dasharray": DASHES[j] },
      ),
    );
    const key = mu.map((m, j) =>
      label(52 + 84 * j, 14, `w${"₁₂₃"[j]}, μ = ${m}`, { style: `fill:var(--hue${j + 1})` }),
    );
    const svg =
      frame.svg.replace(label(44, 16, "weight w of each layer"), "") +
      line(X(0), Y(rho), width - 14, Y(rho), { stroke: "currentColor", "stroke-dasharray": "4 4" }) +
      label(width - 16, Y(rho) - 6, "ρ", { "text-anchor": "end" }) +
      frame.clip(curves.join(""), "linf-inside") +
      alpha.map((a, j) => dot(X(0), Y(a), 6, { fill: `var(--hue${j + 1})` })).join("") +
      key.join("") +
      label(width - 16, 14, width < 480 ? "w" : "weight w of each layer", { "text-anchor": "end" });
    const fate = (m, j) => {
      const [dies, bursts] = [death(m, alpha[j], depth), blowUp(m, alpha[j], depth)];
      const name = `w${"₁₂₃"[j]}`;
      if (depth === 1) return `${name} grows steadily`;
      if (dies < Infinity && dies <= end(alpha, depth)) return `${name} dies at s = ${show(dies)}`;
      if (bursts === end(alpha, depth) && bursts < Infinity) return `${name} blows up at s = ${show(bursts)}`;
      if (end(alpha, depth) < Infinity)
        return `${name} freezes at ${show(weight(m, alpha[j], depth, end(alpha, depth)))}`;
      if (alpha[j] === rho) return `${name} stays at ρ`;
      return alpha[j] > rho ? `${name} grows like exp(${m > 1 ? `${m} ` : ""}s)` : `${name} creeps back to ρ`;
    };
    const first = winner(alpha, depth);
    const says =
      `${mu.map(fate).join("; ")}. ` +
      (depth === 1
        ? "One layer has no thresholds: the direction is that of μ."
        : first === null
          ? "Nobody starts above ρ: the predictor stays bounded."
          : `The limit direction is feature ${first + 1}${first < 2 ? ", not the major one" : ", the major one"}.`);
    return {
      svg,
      says,
      height: 316,
      alt: `Three weights over rescaled time under l-infinity SAM with depth ${depth} and radius 1, started at ${alpha.map((a) => show(a)).join(", ")}. ${says}`,
      handles: alpha.map((a, j) => ({
        key: String(j),
        x: X(0),
        y: Y(a),
        text: `Start of weight ${j + 1} at ${show(a)}`,
      })),
    };
  },
};

export default live(figure);
