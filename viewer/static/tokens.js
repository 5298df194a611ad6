// One response: its tokens coloured by what the models thought of them, and the numbers of a chosen token.
import { Chart } from "./chart.js";
import { COLOURINGS, numbersOf, ownLimits, scaleOf } from "./colours.js";
import { Images } from "./images.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./lib.js";
import { Chooser, ErrorSentence, go, moved, NOT_RECORDED, onKeys, Sentence, StepChooser, useKeys, useStored, useValue } from "./parts.js";
import { rowsOf } from "./responses.js";
import { notes, nth, number, parsed, reasons, signed, visible } from "./text.js";

const COUNTS = 1, LEARNED = 2, MOST_BARS = 4000; // more of them are narrower than a pixel
const CLIPS = [[1, "clipped high"], [2, "clipped low"], [4, "dual clip"]];

export function Tokens({ data, at, theme }) {
  const { facts } = data;
  const steps = facts[at.kind];
  const step = steps.length ? at.step ?? steps.at(-1) : null;
  const all = useValue(step === null ? null : `runs/${at.run}/${at.kind}/${step}`);
  const recorded = useMemo(() => (all.value ? rowsOf(all.value.columns).filter((one) => one.isRecorded) : []), [all.value]);
  const row = at.row ?? recorded[0]?.row ?? null;
  const found = useValue(step === null || row === null ? null : `runs/${at.run}/${at.kind}/${step}/${row}`);
  const scales = useValue(`runs/${at.run}/scales`, steps.length);
  const address = (one, of = step) => `/run/${at.run}/tokens/${at.kind}/${of}${one === null ? "" : `/${nth(one)}`}`;
  const place = recorded.findIndex((one) => one.row === row);
  const open = (one) => one && (() => go(address(one.row)));
  const [previous, next] = [open(recorded[place - 1]), open(recorded[place + 1])];
  useKeys({ j: next, k: previous, g: open(recorded.find((one, at) => at > place && one.prompt_index !== recorded[place]?.prompt_index)) });
  const chooser = html`<div class="bar"><h1>Tokens</h1>
    ${step !== null && html`<${StepChooser} steps=${steps} step=${step} address=${(one) => address(null, one)} />`}
    ${place >= 0 && html`<${Chooser} what="response" note=${`${place + 1} of ${recorded.length} recorded`} ...${{ previous, next }}>
      response ${number(nth(recorded[place].sample))} of prompt ${number(nth(recorded[place].prompt_index))}<//>`}
    <a href=${`#/run/${at.run}/responses/${at.kind}/${step ?? ""}`}>all of the step</a></div>`;
  if (step === null) return html`${chooser}<${Sentence}>${NOT_RECORDED}<//>`;
  const error = all.error ?? found.error ?? scales.error;
  if (error) return html`${chooser}<${ErrorSentence} text=${error} />`;
  if (all.value && row === null) return html`${chooser}<${Sentence}>No response of this step is recorded with its tokens.<//>`;
  return html`${chooser}${found.value && scales.value && html`<${Response} run=${at.run} found=${found.value} scales=${scales.value} theme=${theme} />`}`;
}

