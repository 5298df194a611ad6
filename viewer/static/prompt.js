// How did the answer to one validation prompt change, from one validation to the next, and from run to run?
import { Chart, COLOURS } from "./chart.js";
import { changes } from "./diff.js";
import { Images } from "./images.js";
import { html, useMemo, useState } from "./lib.js";
import { Choice, Chooser, ErrorSentence, go, labelsOf, MOST_RUNS, runNumbers, Sentence, useEvery, useKeys, useValue, useValues } from "./parts.js";
import { nth, number, visible } from "./text.js";

const OTHERS_MS = 5000, ANSWERS = 20;
const NO_VALIDATION = "This run has no record of a validation: tracking.rollouts.enable turns it on, evaluation.test_freq says how often the run validates.";

export function Prompt({ data, at, theme }) {
  const { facts } = data;
  const others = runNumbers(at.rest[at.rest.indexOf("with") + 1 || at.rest.length]).filter((one) => one !== at.run).slice(0, MOST_RUNS - 1);
  const numbers = [at.run, ...others];
  const [asked, askAgain] = useState(0);
  useEvery(OTHERS_MS, () => others.length && askAgain((count) => count + 1), [others.length]);
  const stamp = `${facts.generation} ${facts.val.at(-1)} ${asked}`;
  const all = useValue(others.length ? "runs" : null);
  const lists = useValues(numbers.map((one) => `runs/${one}/prompts`), stamp);
  const listed = numbers.map((one) => lists.find((list) => list.address === `runs/${one}/prompts`) ?? {});
  const prompts = listed[0].value?.prompts ?? [];
  const wanted = /^[1-9]\d*$/.test(at.rest[0] ?? "") ? Number(at.rest[0]) - 1 : prompts[0]?.prompt_index;
  const place = prompts.findIndex((one) => one.prompt_index === wanted);
  const found = listed.map((one) => one.value && place >= 0 && sameOf(prompts[place], one.value.prompts));
  const given = useValues(found.flatMap((one, at) => (one ? [`runs/${numbers[at]}/prompts/${one.prompt_index}`] : [])), `${facts.generation} ${listed.map((one) => one.value?.step)}`);
  const labels = labelsOf(numbers.map((one) => (one === at.run ? facts : all.value?.runs.find((run) => run.number === one) ?? { number: one, name: `run ${one}` })));
  const runs = numbers.map((one, at) => ({ number: one, label: labels[at], ...listed[at], found: found[at], ...given.find((answer) => answer.address === `runs/${one}/prompts/${found[at]?.prompt_index}`) }));
  const open = (prompt) => prompt && (() => go(`/run/${at.run}/prompt/${nth(prompt.prompt_index)}${others.length ? `/with/${others.join("-")}` : ""}`));
  const [next, previous] = [open(prompts[place + 1]), open(prompts[place - 1])];
  useKeys({ j: next, k: previous, "]": next, "[": previous });
  const title = html`<div class="bar"><h1>Prompt</h1>
    ${place >= 0 && html`<${Chooser} what="prompt" note=${`${place + 1} of ${prompts.length}, the same at every validation`} ...${{ previous, next }}>
      <${Choice} label="prompt" value=${place} choose=${(chosen) => open(prompts[chosen])()}
        options=${prompts.map((one, at) => [at, `${nth(one.prompt_index)}: ${visible(one.begin).slice(0, 80)}`])} /><//>`}</div>`;
  const problems = runs.flatMap((run) => [run.error, ...(run.value?.errors ?? [])].filter(Boolean).map((text) => (others.length ? `${run.label}: ${text}` : text)));
  const first = runs[0].value;
  return html`${title}${problems.map((text) => html`<${ErrorSentence} text=${text} />`)}
    ${listed[0].value && !prompts.length && html`<${Sentence}>${NO_VALIDATION}<//>`}
    ${prompts.length > 0 && place < 0 && html`<${Sentence}>Prompt ${nth(wanted)} is none of the ${prompts.length} prompts that each validation of this run records. <a href=${`#/run/${at.run}/prompt`}>The first of them</a><//>`}
    ${place >= 0 && first?.rows && (all.value || all.error || !others.length) && html`<${Answers} key=${wanted} ...${{ runs, theme }} identity=${prompts[place]} texts=${first} />`}`;
}

// The prompt of another run that is this one: by text, source and place; else by the first two, or, told as such, by the last two.
export function sameOf(wanted, prompts) {
  const alike = (...names) => prompts.find((one) => names.every((name) => one[name] === wanted[name]));
  return alike("hash", "data_source", "place") ?? alike("hash", "data_source") ?? alike("data_source", "place") ?? null;
}

// Mean score of all samples by step, oldest first: [[step, mean or null], ...].
export function meanScores(rows) {
  const mean = (scores) => (scores.length ? scores.reduce((sum, one) => sum + one, 0) / scores.length : null);
  const ofSteps = [...Map.groupBy(rows, (row) => row.step)].sort(([one], [other]) => one - other);
  return ofSteps.map(([step, those]) => [step, mean(those.map((row) => row.score).filter(Number.isFinite))]);
}

function Answers({ runs, identity, texts, theme }) {
  const [sample, setSample] = useState(0);
  const [shown, setShown] = useState(Math.max(2, Math.ceil(ANSWERS / runs.length)));
  const answered = runs.filter((run) => run.value?.rows);
  const samples = [...new Set(answered.flatMap((run) => run.value.rows.map((row) => row.sample)))].sort((one, other) => one - other);
  const chosen = samples.includes(sample) ? sample : samples[0];
  const curves = answered.map((run) => new Map(meanScores(run.value.rows)));
  const steps = [...new Set(curves.flatMap((curve) => [...curve.keys()]))].sort((one, other) => one - other);
  const series = answered.map((run, at) => ({ label: run.label, values: steps.map((step) => curves[at].get(step) ?? null), colour: COLOURS[runs.indexOf(run) % COLOURS.length] }));
  const rows = answered.map((run) => run.value.rows.filter((row) => row.sample === chosen));
  const newest = [...steps].reverse();
  return html`<p class="dim">${visible(identity.data_source)} · ${visible(identity.place)}</p>
    <${Images} run=${runs[0].number} names=${texts.images} />
    <div class="text plainly" tabindex="0" role="group" aria-label="prompt">${visible(texts.prompt)}</div>
    ${texts.ground_truth && html`<p>ground truth: <bdi class="name">${visible(texts.ground_truth)}</bdi></p>`}
    ${runs.flatMap((run) => noteOf(run, identity)).map((text) => html`<${Sentence}>${text}<//>`)}
    <section class="card" data-card="prompt"><h2>Score${samples.length > 1 ? `, mean of ${samples.length} samples` : ""}</h2><${Chart} x=${steps} ...${{ series, theme }} label="score at each validation" /></section>
    <div class="bar"><h2>Answers, the newest first</h2>
      ${samples.length > 1 && html`<label>sample
        ${" "}<${Choice} value=${chosen} options=${samples.map((one) => [one, number(nth(one))])} choose=${(text) => setSample(Number(text))} /></label>`}
      <span class="dim">against the validation before: <del>removed</del> <ins>added</ins></span></div>
    <div class="wide"><table class="answers"><thead><tr><th>step</th>${answered.map((run) => html`<th>${run.label}</th>`)}</tr></thead>
      <tbody>${newest.slice(0, shown).map((step) => html`<tr key=${step}><td class="n">${step}</td>${answered.map((run, at) => {
        const place = rows[at].findIndex((row) => row.step === step);
        return html`<td>${place < 0 ? "–" : html`<${Answer} run=${run.number} row=${rows[at][place]} before=${rows[at][place + 1]} />`}</td>`;
      })}</tr>`)}</tbody></table></div>
    ${newest.length > shown && html`<button onClick=${() => setShown(newest.length)}>${newest.length - shown} more</button>`}`;
}

function noteOf(run, identity) {
  const { found, value, label } = run;
  if (value?.prompts && !value.prompts.length) return [`${label}: ${NO_VALIDATION}`];
  if (found === null) return [`${label} does not record this prompt: it validates with other data, or records other prompts of the same.`];
  if (found && found.hash !== identity.hash) return [`In ${label} the prompt at this place has another text, such as that of another chat template.`];
  if (found && found.place !== identity.place) return [`In ${label} this prompt stands at another place: ${visible(found.place)}.`];
  return value?.num_left_out ? [`${label}: ${value.num_left_out} of its validations are left out, evenly.`] : [];
}

function Answer({ run, row, before }) {
  const isWhole = before && !row.is_cut && !before.is_cut;
  const found = useMemo(() => (isWhole ? changes(before.response, row.response) : null), [isWhole, before?.response, row.response]);
  const told = [
    row.has_eos === false && "no EOS", row.is_cut && "cut, for the texts of this page are limited together", found?.every(([sign]) => !sign) && "unchanged",
    before && !found && (isWhole ? "too many words differ to show them" : "not compared"), !before && "the first",
  ].filter(Boolean);
  const parts = found ?? [[0, row.response]];
  return html`<a href=${`#/run/${run}/tokens/val/${row.step}/${nth(row.row)}`}>score ${number(row.score)}</a> <span class="dim">${number(row.length)} tokens${told.map((text) => `, ${text}`)}</span>
    <div class="text answer">${parts.map(([sign, text]) => (sign ? html`<${sign > 0 ? "ins" : "del"}>${visible(text)}<//>` : visible(text)))}</div>`;
}
