// Small parts of several pages: asking the server for a value, choosing a step, sentences about what is missing.
import { get } from "./api.js";
import { html, useEffect, useState } from "./lib.js";
import { visible } from "./text.js";

// {address, value, error} of each of several addresses of the server, once all have answered; what was there before stays until then.
export function useValues(addresses, stamp) {
  const [found, setFound] = useState([]);
  useEffect(() => {
    const stop = new AbortController();
    const asked = addresses.map((address) => get(address, stop.signal).then((value) => ({ address, value }), (error) => ({ address, error: error.message })));
    Promise.all(asked).then((all) => stop.signal.aborted || setFound(all));
    return () => stop.abort();
  }, [addresses.join(), stamp]);
  return found;
}

// The same of one address; an address of null asks for nothing.
export const useValue = (address, stamp) => useValues(address ? [address] : [], stamp)[0] ?? {};

// Calls `act` now, and again `ms` milliseconds after it is done, while somebody looks.
export function useEvery(ms, act, needs) {
  useEffect(() => {
    let timer = null, isOver = false;
    const next = async () => {
      if (!document.hidden) await act();
      if (!isOver) timer = setTimeout(next, ms);
    };
    next();
    return () => { isOver = true; clearTimeout(timer); };
  }, needs);
}

export const MOST_RUNS = 20;

// "0-3-5" -> [0, 3, 5], each one once.
export const runNumbers = (text) => [...new Set((text ?? "").split("-").filter((part) => /^\d+$/.test(part)).map(Number))];

// Names of runs as they are shown, with their numbers where two are equal.
export const labelsOf = (runs) => runs.map(({ name, number }) => visible(runs.filter((one) => one.name === name).length > 1 ? `${name} (${number})` : name));

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