function Response({ run, found, scales, theme }) {
  const { row } = found;
  const [name, choose] = useStored("splitppo-colour", "value");
  const [chosen, setChosen] = useState(null);
  const [isOwn, setOwn] = useState(false);
  useEffect(() => setChosen(null), [found]);
  const isThere = (one) => numbersOf(one, found) !== null;
  const shown = isThere(name) ? name : COLOURINGS.map(([one]) => one).find(isThere) ?? name;
  const limits = useMemo(() => (isOwn ? ownLimits(shown, found) : scales[shown]), [isOwn, shown, found, scales]);
  useKeys(Object.fromEntries(COLOURINGS.map(([one], place) => [String(place + 1), () => isThere(one) && choose(one)])));
  const facts = [
    ["score", number(row.score)], ["reward", number(row.reward)], ["KL", number(row.kl)], ["V₀", number(row.value_first)], ["return", number(row.return_first)],
    ["value error", number(row.value_error)], ["tokens", number(row.length)], ["picked", reasons(row.why).join(", ") || "–"],
  ];
  return html`<div class="bar facts">${facts.map(([title, text]) => html`<span><span class="dim">${title}</span> <b>${text}</b></span>`)}
      <span><span class="dim">source</span> <bdi>${visible(row.data_source)}</bdi> <span class="dim">${visible(row.place)}</span></span>
      ${notes(row).map((note) => html`<b class="error">${visible(note)}</b>`)}</div>
    ${row.extra && html`<p class="dim">scorer: <bdi>${visible(row.extra)}</bdi></p>`}
    <div class="bar" role="group" aria-label="colour of the tokens">colour:${COLOURINGS.map(([one, what], place) => html`<button title=${isThere(one) ? what : `${what}: not recorded`} aria-pressed=${one === shown} disabled=${!isThere(one)} onClick=${() => choose(one)}>${place + 1} ${one}</button>`)}
      ${isThere(shown) && html`<${Legend} name=${shown} limits=${limits} />`}
      <button aria-pressed=${isOwn} title="the smallest and the largest number of this response, instead of those of the whole run" onClick=${() => setOwn(!isOwn)}>own scale</button></div>
    ${row.ends ? html`<${Text} ...${{ found, shown, limits, chosen, setChosen }} />
      <${Strips} ...${{ found, chosen, setChosen, theme }} />
      <${Details} found=${found} chosen=${chosen} />`
    : html`<${Sentence}>The tokens of this response are not recorded${row.response === null ? ", nor is its text" : ", only its text"}.<//>${row.response !== null && html`<div class="text">${visible(row.response)}</div>`}`}
    <div class="split"><div><h2>Prompt</h2><${Images} run=${run} names=${row.images} /><div class="text plainly prompt" tabindex="0">${visible(row.prompt)}</div></div>
      <div><h2>Ground truth</h2><div class="text plainly truth" tabindex="0">${visible(row.ground_truth)}</div></div></div>
    ${row.messages && html`<${Conversation} text=${row.messages} />`}`;
}

function Legend({ name, limits }) {
  const { low, high, at } = scaleOf(name, limits);
  const stops = Array.from({ length: 11 }, (_, stop) => at(stop / 10));
  return html`<span class="legend">${number(low)}<i style=${{ background: `linear-gradient(to right, ${stops.join(", ")})` }}></i>${number(high)}</span>`;
}

// Splits the text of a response at the ends of its tokens, which count code points.
export function splitTokens(response, ends) {
  const points = Array.from(response ?? "");
  return ends.map((end, at) => points.slice(at ? ends[at - 1] : 0, end).join(""));
}

// The contexts of a response that begin anew: where each begins, how many tokens it has, the turn it goes on from or 0.
export function laterContexts({ segments, followed_turns: followed }) {
  const places = segments ?? [];
  return places.filter((_, at) => at % 2 === 0).map((start, at) => ({ number: at + 2, start, length: places[2 * at + 1], turn: followed?.[at] ?? 0 }));
}

// The tokens as elements, made once for a response; another colour changes only their backgrounds.
function Text({ found, shown, limits, chosen, setChosen }) {
  const holder = useRef(null);
  const elements = useRef([]);
  const { row } = found;
  useLayoutEffect(() => {
    const tokens = splitTokens(row.response, row.ends);
    elements.current = tokens.map((text, at) => element("span", classOf(row, at), visible(text).replaceAll("\n", "⏎\n")));
    const contexts = new Map(laterContexts(row).map((context) => [context.start, context]));
    const headOf = (at) => (contexts.has(at) ? contextHead(contexts.get(at)) : startsTurn(row, at) ? turnHead(row, at) : null);
    holder.current.replaceChildren(...elements.current.flatMap((token, at) => [headOf(at), token]).filter(Boolean));
  }, [found]);
  useLayoutEffect(() => {
    const scale = scaleOf(shown, limits);
    const numbers = numbersOf(shown, found);
    elements.current.forEach((token, at) => { token.style.backgroundColor = numbers && row.flags[at] & COUNTS ? scale.of(numbers[at]) : ""; });
  }, [found, shown, limits]);
  useLayoutEffect(() => {
    const token = elements.current[chosen];
    token?.classList.add("chosen");
    token?.scrollIntoView({ block: "nearest" });
    return () => token?.classList.remove("chosen");
  }, [chosen, found]);
  const onClick = ({ target }) => elements.current.includes(target) && setChosen(elements.current.indexOf(target));
  const move = (by) => setChosen(moved(chosen, by, row.ends.length));
  const onKey = onKeys({ ArrowLeft: () => move(-1), ArrowRight: () => move(1) });
  return html`<div ref=${holder} class="text tokens" tabindex="0" role="group" aria-label="tokens of the response; arrow keys choose one"
    onClick=${onClick} onMouseOver=${(event) => chosen === null || onClick(event)} onKeyDown=${onKey}></div>`;
}

const element = (tag, className, textContent) => Object.assign(document.createElement(tag), { className, textContent });

function classOf(row, at) {
  const flags = row.flags[at];
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

function contextHead({ number: nth, length, turn }) {
  const what = turn ? `goes on from turn ${number(turn)}` : "begins anew";
  return element("span", "turn context", `context ${nth} ${what}: ${number(length)} tokens that the model sees, and nothing before`);
}

// Value and return, and the advantage, along the response; linked with the text.
function Strips({ found: { row }, chosen, setChosen, theme }) {
  const [places, curves] = useMemo(() => {
    const counted = (values) => values?.map((value, at) => (row.flags[at] & COUNTS ? value : null));
    const isBars = row.ends.length < MOST_BARS;
    const all = [
      { label: row.value ? "|advantage|, axis on the right" : "|advantage|", values: counted(row.advantage?.map(Math.abs)), colour: "--c2", scale: row.value && "right", isBars, isFilled: true },
      { label: "return", values: counted(row.ret), colour: "--c3" },
      { label: "value", values: counted(row.value), colour: "--c1" },
    ];
    return [row.ends.map((_, at) => at + 1), all.filter(({ values }) => values).map((one) => ({ ...one, hasGaps: true, width: 1 }))];
  }, [row]);
  const mark = useMemo(() => places.map((_, at) => (at === chosen ? 1 : null)), [places, chosen]);
  const series = [...curves, { label: "chosen", values: mark, colour: "--ink", scale: "mark", isBars: true, isFilled: true, hidden: true }];
  if (!row.value && !row.advantage?.some(Boolean)) {
    return row.advantage && html`<p class="dim">
      No value, and the advantage is 0 at every token, which GRPO gives if all samples of a prompt score the same.</p>`;
  }
  return html`<${Chart} x=${places} ...${{ series, theme }} height=${120} onStep=${(place) => setChosen(place - 1)} told=${(place) => `token ${place}`}
    label="value and advantage along the response" />`;
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
  const context = laterContexts(row).find(({ start, length }) => chosen >= start && chosen < start + length);
  const clips = CLIPS.filter(([bit]) => of(row.clip) & bit).map(([, what]) => what);
  return html`<div class="details" role="status" aria-live="polite"><span>token ${chosen + 1} «<bdi>${visible(text).replaceAll("\n", "⏎")}</bdi>» <span class="dim">id ${of(row.ids)}</span></span>
    ${pairs.map(([title, one, show, key]) => html`<span><span class="dim">${title}</span> <b data-name=${key} data-value=${one}>${show(one)}</b></span>`)}
    ${!counts && html`<span>${context ? `said to the model in context ${context.number}` : "written by the environment"}: no value, no advantage, not learned from</span>`}
    ${counts && !(row.flags[chosen] & LEARNED) ? html`<b>not learned from</b>` : ""}${clips.map((clip) => html`<b class="error">${clip}</b>`)}
    ${counts && !row.new ? html`<span class="dim">ratio, clip and entropy: not recorded</span>` : ""}</div>`;
}

function Conversation({ text }) {
  const messages = parsed(text);
  if (!Array.isArray(messages)) return html`<h2>Conversation</h2><div class="text plainly">${visible(text)}</div>`;
  const shown = (value) => visible(typeof value === "string" ? value : JSON.stringify(value ?? ""));
  const isBeginning = (message) => message?.begins_context === true;
  let count = 1;
  const numbers = messages.map((message) => (isBeginning(message) ? ++count : count));
  return html`<h2>Conversation</h2>${messages.map((message, at) => html`${isBeginning(message) && html`<p class="turn context">context ${numbers[at]}</p>`}
    <div class="message"><b>${shown(message?.role)}</b>${shown(message?.content)}
    ${[message?.tool_calls ?? []].flat().map((call) => html`<div class="call"><b>tool call</b>${shown(call?.function?.name ?? call?.name)} ${shown(call?.function?.arguments ?? call?.arguments)}</div>`)}</div>`)}`;
}
