// Shared by the live figures. A figure is data and pure functions; this file draws it and listens.
// Python puts it in front of each figure's own file, and the style sheet as STYLE in front of both, so that what
// runs is one module without imports.

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const range = (n) => Array.from({ length: n }, (_, i) => i);
const linspace = (a, b, n) => range(n).map((i) => a + ((b - a) * i) / (n - 1));
const last = (list) => list[list.length - 1];

// A power of ten, as it is written.
const power = (value) =>
  `10${String(Math.round(Math.log10(value))).replace(/./g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻")}`;

// A number for people: three significant digits, the sign a minus, no exponent where none is needed.
const show = (value, digits = 3) => {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "undefined" : value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size > 0 && (size < 1e-3 || size >= 1e5)) {
    const exponent = Math.floor(Math.log10(size));
    return `${(value / 10 ** exponent).toFixed(1)}·${power(10 ** exponent)}`.replace("-", "−");
  }
  return String(Number(value.toPrecision(digits))).replace("-", "−");
};

// --- Pictures as strings of SVG, so that they can be made and tested without a browser ---

const escape = (text) =>
  String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const tag = (name, attributes, inner = "") =>
  `<${name}${Object.entries(attributes)
    .map(
      ([key, value]) => ` ${key}="${escape(typeof value === "number" ? Number(value.toFixed(2)) : value)}"`,
    )
    .join("")}>${inner}</${name}>`;
const label = (x, y, text, attributes = {}) => tag("text", { x, y, ...attributes }, escape(text));
const line = (x1, y1, x2, y2, attributes) => tag("line", { x1, y1, x2, y2, ...attributes });
const dot = (cx, cy, r, attributes) => tag("circle", { cx, cy, r, ...attributes });

// A broken line through the points whose coordinates are numbers.
const path = (points, attributes) => {
  let pen = "M";
  const d = points
    .map(([x, y]) => {
      if (!Number.isFinite(x) || !Number.isFinite(y)) return ((pen = "M"), "");
      const piece = `${pen}${x.toFixed(2)} ${y.toFixed(2)}`;
      pen = "L";
      return piece;
    })
    .join("");
  return tag("path", { d, fill: "none", ...attributes });
};

const ticks = (low, high, count) => {
  const raw = (high - low) / count;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = unit * [1, 2, 5, 10].find((m) => m * unit >= raw * 0.999);
  return range(Math.floor(high / step + 1e-9) - Math.ceil(low / step - 1e-9) + 1).map(
    (i) => (Math.ceil(low / step - 1e-9) + i) * step,
  );
};

// A frame of axes over a box of the picture: maps to pixels and back, and draws itself.
const axes = ({ x, y, box, xlabel, ylabel, logy = false, xticks, yticks }) => {
  const [left, top, right, bottom] = box;
  const level = logy ? Math.log10 : (v) => v;
  const [low, high] = y.map(level);
  const X = (v) => left + ((v - x[0]) / (x[1] - x[0])) * (right - left);
  const Y = (v) => bottom - ((level(v) - low) / (high - low)) * (bottom - top);
  const across = xticks ?? ticks(x[0], x[1], (right - left) / 80);
  const up =
    yticks ??
    (logy
      ? ticks(low, high, (bottom - top) / 40)
          .filter(Number.isInteger)
          .map((p) => 10 ** p)
      : ticks(y[0], y[1], (bottom - top) / 50));
  const svg =
    up
      .map(
        (v) =>
          line(left, Y(v), right, Y(v), { class: "grid" }) +
          label(left - 6, Y(v) + 4, logy ? power(v) : show(v), { class: "tick", "text-anchor": "end" }),
      )
      .join("") +
    across
      .map(
        (v) =>
          line(X(v), bottom, X(v), bottom + 4, { class: "axis" }) +
          label(X(v), bottom + 18, show(v), { class: "tick", "text-anchor": "middle" }),
      )
      .join("") +
    line(left, bottom, right, bottom, { class: "axis" }) +
    line(left, top, left, bottom, { class: "axis" }) +
    label((left + right) / 2, bottom + 36, xlabel, { "text-anchor": "middle" }) +
    label(left, top - 10, ylabel);
  return {
    X,
    Y,
    x: (px) => x[0] + ((px - left) / (right - left)) * (x[1] - x[0]),
    y: (py) => (logy ? (v) => 10 ** v : (v) => v)(low + ((bottom - py) / (bottom - top)) * (high - low)),
    svg,
    clip: (inner, id) =>
      `<clipPath id="${id}"><rect x="${left}" y="${top}" width="${right - left}" height="${bottom - top}"/></clipPath><g clip-path="url(#${id})">${inner}</g>`,
  };
};

const make = (name, attributes = {}, ...children) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
};

const slider = (control, set) => {
  const value = make("b", { "aria-hidden": "true" });
  const input = make("input", {
    type: "range",
    min: control.min,
    max: control.max,
    step: control.step,
    oninput: () => set({ [control.key]: Number(input.value) }),
  });
  const element = make("label", {}, make("span", {}, `${control.label} = `, value), input);
  return {
    element,
    update: (state) => {
      const text = (control.show ?? show)(state[control.key]);
      input.value = state[control.key];
      input.setAttribute("aria-valuetext", text);
      value.textContent = text;
    },
  };
};

