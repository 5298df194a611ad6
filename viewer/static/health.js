// What died, and what did it cost? Lifelines of the groups, and a table of losses whose sums are the run's own counters.
import { html, useState } from "./lib.js";
import { ErrorSentence, extent, go, onKeys, Sentence, useValue } from "./parts.js";
import { clock, duration, number, visible } from "./text.js";

const CONTROLLER = "controller";
// What is marked on a lifeline: [sign, colour, name].
const MARKS = new Map([["group_lost", ["✕", "--warn", "lost"]], ["recovered", ["▲", "--c3", "recovered"]], ["rollout_restart", ["△", "--c3", "rollout group is back"]],
  ["validation", ["◆", "--c4", "validation"]], ["checkpoint", ["▪", "--dim", "checkpoint"]]]);
const whole = (value) => (Number.isSafeInteger(value) ? value : null);
const lasted = (value) => (Number.isFinite(value) && value >= 0 ? value : null);
const isTime = (value) => Number.isFinite(value) && Math.abs(value) < 1e11;
const joined = (value, sign = ", ") => (value === undefined || value === null ? "" : [value].flat().map(visible).join(sign));

// {losses, starts, lanes} of the events of a run: its losses in their order; of each start of the controller what
// recovery/num_restarts and recovery/num_repeated_steps count; per role the bars of its instances, and marks.
// One recovery may follow several losses: it stands at the first of them. `gone` says why the controller works no more,
// if that is so; `now` ends the bars of what lives.
export function healthOf(events, now = 0, gone = "") {
  const [losses, starts, lanes] = [[], [], new Map()];
  let [dying, open, recovery, before, complete, time] = [null, [], {}, null, null, events.find((event) => isTime(event.unix_s))?.unix_s ?? 0];
  const lane = (role) => lanes.get(role) ?? lanes.set(role, { bars: [], marks: [] }).get(role);
  const end = (bar, at, how) => bar?.to === null && Object.assign(bar, { to: at, how });
  const endAll = (at, how) => lanes.forEach(({ bars }) => end(bars.at(-1), at, how));
  const lose = (event, more) => losses[losses.push({ ...event, from: whole(event.step), seconds: null, repeated: null, ...more }) - 1];
  const die = (cause, more) => {
    const loss = lose(before, { role: CONTROLLER, rank: null, cause, ...more });
    lane(CONTROLLER).marks.push({ at: time, kind: "group_lost", event: { ...loss } });
    end(lane(CONTROLLER).bars.at(-1), time, cause);
    endAll(time, "with its controller");
    return loss;
  };
  for (const event of events) {
    const at = isTime(event.unix_s) ? event.unix_s : time;
    const isStart = !before || event.kind === "start" || event.epoch !== before.epoch;
    const resumed = whole(event.resumed_at);
    if (isStart && before && before.kind !== "end") dying = { since: time, loss: die("its events stop without an `end`", { number: event.number, to: resumed, seconds: lasted(at - time), repeated: resumed === null || complete === null ? null : Math.max(0, complete - resumed) }) };
    if (isStart) {
      starts.push({ epoch: event.epoch, restarts: 0, repeated: 0 });
      lane(CONTROLLER).bars.push({ from: at, to: null, event, name: `start ${visible(event.epoch)}, process ${visible(event.pid)} on ${visible(event.host)}` });
      [open, complete] = [[], resumed ?? complete];
    }
    const { bars } = lane(event.role === undefined ? CONTROLLER : visible(event.role));
    const last = bars.at(-1);
    if (event.kind === "group_up" && dying) dying.loss.seconds = lasted(at - dying.since); // until all groups are there again
    if (event.kind === "step") dying = null;
    if (event.kind === "group_up" && last && last.event.instance_id === event.instance_id && last.how !== "lost") Object.assign(last, { to: null, how: "" });
    else if (event.kind === "group_up") {
      end(last, at, "replaced");
      bars.push({ from: at, to: null, event, name: `instance ${visible(event.instance_id).slice(0, 8)}, processes ${joined(event.pids, " ")} on ${visible(event.host)}` });
    }
    if (event.kind === "group_lost") {
      [open, recovery] = [[...open, lose(event)], {}];
      end(last, at, "lost");
    }
    if (event.kind === "recovery") recovery = event;
    if (event.kind === "recovered" || event.kind === "rollout_restart") {
      const isRollout = event.kind === "rollout_restart";
      const [first, ...others] = open.length ? open : [lose(event, { cause: event.cause ?? "its loss is not among the events" })];
      const { restarted, kept } = isRollout ? { restarted: "rollout" } : recovery;
      Object.assign(first, { from: whole(event.from_step ?? event.step), to: whole(event.to_step ?? event.step), seconds: lasted(event.seconds), repeated: isRollout ? 0 : whole(event.repeated_steps), groups: `${joined(restarted)}; ${joined(kept) || "–"}` });
      others.forEach((one) => { one.isWithOther = true; });
      Object.assign(starts.at(-1), { restarts: starts.at(-1).restarts + 1, repeated: starts.at(-1).repeated + (first.repeated ?? 0) });
      [open, complete] = [[], isRollout ? complete : first.to];
    }
    if (event.kind === "step") complete = whole(event.step) ?? complete;
    if (event.kind === "end") endAll(at, `ended: ${visible(event.reason)}`);
    if (MARKS.has(event.kind)) lane(event.kind === "group_lost" ? visible(event.role) : CONTROLLER).marks.push({ at, kind: event.kind, event });
    [before, time] = [event, at];
  }
  if (gone && before && before.kind !== "end") die(gone);
  endAll(Math.max(now, time), "");
  return { losses, starts, lanes: [...lanes] };
}

