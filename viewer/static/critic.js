// Does the critic learn? Its explained variance with an interval, by position; calibration; first value; worst judged responses; what it alone read.
import { Chart } from "./chart.js";
import { html, useEffect } from "./lib.js";
import { Card, Explained, figuresOn } from "./overview.js";
import { ErrorSentence, go, nearest, Sentence, StepChooser, useValue } from "./parts.js";
import { compared, REASONS, Rows, rowsOf } from "./responses.js";
import { isSaved } from "./saved.js";
import { Strip } from "./strip.js";
import { nth, number, visible } from "./text.js";

const MOST = 20;
const WORST = [
  ["row", "row"], ["value_error", "value error"], ["value_first", "V₀"], ["return_first", "return"], ["score", "score"], ["length", "tokens"], REASONS,
];
const worstOf = (columns) => rowsOf(columns).sort((one, other) => compared(one.value_error, other.value_error, -1)).slice(0, MOST);

export function Critic({ data, at, theme }) {
  const { facts, recorded: critic } = data;
  const figures = figuresOn(facts, "critic");
  const step = facts.train.length ? at.step ?? facts.train.at(-1) : null;
  useEffect(() => {
    data.want(figures.flatMap(({ metrics }) => Object.keys(metrics)));
    data.wantRecorded();
  }, [data]);
  const chosen = useValue(step === null ? null : `runs/${at.run}/train/${step}`);
  const read = useValue(step === null || !facts.has_critic_texts || isSaved ? null : `runs/${at.run}/critic/${step}`);
  const address = (one) => `/run/${at.run}/critic/train/${one}`;
  const onStep = (one) => go(address(nearest(facts.train, one)));
  const hasValues = critic?.value.some((one) => one !== null);
  const shared = { theme, onStep };
  const card = ({ title, metrics, range }) => Object.keys(metrics).some((name) => data.column(name)) && html`<${Card} key=${title} ...${{ title, metrics, range, data, x: data.steps, ...shared }} />`;
  const told = (place) => `Bottom: first tokens, top: last ones. Blue: explains (1 is all), orange: worse than the mean (−1 and less). At step ${critic.steps[place]}: first ${ofPosition(place, 0)}, middle ${ofPosition(place, 8)}, last ${ofPosition(place, 15)}.`;
  const ofPosition = (place, at) => number(critic.by_position[place]?.[at]);
  return html`<div class="bar"><h1>Critic</h1>${step !== null && html`<${StepChooser} steps=${facts.train} step=${step} address=${address} />`}</div>
    ${critic?.errors.map((text) => html`<${ErrorSentence} text=${text} />`)}
    ${!facts.train.length && html`<${Sentence}>This run has recorded no responses, so there is no interval, no calibration and no position: tracking.rollouts.enable turns their record on.<//>`}
    ${critic?.steps.length > 0 && !hasValues && html`<${Sentence}>This run has no values: its estimator (algorithm.adv_estimator) uses no critic.<//>`}
    <div class="cards">
      ${hasValues ? html`<${Explained} recorded=${critic} ...${shared} />`
      : figures.filter(({ recorded }) => recorded).map(card)}
      ${hasValues && html`<section class="card"><h2>Explained variance by position in the response</h2><${Strip} steps=${critic.steps} columns=${critic.by_position} step=${step} told=${told} label="explained variance by position and step" ...${shared} /></section>`}
      ${hasValues && html`<section class="card"><h2>First value against the outcome: area under the curve</h2>
        <${Chart} x=${critic.steps} series=${[{ label: "AUC", values: critic.auc }, { label: "no better than chance", values: critic.steps.map(() => 0.5), width: 1, colour: "--dim", hidden: true }]} label="area under the curve" ...${shared} />
        <p class="dim">How often a response with a score above the mean began with a larger value than one below it. 0.5: chance.</p></section>`}
      ${chosen.value?.footer.calibration && html`<${Calibration} found=${chosen.value.footer.calibration} ...${{ step, theme }} />`}
      ${figures.filter(({ recorded }) => !recorded).map(card)}
    </div>
    ${chosen.error && html`<${ErrorSentence} text=${chosen.error} />`}
    ${chosen.value?.columns.value_error?.some((one) => one !== null) && html`<h2>Worst judged responses of step ${step}</h2>
      <${Rows} name="worst" titles=${WORST} rows=${worstOf(chosen.value.columns)} at=${at} />`}
    ${read.error && html`<${ErrorSentence} text=${read.error} />`}
    ${read.value && html`<${ReadAlone} ...${{ at, step }} found=${read.value} />`}`;
}

// Ten bins of equal count by value: the mean value of each against its mean return; on the dashed diagonal both agree.
function Calibration({ step, found, theme }) {
  const values = found.value ?? [];
  const series = [{ label: "mean return", values: found.ret ?? [] }, { label: "mean value", values, width: 1, colour: "--dim", dash: [4, 4] }];
  const told = (bin) => `bin ${bin} of ${values.length}, ${number(found.count?.[bin - 1])} tokens:`;
  return html`<section class="card" data-card="calibration"><h2>Calibration at step ${step}: mean return over mean value</h2>
    <${Chart} x=${values} steps=${values.map((_, at) => at + 1)} ...${{ series, told, theme }} height=${240} label="calibration" /></section>`;
}

// What the critic alone read before each recorded response (critic.privileged_prompt).
function ReadAlone({ at, step, found }) {
  const tokens = (row) => `#/run/${at.run}/tokens/train/${step}/${nth(row)}`;
  return html`<h2>What the critic alone read, before each recorded response of step ${step}</h2>
    <table class="privileged"><thead><tr><th>row</th><th>text</th></tr></thead>
      <tbody>${found.row.map((row, place) => html`<tr key=${row}><td><a href=${tokens(row)}>${nth(row)}</a></td><td><div class="text">${visible(found.text[place])}</div></td></tr>`)}</tbody></table>`;
}
