// One response: its tokens coloured by what the models thought of them, and the numbers of a chosen token.
import { colour, penOf, useDrawn } from "./chart.js";
import { COLOURINGS, limitsOf, numbersOf, ownLimits, scaleOf, shade } from "./colours.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./lib.js";
import { ErrorSentence, go, NOT_RECORDED, Sentence, StepChooser, useKeys, useValue } from "./parts.js";
import { number, reasons, signed, visible } from "./text.js";

const COUNTS = 1, LEARNED = 2;
const CLIPS = [[1, "clipped high"], [2, "clipped low"], [4, "dual clip"]];

export function Tokens({ data, at, theme }) {
  const { facts } = data;
  const steps = facts[at.kind];
  const step = at.step ?? steps.at(-1) ?? null;
  const all = useValue(step === null ? null : `runs/${at.run}/${at.kind}/${step}`);
  const recorded = useMemo(() => recordedRows(all.value?.columns), [all.value]);
  const row = at.row ?? recorded[0]?.row ?? null;
  const found = useValue(step === null || row === null ? null : `runs/${at.run}/${at.kind}/${step}/${row}`);
  const address = (one, of = step) => `/run/${at.run}/tokens/${at.kind}/${of}${one === null ? "" : `/${one}`}`;
  const place = recorded.findIndex((one) => one.row === row);
  const move = (by) => recorded[place + by] && go(address(recorded[place + by].row));
  const next = recorded.find((one, at) => at > place && one.prompt !== recorded[place]?.prompt);
  useKeys({ j: () => move(1), k: () => move(-1), g: () => next && go(address(next.row)) });
  const chooser = html`<div class="bar"><h1>Tokens</h1>
    ${step !== null && html`<${StepChooser} steps=${steps} step=${step} address=${(one) => address(null, one)} />`}
    ${place >= 0 && html`<span class="chooser"><button disabled=${place === 0} onClick=${() => move(-1)} aria-label="previous response">◂</button>
      response ${number(recorded[place].sample + 1)} of prompt ${visible(recorded[place].prompt)} <button disabled=${place === recorded.length - 1} onClick=${() => move(1)} aria-label="next response">▸</button>
      <span class="dim">${place + 1} of ${recorded.length} recorded</span></span>`}
    <a href=${`#/run/${at.run}/responses/${at.kind}/${step ?? ""}`}>all of the step</a></div>`;
  if (step === null) return html`${chooser}<${Sentence}>${NOT_RECORDED}<//>`;
  const error = all.error ?? found.error;
  if (error) return html`${chooser}<${ErrorSentence} text=${error} />`;
  if (all.value && row === null) return html`${chooser}<${Sentence}>No response of this step is recorded with its tokens.<//>`;
  return html`${chooser}${found.value && html`<${Response} found=${found.value} scales=${facts.scales} theme=${theme} />`}`;
}

function recordedRows(columns) {
  const has = columns?.why ?? columns?.fixed ?? [];
  return has.flatMap((is, place) => (is ? [{ row: columns.row[place], prompt: columns.prompt_index[place], sample: columns.sample[place] }] : []));
}

