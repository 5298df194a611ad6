// Is the run healthy? The figures that the report shares, then every metric.
import { Chart } from "./chart.js";
import { html, useEffect, useMemo, useRef, useState } from "./lib.js";
import { Choice, ErrorSentence, go, nearest, useKeys } from "./parts.js";
import { axesOf } from "./run_data.js";
import { clock, duration, number, visible } from "./text.js";

// The cards that replace a figure, by its `recorded`, if the recorded steps have a column.
const BETTER = { explained_variance: [Explained, "value"], lengths: [Lengths, "p50"] };

// The figures of a page, those without any metric left out.
export const figuresOn = (facts, page) => facts.figures.filter(({ pages, metrics }) => pages.includes(page) && Object.keys(metrics).length);

export function Overview({ data, at, theme }) {
  const [axis, setAxis] = useState("");
  const { facts, recorded } = data;
  const figures = figuresOn(facts, "overview");
  const axes = axesOf([data]);
  const names = figures.flatMap(({ metrics }) => Object.keys(metrics));
  useEffect(() => {
    data.want([...names, ...axes.map(([name]) => name)]);
    data.wantRecorded();
  }, [data, names.join()]);
  const x = data.axis(axis);
  const onStep = (step) => go(`/run/${at.run}/responses/train/${nearest(facts.train, step)}`);
  return html`<div class="bar"><h1>Overview</h1><label>x: <${Choice} value=${axis} options=${axes} choose=${setAxis} /></label>
      <span class="dim">a click on a curve opens the responses of the step</span></div>
    ${facts.why && html`<${ErrorSentence} text=${`Why it ended: ${facts.why}`} />`}
    <div class="cards">
      ${figures.map(({ title, metrics, range, recorded: name }) => {
        const [Better, column] = BETTER[name] ?? [];
        return Better && recorded?.[column].some((one) => one !== null)
          ? html`<${Better} ...${{ recorded, theme, onStep }} x=${recorded.steps.map((step) => x[data.steps.indexOf(step)] ?? null)} />`
          : html`<${Card} ...${{ title, metrics, range, data, x, theme, onStep }} />`;
      })}
      <${Events} facts=${facts} />
    </div>
    <${AllMetrics} metrics=${facts.metrics} want=${(name) => data.want([name])} card=${(name) => html`<${Card} key=${name} title=${visible(name)} metrics=${{ [name]: "" }} ...${{ data, x, theme, onStep }} />`} />`;
}

export function Card({ title, metrics, range, data, x, theme, onStep }) {
  const names = Object.keys(metrics);
  const series = names.filter((name) => data.column(name)).map((name) => ({ label: visible(metrics[name] || name), values: data.column(name) }));
  return html`<section class="card" data-card=${names[0]}><h2>${title}</h2>
    ${series.length ? html`<${Chart} ...${{ x, steps: data.steps, series, theme, onStep, range }} label=${title} />` : html`<p class="dim">${data.facts.step === null ? "no step yet" : `This run has none of ${names.join(", ")}.`}</p>`}</section>`;
}

export function Explained({ recorded, x = recorded.steps, theme, onStep }) {
  const series = [
    { label: "explained variance", values: recorded.value, width: 2 },
    { label: "97.5 %", values: recorded.high, width: 0.5, colour: "--c1" },
    { label: "2.5 %", values: recorded.low, width: 0.5, colour: "--c1" },
    { label: "0", values: recorded.steps.map(() => 0), width: 1, colour: "--dim", hidden: true },
  ];
  return html`<section class="card" data-card="explained"><h2>Explained variance of the critic, with 95 % interval; −1 stands for all below</h2>
    <${Chart} steps=${recorded.steps} ...${{ x, series, theme, onStep }} bands=${[["97.5 %", "2.5 %"]]} range=${[-1, 1]}
      label="explained variance of the critic" /></section>`;
}