export function Health({ data, at }) {
  const { facts, facts: { events } } = data;
  const isAlive = ["live", "quiet"].includes(facts.state) && isTime(facts.live?.unix_s);
  const { losses, starts, lanes } = healthOf(events, isAlive ? facts.live.unix_s : undefined, facts.state === "gone" ? facts.sentence : "");
  return html`<div class="bar"><h1>Health</h1><span class="dim">times are UTC</span></div>
    ${!facts.has_events && html`<${Sentence}>This run has no events.jsonl: it is older than this record.<//>`}
    ${events[0]?.number > 0 && html`<${Sentence}>events.jsonl has more events than this page gets: the sums are those of the last ${number(events.length)}.<//>`}
    ${events.length > 0 && html`<${Lifelines} lanes=${lanes} run=${at.run} />`}
    ${losses.length ? html`<${Losses} losses=${losses} starts=${starts} run=${at.run} />` : events.length > 0 && html`<p>Nothing was lost.</p>`}`;
}

const LANE = 40, BAR = 12, TOP = 22, LEAST = 0.15, SHOWN_LANES = 20, SHOWN_BARS = 500; // heights in pixels; the least width of a bar in percent

function Lifelines({ lanes, run }) {
  const [chosen, choose] = useState(-1);
  const times = lanes.flatMap(([, { bars, marks }]) => [...bars.flatMap((bar) => [bar.from, bar.to]), ...marks.map((mark) => mark.at)]);
  const [begin, end] = extent(times);
  const x = (time) => ((time - begin) / (end - begin || 1)) * 100;
  // Of marks of one kind that would lie upon each other, the last is drawn.
  const rows = lanes.slice(0, SHOWN_LANES).map(([role, { bars, marks }]) => [role, bars.slice(-SHOWN_BARS), [...new Map(marks.map((mark) => [`${mark.kind}${Math.round(x(mark.at) * 5)}`, mark])).values()]]);
  const items = rows.flatMap(([role, bars, marks]) => [...bars.map((bar) => ({ role, bar, at: bar.from })), ...marks.map((mark) => ({ role, mark, at: mark.at }))].sort((one, other) => one.at - other.at));
  const item = items[chosen];
  const beside = (by) => items.findIndex((one) => one.role === rows[rows.findIndex(([role]) => role === (item ?? items[0]).role) + by]?.[0]);
  const to = (place) => items[place] && choose(place);
  const onKey = onKeys({
    ArrowLeft: () => to(chosen - 1), ArrowRight: () => to(chosen + 1), ArrowUp: () => to(beside(-1)), ArrowDown: () => to(beside(1)),
    Enter: () => item && go(timeline(run, (item.mark ?? item.bar).event.step)),
  });
  const isChosen = (one) => (item?.bar ?? item?.mark) === one;
  return html`<section class="card"><h2>Lifelines</h2>
    <svg class="lifelines" width="100%" height=${TOP + rows.length * LANE} tabindex="0" role="img" onKeyDown=${onKey}
      aria-label=${`Lifelines of ${rows.map(([role, bars, marks]) => `${role}: ${bars.length} instances, ${marks.filter((mark) => mark.kind === "group_lost").length} losses`).join("; ")}. Arrows choose one, Enter opens its step in the timeline.`}>
      ${rows.map(([role, bars, marks], at) => html`<g transform=${`translate(0 ${at * LANE})`}>
        <text y="12" fill="var(--ink)" font-size="12">${role}</text><line x1="0" x2="100%" y1=${16 + BAR / 2} y2=${16 + BAR / 2} stroke="var(--line)" />
        ${bars.map((bar, number) => html`<rect class="bar" x=${`${x(bar.from)}%`} width=${`${Math.max(LEAST, x(bar.to) - x(bar.from))}%`} y="16" height=${BAR} fill=${`var(${number % 2 ? "--c6" : "--c1"})`} stroke=${isChosen(bar) ? "var(--ink)" : "none"} stroke-width="2"><title>${saidOf({ bar, role })}</title></rect>`)}
        ${marks.map((mark) => html`<text class=${`mark ${mark.kind}`} x=${`${x(mark.at)}%`} y=${mark.kind === "group_lost" ? 27 : 38} text-anchor="middle" font-size=${isChosen(mark) ? 19 : 13} font-weight="bold" fill=${`var(${MARKS.get(mark.kind)[1]})`}>${MARKS.get(mark.kind)[0]}<title>${saidOf({ mark, role })}</title></text>`)}</g>`)}
      <g fill="var(--dim)" font-size="11"><text y=${rows.length * LANE + 14}>${clock(begin)}</text><text x="100%" y=${rows.length * LANE + 14} text-anchor="end">${clock(end)}</text></g></svg>
    <p class="said" aria-live="polite">${item ? saidOf(item) : "With the focus on the lifelines, arrows lead from one to the next."}</p>
    <p class="dim">${[...MARKS.values()].map(([sign, variable, name]) => html`<span class="legend"><b aria-hidden="true" style=${{ color: `var(${variable})` }}>${sign}</b>${name}</span> `)}</p></section>`;
}

function saidOf({ bar, mark, role }) {
  if (mark) return `${role}, ${clock(mark.at)}, step ${number(mark.event.step)}: ${MARKS.get(mark.kind)[2]}${mark.kind === "group_lost" && mark.event.cause ? `: ${visible(mark.event.cause)}` : ""}`;
  return `${role}, ${bar.name}: from ${clock(bar.from)} for ${duration(bar.to - bar.from)}${bar.how ? `; ${bar.how}` : ""}`;
}

const timeline = (run, step) => `/run/${run}/timeline${whole(step) === null ? "" : `/train/${step}`}`;

function Losses({ losses, starts, run }) {
  const [opened, open] = useState(null);
  const [controllers, groups] = [true, false].map((wanted) => losses.filter((loss) => (loss.role === CONTROLLER) === wanted));
  const total = (rows, name) => rows.reduce((sum, row) => sum + (row[name] ?? 0), 0);
  const sums = [[`Restarts of groups: ${total(starts, "restarts")}`, groups, total(starts, "repeated")], [`Deaths of the controller: ${controllers.length}, and the time until all groups were there again`, controllers, total(controllers, "repeated")]];
  return html`<h2>Losses, newest first</h2><div class="wide"><table class="losses">
    <thead><tr>${["time", "role", "rank", "in", "cause"].map((title) => html`<th>${title}</th>`)}<th class="n">time lost</th><th class="n">steps done again</th><th class="n">step</th><th>restarted; kept</th><th>log</th></tr></thead>
    <tbody>${[...losses].reverse().map((loss) => html`<tr key=${loss.number} data-number=${loss.number}>
        <td class="time">${clock(loss.unix_s)}</td>${[loss.role, loss.rank, [loss.method, loss.phase].filter(Boolean).map(visible).join(", ")].map((text) => html`<td>${visible(text) || "–"}</td>`)}<td class="cause">${visible(loss.cause)}</td>
        <td class="n">${loss.isWithOther ? "with the one before" : lasting(loss.seconds)}</td><td class="n">${number(loss.repeated)}</td>
        <td class="n"><a href=${`#${timeline(run, loss.from)}`}>${number(loss.from)} → ${number(loss.to)}</a></td><td>${loss.groups ?? "–"}</td>
        <td><button aria-expanded=${opened === loss.number} aria-label=${`log of ${visible(loss.role)} at ${clock(loss.unix_s)}`} onClick=${() => open(opened === loss.number ? null : loss.number)}>log</button></td></tr>
      ${opened === loss.number && html`<tr><td colspan="10"><${Log} run=${run} number=${loss.number} /></td></tr>`}`)}
      ${sums.slice(0, controllers.length ? 2 : 1).map(([title, rows, repeated]) => html`<tr class="sums"><th colspan="5">${title}</th><td class="n">${lasting(total(rows, "seconds"))}</td><td class="n">${number(repeated)}</td><td colspan="3"></td></tr>`)}
    </tbody></table></div>
    <p class="dim counters">Restarts and repeated steps of the groups, by start of the controller: ${starts.map(({ epoch, restarts, repeated }) => `start ${visible(epoch)}: ${restarts} and ${repeated}`).join("; ")}. These are recovery/num_restarts and recovery/num_repeated_steps of metrics.jsonl, which begin anew with each start.</p>`;
}

// Tenths of a second where they matter.
const lasting = (value) => (Number.isFinite(value) && value < 100 ? `${value.toFixed(1)} s` : duration(value));

function Log({ run, number: event }) {
  const found = useValue(`runs/${run}/log/${event}`);
  if (found.error) return html`<${ErrorSentence} text=${found.error} />`;
  return html`<div class="logs">${(found.value ?? []).map(({ file, sentence, lines }) => html`<h2>${visible(file)}</h2><p class="dim">${visible(sentence)}</p>
    ${lines.length > 0 && html`<pre ref=${(node) => node && (node.scrollTop = node.scrollHeight)} class="text plainly" tabindex="0" aria-label=${visible(file)}>${lines.map((line) => visible(line)).join("\n")}</pre>`}`)}</div>`;
}
