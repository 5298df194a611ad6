// The table of runs.
import { Spark } from "./chart.js";
import { get } from "./api.js";
import { html, useState } from "./lib.js";
import { ErrorSentence, useEvery } from "./parts.js";
import { number, visible } from "./text.js";

const REFRESH_MS = 3000;
let ticked = []; // stays for as long as the page is open

export function Runs() {
  const [found, setFound] = useState({});
  const [chosen, setChosen] = useState(ticked);
  useEvery(REFRESH_MS, () => get("runs").then(setFound, (error) => setFound((old) => ({ ...old, error: error.message }))), []);
  const tick = (one) => setChosen(ticked = chosen.includes(one) ? chosen.filter((other) => other !== one) : [...chosen, one]);
  const there = found.runs?.filter((run) => !run.is_removed) ?? []; // a page that shows one of the others keeps it, and says so
  return html`<div class="bar"><h1>Runs</h1>
      ${chosen.length > 1 ? html`<a href=${`#/compare/${chosen.join("-")}`}>Compare ${chosen.length} runs</a>` : there.length > 1 && html`<span class="dim">tick several to compare them</span>`}</div>
    ${found.error && html`<${ErrorSentence} text=${found.error} />`}
    ${found.runs && html`<div class="wide"><table class="runs">
      <thead><tr><th>run</th><th>state</th><th class="n">step</th><th class="n">score</th><th class="n">held-out accuracy</th><th>score over recent steps</th></tr></thead>
      <tbody>${there.map((run) => html`<tr key=${run.number}>
        <td><input type="checkbox" aria-label=${`compare ${visible(run.name)}`} checked=${chosen.includes(run.number)} onChange=${() => tick(run.number)} /> <a href=${`#/run/${run.number}/overview`}>${visible(run.name)}</a><div class="dim path">${visible(run.path)}</div>
          ${run.error && html`<div class="error">${visible(run.error)}</div>`}
          ${run.lines_broken > 0 && html`<div class="error">${run.lines_broken} lines of metrics.jsonl cannot be read and are left out.</div>`}</td>
        <td><span class=${`state ${run.state}`}>${visible(run.sentence)}</span></td>
        <td class="n">${number(run.step)}${run.total_steps ? html`<span class="dim">/${run.total_steps}</span>` : ""}</td>
        <td class="n">${number(run.score)}</td><td class="n">${number(run.accuracy)}</td>
        <td><${Spark} values=${run.recent} /></td></tr>`)}</tbody></table></div>`}`;
}
