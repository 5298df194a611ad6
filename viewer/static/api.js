// Asks the server, with the token that came in the fragment of the address; or, in an exported file, what the file holds.
import { isSaved, savedAnswer, savedColumns } from "./saved.js";

const STORED = "splitppo-token";
const LEAST_PAUSE_MS = 500, MOST_PAUSE_MS = 8000;

export function takeToken() {
  const found = /^#token=([\w-]+)$/.exec(location.hash);
  if (!found) return;
  localStorage.setItem(STORED, found[1]);
  history.replaceState(null, "", "#/");
}

async function ask(address, signal) {
  const headers = { Authorization: `Bearer ${localStorage.getItem(STORED) ?? ""}` };
  const answer = await fetch(`/api/${address}`, { headers, signal, credentials: "omit" });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  throw new Error(told.error ?? `The server answered ${answer.status}.`);
}

export async function get(address, signal) {
  return isSaved ? savedAnswer(address) : (await ask(address, signal)).json();
}

// Steps, and a column of numbers per metric.
export async function getColumns(run, numbers, since) {
  if (isSaved) return savedColumns(run, numbers);
  const answer = await ask(`runs/${run}/columns?metrics=${numbers.join(",")}&since=${since}`);
  const buffer = await answer.arrayBuffer();
  const length = new Int32Array(buffer, 0, 1)[0];
  const steps = new Int32Array(buffer, 4, length);
  const columns = numbers.map((_, place) => new Float32Array(buffer, 4 + 4 * length * (place + 1), length));
  return { steps, columns };
}

const shownOrHidden = () => new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));

// Tells a RunData what is new, until `over`: server-sent events by fetch, for an EventSource sends no Authorization.
// Goes on after a loss, and rests while the tab is hidden.
export async function listen(data, over) {
  for (let pauseMs = LEAST_PAUSE_MS; !isSaved && !over.aborted; pauseMs = Math.min(pauseMs * 2, MOST_PAUSE_MS)) {
    if (document.hidden) await shownOrHidden();
    const [rest, turned] = [new AbortController(), shownOrHidden()];
    turned.then(() => rest.abort());
    const signal = AbortSignal.any([over, rest.signal]);
    try {
      const answer = await ask(`runs/${data.number}/live?${new URLSearchParams(data.position())}`, signal);
      data.tell(true);
      pauseMs = LEAST_PAUSE_MS;
      await read(answer.body.pipeThrough(new TextDecoderStream()).getReader(), data);
    } catch (error) {
      if (!signal.aborted) data.tell(false, error.message);
    }
    await Promise.race([turned, new Promise((resolve) => setTimeout(resolve, pauseMs))]);
  }
}

async function read(reader, data) {
  let rest = "";
  for (let next = await reader.read(); !next.done; next = await reader.read()) {
    const blocks = (rest + next.value).split("\n\n");
    rest = blocks.pop();
    blocks.map(parseEvent).filter(Boolean).forEach((event) => data.on(event.name, event.value));
  }
}

export function parseEvent(block) {
  const fields = Object.fromEntries(block.split("\n").filter((line) => /^\w+: /.test(line)).map((line) => line.split(/: (.*)/s)));
  return fields.event && fields.data ? { name: fields.event, value: JSON.parse(fields.data) } : null;
}
