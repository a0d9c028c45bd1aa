// A ball of radius rho on chapter 1's loss of one weight: a narrow valley, and a wide one that is higher.

export const loss = (theta) =>
  1 -
  Math.exp(-((theta + 1.5) ** 2) / (2 * 0.1 ** 2)) -
  0.9 * Math.exp(-((theta - 1.5) ** 2) / (2 * 0.6 ** 2));

const golden = (f, a, b) => {
  const g = (Math.sqrt(5) - 1) / 2;
  let [c, d] = [b - g * (b - a), a + g * (b - a)];
  for (let i = 0; i < 80; i++) {
    if (f(c) < f(d)) [b, d, c] = [d, c, d - g * (d - a)];
    else [a, c, d] = [c, d, c + g * (b - c)];
  }
  return (a + b) / 2;
};

// The hill between the valleys: the only place where the worst point is not at the edge of the ball.
export const hill = golden((theta) => -loss(theta), -1.4, 0.2);

export const worst = (theta, rho) => {
  const places = [theta - rho, theta + rho];
  if (Math.abs(hill - theta) < rho) places.push(hill);
  return places.reduce((best, place) => (loss(place) > loss(best) ? place : best));
};

// The lowest worst case near each minimum.
export const preferred = (rho) => {
  const worstCase = (theta) => loss(worst(theta, rho));
  const [narrow, wide] = [
    [-1.8, -1.2],
    [0.5, 2.5],
  ].map(([a, b]) => worstCase(golden(worstCase, a, b)));
  return { narrow, wide };
};

export const figure = {
  title: "A ball on a loss with a narrow and a wide valley",
  state: { theta: -1.5, rho: 0.3 },
  controls: [
    { key: "theta", label: "centre θ", min: -3, max: 3.5, step: 0.01 },
    { key: "rho", label: "radius ρ", min: 0, max: 1, step: 0.01 },
  ],
  move: (state, key, x, y, width) => ({ theta: clamp(plane(width).x(x), -3, 3.5) }),
  view(state, width) {
    const { theta, rho } = state;
    const frame = plane(width);
    const { X, Y } = frame;
    const grid = linspace(-3.2, 3.7, 691);
    const place = worst(theta, rho);
    const { narrow, wide } = preferred(rho);
    const svg =
      frame.svg +
      `<rect x="${X(theta - rho)}" y="${Y(1.1)}" width="${X(theta + rho) - X(theta - rho)}" height="${Y(0) - Y(1.1)}" fill="var(--sam)" fill-opacity=".14"/>` +
      path(
        grid.map((t) => [X(t), Y(loss(t))]),
        { stroke: "currentColor", "stroke-width": 2 },
      ) +
      path(
        grid.map((t) => [X(t), Y(loss(worst(t, rho)))]),
        { stroke: "var(--sam)", "stroke-width": 2, "stroke-dasharray": "6 3" },
      ) +
      line(X(theta), Y(loss(theta)), X(theta), Y(loss(place)), { stroke: "var(--sam)" }) +
      line(X(theta), Y(loss(place)), X(place), Y(loss(place)), { stroke: "var(--sam)" }) +
      dot(X(place), Y(loss(place)), 5, { fill: "var(--sam)" }) +
      dot(X(theta), Y(loss(theta)), 5, { fill: "currentColor" }) +
      label(X(-3.1), Y(1.03) - 8, "— loss L") +
      label(X(-3.1) + 78, Y(1.03) - 8, "- - worst case within ρ", { style: "fill:var(--sam)" });
    const verdict =
      Math.abs(narrow - wide) < 1e-6
        ? "both valleys equally"
        : narrow < wide
          ? "the narrow valley"
          : "the wide valley";
    const says =
      `At θ = ${show(theta)} the loss is ${Math.abs(loss(theta)).toFixed(3)}; the worst within ρ = ${show(rho)} is ${show(loss(place))}, ` +
      `at ${show(place)}. The best worst case is ${show(narrow)} in the narrow valley and ${show(wide)} in the wide one: it prefers ${verdict}.`;
    return {
      svg,
      says,
      height: 300,
      alt: `Loss of one weight with a narrow valley at −1.5 and a wide one at 1.5, and the worst case within the radius. ${says}`,
      handles: [
        { key: "centre", x: X(theta), y: Y(loss(theta)), text: `Centre of the ball at θ = ${show(theta)}` },
      ],
    };
  },
};

const plane = (width) =>
  axes({ x: [-3.2, 3.7], y: [0, 1.12], box: [44, 26, width - 14, 250], xlabel: "weight θ", ylabel: "loss" });

export default live(figure);
