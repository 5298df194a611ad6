// A heat strip: one column per step, one row per bin from the bottom up. A click on a column, or Enter at it, opens its step.
import { colour, penOf, useDrawn } from "./chart.js";
import { shade } from "./colours.js";
import { html, useEffect, useState } from "./lib.js";
import { clamp, moved, onKeys } from "./parts.js";

// columns: per step the numbers of its bins, -1 (orange) to 1 (blue), null: not known; lines: per step heights from 0 to 1.
export function Strip({ steps, columns, lines = [], step, onStep, told, label, theme }) {
  const [chosen, choose] = useState(null);
  useEffect(() => choose(null), [step]);
  const own = steps.indexOf(step);
  const at = chosen ?? (own < 0 ? null : own);
  const place = Math.min(at ?? Infinity, steps.length - 1);
  const canvas = useDrawn((node) => draw(node, columns, lines, at), [columns, at, theme]);
  const under = (event) => clamp(Math.floor((event.offsetX / canvas.current.clientWidth) * steps.length), 0, steps.length - 1);
  const move = (by) => choose(moved(at, by, steps.length));
  const keys = {
    ArrowLeft: () => move(-1), ArrowRight: () => move(1), Home: () => choose(0), End: () => choose(steps.length - 1),
    Enter: () => steps.length && onStep(steps[place]),
  };
  return html`<canvas ref=${canvas} class="heat" tabindex="0" role="img" aria-label=${`${label}; arrows choose a step, Enter opens it`}
      onKeyDown=${onKeys(keys)} onMouseMove=${(event) => choose(under(event))}
      onMouseLeave=${() => choose(null)} onClick=${(event) => onStep(steps[under(event)])}></canvas>
    <p class="dim" aria-live="polite">${steps.length ? told(place) : "no step yet"}</p>`;
}

function draw(canvas, columns, lines, chosen) {
  const pen = penOf(canvas);
  const [width, height] = [canvas.clientWidth / columns.length, canvas.clientHeight];
  const whole = (length) => Math.round(length * devicePixelRatio) / devicePixelRatio; // or seams would show
  columns.forEach((values, at) => (values ?? []).forEach((value, bin) => {
    if (typeof value !== "number") return;
    const [left, right] = [at, at + 1].map((column) => whole(column * width));
    const [top, bottom] = [bin + 1, bin].map((row) => whole(height * (1 - row / values.length)));
    pen.fillStyle = shade(value >= 0, Math.abs(value));
    pen.fillRect(left, top, Math.max(1, right - left), bottom - top);
  }));
  pen.strokeStyle = colour("--ink");
  lines.forEach((line, number) => {
    pen.lineWidth = number === 1 ? 2 : 1;
    pen.beginPath();
    line.forEach((share, at) => {
      const isOn = at > 0 && Number.isFinite(line[at - 1]);
      if (Number.isFinite(share)) pen[isOn ? "lineTo" : "moveTo"]((at + 0.5) * width, (1 - share) * height);
    });
    pen.stroke();
  });
  pen.lineWidth = 1;
  if (chosen !== null) pen.strokeRect(chosen * width, 0, Math.max(1, width), height);
}
