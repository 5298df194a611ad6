// The table of runs.
import { Spark } from "./chart.js";
import { get } from "./api.js";
import { html, useEffect, useState } from "./lib.js";
import { ErrorSentence } from "./parts.js";
import { number, visible } from "./text.js";

const REFRESH_MS = 3000;

export function Runs() {
  const [found, setFound] = useState({});
  useEffect(() => {
    let timer = null;
    let isOver = false;
    const load = async () => {
      if (!document.hidden) await get("runs").then(({ runs }) => isOver || setFound({ runs }), (error) => isOver || setFound((old) => ({ ...old, error: error.message })));
      if (!isOver) timer = setTimeout(load, REFRESH_MS);
    };
    load();
    return () => { isOver = true; clearTimeout(timer); };
  }, []);
  return html`<h1>Runs</h1>
    ${found.error && html`<${ErrorSentence} text=${found.error} />`}
    ${found.runs && html`<div class="wide"><table class="runs">
      <thead><tr><th>run</th><th>state</th><th class="n">step</th><th class="n">score</th><th class="n">held-out accuracy</th><th>score over recent steps</th></tr></thead>
      <tbody>${found.runs.map((run) => html`<tr key=${run.number}>
        <td><a href=${`#/run/${run.number}/overview`}>${visible(run.name)}</a><div class="dim path">${visible(run.path)}</div>
          ${run.error && html`<div class="error">${visible(run.error)}</div>`}
          ${run.lines_broken > 0 && html`<div class="error">${run.lines_broken} lines of metrics.jsonl cannot be read and are left out.</div>`}</td>
        <td><span class=${`state ${run.state}`}>${visible(run.sentence)}</span></td>
        <td class="n">${number(run.step)}${run.total_steps ? html`<span class="dim">/${run.total_steps}</span>` : ""}</td>
        <td class="n">${number(run.score)}</td><td class="n">${number(run.accuracy)}</td>
        <td><${Spark} values=${run.recent} /></td></tr>`)}</tbody></table></div>`}`;
}
