// One step seen from above: where g0, g1 and XSAM's v(alpha) point on the ball, and the loss along its edge.

const TURN = 2 * Math.PI;

// The highest point of the circle: the best of 720 angles, then golden section around it.
export const highest = (theta, rho) => {
  const height = (angle) => loss(add(theta, [Math.cos(angle), Math.sin(angle)], rho));
  const angles = range(720).map((i) => (i * TURN) / 720);
  const best = angles.reduce((a, b) => (height(b) > height(a) || Number.isNaN(height(a)) ? b : a));
  const g = (Math.sqrt(5) - 1) / 2;
  let [low, high] = [best - TURN / 720, best + TURN / 720];
  for (let i = 0; i < 60; i++) {
    const [c, d] = [high - g * (high - low), low + g * (high - low)];
    if (height(c) > height(d)) high = d;
    else low = c;
  }
  return (low + high) / 2;
};

const angleOf = (v) => Math.atan2(v[1], v[0]);
const MARKS = [
  { key: "g0", text: "g₀", color: "var(--gd)" },
  { key: "g1", text: "g₁", color: "var(--sam)" },
  { key: "v", text: "v(α*)", color: "var(--xsam)" },
  { key: "top", text: "maximum", color: "var(--hue3)" },
];

export const directions = (theta, rho, k) => {
  const { alpha, v, v1 } = search(theta, rho, k);
  return { g0: angleOf(gradient(theta)), g1: angleOf(v1), v: angleOf(v), top: highest(theta, rho), alpha };
};

const mapBox = (width) => [46, 16, width - 14, 270];

export const figure = {
  title: "The ball of one step",
  state: { theta: [-12, 24], rho: 8, k: 1 },
  controls: [
    { key: "rho", label: "radius ρ", min: 0.5, max: 16, step: 0.5 },
    { key: "k", label: "ascent steps k", min: 1, max: 5, step: 1 },
  ],
  move(state, key, x, y, width) {
    const frame = mapOf(width, mapBox(width));
    return {
      theta: [clamp(frame.x(x), -44, 59), clamp(frame.y(y), 2, 54)].map((v) => Math.round(v * 10) / 10),
    };
  },
  view(state, width) {
    const { theta, rho, k } = state;
    const frame = mapOf(width, mapBox(width));
    const found = directions(theta, rho, k);
    const height = (angle) => loss(add(theta, [Math.cos(angle), Math.sin(angle)], rho));
    const circle = linspace(0, TURN, 145).map((a) => add(theta, [Math.cos(a), Math.sin(a)], rho));
    const pixel = ([m, s]) => [frame.X(m), frame.Y(s)];
    const arrows = MARKS.map(({ key, color }, i) =>
      path([pixel(theta), pixel(add(theta, [Math.cos(found[key]), Math.sin(found[key])], rho))], {
        stroke: color,
        "stroke-width": 2.5,
        "stroke-dasharray": ["7 3", "none", "8 2 2 2", "2 3"][i],
      }),
    );
    const angles = linspace(0, 360, 361);
    const heights = angles.map((a) => height((a * Math.PI) / 180));
    const finite = heights.filter(Number.isFinite);
    const [low, high] = [Math.min(...finite), Math.max(...finite)];
    const gap = high - low || 1;
    const degrees = (a) => ((((a * 180) / Math.PI) % 360) + 360) % 360;
    const curve = axes({
      x: [0, 360],
      y: [low - 0.08 * gap, high + 0.12 * gap],
      box: [46, 360, width - 14, 520],
      xlabel: "angle on the circle of radius ρ (degrees)",
      ylabel: "",
      xticks: [0, 90, 180, 270, 360],
    });
    const marks = MARKS.map(({ key, color }, i) =>
      dot(curve.X(degrees(found[key])), curve.Y(height(found[key])), [7, 5.5, 4, 2.5][i], {
        fill: color,
        stroke: "none",
      }),
    );
    const keys = MARKS.map(({ text, color }, i) =>
      label(46 + ((width - 70) / 4) * i, 330, `● ${text}`, { style: `fill:${color}` }),
    );
    const svg =
      drawMap(frame, "ball-map") +
      frame.clip(
        path(circle.map(pixel), { stroke: "currentColor", "stroke-width": 1.5 }) + arrows.join(""),
        "ball-arrows",
      ) +
      dot(...pixel(theta), 5, { fill: "currentColor" }) +
      curve.svg +
      label(50, 352, "loss on the circle") +
      path(
        angles.map((a, i) => [curve.X(a), curve.Y(heights[i])]),
        { stroke: "currentColor", "stroke-width": 2 },
      ) +
      marks.join("") +
      keys.join("");
    const here = loss(theta);
    const share = (angle) => `${show((100 * (height(angle) - here)) / (height(found.top) - here))} %`;
    const says =
      `Of the largest rise on the circle, g₀ finds ${share(found.g0)}, g₁ ${share(found.g1)}, ` +
      `and v(α*), with α* = ${show(found.alpha)} found at 2ρ, ${share(found.v)}.` +
      (finite.length < heights.length ? " Part of the circle lies outside the domain s > 0." : "");
    return {
      svg,
      says,
      height: 564,
      alt: `Above, level lines, a circle and the directions g0, g1, v(alpha*) and the highest point; below, the loss along the circle. ${says}`,
      handles: [
        {
          key: "theta",
          x: frame.X(theta[0]),
          y: frame.Y(theta[1]),
          text: `Weights at m = ${show(theta[0])}, s = ${show(theta[1])}`,
        },
      ],
    };
  },
};

export default live(figure);