// Of ten responses, one is longer than p90, and one shorter than p10.
function Lengths({ recorded, x, theme, onStep }) {
  const series = ["p90", "p50", "p10"].map((label) => ({ label, values: recorded[label], width: label === "p50" ? 2 : 0.5, colour: "--c1" }));
  return html`<section class="card" data-card="response_length/mean"><h2>Length of responses, tokens: percentiles 10, 50, 90</h2>
    <${Chart} steps=${recorded.steps} ...${{ x, series, theme, onStep }} bands=${[["p90", "p10"]]} label="percentiles of the length of responses" /></section>`;
}

function Events({ facts }) {
  const shown = facts.events.filter((event) => !["step", "cut"].includes(event.kind)).slice(-200).reverse();
  return html`<section class="card"><h2>Events</h2>
    ${facts.has_events ? "" : html`<p class="dim">This run has no events.jsonl: it is older than this record.</p>`}
    <ul class="events" tabindex="0" aria-label="events">${shown.map((event) => html`<li class=${visible(event.kind)}><time>${clock(event.unix_s)}</time> <b>${visible(event.kind)}</b> ${visible(sentence(event))}</li>`)}</ul></section>`;
}

// One event as a text: by its kind, whatever its fields hold.
function sentence(event) {
  const told = (name) => [event[name] ?? []].flat().map(visible).join(", ");
  const seconds = typeof event.seconds === "number" ? ` in ${duration(event.seconds)}` : "";
  const texts = {
    start: `${event.resumed_at ? `after step ${told("resumed_at")}` : "from the initial models"}${told("changes") && `; changed: ${told("changes")}`}`,
    group_up: `${told("role")} ${told("instance_id")}`,
    validation: `step ${told("step")}: accuracy ${number(event.accuracy)}${seconds}`,
    checkpoint: `step ${told("step")}${seconds}`,
    group_lost: `${told("role")}${told("rank") && ` rank ${told("rank")}`} at step ${told("step")}${told("method") && ` in ${told("method")}`}: ${told("cause")}`,
    recovery: `from step ${told("from_step")} back to ${told("to_step")}; restarted: ${told("restarted")}`,
    recovered: `step ${told("to_step")}${seconds}; complete steps done again: ${told("repeated_steps")}`,
    end: `${told("reason")}, exit status ${told("exit_status")}${told("why") && `: ${told("why")}`}`,
  };
  return Object.hasOwn(texts, told("kind")) ? texts[told("kind")] : `${told("cause")} ${told("why")}`;
}

// All metrics, [name, section, unit, meaning] of each, to search; what is chosen is drawn by `card`.
export function AllMetrics({ metrics, want, card }) {
  const [search, setSearch] = useState("");
  const [chosen, setChosen] = useState([]);
  const input = useRef(null);
  useKeys({ "/": () => input.current.focus() });
  const words = search.toLowerCase().split(" ").filter(Boolean);
  const found = useMemo(() => metrics.filter((row) => words.every((word) => row.join(" ").toLowerCase().includes(word))).sort(([one], [other]) => (one < other ? -1 : 1)), [search, metrics.length]);
  const choose = (name) => setChosen((old) => (old.includes(name) ? old.filter((one) => one !== name) : [name, ...old]));
  useEffect(() => chosen.forEach(want), [chosen]);
  return html`<section><h2>All metrics</h2>
    <input ref=${input} type="search" size="30" placeholder="search name, unit, meaning" aria-label="search metrics" value=${search} onInput=${(event) => setSearch(event.target.value)} />
    <span class="dim"> ${found.length} of ${metrics.length}; a click draws one</span>
    <div class="cards">${chosen.map(card)}</div>
    <div class="wide scroll"><table><tbody>${found.slice(0, 400).map(([name, section, unit, meaning]) => html`<tr>
      <td><button class="link" aria-pressed=${chosen.includes(name)} onClick=${() => choose(name)}>${visible(name)}</button></td>
      <td class="dim">${section}</td><td class="dim">${unit === "1" ? "" : unit}</td><td>${meaning}</td></tr>`)}</tbody></table></div></section>`;
}
