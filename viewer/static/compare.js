// Which run was better? Curves of several runs over each other, their last values, and the keys in which they differ.
import { get } from "./api.js";
import { Chart, COLOURS, Key } from "./chart.js";
import { html, useEffect, useMemo, useState } from "./lib.js";
import { AllMetrics, figuresOn } from "./overview.js";
import { Choice, ErrorSentence, labelsOf, MOST_RUNS, Sentence, useEvery, useValues } from "./parts.js";
import { axesOf, RunData } from "./run_data.js";
import { number, visible } from "./text.js";

const POLL_MS = 3000, REDRAW_MS = 500, MOST_KEYS = 400;
const SEED = "run.seed", LEFT_OUT = ["run.dir", "run.name"];
const DASHES = [undefined, [6, 3], [2, 2]];
// [title, metrics, range] of the Overview's figures, of all runs together; the first is one for each metric, for runs are compared by them.
function figuresOf(runs) {
  const all = new Map();
  for (const { title, metrics, range } of runs.flatMap((run) => (run.facts ? figuresOn(run.facts, "overview") : []))) {
    all.set(title, [title, [...new Set([...(all.get(title)?.[1] ?? []), ...Object.keys(metrics)])], range]);
  }
  return [...all.values()].flatMap(([title, names, range], place) => (place ? [[title, names, range]] : names.map((name) => [`${title}: ${name}`, [name], range])));
}

