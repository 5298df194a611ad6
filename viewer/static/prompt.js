// How did the answer to one validation prompt change?
import { html } from "./lib.js";

export function Prompt() {
  return html`<div class="bar"><h1>Prompt</h1></div>`;
}
