// Small parts of several pages: asking the server for a value, choosing a step, sentences about what is missing.
import { get } from "./api.js";
import { html, useEffect, useLayoutEffect, useState } from "./lib.js";
import { isSaved } from "./saved.js";
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

// A state that the browser keeps.
export function useStored(name, first) {
  const [value, setValue] = useState(localStorage.getItem(name) ?? first);
  useLayoutEffect(() => localStorage.setItem(name, value), [value]);
  return [value, setValue];
}

export const MOST_RUNS = 20;

// "0-3-5" -> [0, 3, 5], each one once.
export const runNumbers = (text) => [...new Set((text ?? "").split("-").filter((part) => /^\d+$/.test(part)).map(Number))];

// Names of runs as they are shown, with their numbers where two are equal.
export const labelsOf = (runs) => runs.map(({ name, number }) => visible(runs.filter((one) => one.name === name).length > 1 ? `${name} (${number})` : name));

// Handles a key by what `keys` has under its name; not while somebody types.
export const onKeys = (keys) => (event) => {
  const isOther = event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName);
  if (isOther || !Object.hasOwn(keys, event.key)) return;
  event.preventDefault();
  keys[event.key]?.();
};

// Keys of a page.
export function useKeys(keys) {
  useEffect(() => {
    const onKey = onKeys(keys);
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  });
}

export const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

// The smallest and the largest of some numbers, of which those that are none do not count; [Infinity, -Infinity] of none.
export const extent = (values) => values.filter(Number.isFinite)
  .reduce(([low, high], one) => [Math.min(low, one), Math.max(high, one)], [Infinity, -Infinity]);

// The place beside one of `length`; from none, the first or the last.
export const moved = (place, by, length) => clamp((place ?? (by > 0 ? -1 : length)) + by, 0, length - 1);

export function go(address) {
  location.hash = address;
}

export const Sentence = ({ children }) => html`<p class="sentence">${children}</p>`;

export const NOT_RECORDED = "This run has recorded no responses: tracking.rollouts.enable turns their record on.";

export const ErrorSentence = ({ text }) => html`<p class="sentence error" role="alert">${visible(text)}</p>`;

// One of several options, [value, text] each; `choose` gets the value as a text.
export function Choice({ label, value, options, choose }) {
  return html`<select aria-label=${label} value=${value} onChange=${(event) => choose(event.target.value)}>
    ${options.map(([one, text]) => html`<option value=${one}>${text}</option>`)}</select>`;
}

// ◂ ... ▸: `previous` and `next` open what is beside, and are undefined at the ends.
export function Chooser({ what, previous, next, note, children }) {
  return html`<span class="chooser">
    <button disabled=${!previous} onClick=${previous} aria-label=${`previous ${what}`}>◂</button>
    ${children}
    <button disabled=${!next} onClick=${next} aria-label=${`next ${what}`}>▸</button>
    <span class="dim">${note}</span></span>`;
}

// The step next to one that is wanted; that one itself if there are none.
export function nearest(steps, wanted) {
  return steps.reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best), steps[0] ?? wanted);
}

// The steps that have a file, to go from one to the next.
export function StepChooser({ steps, step, to, address }) {
  const open = (one) => (one === undefined ? undefined : () => go(address(one)));
  const previous = open(steps.findLast((one) => one < step));
  const next = open(steps.find((one) => one > step));
  useKeys({ "[": previous, "]": next });
  return html`<${Chooser} what="step" note=${`of ${steps.length} ${isSaved ? "in this file" : "recorded"}`} ...${{ previous, next }}>
    <label>step <input type="number" value=${step} onChange=${(event) => go(address(nearest(steps, Number(event.target.value))))} /></label>
    ${to !== undefined && html`<label>to <input type="number" value=${to} onChange=${(event) => go(address(`${step}-${event.target.value}`))} /></label>`}<//>`;
}
