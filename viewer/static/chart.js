// Curves over steps by uPlot: a click on a point, or Enter at it, leads to its step.
import uPlot from "./vendor/uplot.js";
import { html, useEffect, useRef, useState } from "./lib.js";
import { number } from "./text.js";

export const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];

// No fraction of a step, a token or a second stands at a tick.
const STEPS_OF_TICKS = Array.from({ length: 13 }, (_, at) => [1, 2, 5].map((one) => one * 10 ** at)).flat();

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

// A ref for an element that `draw` draws, now and whenever its size changes.
export function useDrawn(draw, needs) {
  const ref = useRef(null);
  useEffect(() => {
    const node = ref.current;
    if (!node) return undefined;
    const redraw = () => node.isConnected && draw(node);
    redraw();
    const watch = new ResizeObserver(redraw);
    watch.observe(node);
    return () => watch.disconnect();
  }, needs);
  return ref;
}

// What is drawn: nothing for a missing number, the edge of the range for one beyond it; an edge of null is none.
export const drawn = (values, [low, high] = []) => Array.from(values, (value) => (Number.isFinite(value) ? Math.max(low ?? -Infinity, Math.min(high ?? Infinity, value)) : null));

// series: [{label, values, width?, colour?, dash?}]; bands: [[label of the upper curve, of the lower one, colour?], ...].
// told: what the caption says of x, chosen or the last; carries: between its points, a curve tells the last one.
export function Chart({ x, steps = x, series, band, bands = band ? [band] : [], onStep, height = 150, label, theme, range, told = (step) => `step ${step}`, carries }) {
  const holder = useRef(null);
  const plot = useRef(null);
  const [place, setPlace] = useState(null);
  const shape = JSON.stringify([series.map((one) => one.label), bands, theme, range]);
  const open = () => plot.current?.cursor.idx != null && onStep?.(steps[plot.current.cursor.idx]);
  const follow = useRef(open);
  follow.current = open;

  useEffect(() => {
    const names = series.map((one) => one.label);
    const grid = { stroke: colour("--line"), width: 1 };
    const axis = { stroke: colour("--dim"), grid, ticks: grid, font: "11px sans-serif" };
    const made = new uPlot({
      width: Math.max(100, holder.current.clientWidth), height, legend: { show: false },
      cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: range ? { range: (_, least, most) => { const own = uPlot.rangeNum(least ?? 0, most ?? 1, 0.1, true); return range.map((edge, side) => edge ?? own[side]); } } : {} },
      axes: [{ ...axis, size: 32, incrs: STEPS_OF_TICKS }, { ...axis, size: 54, space: 24, values: (_, ticks) => ticks.map((tick) => number(tick)) }],
      series: [{}, ...series.map((one, at) => ({
        label: one.label, stroke: colour(one.colour ?? COLOURS[at % COLOURS.length]), width: one.width ?? 1.5, dash: one.dash, spanGaps: true, points: { show: one.values.filter(Number.isFinite).length < 3 },
      }))],
      bands: bands.map(([upper, lower, name]) => ({ series: [upper, lower].map((one) => names.indexOf(one) + 1), fill: name ? colour(name).replace(/rgb\((.*)\)/, "rgba($1, 0.18)") : colour("--band") })),
      hooks: { setCursor: [(self) => setPlace(self.cursor.idx ?? null)] },
    }, [x, ...series.map((one) => drawn(one.values, range))], holder.current);
    plot.current = made;
    setPlace(null);
    let pressed = null;
    made.over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
    made.over.addEventListener("click", (event) => Math.abs(event.clientX - pressed) < 4 && follow.current());
    const node = holder.current;
    const watch = new ResizeObserver(() => node.isConnected && made.setSize({ width: Math.max(100, node.clientWidth), height }));
    watch.observe(node);
    return () => { watch.disconnect(); made.destroy(); };
  }, [shape]);

  useEffect(() => { plot.current?.setData([x, ...series.map((one) => drawn(one.values, range))]); }, [x, x.length, ...series.map((one) => one.values)]);

  const onKey = (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Enter") open();
    if (!move || !x.length) return;
    const next = Math.max(0, Math.min(x.length - 1, (place ?? (move > 0 ? -1 : x.length)) + move));
    plot.current.setCursor({ left: plot.current.valToPos(x[next], "x"), top: 10 });
    event.preventDefault();
  };
  const at = place ?? x.length - 1;
  const lastOf = (values) => values.slice(0, at + 1).findLastIndex((value) => Number.isFinite(value));
  // A number of an older step says so.
  const shown = (values) => {
    const from = place === null || carries ? lastOf(values) : at;
    return html`<b>${number(values[from])}</b>${from >= 0 && from < at && !carries ? html`<span class="dim"> at ${told(steps[from], true)}</span>` : ""}`;
  };
  return html`<figure class="chart">
    <div ref=${holder} class=${onStep ? "plot opens" : "plot"} tabindex="0" role="img" aria-label=${label} onKeyDown=${onKey}></div>
    <figcaption>${x.length ? html`<span class="dim">${told(steps[at], place !== null)}</span>` : html`<span class="dim">no step yet</span>`}
      ${series.map((one, place) => one.hidden || html`<span><${Key} name=${one.colour ?? COLOURS[place % COLOURS.length]} width=${one.width} dash=${one.dash} />${one.label} ${shown(one.values)}</span>`)}
    </figcaption>
  </figure>`;
}

// The colour of a curve, with its gaps.
export function Key({ name, width, dash }) {
  return html`<i class=${width < 1 ? "key thin" : "key"} style=${{ background: dash ? `repeating-linear-gradient(90deg, var(${name}) 0 ${dash[0]}px, transparent 0 ${dash[0] + dash[1]}px)` : `var(${name})` }}></i>`;
}

export function Spark({ values, width = 120, height = 24 }) {
  const finite = values.filter(Number.isFinite);
  const [low, high] = [Math.min(...finite), Math.max(...finite)];
  const points = finite.map((value, at) => `${(at / Math.max(1, finite.length - 1)) * width},${height - 2 - ((value - low) / (high - low || 1)) * (height - 4)}`);
  return html`<svg class="spark" width=${width} height=${height} aria-hidden="true"><polyline points=${points.join(" ")} /></svg>`;
}
