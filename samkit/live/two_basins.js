// The test function of samkit.landscapes.two_basins, its gradient, and the methods that walk on it.

const BASINS = [
  { m: 20, s: 30, weight: 0.7, heat: 1.8 ** 2 },
  { m: -20, s: 10, weight: 0.3, heat: 1.2 ** 2 },
];

const terms = ([m, s]) =>
  BASINS.map(
    (b) =>
      Math.log(b.weight) - (Math.log(b.s / s) + (s * s + (m - b.m) ** 2) / (2 * b.s * b.s) - 0.5) / b.heat,
  );

export const loss = (theta) => {
  if (!(theta[1] > 0)) return NaN;
  const [a, b] = terms(theta);
  const high = Math.max(a, b);
  return -(high + Math.log(Math.exp(a - high) + Math.exp(b - high)));
};

export const gradient = (theta) => {
  const [m, s] = theta;
  if (!(s > 0)) return [NaN, NaN];
  const value = -loss(theta);
  const shares = terms(theta).map((t) => Math.exp(t - value));
  const sum = (f) => BASINS.reduce((total, b, i) => total + (shares[i] * f(b)) / b.heat, 0);
  return [sum((b) => (m - b.m) / (b.s * b.s)), sum((b) => s / (b.s * b.s) - 1 / s)];
};

const add = (theta, direction, length) => [
  theta[0] + length * direction[0],
  theta[1] + length * direction[1],
];
const unit = (g) => {
  const size = Math.hypot(...g);
  return size > 0 ? [g[0] / size, g[1] / size] : [0, 0];
};

// The ascent point after k steps of rho / k each.
export const ascend = (theta, rho, k) => {
  let point = theta;
  for (let i = 0; i < k; i++) point = add(point, unit(gradient(point)), rho / k);
  return point;
};

// v(alpha), from v0 (alpha = 0) to v1 (alpha = 1) and on along the great circle.
export const slerp = (v0, v1, alpha) => {
  const psi =
    2 * Math.atan2(Math.hypot(v0[0] - v1[0], v0[1] - v1[1]), Math.hypot(v0[0] + v1[0], v0[1] + v1[1]));
  const sine = Math.sin(psi);
  if (sine < 1e-6) return v1;
  const [a, b] = [Math.sin((1 - alpha) * psi) / sine, Math.sin(alpha * psi) / sine];
  return [a * v0[0] + b * v1[0], a * v0[1] + b * v1[1]];
};

export const GRID = range(21).map((i) => i / 10);

// The direction that XSAM finds, as {alpha, v, psi}: the grid point with the highest loss at 2 rho.
export const search = (theta, rho, k) => {
  const point = ascend(theta, rho, k);
  const v0 = unit([point[0] - theta[0], point[1] - theta[1]]);
  const v1 = unit(gradient(point));
  const heights = GRID.map((alpha) => loss(add(theta, slerp(v0, v1, alpha), 2 * rho)));
  const best = heights.reduce((b, h, i) => (h > heights[b] || Number.isNaN(heights[b]) ? i : b), 0);
  return { alpha: GRID[best], v: slerp(v0, v1, GRID[best]), v0, v1 };
};

// One step with momentum; returns [theta, velocity, ascent point].
export const step = (method, theta, velocity, { rho, k, learningRate, momentum }) => {
  const away = method === "GD" ? theta : ascend(theta, rho, k);
  let g = gradient(away);
  if (method === "XSAM" && Math.hypot(...g) > 0) {
    const size = Math.hypot(...g);
    const { v } = search(theta, rho, k);
    g = [size * v[0], size * v[1]];
  }
  const speed = [momentum * velocity[0] + g[0], momentum * velocity[1] + g[1]];
  return [add(theta, speed, -learningRate), speed, away];
};

export const walk = (method, start, settings, steps) => {
  let [theta, velocity] = [start, [0, 0]];
  const visited = [];
  for (let i = 0; i <= steps; i++) {
    const [next, speed, away] = step(method, theta, velocity, settings);
    visited.push({ theta, away });
    [theta, velocity] = [next, speed];
    if (!(theta[1] > 0) || !(away[1] > 0)) break; // it left the domain
  }
  return visited;
};

export const SHARP = [-16.804743956699102, 12.80254353111201];
export const FLAT = [19.810063940435864, 29.936621031918705];
export const SADDLE = [0.3103362324785204, 22.499038304993626];

// --- The map ---

const M = [-45, 60];
const S = [1, 55];
const mapOf = (width, box) =>
  axes({ x: M, y: S, box: box ?? [46, 16, width - 14, 300], xlabel: "weight m", ylabel: "" });

// Level lines by marching squares: each cell contributes the pieces that cross it.
const LEVELS = [0.29, 0.31, 0.33, 0.36, 0.38, 0.3977, 0.42, 0.46, 0.52, 0.6, 0.75, 1, 1.5, 2.5];
const [COLUMNS, ROWS] = [64, 44];
const contours = (() => {
  const ms = linspace(...M, COLUMNS);
  const ss = linspace(...S, ROWS);
  const z = ss.map((s) => ms.map((m) => loss([m, s])));
  return LEVELS.map((level) => {
    const pieces = [];
    for (let i = 0; i + 1 < ROWS; i++)
      for (let j = 0; j + 1 < COLUMNS; j++) {
        const corners = [
          [i, j],
          [i, j + 1],
          [i + 1, j + 1],
          [i + 1, j],
        ];
        const cuts = [];
        corners.forEach(([a, b], c) => {
          const [p, q] = corners[(c + 1) % 4];
          const [u, v] = [z[a][b] - level, z[p][q] - level];
          if (u < 0 === v < 0) return;
          const t = u / (u - v);
          cuts.push([ms[b] + t * (ms[q] - ms[b]), ss[a] + t * (ss[p] - ss[a])]);
        });
        for (let c = 0; c + 1 < cuts.length; c += 2) pieces.push([cuts[c], cuts[c + 1]]);
      }
    return pieces;
  });
})();

const drawMap = (frame, id) =>
  frame.svg +
  frame.clip(
    contours
      .map((pieces) =>
        tag("path", {
          d: pieces
            .map(
              ([a, b]) =>
                `M${frame.X(a[0]).toFixed(1)} ${frame.Y(a[1]).toFixed(1)}L${frame.X(b[0]).toFixed(1)} ${frame.Y(b[1]).toFixed(1)}`,
            )
            .join(""),
          class: "axis",
          fill: "none",
          "stroke-width": 0.8,
        }),
      )
      .join(""),
    id,
  ) +
  [
    ["sharp", SHARP],
    ["flat", FLAT],
    ["saddle", SADDLE],
  ]
    .map(
      ([name, p]) =>
        label(frame.X(p[0]), frame.Y(p[1]) + 4, name === "saddle" ? "×" : "+", {
          "text-anchor": "middle",
          "font-weight": 700,
        }) + label(frame.X(p[0]), frame.Y(p[1]) + 20, name, { class: "tick", "text-anchor": "middle" }),
    )
    .join("") +
  label(frame.X(M[0]) + 6, 12, "weight s");
