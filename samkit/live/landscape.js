// A walk on the landscape with a sharp and a flat minimum, step by step.

const STEPS = 150;
const SETTINGS = { learningRate: 20, momentum: 0.9 };
const COLOR = { GD: "var(--gd)", SAM: "var(--sam)", XSAM: "var(--xsam)" };

const known = new Map();
const walkOf = (state) => {
  const key = [state.method, ...state.start, state.rho, state.k].join(" ");
  if (!known.has(key)) {
    if (known.size > 20) known.clear();
    known.set(key, walk(state.method, state.start, { rho: state.rho, k: state.k, ...SETTINGS }, STEPS));
  }
  return known.get(key);
};

const nearest = (theta) => {
  const places = {
    "near the sharp minimum": SHARP,
    "near the flat minimum": FLAT,
    "near the saddle": SADDLE,
  };
  const [name, distance] = Object.entries(places)
    .map(([key, p]) => [key, Math.hypot(theta[0] - p[0], theta[1] - p[1])])
    .reduce((a, b) => (b[1] < a[1] ? b : a));
  return `${name}, at a distance of ${show(distance)}`;
};

export const figure = {
  title: "A walk on a landscape with a sharp and a flat minimum",
  state: { start: [-30, 20], method: "SAM", rho: 10, k: 1, step: 0 },
  controls: [
    {
      key: "method",
      label: "method",
      choices: [
        ["GD", "gradient descent"],
        ["SAM", "SAM"],
        ["XSAM", "XSAM"],
      ],
    },
    { key: "rho", label: "radius ρ", min: 0.5, max: 16, step: 0.5 },
    { key: "k", label: "ascent steps k", min: 1, max: 5, step: 1 },
  ],
  length: (state) => walkOf(state).length - 1,
  move(state, key, x, y, width) {
    const frame = mapOf(width);
    return {
      start: [clamp(frame.x(x), -44, 59), clamp(frame.y(y), 2, 54)].map((v) => Math.round(v * 10) / 10),
      step: 0,
    };
  },
  view(state, width) {
    const frame = mapOf(width);
    const visited = walkOf(state);
    const step = Math.min(state.step, visited.length - 1);
    const { theta, away } = visited[step];
    const pixel = ([m, s]) => [frame.X(m), frame.Y(s)];
    const color = COLOR[state.method];
    const rest = visited.slice(step).map((v) => pixel(v.theta));
    const svg =
      drawMap(frame, "landscape-map") +
      frame.clip(
        path(rest, { stroke: color, "stroke-opacity": 0.35, "stroke-width": 1.5 }) +
          path(
            visited.slice(0, step + 1).map((v) => pixel(v.theta)),
            { stroke: color, "stroke-width": 2.5 },
          ) +
          (state.method === "GD"
            ? ""
            : path([pixel(theta), pixel(away)], {
                stroke: color,
                "stroke-width": 2,
                "stroke-dasharray": "4 3",
              }) + dot(...pixel(away), 4, { fill: "none", stroke: color, "stroke-width": 2 })),
        "landscape-walk",
      ) +
      dot(...pixel(theta), 6, { fill: color });
    const left = visited.length <= STEPS;
    const end = last(visited).theta;
    const says =
      `Step ${step} of ${visited.length - 1}: at (${show(theta[0])}, ${show(theta[1])}) the loss is ${show(loss(theta))}` +
      (state.method === "GD" ? ". " : `, and ${show(loss(away))} at the ascent point. `) +
      (left ? "The walk leaves the domain s > 0." : `It ends ${nearest(end)}.`);
    return {
      svg,
      says,
      height: 344,
      alt: `Level lines of a loss with a sharp minimum at lower left and a flat one at upper right, and the walk of ${state.method}. ${says}`,
      handles: [
        {
          key: "start",
          x: frame.X(state.start[0]),
          y: frame.Y(state.start[1]),
          text: `Start at m = ${show(state.start[0])}, s = ${show(state.start[1])}`,
        },
      ],
    };
  },
};

export default live(figure);
