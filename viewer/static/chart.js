// Curves over steps by uPlot: a click on a point, or Enter at it, leads to its step.
import uPlot from "./vendor/uplot.js";
import { html, useEffect, useRef, useState } from "./lib.js";
import { clamp, extent, moved, onKeys } from "./parts.js";
import { number } from "./text.js";

export const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];

// 0.0001, 0.0002, 0.0005, 0.001, ...
export const ROUND = Array.from({ length: 17 }, (_, at) => [1, 2, 5].map((one) => one * 10 ** (at - 4))).flat();

// The colour of a variable of the style sheet as it is now, by the theme.
export function colour(name) {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(${name})`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

// A pen for a cleared canvas, in pixels of the style sheet, with all that the screen has.
export function penOf(canvas) {
  const scale = devicePixelRatio || 1;
  Object.assign(canvas, { width: canvas.clientWidth * scale, height: canvas.clientHeight * scale });
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return pen;
}

// Calls `act` with an element now and whenever its size changes; returns what ends that.
function onSize(node, act) {
  const watch = new ResizeObserver(() => node.isConnected && act(node));
  watch.observe(node);
  return () => watch.disconnect();
}

// A ref for an element that `draw` draws, now and whenever its size changes.
export function useDrawn(draw, needs) {
  const ref = useRef(null);
  useEffect(() => ref.current && onSize(ref.current, draw), needs);
  return ref;
}

// What is drawn: nothing for a missing number, the edge of the range for one beyond it; an edge of null is none.
export const drawn = (values, [low, high] = []) =>
  Array.from(values, (value) => (Number.isFinite(value) ? clamp(value, low ?? -Infinity, high ?? Infinity) : null));

const faint = (name) => colour(name).replace(/rgb\((.*)\)/, "rgba($1, 0.18)");

// series: [{label, values, width?, colour?, dash?, scale? ("right": from 0, with an axis on the right), hasGaps?, isFilled?, isBars?, hidden?}], of which those of one scale share their limits.
// bands: [[label of the upper curve, of the lower one, colour?], ...]; told: what the caption says of x, chosen or the last;
// carries: between its points, a curve tells the last one.
export function Chart({
  x, steps = x, series, bands = [], onStep, height = 150, label, theme, range, told = (step) => `step ${step}`, carries,
}) {
  const holder = useRef(null);
  const plot = useRef(null);
  const [place, setPlace] = useState(null);
  const curves = series.map((one, at) => ({ ...one, colour: one.colour ?? COLOURS[at % COLOURS.length] }));
  const names = series.map((one) => one.label);
  const shape = JSON.stringify([names, series.map((one) => one.isBars), bands, theme, range]);
  // uPlot lets no click through that ends a drag.
  const open = () => plot.current?.cursor.idx != null && onStep?.(steps[plot.current.cursor.idx]);

  useEffect(() => {
    const grid = { stroke: colour("--line"), width: 1 };
    const axis = { stroke: colour("--dim"), grid, ticks: grid, font: "11px sans-serif" };
    const numbers = (_, ticks) => ticks.map((tick) => number(tick));
    const size = () => ({ width: Math.max(100, holder.current.clientWidth), height });
    const made = new uPlot({
      ...size(), legend: { show: false },
      cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { range }, right: { range: (_, low, high) => [0, high || 1] } },
      // No fraction of a step or a token stands at a tick.
      axes: [
        { ...axis, size: 32, incrs: x.every(Number.isInteger) ? ROUND.filter(Number.isInteger) : ROUND },
        { ...axis, size: 54, space: 24, values: numbers },
        ...(curves.some((one) => one.scale === "right") ? [{ ...axis, scale: "right", side: 1, size: 54, space: 24, grid: { show: false }, values: numbers }] : []),
      ],
      series: [{}, ...curves.map((one) => ({
        label: one.label, scale: one.scale ?? "y", stroke: colour(one.colour), width: one.width ?? 1.5, dash: one.dash, spanGaps: !one.hasGaps,
        points: { show: !one.isBars && one.values.filter(Number.isFinite).length < 3 },
        fill: one.isFilled && faint(one.colour), paths: one.isBars && uPlot.paths.bars({ size: [1] }),
      }))],
      bands: bands.map(([upper, lower, name]) => ({
        series: [upper, lower].map((one) => names.indexOf(one) + 1), fill: name ? faint(name) : colour("--band"),
      })),
      hooks: { setCursor: [(self) => setPlace(self.cursor.idx ?? null)] },
    }, null, holder.current);
    plot.current = made;
    setPlace(null);
    const rest = onSize(holder.current, () => made.setSize(size()));
    return () => { rest(); made.destroy(); };
  }, [shape]);

  useEffect(() => {
    plot.current.setData([x, ...series.map((one) => drawn(one.values, range))]);
  }, [shape, x, ...series.map((one) => one.values)]);

  const move = (by) => x.length && plot.current.setCursor({ left: plot.current.valToPos(x[moved(place, by, x.length)], "x"), top: 10 });
  const keys = { ArrowLeft: () => move(-1), ArrowRight: () => move(1), Enter: open };
  const at = place ?? x.length - 1;
  const lastOf = (values) => values.slice(0, at + 1).findLastIndex((value) => Number.isFinite(value));
  // A number of an older step says so.
  const shown = (values) => {
    const from = place === null || carries ? lastOf(values) : at;
    return html`<b>${number(values[from])}</b>
      ${from >= 0 && from < at && !carries && html`<span class="dim"> at ${told(steps[from], true)}</span>`}`;
  };
  return html`<figure class="chart">
    <div ref=${holder} class=${onStep ? "plot opens" : "plot"} tabindex="0" role="img" aria-label=${label} onClick=${open} onKeyDown=${onKeys(keys)}></div>
    <figcaption><span class="dim">${x.length ? told(steps[at], place !== null) : "no step yet"}</span>
      ${curves.map((one) => one.hidden || html`<span><${Key} ...${one} />${one.label} ${shown(one.values)}</span>`)}
    </figcaption>
  </figure>`;
}

// The colour of a curve, with its gaps.
export function Key({ colour, width, dash }) {
  const tone = colour.startsWith("--") ? `var(${colour})` : colour;
  const background = dash ? `repeating-linear-gradient(90deg, ${tone} 0 ${dash[0]}px, transparent 0 ${dash[0] + dash[1]}px)` : tone;
  return html`<i class=${width < 1 ? "key thin" : "key"} style=${{ background }}></i>`;
}

export function Spark({ values, width = 120, height = 24 }) {
  const finite = values.filter(Number.isFinite);
  const [low, high] = extent(finite);
  const points = finite.map((value, at) => `${(at / Math.max(1, finite.length - 1)) * width},${height - 2 - ((value - low) / (high - low || 1)) * (height - 4)}`);
  return html`<svg class="spark" width=${width} height=${height} aria-hidden="true"><polyline points=${points.join(" ")} /></svg>`;
}
