// Where is the time? Lanes of the pools on a canvas; of one step, how busy each pool was and what its time was spent waiting for.
import { colour, Key, penOf, ROUND, useDrawn } from "./chart.js";
import { html, useEffect, useMemo, useRef, useState } from "./lib.js";
import { clamp, ErrorSentence, go, onKeys, Sentence, StepChooser, useValue } from "./parts.js";
import { number, visible } from "./text.js";

const ROW = 18, GAP = 8, TOP = 20, BOTTOM = 22, LEFT = 92, MOST_ROWS = 6, MARGIN = 0.05, SHORTEST_S = 0.001;
const ALL = { from: -Infinity, to: Infinity };
const HELP = "drag or ← → pan, wheel, two fingers or + − zoom, Home shows all, ↑ ↓ choose a span, Enter opens its step";

export function Timeline({ data, at, theme }) {
  const stamp = `${data.facts.step} ${data.facts.events.length} ${data.facts.state}`;
  const { value: table, error } = useValue(data.facts.has_trace ? `runs/${at.run}/timeline` : null, stamp);
  const asked = useValue(at.step === null || !data.facts.has_trace ? null : `runs/${at.run}/timeline/${at.step}`, stamp);
  const found = asked.value?.step === at.step ? asked.value : null;
  const address = (step) => `/run/${at.run}/timeline/train/${step}`;
  const lanes = useMemo(() => table && laid(table), [table]);
  if (!data.facts.has_trace) return html`<h1>Timeline</h1><${Sentence}>This run has no trace.json, so it has no timeline.<//>`;
  if (error) return html`<h1>Timeline</h1><${ErrorSentence} text=${error} />`;
  if (!table) return html`<h1>Timeline</h1><p class="dim">…</p>`;
  if (!table.columns.start.length) return html`<h1>Timeline</h1><${Sentence}>trace.json holds no work yet.<//>`;
  return html`<div class="bar"><h1>Timeline</h1><${StepChooser} steps=${table.steps.step} step=${at.step} address=${address} />
      ${table.shown !== null && html`<a href=${`#${address(table.shown)}`}>a typical step: ${table.shown}</a>`}
      <button onClick=${() => download(table, lanes)}>download trace.json</button>
      <span>for <a href="https://ui.perfetto.dev" target="_blank" rel="noreferrer noopener">ui.perfetto.dev</a>, a site of others</span></div>
    ${table.sentence && html`<${Sentence}>${table.sentence}<//>`}
    <${Lanes} ...${{ table, lanes, found, theme }} step=${at.step} open=${(step) => go(address(step))} />
    ${asked.error && html`<${ErrorSentence} text=${asked.error} />`}
    ${found && html`<${StepTable} found=${found} table=${table} />`}`;
}

// Rows of spans, from top to bottom: of each pool as many as its overlapping spans need. `until`: how far its spans reach.
function laid({ columns: { pool, start, end }, pools }) {
  const rows = [];
  let y = TOP;
  pools.forEach((name, place) => {
    const own = [];
    for (let span = 0; span < pool.length; span++) {
      if (pool[span] !== place) continue;
      let row = own.find((one) => one.until <= start[span]);
      if (!row && own.length < MOST_ROWS) own.push((row = { pool: name, place, number: own.length, y: y + own.length * ROW, spans: [], until: 0 }));
      row ??= own.at(-1);
      row.spans.push(span);
      row.until = Math.max(row.until, end[span]);
    }
    rows.push(...own);
    if (own.length) y += own.length * ROW + GAP;
  });
  return { rows, height: y + BOTTOM };
}

// The part of the time that is shown, at most a little more than all of it.
export function clamped(from, to, end) {
  const edge = end * 0.02 || 1;
  const long = clamp(to - from, SHORTEST_S, end + 2 * edge);
  const begin = clamp(from, -edge, end + edge - long);
  return { from: begin, to: begin + long };
}

function Lanes({ table, lanes, found, theme, step, open }) {
  const { columns, steps } = table;
  const end = useMemo(() => columns.end.reduce((most, one) => Math.max(most, one), 0), [table]);
  const [asked, show] = useState(ALL);
  const view = clamped(asked.from, asked.to, end);
  const { from, to } = view;
  const [chosen, choose] = useState(null);
  const path = useMemo(() => (found ? found.path.map((piece) => ({ ...piece, y: rowOf(piece, table, lanes)?.y })) : []), [found, lanes]);
  const canvas = useDrawn((node) => draw(node, { table, lanes, path, step, chosen }, view), [table, theme, path, step, chosen, from, to]);
  const move = (seconds) => show({ from: from + seconds, to: to + seconds });
  const zoom = (factor, share = 0.5) => {
    const middle = from + (to - from) * share;
    show({ from: middle - (middle - from) * factor, to: middle + (to - middle) * factor });
  };
  useEffect(() => {
    const place = steps.step.indexOf(step);
    const margin = (steps.next_start[place] - steps.start[place]) * MARGIN;
    if (place >= 0) show({ from: steps.start[place] - margin, to: steps.next_start[place] + margin });
  }, [step]);
  const onWheel = (event) => { event.preventDefault(); zoom(Math.exp(event.deltaY * 0.0015), Math.max(0, (event.offsetX - LEFT) / (event.target.clientWidth - LEFT))); };
  const held = useRef(new Map()); // of each pointer that is down: its x, and the time that stays below it
  const onDown = ({ button, pointerId, offsetX, target }) => {
    if (button) return; // a menu that it opens would swallow its end
    held.current.set(pointerId, { x: offsetX, time: from + ((offsetX - LEFT) * (to - from)) / (target.clientWidth - LEFT) });
    target.setPointerCapture(pointerId);
  };
  const onMove = (event) => {
    if (!held.current.has(event.pointerId)) return point(event);
    held.current.get(event.pointerId).x = event.offsetX;
    const [first, second] = held.current.values();
    const width = event.target.clientWidth - LEFT;
    const pixel = second ? (second.time - first.time) / (second.x - first.x) : (to - from) / width;
    const begin = first.time - (first.x - LEFT) * pixel;
    if (pixel > 0 && Number.isFinite(pixel)) show({ from: begin, to: begin + width * pixel });
  };
  const point = (event) => choose(hit(event, table, lanes, view) ?? chosen);
  const next = (by) => {
    const wanted = chosen === null ? columns.start.findLastIndex((one) => one <= from) + 1 : chosen + by;
    const span = clamp(wanted, 0, columns.start.length - 1);
    if (columns.start[span] < from || columns.end[span] > to) move(columns.start[span] - (from + to) / 2);
    choose(span);
  };
  const keys = {
    ArrowLeft: () => move((from - to) / 10), ArrowRight: () => move((to - from) / 10), "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), Home: () => show(ALL),
    ArrowDown: () => next(1), ArrowUp: () => next(-1), Enter: () => chosen !== null && open(columns.step[chosen]),
  };
  return html`<div class="bar"><button onClick=${() => zoom(0.7)} aria-label="zoom in">+</button><button onClick=${() => zoom(1 / 0.7)} aria-label="zoom out">−</button>
      <button onClick=${keys.Home}>all</button><span class="dim">${HELP}</span></div>
    <canvas ref=${canvas} class="lanes" style=${{ height: `${lanes.height}px` }} tabindex="0" role="img" aria-label=${`work of the pools over time: ${HELP}`}
      onPointerDown=${onDown} onPointerMove=${onMove} onLostPointerCapture=${(event) => held.current.delete(event.pointerId)} onClick=${point} onDblClick=${keys.Enter} onWheel=${onWheel} onKeyDown=${onKeys(keys)}></canvas>
    <${Legend} table=${table} />
    <div class="details" role="status">${chosen !== null && columns.start.length > chosen ? told(table, chosen) : html`<span class="dim">no span chosen</span>`}</div>`;
}

function told({ columns, phases, pools }, span) {
  const [name, label] = phases[columns.name[span]];
  const [start, end] = [columns.start[span], columns.end[span]];
  return html`<b>${pools[columns.pool[span]]}</b><span>${visible(label)} (${visible(name)})</span><span>step ${columns.step[span]}</span><span>${seconds(end - start)}</span>
    <span class="dim">from ${seconds(start)} to ${seconds(end)}</span>${columns.lost[span] ? html`<span>lost: the run went back, and has done this step again</span>` : ""}`;
}

const seconds = (time) => `${number(Math.round(time * 1e6) / 1e6)} s`;

function Legend({ table: { phases, columns } }) {
  const colours = new Map(phases.map(([, label, tone]) => [label, tone]));
  return html`<figcaption class="phases">${[...colours].map(([label, tone]) => html`<span><${Key} colour=${tone} />${visible(label)}</span>`)}
    ${columns.lost.includes(1) && html`<span>hatched: lost work, done again</span>`}<span>line: critical path of the chosen step</span></figcaption>`;
}

// The row of the work in which a piece of the critical path lies.
function rowOf({ pool, name, step, start, end }, { columns, phases }, { rows }) {
  const isIt = (span) => columns.step[span] === step && columns.start[span] < end && columns.end[span] > start
    && !columns.lost[span] && phases[columns.name[span]][0] === name;
  return rows.find((row) => row.pool === pool && row.spans.some(isIt));
}

// The span under the pointer, or one a pixel beside it.
function hit(event, { columns }, lanes, { from, to }) {
  const pixel = (to - from) / (event.target.clientWidth - LEFT);
  const time = from + (event.offsetX - LEFT) * pixel;
  const row = lanes.rows.find((one) => event.offsetY >= one.y && event.offsetY < one.y + ROW);
  return row?.spans.find((span) => columns.end[span] > time - pixel && columns.start[span] <= time + pixel);
}

function draw(canvas, scene, view) {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  canvas.dataset.view = `${view.from} ${view.to}`;
  const pen = penOf(canvas);
  const x = (time) => LEFT + ((time - view.from) / (view.to - view.from)) * (width - LEFT);
  const inks = { ink: colour("--ink"), dim: colour("--dim"), paper: colour("--paper") };
  pen.font = "11px sans-serif";
  pen.fillStyle = inks.ink;
  scene.lanes.rows.filter((row) => row.number === 0).forEach((row) => pen.fillText(row.pool, 4, row.y + 12));
  drawAxis(pen, scene, inks, view, x, height);
  scene.lanes.rows.forEach((row) => drawRow(pen, row, scene, inks, view, x, width));
  drawPath(pen, scene.path, inks, (time) => Math.max(LEFT, x(time)));
}

// Borders of steps with their numbers, and seconds below.
function drawAxis(pen, { table: { steps }, step }, inks, view, x, height) {
  let last = -Infinity;
  pen.strokeStyle = pen.fillStyle = inks.dim;
  pen.lineWidth = 1;
  for (let place = 0; place < steps.step.length; place++) {
    const left = x(steps.start[place]);
    if (steps.next_start[place] < view.from || left < last + 34 || left > x(view.to)) continue;
    last = left;
    pen.globalAlpha = steps.step[place] === step ? 1 : 0.5;
    if (left >= LEFT) pen.strokeRect(left, 0, 0, height - BOTTOM);
    pen.globalAlpha = 1;
    pen.fillText(steps.step[place], Math.max(LEFT, left) + 3, 11);
  }
  const stride = ROUND.find((one) => one > (view.to - view.from) / 6);
  for (let time = Math.ceil(view.from / stride) * stride; time <= view.to; time += stride) pen.fillText(`${Number(time.toFixed(4))} s`, x(time), height - 6);
}

// What is narrower than a pixel is drawn once with its neighbours.
function drawRow(pen, row, { table: { columns, phases }, step, chosen }, inks, view, x, width) {
  let painted = -1;
  for (const span of row.spans) {
    if (columns.end[span] < view.from) continue;
    if (columns.start[span] > view.to) break;
    const [left, right] = [Math.max(LEFT, x(columns.start[span])), Math.min(width + 2, x(columns.end[span]))];
    if (right < painted + 1) continue;
    const wide = Math.max(1, right - left - (right - left > 3 ? 0.7 : 0));
    const [, label, tone, isDark] = phases[columns.name[span]];
    const isPale = columns.lost[span] || (step !== null && columns.step[span] !== step);
    Object.assign(pen, { globalAlpha: isPale ? 0.4 : 1, fillStyle: tone }).fillRect(left, row.y, wide, ROW - 2);
    pen.globalAlpha = 1;
    if (columns.lost[span]) hatch(pen, inks, left, row.y, wide);
    else if (wide > 20 && wide > pen.measureText(label).width + 8) Object.assign(pen, { fillStyle: isPale ? inks.ink : isDark ? "#ffffff" : "#22313f" }).fillText(label, left + 4, row.y + 12);
    if (span === chosen) Object.assign(pen, { strokeStyle: inks.ink, lineWidth: 2 }).strokeRect(left, row.y - 1, wide, ROW);
    painted = left + wide;
  }
}

function hatch(pen, inks, left, top, wide) {
  pen.fillStyle = inks.ink;
  for (let at = 0; at < wide; at += 6) pen.fillRect(left + at, top, Math.min(1.5, wide - at), ROW - 2);
}

// From piece to piece through the lanes; where the step waited for no call, the line stays in the lane where it was.
function drawPath(pen, path, inks, x) {
  for (const [tone, wide] of [[inks.paper, 4], [inks.ink, 2]]) {
    let y = path.find((piece) => piece.y !== undefined)?.y;
    Object.assign(pen, { strokeStyle: tone, lineWidth: wide }).beginPath();
    for (const piece of path) {
      y = piece.y ?? y;
      pen.lineTo(x(piece.start), y + ROW + 1);
      pen.lineTo(x(piece.end), y + ROW + 1);
    }
    pen.stroke();
  }
}

function StepTable({ found, table: { phases, pools } }) {
  const whole = found.next_start - found.start;
  const share = (part) => `${number(Math.round((1000 * part) / whole) / 10)} %`;
  const labels = new Map(phases.map(([name, label]) => [name, label]));
  const path = new Map();
  for (const { pool, name, start, end } of found.path) path.set(`${pool} ${name}`, { pool, name, time: (path.get(`${pool} ${name}`)?.time ?? 0) + end - start });
  return html`<h2>Step ${found.step}: ${seconds(whole)} until the next one${found.end > found.next_start ? `, with work until ${seconds(found.end - found.start)}` : ""}</h2>
    <div class="split"><section><h2>How busy each pool was</h2><table class="busy"><thead><tr><th>pool</th><th class="n">busy, s</th><th class="n">busy</th><th class="n">idle</th></tr></thead>
      <tbody>${pools.filter((pool) => pool in found.busy).map((pool) => html`<tr><td>${pool}</td><td class="n">${number(found.busy[pool])}</td><td class="n">${share(found.busy[pool])}</td><td class="n">${share(whole - found.busy[pool])}</td></tr>`)}</tbody></table></section>
    <section><h2>Critical path: what the time was spent waiting for</h2><table class="critical"><thead><tr><th>pool</th><th>phase</th><th class="n">seconds</th><th class="n">share</th></tr></thead>
      <tbody>${[...path.values()].map(({ pool, name, time }) => html`<tr><td>${pool || "–"}</td><td>${visible(labels.get(name) ?? name)}</td><td class="n">${number(Math.round(time * 1e6) / 1e6)}</td><td class="n">${share(time)}</td></tr>`)}</tbody></table>
      <p class="dim">In the order of the first piece of each. “waiting”: for no call, but for messages and the controller's own work.</p></section></div>`;
}

// The spans as trace.json has them, which every reader of Chrome's trace event format can open.
function download({ columns, phases, pools, unix_s: first }, { rows }) {
  const names = pools.map((pool, place) => ({ ph: "M", pid: place + 1, tid: 0, name: "process_name", args: { name: pool } }));
  const spans = rows.flatMap((row) => row.spans.filter((span) => !columns.lost[span]).map((span) => ({
    ph: "X", pid: row.place + 1, tid: row.number + 1, ts: Math.round((first + columns.start[span]) * 1e6), dur: Math.round((columns.end[span] - columns.start[span]) * 1e6),
    name: phases[columns.name[span]][0], cat: row.pool, args: { step: columns.step[span] },
  })));
  const text = `[\n${[...names, ...spans].map((event) => JSON.stringify(event)).join(",\n")}\n]`;
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: "trace.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
