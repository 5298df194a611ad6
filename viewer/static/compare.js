// Which run was better?
import { html } from "./lib.js";

export function Compare() {
  return html`<div class="bar"><h1>Compare</h1></div>`;
}
