// With which configuration does the run train? All keys of its config.yaml, to search, and what later starts changed.
import { html, useRef, useState } from "./lib.js";
import { ErrorSentence, Sentence, useKeys, useValue } from "./parts.js";
import { clock, visible } from "./text.js";

export function Configuration({ data, at }) {
  const [search, setSearch] = useState("");
  const input = useRef(null);
  useKeys({ "/": () => input.current?.focus() });
  const found = useValue(`runs/${at.run}/config`, data.facts.events.length);
  const error = found.error ?? found.value?.error;
  const words = search.toLowerCase().split(" ").filter(Boolean);
  const all = Object.entries(found.value?.keys ?? {});
  const shown = all.filter((pair) => words.every((word) => pair.join(" ").toLowerCase().includes(word)));
  const changed = data.facts.events.filter((event) => event.kind === "start" && [event.changes ?? []].flat().length);
  return html`<div class="bar"><h1>Config</h1>
      <input ref=${input} type="search" size="30" placeholder="search key, value" aria-label="search the configuration" value=${search} onInput=${(event) => setSearch(event.target.value)} />
      <span class="dim">${shown.length} of ${all.length} keys of config.yaml, with the defaults; what looks like a secret is hidden</span></div>
    ${error && html`<${ErrorSentence} text=${error} />`}
    ${changed.map((event) => html`<${Sentence}>Changed at the start of ${clock(event.unix_s)}: ${visible([event.changes].flat().join(", "))}<//>`)}
    ${all.length > 0 && html`<div class="wide"><table class="config"><thead><tr><th>key</th><th>value</th></tr></thead>
      <tbody>${shown.map(([key, value]) => html`<tr key=${key}><td>${visible(key)}</td><td><bdi>${visible(value)}</bdi></td></tr>`)}</tbody></table></div>`}`;
}
