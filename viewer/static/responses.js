// All responses of a step or of several: a table to sort, a scatter to choose from. Reasons are listed; none is a verdict.
import { colour, penOf, useDrawn } from "./chart.js";
import { html, useMemo, useRef, useState } from "./lib.js";
import { Choice, ErrorSentence, extent, go, NOT_RECORDED, Sentence, StepChooser, useKeys, useValues } from "./parts.js";
import { notes, nth, number, parsed, reasons, visible } from "./text.js";

// [column, title]
const COLUMNS = [
  ["row", "row"], ["step", "step"], ["prompt_index", "prompt"], ["data_source", "source"], ["score", "score"], ["reward", "reward"], ["length", "tokens"], ["turns", "turns"], ["contexts", "contexts"],
  ["kl", "KL"], ["entropy", "entropy"], ["mismatch", "mismatch"], ["value_first", "V₀"], ["value_error", "value error"], ["advantage_sum", "Σ adv"], ["repetition", "repetition"],
  ["prompt", "prompt, its end"], ["response", "response, its beginning"],
];
const TEXTS = ["prompt", "response"];
export const REASONS = ["num_reasons", "reasons to look"];
const EXTRA = "extra:", PAGE = 200, MOST_FIELDS = 12, AT_RANDOM = 1;
const MOST_STEPS = 20, MOST_ROWS = 20000; // of several steps together

export function Responses({ data, at }) {
  const { facts } = data;
  const steps = facts[at.kind];
  const step = steps.length ? at.step ?? steps.at(-1) : null;
  const to = Math.max(at.to ?? step, step);
  const [text, setText] = useState("");
  const shown = to > step ? steps.filter((one) => one >= step && one <= to) : [step];
  const asked = step === null || shown.length > MOST_STEPS ? [] : shown;
  const found = useValues(asked.map((one) => `runs/${at.run}/${at.kind}/${one}?text=${encodeURIComponent(text)}`), steps.length);
  const columns = useMemo(() => found.length && found.every(({ value }) => value) && joined(found.map(({ value }) => value.columns)), [found]);
  const address = (kind) => (one) => `/run/${at.run}/responses/${kind}/${one}`;
  const chooser = html`<div class="bar"><h1>Responses</h1>
    ${["train", "val"].map((kind) => html`<button aria-pressed=${at.kind === kind} disabled=${!facts[kind].length} onClick=${() => go(address(kind)(facts[kind].at(-1)))}>${kind === "val" ? "validation" : "training"}</button>`)}
    ${step !== null && html`<${StepChooser} steps=${steps} step=${step} to=${to} address=${address(at.kind)} />`}</div>`;
  if (step === null) return html`${chooser}<${Sentence}>${NOT_RECORDED}<//>`;
  const counts = `${shown.length} recorded steps from ${step} to ${to}`;
  const errors = [
    !asked.length && `${counts}: expected 1 to ${MOST_STEPS}.`,
    shown.length > 1 && columns?.row?.length > MOST_ROWS && `${counts} have ${number(columns.row.length)} responses; a table of several has at most ${number(MOST_ROWS)}.`,
    ...found.map(({ error }) => error),
  ].filter(Boolean);
  if (errors.length) return html`${chooser}${errors.slice(0, 1).map((one) => html`<${ErrorSentence} text=${one} />`)}`;
  return html`${chooser}${columns && html`<${Table} key=${`${at.kind}${step}-${to}`} ...${{ columns, at, text, setText }} />`}`;
}

// The columns of several steps, one after the other; a column that a step lacks has null there.
export function joined(tables) {
  const names = [...new Set(tables.flatMap(Object.keys))];
  return Object.fromEntries(names.map((name) => [name, tables.flatMap((columns) => columns[name] ?? columns.row.map(() => null))]));
}

