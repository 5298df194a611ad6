// The answers that an exported file holds, each compressed by itself, by the address at which the server would give it.
const holder = document.getElementById("saved");
const saved = holder && JSON.parse(holder.textContent);
export const isSaved = saved !== null;

async function open(path) {
  if (!Object.hasOwn(saved, path)) throw new Error(`This file does not hold ${path}: the export had to leave some of the run out.`);
  const packed = Uint8Array.from(atob(saved[path]), (char) => char.charCodeAt(0));
  const answer = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  if (answer?.unreadable) throw new Error(answer.unreadable);
  return answer;
}

export async function savedAnswer(address) {
  const [path, query] = address.split("?");
  const table = /^(runs\/\d+)\/(train|val)\/(\d+)$/.exec(path);
  if (!table) return open(path);
  const [, run, kind, first] = table;
  const asked = new URLSearchParams(query);
  const last = Math.max(Number(first), Number(asked.get("to")));
  const facts = await open(run);
  const steps = last > Number(first) ? facts[kind].filter((step) => step >= Number(first) && step <= last) : [Number(first)];
  const parts = await Promise.all(steps.map((step) => open(`${run}/${kind}/${step}`)));
  const text = asked.get("text")?.toLowerCase();
  if (text) await Promise.all(parts.map(async ({ step, columns }) => { columns.found = await Promise.all(columns.row.map((row) => has(`${run}/${kind}/${step}/${row}`, text))); }));
  const names = new Set(parts.flatMap((part) => Object.keys(part.columns)));
  const columns = Object.fromEntries([...names].map((name) => [name, parts.flatMap((part) => part.columns[name] ?? part.columns.row.map(() => null))]));
  return { ...parts.at(-1), columns };
}

async function has(path, text) {
  if (!Object.hasOwn(saved, path)) return false;
  const { row } = await open(path);
  return ["prompt", "response", "ground_truth", "messages"].some((name) => row[name]?.toLowerCase().includes(text));
}

export async function savedColumns(run, numbers) {
  const { steps, columns } = await open(`runs/${run}/columns`);
  return { steps: Int32Array.from(steps), columns: numbers.map((number) => Float32Array.from(columns[number], (value) => value ?? NaN)) };
}
