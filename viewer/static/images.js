// The images of a prompt, beside it: asked for by their names, drawn from what the answers hold.
import { html } from "./lib.js";
import { ErrorSentence, useValues } from "./parts.js";

export function Images({ run, names }) {
  const found = useValues(names.map((name) => `runs/${run}/images/${name}`));
  return names.length > 0 && html`<div class="images" role="group" aria-label="images of the prompt">
    ${found.map(({ address, value, error }, at) => (error
    ? html`<${ErrorSentence} key=${address} text=${error} />`
    : html`<img key=${address} src=${`data:${value.type};base64,${value.base64}`} alt=${`image ${at + 1} of the prompt`} />`))}</div>`;
}
