// Chooses the page by the address, and holds what all pages share: the head line, the theme, the run that is watched.
import { takeToken } from "./api.js";
import { Compare } from "./compare.js";
import { Configuration } from "./configuration.js";
import { Critic } from "./critic.js";
import { Health } from "./health.js";
import { html, render, useEffect, useErrorBoundary, useLayoutEffect, useMemo, useState } from "./lib.js";
import { Overview } from "./overview.js";
import { ErrorSentence, runNumbers, useEvery, useKeys, useStored } from "./parts.js";
import { Policy } from "./policy.js";
import { Prompt } from "./prompt.js";
import { Responses } from "./responses.js";
import { RunData } from "./run_data.js";
import { Runs } from "./runs.js";
import { duration, nth, number, visible } from "./text.js";
import { Timeline } from "./timeline.js";
import { Tokens } from "./tokens.js";

const SCHEME = matchMedia("(prefers-color-scheme: dark)");
// By the value of color-scheme.
const THEMES = { "light dark": { name: "auto", next: "light" }, light: { name: "light", next: "dark" }, dark: { name: "dark", next: "light dark" } };
const KEYS = [
  ["j k", "next, previous response (Tokens), prompt (Prompt)"], ["g", "next prompt (Tokens)"], ["1–8", "colour of tokens (Tokens)"], ["[ ]", "previous, next step; prompt (Prompt)"],
  ["← →", "a token, or a point of a curve, once the text or the curve has the focus"], ["Enter", "open the point"], ["+ − Home", "zoom, show all (Timeline)"], ["/", "search (Overview, Responses, Config, Compare)"], ["?", "these keys"],
];

// The pages of a run in the order of the head line: their names, titles and components.
const PAGES = [
  ["overview", "Overview", Overview], ["critic", "Critic", Critic], ["policy", "Policy", Policy], ["responses", "Responses", Responses], ["tokens", "Tokens", Tokens],
  ["prompt", "Prompt", Prompt], ["timeline", "Timeline", Timeline], ["health", "Health", Health], ["config", "Config", Configuration],
];

// #/run/3/tokens/train/120/17 -> {page: "tokens", run: 3, kind: "train", step: 120, to: null, row: 16}; 120-130 has a `to`.
// Addresses count rows and prompts from 1, the data from 0. #/run/3/prompt/17 -> {page: "prompt", run: 3, rest: ["17"], ...}; #/compare/0-3-5 -> {page: "compare", runs: [0, 3, 5]}.
export function parseAddress(hash) {
  const [, begin, run, page = "overview", ...rest] = hash.split("/");
  const [kind, step, row] = rest;
  if (begin === "compare") return { page: "compare", runs: runNumbers(run) };
  if (begin !== "run" || !/^\d+$/.test(run)) return { page: "runs" };
  const whole = (text) => (/^\d{1,9}$/.test(text ?? "") ? Number(text) : null);
  const indexOf = (text) => (whole(text) ? whole(text) - 1 : null);
  const [first, last] = (step ?? "").split("-");
  return { page, rest, run: Number(run), kind: kind === "val" ? "val" : "train", step: whole(first), to: whole(last), row: indexOf(row) };
}

