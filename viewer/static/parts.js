// Small parts of several pages: asking the server for a value, choosing a step, sentences about what is missing.
import { get } from "./api.js";
import { html, useEffect, useState } from "./lib.js";
import { visible } from "./text.js";

// {value, error} of an address of the server; an address of null asks for nothing.
export function useValue(address, stamp) {
  const [found, setFound] = useState({});
  useEffect(() => {
    if (!address) return setFound({});
    const stop = new AbortController();
    get(address, stop.signal).then((value) => setFound({ value }), (error) => stop.signal.aborted || setFound({ error: error.message }));
    return () => stop.abort();
  }, [address, stamp]);
  return found;
}

// Keys of a page, by name; not while somebody types.
export function useKeys(keys) {
  useEffect(() => {
    const onKey = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
      if (keys[event.key]) {
        event.preventDefault();
        keys[event.key]();
      }
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  });
}

export function go(address) {
  location.hash = address;
}

export function Sentence({ children }) {
  return html`<p class="sentence">${children}</p>`;
}

export const NOT_RECORDED = "This run has recorded no responses: tracking.rollouts.enable turns their record on.";

export function ErrorSentence({ text }) {
  return html`<p class="sentence error" role="alert">${visible(text)}</p>`;
}

// ◂ step ▸ among the steps that have a file.
export function StepChooser({ steps, step, to, address }) {
  const place = steps.indexOf(step);
  const previous = place < 0 ? steps.findLast((one) => one < step) : steps[place - 1];
  const next = place < 0 ? steps.find((one) => one > step) : steps[place + 1];
  const open = (one) => one !== undefined && go(address(one));
  useKeys({ "[": () => open(previous), "]": () => open(next) });
  const onInput = (event) => {
    const wanted = Number(event.target.value);
    open(steps.reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best), steps[0]));
  };
  return html`<span class="chooser">
    <button disabled=${previous === undefined} onClick=${() => open(previous)} aria-label="previous step">◂</button>
    <label>step <input type="number" value=${step} onChange=${onInput} /></label>
    ${to !== undefined && html`<label>to <input type="number" value=${to} onChange=${(event) => go(address(`${step}-${event.target.value}`))} /></label>`}
    <button disabled=${next === undefined} onClick=${() => open(next)} aria-label="next step">▸</button>
    <span class="dim">of ${steps.length} recorded</span></span>`;
}
