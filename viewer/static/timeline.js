// Where did the time go?
import { html } from "./lib.js";

export function Timeline() {
  return html`<div class="bar"><h1>Timeline</h1></div>`;
}