function App() {
  const [at, setAt] = useState(parseAddress(location.hash));
  const [theme, setTheme] = useStored("splitppo-theme", "light dark");
  const [held, hold] = useState(null);
  const [, redraw] = useState(0);
  const [hasHelp, setHelp] = useState(false);

  useMemo(() => { document.documentElement.style.colorScheme = theme; }, [theme]); // before what is below asks for its colours
  useKeys({ "?": () => setHelp(!hasHelp), Escape: () => setHelp(false) });
  useLayoutEffect(() => {
    addEventListener("hashchange", () => setAt(parseAddress(location.hash)));
    SCHEME.addEventListener("change", () => redraw((count) => count + 1));
  }, []);

  useEffect(() => {
    if (at.run === undefined) return hold(null);
    const over = new AbortController();
    hold(new RunData(at.run, () => redraw((count) => count + 1), over.signal));
    return () => over.abort();
  }, [at.run]);

  // Until the effect above has run, what is held belongs to the run that was left.
  const data = held?.number === at.run ? held : null;
  const broken = data?.facts?.lines_broken && `${data.facts.lines_broken} lines of metrics.jsonl cannot be read and are left out.`;
  const isDark = theme === "dark" || (theme !== "light" && SCHEME.matches);
  const shared = { at, data, theme: isDark ? "dark" : "light" };
  return html`
    <header><a href="#/" class="brand">SplitPPO</a>${data?.facts && html`<${Head} ...${shared} />`}
      <span class="room"></span>
      <button onClick=${() => setTheme(THEMES[theme].next)} aria-label="theme">theme: ${THEMES[theme].name}</button>
      <button onClick=${() => setHelp(!hasHelp)} aria-expanded=${hasHelp}>keys ?</button>
    </header>
    ${hasHelp && html`<dl class="help" role="dialog" aria-label="keys">${KEYS.map(([key, what]) => html`<dt>${key}</dt><dd>${what}</dd>`)}</dl>`}
    ${[data?.error, data?.facts?.error, data?.lost, data?.notice, broken].filter(Boolean).map((text) => html`<p class="notice" role="status">${visible(text)}</p>`)}
    <main><${Page} ...${shared} /></main>`;
}

function Head({ at, data }) {
  const { facts } = data;
  const step = at.step ?? facts.train.at(-1) ?? "";
  const rest = { responses: `/train/${step}`, tokens: step === "" ? "" : `/${at.kind}/${step}${at.row === null ? "" : `/${nth(at.row)}`}` };
  return html`<b class="name">${visible(facts.name)}</b><${State} facts=${facts} />
    <nav aria-label="pages">${PAGES.map(([page, title]) => html`<a href=${`#/run/${at.run}/${page}${rest[page] ?? ""}`} aria-current=${at.page === page ? "page" : null}>${title}</a>`)}</nav>`;
}

function State({ facts }) {
  const [, tick] = useState(0);
  useEvery(1000, () => tick((count) => count + 1), []);
  const quiet = facts.live && facts.state !== "ended" && facts.state !== "gone" ? Date.now() / 1000 - facts.live.unix_s : 0;
  const sentence = facts.state === "quiet" && quiet > 15 ? `quiet for ${duration(quiet)}` : visible(facts.sentence);
  const pools = facts.state === "live" ? Object.entries(facts.live?.pools ?? {}) : [];
  return html`<span class=${`state ${facts.state}`}>${sentence}</span>
    ${facts.state === "live" && html`<span class="dim">step ${number(facts.live.step)}/${number(facts.live.total_steps)}</span>`}
    ${pools.map(([role, pool]) => html`<span class="pool">${visible(role)}: ${visible(pool?.phase || pool?.method || (pool?.state === "lost" ? "lost" : "idle"))}${pool?.phase && pool.total ? ` ${number(pool.done)}/${number(pool.total)}` : ""}</span>`)}`;
}

function Page(shared) {
  const { at, data } = shared;
  const isOfRun = at.run !== undefined;
  // What is wrong with a run stands above.
  if (isOfRun && (!data?.facts || data.facts.error)) return html`<p class="dim">${data?.error || data?.facts ? "" : "…"}</p>`;
  const Chosen = isOfRun ? PAGES.find(([page]) => page === at.page)?.[2] : { runs: Runs, compare: Compare }[at.page];
  return Chosen ? html`<${Careful} key=${`${at.page}${at.run ?? at.runs}`} ...${{ Chosen, shared }} />` : html`<p>There is no such page.</p>`;
}

// A page; one sentence, until another address is opened, if it meets what no run writes.
function Careful({ Chosen, shared }) {
  const [error, reset] = useErrorBoundary();
  useLayoutEffect(() => reset, [shared.at]); // not as it begins, or an error of its first drawing would come again and again
  return error ? html`<${ErrorSentence} text=${`This page cannot show what the run folder holds: ${error}`} />` : html`<${Chosen} ...${shared} />`;
}

takeToken();
render(html`<${App} />`, document.getElementById("app"));