// One object per response, with the scorer's fields as `extra:NAME`, and the reasons to look at it.
export function rowsOf(columns) {
  const rows = columns.row.map((_, place) => Object.fromEntries(Object.keys(columns).map((name) => [name, columns[name][place]])));
  const alike = Map.groupBy(rows, (row) => row.text_hash ?? null);
  const numPrompts = new Map([...alike].map(([hash, those]) => [hash, new Set(those.map((row) => row.prompt_index)).size]));
  for (const row of rows) {
    const others = row.text_hash ? numPrompts.get(row.text_hash) - 1 : 0;
    const same = `same text for ${others} other prompt${others > 1 ? "s" : ""}`;
    const fields = Object.entries(parsed(row.extra) ?? {}).filter(([, value]) => ["number", "boolean"].includes(typeof value));
    row.reasons = [...new Set([...reasons(row.why & ~AT_RANDOM), ...(others ? [same] : []), ...notes(row)])];
    row.num_reasons = row.reasons.length;
    row.key = `${row.step}/${row.row}`;
    row.isRecorded = row.why > 0 || Boolean(row.fixed);
    Object.assign(row, Object.fromEntries(fields.map(([name, value]) => [`${EXTRA}${name}`, Number(value)])));
  }
  return rows;
}

function Table({ columns, at, text, setText }) {
  const [[by, direction], setSort] = useState(["row", 1]);
  const [shown, setShown] = useState(PAGE);
  const [box, setBox] = useState(null);
  const [search, setSearch] = useState(text);
  const input = useRef(null);
  useKeys({ "/": () => input.current.focus() });
  const rows = useMemo(() => rowsOf(columns), [columns]);
  const titles = useMemo(() => {
    const fields = [...new Set(rows.flatMap(Object.keys))].filter((name) => name.startsWith(EXTRA)).slice(0, MOST_FIELDS);
    const told = COLUMNS.filter(([name]) => columns[name]?.some((value) => value !== null && isNews(name, value, columns)));
    return [...told, ...fields.map((name) => [name, visible(name.slice(EXTRA.length))]), REASONS];
  }, [rows]);
  const words = search.toLowerCase().split(" ").filter(Boolean);
  const has = (row, word) => `${row.data_source} ${row.place} ${row.reasons.join(" ")}`.toLowerCase().includes(word);
  // What was found belongs to the text that was searched, not to one that is being typed.
  const sought = rows.filter((row) => (row.found && search === text) || words.every((word) => has(row, word)));
  const chosen = sought.filter((row) => !box || box.has(row.key)).sort((one, other) => compared(one[by], other[by], direction));
  const sorted = ([name, title]) => html`<button onClick=${() => setSort([name, by === name ? -direction : -1])}>
    ${title}${by === name ? (direction > 0 ? " ▴" : " ▾") : ""}</button>`;
  const order = ([name]) => (by !== name ? null : direction > 0 ? "ascending" : "descending");
  return html`<${Scatter} rows=${sought} names=${titles.filter(isNumeric)} onChoose=${setBox} onOpen=${(row) => go(address(at, row))} />
    <div class="bar"><input ref=${input} type="search" aria-label="search responses" size="34" placeholder="source, file, reason; Enter: texts"
      value=${search} onInput=${(event) => setSearch(event.target.value)} onChange=${() => setText(search)} />
      <span class="dim">${chosen.length} of ${rows.length} responses, ${rows.filter((row) => row.isRecorded).length} with their text</span>
      ${box && html`<button onClick=${() => setBox(null)}>show all</button>`}</div>
    <${Rows} name="responses" rows=${chosen.slice(0, shown)} ...${{ titles, at, sorted, order }} />
    ${chosen.length > shown && html`<button onClick=${() => setShown(shown + PAGE)}>${chosen.length - shown} more</button>`}`;
}

