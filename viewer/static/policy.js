// Does the policy go too far, or collapse? How its numbers spread over the tokens of each step, by heat strips, and the curves beside them.
import { html, useEffect, useMemo, useState } from "./lib.js";
import { Card, figuresOn } from "./overview.js";
import { ErrorSentence, go, nearest, NOT_RECORDED, Sentence, useValue } from "./parts.js";
import { Strip } from "./strip.js";
import { number } from "./text.js";

const BINS = 24, ONCE = 50;
const RANDOM = "of the tokens drawn at random";
// [key of a column, title, what makes a strip of it, what its lack means; without that, a strip that is missing needs no word]
const STRIPS = [
  ["kl", "KL: log p − log p of the reference, nats, of all tokens", spread, "No file has histograms.log_ratio_ref: this run has no reference model."],
  ["mismatch", "Mismatch: log p of the trainer − of the rollout backend, nats, of all tokens", spread, "No file has histograms.log_ratio_rollout: one of the two stood for both (algorithm.rollout_correction.bypass_mode)."],
  ["entropy", `Entropy at the update, nats, ${RANDOM}`, spread, "No file has entropy_tokens: the updates of this run recorded no entropies."],
  ["ratio", `Ratio: p in the update / p before it, ${RANDOM}`, spread, "No file has both old and new: the updates of this run recorded no ratios."],
  ["kl_by_position", "Mean KL by position in the response, nats", places],
  ["mismatch_by_position", "Mean |mismatch| by position in the response, nats", places],
];
const sum = (values) => values.reduce((total, one) => total + one, 0);

// How many of a histogram lie below a number; within a bin they lie evenly.
const below = ({ edges, counts }, value) => sum(counts.map((count, at) => count * (edges[at + 1] < value ? 1 : Math.max(0, (value - edges[at]) / (edges[at + 1] - edges[at]) || 0))));

// Counts in bins of equal width between two limits; the first and the last have what lies beyond. Their sum stays the same.
export function rebinned(histogram, [low, high], bins) {
  const ends = Array.from({ length: bins - 1 }, (_, at) => below(histogram, low + ((at + 1) / bins) * (high - low)));
  return [...ends, sum(histogram.counts)].map((end, at) => end - (at ? ends[at - 1] : 0));
}

// The columns of the recorded steps, each asked for once, and the limits of their strips; all of them anew after the run went back.
function useColumns(run, facts) {
  const [held, hold] = useState({ columns: [], steps: [], limits: {} });
  const { generation, train } = facts;
  const last = train.at(-1) ?? -1;
  const known = held.generation === generation && (held.columns.at(-1)?.step ?? -1) <= last ? held.columns : [];
  const since = known.at(-1)?.step ?? "";
  const { value, error } = useValue(last === -1 ? null : `runs/${run}/policy?since=${since}&most=${ONCE}`, `${generation} ${train.length} ${last}`);
  useEffect(() => {
    if (value) hold({ generation, ...value, columns: [...known, ...value.columns].filter(({ step }) => value.steps.includes(step)) });
  }, [value]);
  return { ...held, columns: known, error };
}

export function Policy({ data, at, theme }) {
  const { facts } = data;
  const figures = figuresOn(facts, "policy");
  useEffect(() => { data.want(figures.flatMap(({ metrics }) => Object.keys(metrics))); }, [data]);
  const { columns, steps, limits, error } = useColumns(at.run, facts);
  const onStep = (step) => go(`/run/${at.run}/responses/train/${step}`);
  const onCurve = (step) => onStep(nearest(facts.train, step));
  return html`<div class="bar"><h1>Policy</h1><span class="dim">a click on a column or a curve opens the responses of its step${steps.length > columns.length ? `; ${columns.length} of ${steps.length} steps are read` : ""}</span></div>
    ${[error, ...columns.map((one) => one.error)].filter(Boolean).slice(0, 5).map((text) => html`<${ErrorSentence} text=${text} />`)}
    ${!facts.train.length && html`<${Sentence}>${NOT_RECORDED}<//>`}
    ${columns.length > 0 && html`<p class="dim">Bluer: more tokens. The lines are percentiles 10, 50 and 90. The limits are percentiles 1 and 99 of the run; what lies beyond is in the outermost rows.
      KL and mismatch count all tokens that are learned from; entropy and ratio those of the responses drawn at random, at their last use in the update.</p>`}
    <div class="cards">
      ${STRIPS.map(([name, title, make, lack]) => html`<${Panel} key=${name} ...${{ name, title, make, lack, columns, theme, onStep }} limits=${limits[name]} />`)}
      ${figures.filter((one) => one.pages.includes("overview") || Object.keys(one.metrics).some((name) => data.column(name)))
        .map(({ title, metrics, range }) => html`<${Card} key=${title} ...${{ title, metrics, range, data, theme }} x=${data.steps} onStep=${onCurve} />`)}
    </div>`;
}

function Panel({ name, title, make, lack, columns, limits, theme, onStep }) {
  const shown = columns.filter((one) => one[name]);
  const steps = shown.map((one) => one.step);
  const { painted, lines, say } = useMemo(() => make(shown.map((one) => one[name]), limits), [columns.length, columns[0], columns.at(-1)]);
  if (!steps.length && !(lack && columns.length)) return null;
  return html`<section class="card" data-card=${name}><h2>${title}</h2>
    ${steps.length ? html`<${Strip} ...${{ steps, lines, theme, onStep }} columns=${painted} label=${title} told=${(place) => `Step ${steps[place]}: ${say(place)}`} />` : html`<p class="dim">${lack}</p>`}</section>`;
}

// The strip of histograms: shares of tokens, so that the fullest bin of the run is bluest, and their percentiles.
function spread(histograms, limits) {
  const [low, high] = limits ?? [0, 1];
  const shares = histograms.map((one) => rebinned(one, [low, high], BINS).map((count) => count / sum(one.counts)));
  const most = Math.max(...shares.flat());
  const [p10, p50, p90] = [1, 2, 3].map((place) => histograms.map((one) => one.quantiles[place]));
  return {
    painted: shares.map((values) => values.map((share) => Math.sqrt(share / most))),
    lines: [p10, p50, p90].map((values) => values.map((value) => (value - low) / (high - low))),
    say: (at) => `p10 ${number(p10[at])}, p50 ${number(p50[at])}, p90 ${number(p90[at])}, of ${number(sum(histograms[at].counts))} tokens. Bottom ${number(low)}, top ${number(high)}.`,
  };
}

// The strip of means by position.
function places(columns) {
  const reach = Math.max(...columns.flat().map(Math.abs)) || 1; // of null it is 0
  return {
    painted: columns.map((values) => values.map((value) => (value === null ? null : value / reach))),
    say: (at) => `first ${number(columns[at][0])}, middle ${number(columns[at][columns[at].length >> 1])}, last ${number(columns[at].at(-1))}. Bottom: first tokens, top: last ones; blue: more than 0, orange: less.`,
  };
}
