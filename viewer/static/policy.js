// How far did the policy move?
import { html } from "./lib.js";

export function Policy() {
  return html`<div class="bar"><h1>Policy</h1></div>`;
}
