// Does the critic learn? Its explained variance with an interval, by position; calibration; first value; worst judged responses.
import { Chart } from "./chart.js";
import { html, useEffect } from "./lib.js";
import { Card, Explained, nearest } from "./overview.js";
import { ErrorSentence, go, Sentence, StepChooser, useValue } from "./parts.js";
import { compared, rowsOf } from "./responses.js";
import { Strip } from "./strip.js";
import { number, visible } from "./text.js";

const WORST = 20;

export function Critic({ data, at, theme }) {
  const { facts } = data;
  const step = at.step ?? facts.train.at(-1) ?? null;
  useEffect(() => {
    data.want(["critic/vf_explained_var", "critic/vf_loss", "critic/values/mean", "critic/returns/mean"]);
    data.wantRecorded();
  }, [data]);
  const { recorded: critic } = data;
  const chosen = useValue(step === null ? null : `runs/${at.run}/train/${step}`);
  const address = (one) => `/run/${at.run}/critic/train/${one}`;
  const onStep = (one) => go(address(facts.train.length ? nearest(facts.train, one) : one));
  const hasValues = critic?.value.some((one) => one !== null);
  const shared = { theme, onStep };
  const curves = { data, x: data.steps, ...shared };
  const told = (place) => `Bottom: first tokens, top: last ones. Blue: explains (1 is all), orange: worse than the mean (−1 and less). At step ${critic.steps[place]}: first ${ofPosition(place, 0)}, middle ${ofPosition(place, 8)}, last ${ofPosition(place, 15)}.`;
  const ofPosition = (place, at) => number(critic.by_position[place]?.[at]);
  return html`<div class="bar"><h1>Critic</h1>${step !== null && html`<${StepChooser} steps=${facts.train} step=${step} address=${address} />`}</div>
    ${critic?.errors.map((text) => html`<${ErrorSentence} text=${text} />`)}
    ${!facts.train.length && html`<${Sentence}>This run has recorded no responses, so there is no interval, no calibration and no position: tracking.rollouts.enable turns their record on.<//>`}
    ${critic?.steps.length > 0 && !hasValues && html`<${Sentence}>This run has no values: its estimator (algorithm.adv_estimator) uses no critic.<//>`}
    <div class="cards">
      ${hasValues ? html`<${Explained} recorded=${critic} height=${200} ...${shared} />`
      : data.column("critic/vf_explained_var") && html`<${Card} title="Explained variance, without an interval" metrics=${{ "critic/vf_explained_var": "" }} range=${[-1, 1]} ...${curves} />`}
      ${hasValues && html`<section class="card"><h2>Explained variance by position in the response</h2><${Strip} steps=${critic.steps} columns=${critic.by_position} step=${step} told=${told} label="explained variance by position and step" ...${shared} /></section>`}
      ${hasValues && html`<section class="card"><h2>First value against the outcome: area under the curve</h2>
        <${Chart} x=${critic.steps} series=${[{ label: "AUC", values: critic.auc }, { label: "no better than chance", values: critic.steps.map(() => 0.5), width: 1, colour: "--dim", hidden: true }]} label="area under the curve" ...${shared} />
        <p class="dim">How often a response with a score above the mean began with a larger value than one below it. 0.5: chance.</p></section>`}
      ${chosen.value?.footer.calibration && html`<section class="card"><h2>Calibration at step ${step}</h2><${Calibration} found=${chosen.value.footer.calibration} /></section>`}
      ${data.column("critic/returns/mean") && html`<${Card} title=${`Mean ${data.column("critic/values/mean") ? "value and mean " : ""}return`} metrics=${{ "critic/values/mean": "", "critic/returns/mean": "" }} ...${curves} />`}
      ${data.column("critic/vf_loss") && html`<${Card} title="Value loss" metrics=${{ "critic/vf_loss": "" }} ...${curves} />`}
    </div>
    ${chosen.error && html`<${ErrorSentence} text=${chosen.error} />`}
    ${chosen.value?.columns.value_error?.some((one) => one !== null) && html`<${Worst} columns=${chosen.value.columns} at=${at} step=${step} />`}`;
}

const SIDE = 200, MARGIN = 36;

// Ten bins of equal count by value: the mean value of each against its mean return; on the diagonal both agree.
function Calibration({ found }) {
  const [values, returns] = [found.value ?? [], found.ret ?? []];
  const numbers = [...values, ...returns].filter(Number.isFinite);
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const at = (value) => ((value - low) / (high - low || 1)) * SIDE;
  const dots = values.map((value, place) => ({ x: MARGIN + at(value), y: 8 + SIDE - at(returns[place]), text: `value ${number(value)}, return ${number(returns[place])}, ${number(found.count?.[place])} tokens` }));
  return html`<svg viewBox=${`0 0 ${SIDE + MARGIN + 12} ${SIDE + 40}`} width="100%" height="240" role="img" aria-label=${dots.map((dot) => dot.text).join("; ")}>
    <g stroke="var(--line)" fill="none"><rect x=${MARGIN} y="8" width=${SIDE} height=${SIDE} /><line x1=${MARGIN} y1=${8 + SIDE} x2=${MARGIN + SIDE} y2="8" stroke="var(--dim)" stroke-dasharray="4" /></g>
    <polyline points=${dots.map((dot) => `${dot.x},${dot.y}`).join(" ")} fill="none" stroke="var(--c1)" />
    ${dots.map((dot) => html`<circle cx=${dot.x} cy=${dot.y} r="4" fill="var(--c1)"><title>${dot.text}</title></circle>`)}
    <g fill="var(--dim)" font-size="10"><text x="2" y="14">${number(high)}</text><text x="2" y=${SIDE + 6}>${number(low)}</text><text x=${MARGIN} y=${SIDE + 22}>${number(low)}</text><text x=${MARGIN + SIDE - 20} y=${SIDE + 22}>${number(high)}</text>
      <text x=${MARGIN + 50} y=${SIDE + 34}>mean value of a bin → mean return ↑</text></g></svg>`;
}

function Worst({ columns, at, step }) {
  const rows = rowsOf(columns).sort((one, other) => compared(one.value_error, other.value_error, -1)).slice(0, WORST);
  return html`<h2>Worst judged responses of step ${step}</h2><div class="wide"><table class="worst">
    <thead><tr><th class="n">row</th><th class="n">value error</th><th class="n">V₀</th><th class="n">return</th><th class="n">score</th><th class="n">tokens</th><th>reasons to look</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr><td class="n">${row.why > 0 ? html`<a href=${`#/run/${at.run}/tokens/train/${step}/${row.row}`}>${row.row}</a>` : row.row}</td>
      ${["value_error", "value_first", "return_first", "score", "length"].map((name) => html`<td class="n">${number(row[name])}</td>`)}<td>${visible(row.reasons.join(", "))}</td></tr>`)}</tbody></table></div>`;
}
