// All responses of a step or of several: a table to sort, a scatter to choose from. Reasons are listed; none is a verdict.
import { colour, penOf, useDrawn } from "./chart.js";
import { html, useMemo, useRef, useState } from "./lib.js";
import { ErrorSentence, go, NOT_RECORDED, Sentence, StepChooser, useKeys, useValue } from "./parts.js";
import { number, reasons, visible } from "./text.js";

// [column, title]
const COLUMNS = [
  ["row", "row"], ["step", "step"], ["prompt_index", "prompt"], ["data_source", "source"], ["score", "score"], ["reward", "reward"], ["length", "tokens"], ["turns", "turns"],
  ["kl", "KL"], ["entropy", "entropy"], ["mismatch", "mismatch"], ["value_first", "V₀"], ["value_error", "value error"], ["advantage_sum", "Σ adv"], ["repetition", "repetition"],
];
const PAGE = 200;

export function Responses({ data, at }) {
  const { facts } = data;
  const steps = facts[at.kind];
  const step = at.step ?? steps.at(-1) ?? null;
  const to = Math.max(at.to ?? step, step);
  const [text, setText] = useState("");
  const { value, error } = useValue(step === null ? null : `runs/${at.run}/${at.kind}/${step}?to=${to}&text=${encodeURIComponent(text)}`, steps.length);
  const address = (kind) => (one) => `/run/${at.run}/responses/${kind}/${one}`;
  const chooser = html`<div class="bar"><h1>Responses</h1>
    ${["train", "val"].map((kind) => html`<button aria-pressed=${at.kind === kind} disabled=${!facts[kind].length} onClick=${() => go(address(kind)(facts[kind].at(-1)))}>${kind === "val" ? "validation" : "training"}</button>`)}
    ${step !== null && html`<${StepChooser} steps=${steps} step=${step} to=${to} address=${address(at.kind)} />`}</div>`;
  if (step === null) return html`${chooser}<${Sentence}>${NOT_RECORDED}<//>`;
  if (error) return html`${chooser}<${ErrorSentence} text=${error} />`;
  return html`${chooser}${value && html`<${Table} key=${`${at.kind}${step}-${to}`} columns=${value.columns} at=${at} text=${text} setText=${setText} />`}`;
}

// One object per response, with the scorer's fields as columns of their own, and the reasons to look at it.
export function rowsOf(columns) {
  const names = Object.keys(columns);
  const rows = columns.row.map((_, place) => Object.fromEntries(names.map((name) => [name, columns[name][place]])));
  const prompts = new Map();
  for (const row of rows) {
    if (row.text_hash) prompts.set(row.text_hash, (prompts.get(row.text_hash) ?? new Set()).add(row.prompt_index));
  }
  for (const row of rows) {
    row.key = `${row.step}/${row.row}`;
    row.fields = fieldsOf(row.extra);
    row.others = row.text_hash ? prompts.get(row.text_hash).size - 1 : 0;
    row.reasons = [
      ...reasons(row.why ?? 0).slice(row.why & 1 ? 1 : 0),
      row.others > 0 && `same text for ${row.others} other prompt${row.others > 1 ? "s" : ""}`,
      row.is_truncated && "cut at the limit",
      row.has_eos === false && !(row.why & 512) && "no EOS",
      row.failure && `no score: ${row.failure}`,
      row.lost && "environment lost",
    ].filter(Boolean);
  }
  return rows;
}

function fieldsOf(extra) {
  try {
    return Object.entries(JSON.parse(extra || "{}")).filter(([, value]) => typeof value === "number" || typeof value === "boolean");
  } catch {
    return [];
  }
}

