// A heat strip: one column per step, one row per bin from the bottom up. A click on a column, or Enter at it, opens its step.
import { colour, useDrawn } from "./chart.js";
import { shade } from "./colours.js";
import { html, useEffect, useState } from "./lib.js";

// columns: per step the numbers of its bins, -1 (orange) to 1 (blue), null: not known; lines: per step heights from 0 to 1.
export function Strip({ steps, columns, lines = [], step, onStep, told, label, theme, height = 200 }) {
  const [chosen, choose] = useState(null);
  useEffect(() => choose(null), [step]);
  const own = steps.indexOf(step);
  const place = Math.min(chosen ?? (own < 0 ? steps.length - 1 : own), steps.length - 1);
  const canvas = useDrawn((node) => draw(node, columns, lines, chosen === null && own < 0 ? -1 : place, height), [columns, lines.map((line) => line.length).join(), place, chosen, theme]);
  const under = (event) => Math.max(0, Math.min(steps.length - 1, Math.floor((event.offsetX / canvas.current.clientWidth) * steps.length)));
  const onKey = (event) => {
    const next = { ArrowLeft: place - (chosen === null && own < 0 ? 0 : 1), ArrowRight: place + 1, Home: 0, End: steps.length - 1 }[event.key];
    if (event.key === "Enter" && steps.length) onStep(steps[place]);
    if (next === undefined) return;
    choose(Math.max(0, Math.min(steps.length - 1, next)));
    event.preventDefault();
  };
  return html`<canvas ref=${canvas} class="heat" tabindex="0" role="img" aria-label=${`${label}; arrows choose a step, Enter opens it`} onKeyDown=${onKey}
      onMouseMove=${(event) => choose(under(event))} onMouseLeave=${() => choose(null)} onClick=${(event) => onStep(steps[under(event)])}></canvas>
    <p class="dim" aria-live="polite">${steps.length ? told(place) : "no step yet"}</p>`;
}

function draw(canvas, columns, lines, place, height) {
  const scale = devicePixelRatio || 1;
  canvas.width = canvas.clientWidth * scale;
  canvas.height = height * scale;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  const width = canvas.width / columns.length;
  columns.forEach((values, at) => (values ?? []).forEach((value, bin) => {
    if (typeof value !== "number") return;
    const [left, right] = [at, at + 1].map((column) => Math.round(column * width));
    const [top, bottom] = [bin + 1, bin].map((row) => Math.round(canvas.height * (1 - row / values.length)));
    pen.fillStyle = shade(value >= 0, Math.abs(value));
    pen.fillRect(left, top, Math.max(1, right - left), bottom - top);
  }));
  pen.strokeStyle = pen.fillStyle = colour("--ink");
  lines.forEach((line, number) => {
    pen.lineWidth = number === 1 ? 2 * scale : scale;
    pen.beginPath();
    line.forEach((share, at) => Number.isFinite(share) && pen[at && Number.isFinite(line[at - 1]) ? "lineTo" : "moveTo"]((at + 0.5) * width, (1 - share) * canvas.height));
    pen.stroke();
  });
  pen.lineWidth = scale;
  if (place >= 0) pen.strokeRect(place * width, 0, Math.max(1, width), canvas.height);
}