const choice = (control, set) => {
  const input = make(
    "select",
    { onchange: () => set({ [control.key]: control.choices[input.selectedIndex][0] }) },
    ...control.choices.map(([, text]) => make("option", {}, text)),
  );
  return {
    element: make("label", {}, make("span", {}, control.label), input),
    update: (state) => {
      input.selectedIndex = control.choices.findIndex(([value]) => value === state[control.key]);
    },
  };
};

// Play, pause and single steps through state.step = 0 ... figure.length(state).
const player = (figure, get, set) => {
  let timer = null;
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const stop = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  };
  const advance = (count) => {
    const end = figure.length(get());
    const step = Math.min(get().step + count, end);
    set({ step });
    if (step === end) stop();
  };
  const play = make(
    "button",
    {
      type: "button",
      onclick: () => {
        if (timer) return stop();
        if (get().step >= figure.length(get())) set({ step: 0 });
        if (still.matches) return advance(Infinity); // who asked for less motion sees the end at once
        play.textContent = "Pause";
        timer = setInterval(() => advance(1), 60);
      },
    },
    "Play",
  );
  const buttons = [
    play,
    make("button", { type: "button", onclick: () => (stop(), advance(1)) }, "Step"),
    make("button", { type: "button", onclick: () => (stop(), set({ step: 0 })) }, "Back to start"),
  ];
  return {
    element: make("div", { class: "player", role: "group", "aria-label": "Playback" }, ...buttons),
    update: () => {},
    stop,
  };
};

// The module's default export: what draws a figure into an element and keeps it in step with a model.
const live = (figure) => ({
  render({ model, el }) {
    let state = { ...figure.state, ...model.get("state") };
    let width = 0;
    const get = () => state;
    const set = (patch) => {
      state = { ...state, ...patch };
      model.set("state", state);
      model.save_changes();
      draw();
    };
    const picture = make("div", { class: "picture" });
    const says = make("p", { class: "says", role: "status" });
    const widgets = figure.controls.map((control) => (control.choices ? choice : slider)(control, set));
    if (figure.length) widgets.push(player(figure, get, set));
    const root = make(
      "div",
      { class: "samkit-live", role: "group", "aria-label": figure.title },
      make("style", {}, STYLE),
      picture,
      make("div", { class: "controls" }, ...widgets.map((w) => w.element)),
      says,
    );
    const handles = new Map();

    const grip = (key) => {
      const move = (x, y) => set(figure.move(state, key, x, y, width));
      const button = make("button", {
        type: "button",
        class: "handle",
        onpointerdown: (event) => {
          button.setPointerCapture(event.pointerId);
          event.preventDefault();
          button.focus();
        },
        onpointermove: (event) => {
          if (!button.hasPointerCapture(event.pointerId)) return;
          const box = picture.getBoundingClientRect();
          move(event.clientX - box.left, event.clientY - box.top);
        },
        onkeydown: (event) => {
          const away = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[
            event.key
          ];
          if (!away) return;
          event.preventDefault();
          const [x, y] = handles.get(key).at;
          const pixels = event.shiftKey ? 20 : 4;
          move(x + pixels * away[0], y + pixels * away[1]);
        },
      });
      picture.append(button);
      return button;
    };

    const draw = () => {
      width = Math.round(picture.clientWidth) || 700;
      const view = figure.view(state, width);
      picture.querySelector("svg")?.remove();
      picture.insertAdjacentHTML("afterbegin", wrap(view, width));
      for (const { key, x, y, text } of view.handles ?? []) {
        if (!handles.has(key)) handles.set(key, { button: grip(key) });
        const handle = handles.get(key);
        handle.at = [x, y];
        handle.button.style.left = `${x}px`;
        handle.button.style.top = `${y}px`;
        handle.button.setAttribute("aria-label", `${text}. The arrow keys move it.`);
      }
      says.textContent = view.says;
      for (const widget of widgets) widget.update(state);
    };

    el.replaceChildren(root);
    draw();
    const watcher = new ResizeObserver(() => Math.round(picture.clientWidth) !== width && draw());
    watcher.observe(picture);
    const follow = () => {
      if (JSON.stringify(model.get("state")) === JSON.stringify(state)) return;
      state = { ...figure.state, ...model.get("state") };
      draw();
    };
    model.on("change:state", follow);
    return () => {
      watcher.disconnect();
      for (const widget of widgets) widget.stop?.();
    };
  },
});

const wrap = (view, width) =>
  `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${view.height}" role="img" aria-label="${escape(view.alt)}">${view.svg}</svg>`;

// What stands where no script runs, and on paper.
export const picture = (figure) => {
  const view = figure.view(figure.state, 700);
  return `<div class="samkit-live">${wrap(view, 700)}<p class="says">${escape(view.says)}</p></div>`;
};