function Table({ columns, at, text, setText }) {
  const [sort, setSort] = useState(["row", 1]);
  const [shown, setShown] = useState(PAGE);
  const [box, setBox] = useState(null);
  const [search, setSearch] = useState(text);
  const input = useRef(null);
  useKeys({ "/": () => input.current.focus() });
  const rows = useMemo(() => rowsOf(columns), [columns]);
  const fields = useMemo(() => [...new Set(rows.flatMap((row) => row.fields.map(([name]) => name)))].slice(0, 12), [rows]);
  const titles = [...COLUMNS.filter(([name]) => columns[name]?.some((value) => value !== null && isNews(name, value, columns))), ...fields.map((name) => [`extra:${name}`, name])];
  const valueOf = (row, name) => (name === "reasons" ? row.reasons.length : name.startsWith("extra:") ? Number(row.fields.find(([one]) => one === name.slice(6))?.[1] ?? NaN) : row[name]);
  const words = search.toLowerCase().split(" ").filter(Boolean);
  const has = (row, word) => `${row.data_source} ${row.place} ${row.reasons.join(" ")}`.toLowerCase().includes(word);
  // What was found belongs to the text that was searched, not to one that is being typed.
  const isFound = (row) => (row.found && search === text) || words.every((word) => has(row, word));
  const sought = rows.filter(isFound);
  const chosen = sought.filter((row) => !box || box.has(row.key));
  chosen.sort((one, other) => compared(valueOf(one, sort[0]), valueOf(other, sort[0]), sort[1]));
  const head = (name, title, isNumber = true) => html`<th class=${isNumber ? "n" : ""} aria-sort=${sort[0] === name ? (sort[1] > 0 ? "ascending" : "descending") : null}>
    <button onClick=${() => setSort([name, sort[0] === name ? -sort[1] : -1])}>${visible(title)}${sort[0] === name ? (sort[1] > 0 ? " ▴" : " ▾") : ""}</button></th>`;
  const numeric = titles.filter(([name]) => name !== "data_source");
  return html`<${Scatter} rows=${sought} names=${numeric} valueOf=${valueOf} onChoose=${setBox} onOpen=${(row) => go(address(at, row))} />
    <div class="bar"><input ref=${input} type="search" aria-label="search responses" size="34" placeholder="source, file, reason; Enter: texts" value=${search} onInput=${(event) => setSearch(event.target.value)} onChange=${() => setText(search)} />
      <span class="dim">${chosen.length} of ${rows.length} responses, ${rows.filter((row) => isRecorded(at, row)).length} with their text</span>
      ${box && html`<button onClick=${() => setBox(null)}>show all</button>`}</div>
    <div class="wide"><table class="responses"><thead><tr>${titles.map(([name, title]) => head(name, title, name !== "data_source"))}${head("reasons", "reasons to look", false)}</tr></thead>
    <tbody>${chosen.slice(0, shown).map((row) => html`<tr key=${row.key}>${titles.map(([name]) => html`<td class=${name === "data_source" ? "" : "n"}>${cell(row, name, valueOf, at)}</td>`)}
      <td>${visible(row.reasons.join(", "))}</td></tr>`)}</tbody></table></div>
    ${chosen.length > shown && html`<button onClick=${() => setShown(shown + PAGE)}>${chosen.length - shown} more</button>`}`;
}

const isRecorded = (at, row) => (at.kind === "train" ? row.why > 0 : row.fixed);
const address = (at, row) => `/run/${at.run}/tokens/${at.kind}/${row.key}`;
// Columns that are the same everywhere in most tables.
const isNews = (name, value, columns) => (name === "turns" ? value > 1 : name !== "step" || value !== columns.step[0]);

function cell(row, name, valueOf, at) {
  if (name === "row") return isRecorded(at, row) ? html`<a href=${`#${address(at, row)}`}>${row.row}</a>` : row.row;
  return name === "data_source" ? html`<bdi>${visible(row.data_source)}</bdi>` : number(valueOf(row, name));
}

// Missing values come last, whatever the direction: 1 rises, -1 falls.
export function compared(one, other, direction) {
  if (typeof one === "string" || typeof other === "string") return String(one).localeCompare(String(other)) * direction;
  const [left, right] = [Number.isFinite(one), Number.isFinite(other)];
  return left && right ? (one - other) * direction : Number(right) - Number(left);
}