function Response({ found, scales, theme }) {
  const { row } = found;
  const [name, setName] = useState(localStorage.getItem("splitppo-colour") ?? "value");
  const [chosen, setChosen] = useState(null);
  const [isOwn, setOwn] = useState(false);
  useEffect(() => setChosen(null), [found]);
  const choose = (one) => { localStorage.setItem("splitppo-colour", one); setName(one); };
  const isThere = (one) => numbersOf(one, found) !== null;
  const shown = isThere(name) ? name : COLOURINGS.map(([one]) => one).find(isThere) ?? name;
  const limits = useMemo(() => (isOwn ? ownLimits(shown, found) : scales[shown]), [isOwn, shown, found, scales]);
  useKeys(Object.fromEntries(COLOURINGS.map(([one], place) => [String(place + 1), () => isThere(one) && choose(one)])));
  const facts = [
    ["score", number(row.score)], ["reward", number(row.reward)], ["KL", number(row.kl)], ["V₀", number(row.value_first)], ["return", number(row.return_first)],
    ["value error", number(row.value_error)], ["tokens", number(row.length)], ["picked", reasons(row.why ?? 0).join(", ") || "–"],
  ];
  const notes = [row.has_eos === false && "no EOS", row.is_truncated && "cut at the limit", row.failure && `no score: ${row.failure}`, row.lost && "environment lost"].filter(Boolean);
  return html`<div class="bar facts">${facts.map(([title, text]) => html`<span><span class="dim">${title}</span> <b>${text}</b></span>`)}
      <span><span class="dim">source</span> <bdi>${visible(row.data_source)}</bdi> <span class="dim">${visible(row.place)}</span></span>${notes.map((note) => html`<b class="error">${visible(note)}</b>`)}</div>
    ${row.extra && html`<p class="dim">scorer: <bdi>${visible(row.extra)}</bdi></p>`}
    <div class="bar" role="group" aria-label="colour of the tokens">colour:${COLOURINGS.map(([one, what], place) => html`<button title=${isThere(one) ? what : `${what}: not recorded`} aria-pressed=${one === shown} disabled=${!isThere(one)} onClick=${() => choose(one)}>${place + 1} ${one}</button>`)}
      ${isThere(shown) && html`<${Legend} name=${shown} limits=${limits} />`}
      <button aria-pressed=${isOwn} title="the smallest and the largest number of this response, instead of those of the whole run" onClick=${() => setOwn(!isOwn)}>own scale</button></div>
    ${row.ends ? html`<${Text} ...${{ found, shown, limits, chosen, setChosen }} />
      <${Strips} ...${{ found, chosen, setChosen, theme }} />
      <${Details} found=${found} chosen=${chosen} />`
    : html`<${Sentence}>The tokens of this response are not recorded${row.response === null ? ", nor is its text" : ", only its text"}.<//>${row.response !== null && html`<div class="text">${visible(row.response)}</div>`}`}
    <div class="split"><div><h2>Prompt</h2><div class="text plainly prompt" tabindex="0">${visible(row.prompt)}</div></div>
      <div><h2>Ground truth</h2><div class="text plainly truth" tabindex="0">${visible(row.ground_truth)}</div></div></div>
    ${row.messages && html`<${Conversation} text=${row.messages} />`}`;
}

function Legend({ name, limits }) {
  const [low, high] = limitsOf(name, limits);
  const scale = scaleOf(name, limits);
  const stops = Array.from({ length: 11 }, (_, at) => scale(name === "ratio" ? low * (high / low) ** (at / 10) : low + ((high - low) * at) / 10) || shade(true, 0));
  return html`<span class="legend">${number(low)}<i style=${{ background: `linear-gradient(to right, ${stops.join(", ")})` }}></i>${number(high)}</span>`;
}

// Splits the text of a response at the ends of its tokens, which count code points.
export function splitTokens(response, ends) {
  const points = Array.from(response ?? "");
  return ends.map((end, at) => points.slice(at ? ends[at - 1] : 0, end).join(""));
}

// The tokens as elements, made once for a response; another colour changes only their backgrounds.
function Text({ found, shown, limits, chosen, setChosen }) {
  const holder = useRef(null);
  const elements = useRef([]);
  const { row } = found;
  useLayoutEffect(() => {
    const tokens = splitTokens(row.response, row.ends);
    elements.current = tokens.map((text, at) => element("span", classOf(row, at), visible(text).replaceAll("\n", "⏎\n")));
    const parts = elements.current.flatMap((token, at) => (startsTurn(row, at) ? [turnHead(row, at), token] : [token]));
    elements.current.forEach((token, at) => { token.dataset.at = at; });
    holder.current.replaceChildren(...parts);
  }, [found]);
  useLayoutEffect(() => {
    const scale = scaleOf(shown, limits);
    const numbers = numbersOf(shown, found);
    elements.current.forEach((token, at) => { token.style.backgroundColor = numbers && row.flags[at] & COUNTS ? scale(numbers[at]) : ""; });
  }, [found, shown, limits]);
  useLayoutEffect(() => {
    const token = elements.current[chosen];
    token?.classList.add("chosen");
    token?.scrollIntoView({ block: "nearest" });
    return () => token?.classList.remove("chosen");
  }, [chosen, found]);
  const onClick = (event) => event.target.dataset.at !== undefined && setChosen(Number(event.target.dataset.at));
  const onKey = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    setChosen(Math.max(0, Math.min(row.ends.length - 1, (chosen ?? (by > 0 ? -1 : row.ends.length)) + by)));
    event.preventDefault();
  };
  return html`<div ref=${holder} class="text tokens" tabindex="0" role="group" aria-label="tokens of the response; arrow keys choose one" onClick=${onClick} onMouseOver=${(event) => chosen === null || onClick(event)} onKeyDown=${onKey}></div>`;
}

function element(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function classOf(row, at) {
  const flags = row.flags?.[at] ?? COUNTS | LEARNED;
  if (!(flags & COUNTS)) return "tok environment";
  return `tok${flags & LEARNED ? "" : " unlearned"}${row.clip?.[at] ? " clipped" : ""}`;
}

const startsTurn = (row, at) => row.turn !== null && (at === 0 || row.turn[at] !== row.turn[at - 1]);

function turnHead(row, at) {
  const turn = row.turn[at];
  const reward = row.turn_rewards?.[turn - 1];
  const head = element("span", "turn", turn ? `turn ${turn} ` : "environment: no value, no advantage");
  if (turn && reward !== undefined && reward !== null) head.append(element("b", "", `reward ${number(reward)}`));
  return head;
}

const STRIP = 70;

// Value and return, and the advantage, along the response; linked with the text.
function Strips({ found, chosen, setChosen, theme }) {
  const { row } = found;
  const length = row.ends.length;
  const canvas = useDrawn((node) => drawStrip(node, row, chosen), [found, chosen, theme]);
  if (!row.value && !row.advantage?.some(Boolean)) return row.advantage && html`<p class="dim">No value, and the advantage is 0 at every token, which GRPO gives if all samples of a prompt score the same.</p>`;
  const onClick = (event) => setChosen(Math.max(0, Math.min(length - 1, Math.floor((event.offsetX / canvas.current.clientWidth) * length))));
  return html`<canvas ref=${canvas} class="strip" role="img" aria-label="value and advantage along the response" onClick=${onClick}></canvas>
    <p class="dim"><i class="key" style=${{ background: "var(--c1)" }}></i>value <i class="key" style=${{ background: "var(--c3)" }}></i>return <i class="key" style=${{ background: "var(--c2)" }}></i>|advantage|, bars</p>`;
}

function drawStrip(canvas, row, chosen) {
  const [pen, width] = [penOf(canvas), canvas.clientWidth];
  const length = row.ends.length;
  const x = (at) => ((at + 0.5) / length) * width;
  const counted = (values) => (values ?? []).map((value, at) => (row.flags[at] & COUNTS ? value : null));
  const bars = counted(row.advantage).map((value) => Math.abs(value ?? 0));
  const most = bars.reduce((one, other) => Math.max(one, other), 1e-9);
  pen.fillStyle = colour("--c2");
  pen.globalAlpha = 0.5;
  bars.forEach((value, at) => pen.fillRect(x(at) - width / length / 2, STRIP - (value / most) * STRIP * 0.45, Math.max(0.5, width / length - 1), STRIP));
  pen.globalAlpha = 1;
  const lines = row.value ? [[counted(row.ret), "--c3"], [counted(row.value), "--c1"]] : [];
  const all = lines.flatMap(([values]) => values).filter(Number.isFinite);
  const [low, high] = all.reduce(([least, largest], value) => [Math.min(least, value), Math.max(largest, value)], [Infinity, -Infinity]);
  for (const [values, name] of lines) {
    pen.strokeStyle = colour(name);
    pen.beginPath();
    let isDown = false;
    values.forEach((value, at) => {
      const y = STRIP - 4 - ((value - low) / (high - low || 1)) * (STRIP - 8);
      if (Number.isFinite(value)) pen[isDown ? "lineTo" : "moveTo"](x(at), y);
      isDown = Number.isFinite(value);
    });
    pen.stroke();
  }
  pen.strokeStyle = colour("--ink");
  if (chosen !== null) pen.strokeRect(x(chosen), 0, 0.5, STRIP);
}

function Details({ found, chosen }) {
  const { row, derived } = found;
  if (chosen === null || chosen >= row.ends.length) return html`<div class="details dim">Choose a token: click it, or focus the text and use the arrow keys.</div>`;
  const text = splitTokens(row.response, row.ends)[chosen];
  const of = (list) => list?.[chosen] ?? null;
  const counts = row.flags[chosen] & COUNTS;
  const following = row.value?.findIndex((_, at) => at > chosen && row.flags[at] & COUNTS) ?? -1;
  const value = of(row.value);
  // [title, number, how it is shown, its name]
  const pairs = counts ? [
    ["value", value, () => `${number(value)} → ${following < 0 ? "end" : number(row.value[following])}`, "value"],
    ["δ", of(derived.delta), signed, "delta"], ["advantage", of(row.advantage), signed, "advantage"], ["return", of(row.ret), number, "return"], ["reward", of(row.rewards), number, "reward"],
    ["ratio", of(derived.ratio), number, "ratio"], ["log p", of(row.old), number, "old"], ["reference", of(row.ref), number, "ref"], ["rollout", of(row.rollout), number, "rollout"], ["in the update", of(row.new), number, "new"],
    ["KL", of(derived.kl), signed, "kl"], ["mismatch", of(derived.mismatch), number, "mismatch"], ["entropy", of(row.entropy_tokens), number, "entropy"],
  ].filter(([, one]) => one !== null) : [];
  const clips = CLIPS.filter(([bit]) => of(row.clip) & bit).map(([, what]) => what);
  return html`<div class="details" role="status" aria-live="polite"><span>token ${chosen + 1} «<bdi>${visible(text).replaceAll("\n", "⏎")}</bdi>» <span class="dim">id ${of(row.ids)}</span></span>
    ${pairs.map(([title, one, show, key]) => html`<span><span class="dim">${title}</span> <b data-name=${key} data-value=${one}>${show(one)}</b></span>`)}
    ${!counts && html`<span>written by the environment: no value, no advantage, not learned from</span>`}
    ${counts && !(row.flags[chosen] & LEARNED) ? html`<b>not learned from</b>` : ""}${clips.map((clip) => html`<b class="error">${clip}</b>`)}
    ${counts && !row.new ? html`<span class="dim">ratio, clip and entropy: not recorded</span>` : ""}</div>`;
}

function Conversation({ text }) {
  let messages = null;
  try {
    messages = JSON.parse(text);
  } catch { /* what is shown then is the text */ }
  if (!Array.isArray(messages)) return html`<h2>Conversation</h2><div class="text plainly">${visible(text)}</div>`;
  const shown = (value) => visible(typeof value === "string" ? value : JSON.stringify(value ?? ""));
  return html`<h2>Conversation</h2>${messages.map((message) => html`<div class="message"><b>${shown(message?.role)}</b>${shown(message?.content)}
    ${[message?.tool_calls ?? []].flat().map((call) => html`<div class="call"><b>tool call</b>${shown(call?.function?.name ?? call?.name)} ${shown(call?.function?.arguments ?? call?.arguments)}</div>`)}</div>`)}`;
}