export function Compare({ at, theme }) {
  const [axis, setAxis] = useState("");
  const [hidden, setHidden] = useState([]);
  const [joins, setJoins] = useState(true);
  const numbers = at.runs.slice(0, MOST_RUNS);
  const [runs, version] = useRuns(numbers);
  const labels = labelsOf(runs.map((run) => run.facts ?? { number: run.number, name: `run ${run.number}` }));
  const found = useValues(numbers.map((one) => `runs/${one}/config`), "");
  const configs = useMemo(() => found.map(({ value }) => value?.keys ?? null), [found]);
  const groups = useMemo(() => seedGroups(configs), [configs]);
  const shared = useMemo(() => {
    const joined = joins && !axis ? groups : [];
    const all = runs.map((run, place) => {
      const [first] = joined.find((places) => places.includes(place)) ?? [place];
      return { run, place, label: labels[place], colour: COLOURS[first % COLOURS.length], dash: DASHES[Math.floor(first / COLOURS.length)] };
    });
    const shown = all.filter(({ run }) => run.facts && !hidden.includes(run.number) && (!axis || run.column(axis)));
    shown.forEach((one) => { one.x = one.run.axis(axis); });
    return { all, shown, axis, x: union(shown.map((one) => one.x)), groups: joined };
  }, [version, runs, axis, hidden, joins, groups, labels.join()]);
  const card = ([title, names, range]) => html`<${Card} key=${title} ...${{ title, names, range, shared, theme }} />`;
  const metrics = useMemo(() => [...new Map(runs.flatMap((run) => run.facts?.metrics ?? []).map((row) => [row[0], row])).values()], [version]);
  const toggle = (one) => setHidden(hidden.includes(one) ? hidden.filter((other) => other !== one) : [...hidden, one]);
  const sentences = runs.flatMap((run, place) => [run.error, run.facts?.error, run.notice, found[place]?.error ?? found[place]?.value?.error].filter(Boolean).map((text) => `${labels[place]}: ${text}`));
  const homeless = axis ? runs.filter((run) => run.facts && run.columns.size && !run.column(axis)) : [];
  return html`<div class="bar"><h1>Compare</h1><label>x: <${Choice} value=${axis} options=${axesOf(runs)} choose=${setAxis} /></label>
      ${groups.length > 0 && html`<label><input type="checkbox" checked=${joins} disabled=${axis !== ""} onChange=${() => setJoins(!joins)} />
        ${" "}runs that differ in ${SEED} alone: mean and range, at steps that all of them have</label>`}
      <a href="#/">other runs</a></div>
    ${at.runs.length > MOST_RUNS && html`<${Sentence}>These are ${at.runs.length} runs; the first ${MOST_RUNS} are compared.<//>`}
    ${!at.runs.length && html`<${Sentence}>No run is named: tick some in the <a href="#/">table of runs</a>.<//>`}
    ${[runs[0]?.lost, ...sentences].filter(Boolean).map((text) => html`<${ErrorSentence} text=${text} />`)}
    ${homeless.map((run) => html`<${Sentence}>${labels[runs.indexOf(run)]} has no ${axis}, and so no place on this axis.<//>`)}
    <div class="bar" role="group" aria-label="runs that are drawn">${shared.all.map(({ run, label, colour, dash }) => html`<label>
      <input type="checkbox" checked=${!hidden.includes(run.number)} onChange=${() => toggle(run.number)} />
      ${" "}<${Key} ...${{ colour, dash }} />${label}</label>`)}</div>
    <div class="cards">${figuresOf(runs).map(card)}</div>
    ${runs.length > 0 && html`<${LastValues} ...${{ runs, labels }} />`}
    ${found.length > 0 && html`<${Differences} ...${{ configs, labels }} />`}
    <${AllMetrics} metrics=${metrics} want=${(name) => runs.forEach((run) => run.facts && run.want([name]))} card=${(name) => card([visible(name), [name]])} />`;
}

// The runs with their columns, and a number that grows when there is news; the table of runs tells it, for a browser keeps few streams open.
function useRuns(numbers) {
  const [runs, setRuns] = useState([]);
  const [version, redraw] = useState(0);
  useEffect(() => {
    let timer = null;
    const changed = () => { timer ??= setTimeout(() => { timer = null; redraw((count) => count + 1); }, REDRAW_MS); };
    const wanted = (run) => [...figuresOf([run]).flatMap(([, names]) => names), ...run.facts.compared.flatMap(([, names]) => names), ...axesOf([run]).map(([name]) => name)];
    const made = numbers.map((one) => new RunData(one, changed));
    made.forEach((run) => run.ready.then(() => run.facts && run.want([...new Set(wanted(run))])));
    setRuns(made);
    return () => clearTimeout(timer);
  }, []);
  const told = ({ runs: lines }) => runs.forEach((run) => news(run, lines.find((line) => line.number === run.number)));
  useEvery(POLL_MS, () => runs.length && get("runs").then(told, (error) => runs[0].tell(false, error.message)), [runs]);
  return [runs, version];
}

function news(run, line) {
  if (run.lost) run.tell(true);
  if (!line || !run.facts) return;
  const { error, state, sentence, generation, step } = line;
  if (error !== run.facts.error || sentence !== run.facts.sentence) run.on("state", { error, state, sentence });
  if (generation !== run.facts.generation) run.on("reset", { step: step ?? -1 });
  else if (step !== run.facts.step) run.on("steps", { last: step });
}

const valueOf = (config, key) => (config && Object.hasOwn(config, key) ? config[key] : undefined);

// Groups of places of runs that have the same configuration but for the seed, and each its own seed.
export function seedGroups(configs) {
  const others = (config) => JSON.stringify(Object.entries(config).filter(([key]) => key !== SEED && !LEFT_OUT.includes(key)).sort());
  const seeded = [...configs.keys()].filter((place) => valueOf(configs[place], SEED) !== undefined);
  const groups = [...Map.groupBy(seeded, (place) => others(configs[place])).values()];
  return groups.filter((places) => places.length > 1 && new Set(places.map((place) => configs[place][SEED])).size === places.length);
}

// [key, [text or undefined of each run]] for every key that has not the same text in all runs that have a configuration.
export function differences(configs) {
  const known = configs.filter(Boolean);
  const keys = [...new Set(known.flatMap(Object.keys))].filter((key) => !LEFT_OUT.includes(key) && new Set(known.map((one) => valueOf(one, key))).size > 1);
  return keys.map((key) => [key, configs.map((one) => valueOf(one, key))]);
}

export const union = (lists) => [...new Set(lists.flat())].sort((one, other) => one - other);

// The values that a run has at `own` as they stand at `x`, which has all of `own`; null elsewhere.
export function aligned(x, own, values) {
  const found = new Map(own.map((one, at) => [one, values[at]]).filter(([, value]) => Number.isFinite(value)));
  return x.map((one) => found.get(one) ?? null);
}

// Mean, highest and lowest of several runs, where all of them have a number.
export function spread(columns) {
  const of = (reduce) => columns[0].map((_, at) => (columns.every((column) => Number.isFinite(column[at])) ? reduce(columns.map((column) => column[at])) : null));
  return { mean: of((all) => all.reduce((sum, one) => sum + one, 0) / all.length), high: of((all) => Math.max(...all)), low: of((all) => Math.min(...all)) };
}

function curvesOf({ shown, x, groups }, name) {
  const has = shown.filter(({ run }) => run.column(name)).map((one) => ({ ...one, values: aligned(x, one.x, one.run.column(name)) }));
  const joined = groups.map((places) => has.filter(({ place }) => places.includes(place))).filter((members) => members.length > 1);
  const bands = [];
  const means = joined.flatMap((members) => {
    const [{ label, colour, dash }] = members;
    const { mean, high, low } = spread(members.map(({ values }) => values));
    const all = `${members.slice(0, 3).map((one) => one.label).join(", ")}${members.length > 3 ? " and others" : ""}`;
    const edges = [["highest", high], ["lowest", low]].map(([edge, values]) => ({ label: `${label}… ${edge}`, values, colour, width: 0.5 }));
    bands.push([...edges.map((one) => one.label), colour]);
    return [{ label: `mean of ${members.length}: ${all}`, values: mean, colour, dash, width: 2 }, ...edges];
  });
  return { series: [...means, ...has.filter((one) => !joined.some((members) => members.includes(one)))], bands };
}

function Card({ title, names, range, shared, theme }) {
  const [picked, pick] = useState(null);
  const there = names.filter((name) => shared.shown.some(({ run }) => run.column(name)));
  const name = there.includes(picked) ? picked : there[0];
  const { series, bands } = useMemo(() => curvesOf(shared, name), [shared, name]);
  const told = (x, isChosen) => (isChosen ? `${new Map(axesOf(shared.all.map(({ run }) => run))).get(shared.axis)} ${number(x)}` : "last:");
  return html`<section class="card" data-card=${names[0]}><h2>${title}${there.length === 1 && names.length > 1 ? `: ${visible(name)}` : ""}</h2>
    ${there.length > 1 && html`<${Choice} label=${`metric of: ${title}`} value=${name} options=${there.map((one) => [one, visible(one)])} choose=${pick} />`}
    ${name ? html`<${Chart} ...${{ x: shared.x, series, bands, theme, told, range }} carries=${shared.axis !== ""} label=${title} />`
    : html`<p class="dim">None of these runs has ${names.map(visible).join(", ")}.</p>`}</section>`;
}

function LastValues({ runs, labels }) {
  const [first, ...others] = runs;
  const last = (run, names) => names.flatMap((name) => run.column(name)?.findLast(Number.isFinite) ?? [])[0];
  const compared = runs.find((run) => run.facts)?.facts.compared ?? [];
  const columns = compared.map(([title, names]) => [title, names.filter((name) => runs.some((run) => run.column(name))).slice(0, 1)]);
  return html`<h2>Last values</h2><div class="wide"><table class="last"><thead><tr><th>run</th>${columns.map(([title, names]) => html`<th class="n">${title}<div class="dim path">${names[0] ?? "–"}</div></th>`)}<th class="n">steps</th><th>state</th></tr></thead>
    <tbody>${runs.map((run, place) => html`<tr><td><a href=${`#/run/${run.number}/overview`}>${labels[place]}</a></td>${columns.map(([, names]) => html`<td class="n">${number(last(run, names))}</td>`)}
      <td class="n">${number(run.facts?.step)}</td><td>${visible(run.facts?.sentence)}</td></tr>`)}</tbody></table></div>
    ${others.length > 0 && html`<p><a href=${`#/run/${first.number}/prompt/with/${others.map((run) => run.number).join("-")}`}>
      the same prompt side by side</a></p>`}`;
}

function Differences({ configs, labels }) {
  const rows = useMemo(() => differences(configs), [configs]);
  const isHidden = configs.some((config) => Object.values(config ?? {}).includes("(hidden)"));
  return html`<h2>Configuration: ${rows.length} key${rows.length === 1 ? " differs" : "s differ"}</h2>
    <p class="dim">By config.yaml of each run, without ${LEFT_OUT.join(" and ")}.${isHidden ? " Values that look like secrets are hidden, and count as equal." : ""}${rows.length > MOST_KEYS ? ` The first ${MOST_KEYS} keys:` : ""}</p>
    ${rows.length > 0 && html`<div class="wide scroll"><table class="differences"><thead><tr><th>key</th>${labels.map((label) => html`<th>${label}</th>`)}</tr></thead>
      <tbody>${rows.slice(0, MOST_KEYS).map(([key, texts]) => html`<tr><td class="name">${visible(key)}</td>${texts.map((text) => html`<td class="name">${text === undefined ? html`<span class="dim">–</span>` : visible(text)}</td>`)}</tr>`)}</tbody></table></div>`}`;
}
