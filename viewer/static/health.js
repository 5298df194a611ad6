// What died, and what did it cost?
import { html } from "./lib.js";

export function Health() {
  return html`<div class="bar"><h1>Health</h1></div>`;
}