const HEIGHT = 220, EDGE = 34;

// A dot per response; a click opens the nearest recorded one, a drag chooses those inside.
function Scatter({ rows, names, valueOf, onChoose, onOpen }) {
  const [axes, setAxes] = useState(["length", "score"]);
  const start = useRef(null);
  const places = useRef([]);
  const canvas = useDrawn((node) => { places.current = drawDots(node, rows, axes, valueOf); });
  const spot = (event) => [event.offsetX, event.offsetY];
  const onUp = (event) => {
    const [from, to] = [start.current, spot(event)];
    start.current = null;
    if (!from) return;
    if (Math.hypot(to[0] - from[0], to[1] - from[1]) < 5) {
      const near = places.current.filter((dot) => dot.row.why > 0 || dot.row.fixed).map((dot) => [Math.hypot(dot.x - to[0], dot.y - to[1]), dot]).sort((a, b) => a[0] - b[0])[0];
      if (near && near[0] < 12) onOpen(near[1].row);
      return;
    }
    const inside = (value, one, other) => value >= Math.min(one, other) && value <= Math.max(one, other);
    onChoose(new Set(places.current.filter((dot) => inside(dot.x, from[0], to[0]) && inside(dot.y, from[1], to[1])).map((dot) => dot.row.key)));
  };
  const select = (place) => html`<select aria-label=${place ? "y axis" : "x axis"} value=${axes[place]} onChange=${(event) => setAxes(axes.map((old, at) => (at === place ? event.target.value : old)))}>
    ${names.map(([name, title]) => html`<option value=${name}>${visible(title)}</option>`)}</select>`;
  return html`<div class="bar">${select(1)} <span class="dim">over</span> ${select(0)} <span class="dim">filled: recorded with text; larger: several; drag to choose, click to open</span></div>
    <canvas ref=${canvas} class="scatter" style=${{ height: `${HEIGHT}px` }} role="img" aria-label="scatter of the responses; the table below has the same numbers" onMouseDown=${(event) => { start.current = spot(event); }} onMouseUp=${onUp}></canvas>`;
}

function drawDots(canvas, rows, axes, valueOf) {
  const [pen, width] = [penOf(canvas), canvas.clientWidth];
  const dots = rows.map((row) => ({ row, values: axes.map((name) => valueOf(row, name)) })).filter((dot) => dot.values.every(Number.isFinite));
  const limits = [0, 1].map((at) => [Math.min(...dots.map((dot) => dot.values[at])), Math.max(...dots.map((dot) => dot.values[at]))]);
  const share = (at, value) => (value - limits[at][0]) / (limits[at][1] - limits[at][0] || 1);
  pen.fillStyle = colour("--dim");
  pen.font = "11px sans-serif";
  if (dots.length) {
    pen.fillText(number(limits[1][1]), 2, 14);
    pen.fillText(number(limits[1][0]), 2, HEIGHT - 20);
    pen.fillText(number(limits[0][0]), EDGE, HEIGHT - 4);
    pen.fillText(number(limits[0][1]), width - 44, HEIGHT - 4);
  }
  pen.strokeStyle = pen.fillStyle = colour("--c1");
  const spots = new Map();
  for (const dot of dots) {
    dot.x = EDGE + 8 + share(0, dot.values[0]) * (width - EDGE - 24);
    dot.y = HEIGHT - 26 - share(1, dot.values[1]) * (HEIGHT - 42);
    const spot = `${Math.round(dot.x)} ${Math.round(dot.y)}`;
    spots.set(spot, (spots.get(spot) ?? 0) + 1);
    pen.beginPath();
    pen.arc(dot.x, dot.y, Math.min(14, 3 * spots.get(spot) ** 0.3), 0, 7);
    pen.globalAlpha = spots.get(spot) > 1 ? 0.15 : 0.7;
    if (dot.row.why > 0 || dot.row.fixed) pen.fill();
    else pen.stroke();
  }
  return dots;
}