// A table of responses, with [name, title] of its columns; each row that is recorded with its tokens leads to them.
export function Rows({ name, titles, rows, at, sorted = ([, title]) => title, order = () => null }) {
  const side = (title) => (isNumeric(title) ? "n" : "");
  return html`<div class="wide"><table class=${name}>
    <thead><tr>${titles.map((title) => html`<th class=${side(title)} aria-sort=${order(title)}>${sorted(title)}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.key}>${titles.map((title) => html`<td class=${side(title)}>${cell(row, title[0], at)}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

const isNumeric = ([name]) => !["data_source", REASONS[0], ...TEXTS].includes(name);
const address = (at, row) => `/run/${at.run}/tokens/${at.kind}/${row.step}/${nth(row.row)}`;
// Columns that are the same everywhere in most tables.
const isNews = (name, value, columns) => (["turns", "contexts"].includes(name) ? value > 1 : name !== "step" || value !== columns.step[0]);

function cell(row, name, at) {
  if (name === "row") return row.isRecorded ? html`<a href=${`#${address(at, row)}`}>${nth(row.row)}</a>` : nth(row.row);
  if (name === "prompt_index") return number(nth(row.prompt_index));
  if (TEXTS.includes(name)) return html`<div class="excerpt"><bdi>${visible(row[name])}</bdi></div>`;
  if (name === REASONS[0]) return visible(row.reasons.join(", "));
  return name === "data_source" ? html`<bdi>${visible(row.data_source)}</bdi>` : number(row[name]);
}

// Missing values come last, whatever the direction: 1 rises, -1 falls.
export function compared(one, other, direction) {
  if (typeof one === "string" || typeof other === "string") return String(one).localeCompare(String(other)) * direction;
  const [left, right] = [Number.isFinite(one), Number.isFinite(other)];
  return left && right ? (one - other) * direction : Number(right) - Number(left);
}

const HEIGHT = 220, EDGE = 34;

// A dot per response; a click opens the nearest recorded one, a drag chooses those inside.
function Scatter({ rows, names, onChoose, onOpen }) {
  const [axes, setAxes] = useState(["length", "score"]);
  const start = useRef(null);
  const dots = useRef([]);
  const canvas = useDrawn((node) => { dots.current = drawDots(node, rows, axes); });
  const onUp = ({ offsetX, offsetY }) => {
    const from = start.current;
    start.current = null;
    if (!from) return;
    const [[left, right], [top, bottom]] = [extent([from.x, offsetX]), extent([from.y, offsetY])];
    if (Math.hypot(right - left, bottom - top) < 5) {
      const away = (dot) => Math.hypot(dot.x - offsetX, dot.y - offsetY);
      const [near] = dots.current.filter((dot) => dot.row.isRecorded && away(dot) < 12).sort((one, other) => away(one) - away(other));
      if (near) onOpen(near.row);
    } else {
      const inside = dots.current.filter(({ x, y }) => x >= left && x <= right && y >= top && y <= bottom);
      onChoose(new Set(inside.map((dot) => dot.row.key)));
    }
  };
  const select = (place, label) => html`<${Choice} label=${label} value=${axes[place]} options=${names} choose=${(name) => setAxes(axes.with(place, name))} />`;
  return html`<div class="bar">${select(1, "y axis")} <span class="dim">over</span> ${select(0, "x axis")}
      <span class="dim">filled: recorded with text; larger: several; drag to choose, click to open</span></div>
    <canvas ref=${canvas} class="scatter" style=${{ height: `${HEIGHT}px` }} role="img"
      aria-label="scatter of the responses; the table below has the same numbers"
      onMouseDown=${({ offsetX, offsetY }) => { start.current = { x: offsetX, y: offsetY }; }} onMouseUp=${onUp}></canvas>`;
}

function drawDots(canvas, rows, axes) {
  const [pen, width] = [penOf(canvas), canvas.clientWidth];
  const dots = rows.map((row) => ({ row, values: axes.map((name) => row[name]) })).filter((dot) => dot.values.every(Number.isFinite));
  if (!dots.length) return dots;
  const [[left, right], [low, high]] = axes.map((_, at) => extent(dots.map((dot) => dot.values[at])));
  pen.fillStyle = colour("--dim");
  pen.font = "11px sans-serif";
  pen.fillText(number(high), 2, 14);
  pen.fillText(number(low), 2, HEIGHT - 20);
  pen.fillText(number(left), EDGE, HEIGHT - 4);
  pen.fillText(number(right), width - 44, HEIGHT - 4);
  pen.strokeStyle = pen.fillStyle = colour("--c1");
  const spots = new Map();
  for (const dot of dots) {
    dot.x = EDGE + 8 + ((dot.values[0] - left) / (right - left || 1)) * (width - EDGE - 24);
    dot.y = HEIGHT - 26 - ((dot.values[1] - low) / (high - low || 1)) * (HEIGHT - 42);
    const spot = `${Math.round(dot.x)} ${Math.round(dot.y)}`;
    spots.set(spot, (spots.get(spot) ?? 0) + 1);
    pen.beginPath();
    pen.arc(dot.x, dot.y, Math.min(14, 3 * spots.get(spot) ** 0.3), 0, 7);
    pen.globalAlpha = spots.get(spot) > 1 ? 0.15 : 0.7;
    if (dot.row.isRecorded) pen.fill();
    else pen.stroke();
  }
  return dots;
}
