// Asks the server, with the token that came in the fragment of the address; or, in an exported file, what the file holds.
import { isSaved, savedAnswer, savedColumns } from "./saved.js";

const STORED = "splitppo-token";

export function takeToken() {
  const found = /^#token=([\w-]+)$/.exec(location.hash);
  if (!found) return;
  localStorage.setItem(STORED, found[1]);
  history.replaceState(null, "", "#/");
}

async function ask(address, more = {}) {
  const headers = { Authorization: `Bearer ${localStorage.getItem(STORED) ?? ""}`, ...more.headers };
  const answer = await fetch(`/api/${address}`, { ...more, headers, credentials: "omit" });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  throw new Error(told.error ?? `The server answered ${answer.status}.`);
}

export async function get(address, signal) {
  return isSaved ? savedAnswer(address) : (await ask(address, { signal })).json();
}

// Steps as Int32Array and one Float32Array per metric.
export async function getColumns(run, numbers, since) {
  if (isSaved) return savedColumns(run, numbers);
  const answer = await ask(`runs/${run}/columns?metrics=${numbers.join(",")}&since=${since < 0 ? "" : since}`);
  const buffer = await answer.arrayBuffer();
  const length = new Int32Array(buffer, 0, 1)[0];
  const steps = new Int32Array(buffer, 4, length);
  const columns = numbers.map((_, place) => new Float32Array(buffer, 4 + 4 * length * (place + 1), length));
  return { steps, columns };
}

// Server-sent events by fetch, for an EventSource sends no Authorization. Goes on after a loss, and rests while the tab is hidden.
export function listen(run, position, handle, tell) {
  if (isSaved) return () => {};
  let controller = null;
  let isOver = false;
  let pauseMs = 500;

  async function connect() {
    if (isOver || document.hidden || controller?.signal.aborted === false) return;
    const mine = new AbortController();
    controller = mine;
    try {
      const { since, generation, events } = position();
      const answer = await ask(`runs/${run}/live?since=${since < 0 ? "" : since}&generation=${generation}&events=${events}`, { signal: mine.signal });
      tell(true);
      pauseMs = 500;
      await read(answer.body.pipeThrough(new TextDecoderStream()).getReader());
    } catch (error) {
      if (!mine.signal.aborted) tell(false, error.message);
    }
    if (controller === mine) controller = null;
    if (isOver || mine.signal.aborted) return;
    setTimeout(connect, pauseMs);
    pauseMs = Math.min(pauseMs * 2, 8000);
  }

  async function read(reader) {
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      blocks.map(parseEvent).filter(Boolean).forEach((event) => handle(event.name, event.value));
    }
  }

  function onVisibility() {
    if (document.hidden) controller?.abort();
    else connect();
  }
  document.addEventListener("visibilitychange", onVisibility);
  connect();
  return () => {
    isOver = true;
    document.removeEventListener("visibilitychange", onVisibility);
    controller?.abort();
  };
}

export function parseEvent(block) {
  const fields = Object.fromEntries(block.split("\n").filter((line) => /^\w+: /.test(line)).map((line) => line.split(/: (.*)/s)));
  return fields.event && fields.data ? { name: fields.event, value: JSON.parse(fields.data) } : null;
}
