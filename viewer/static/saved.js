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
  const { to = first, text } = Object.fromEntries(new URLSearchParams(query));
  const facts = await open(run);
  const steps = Number(to) > Number(first) ? facts[kind].filter((step) => step >= Number(first) && step <= Number(to)) : [Number(first)];
  const parts = await Promise.all(steps.map((step) => open(`${run}/${kind}/${step}`)));
  const search = async ({ step, columns }) => { columns.found = await Promise.all(columns.row.map((row) => has(`${run}/${kind}/${step}/${row}`, text))); };
  if (text) await Promise.all(parts.map(search));
  const names = new Set(parts.flatMap((part) => Object.keys(part.columns)));
  const columns = Object.fromEntries([...names].map((name) => [name, parts.flatMap((part) => part.columns[name] ?? part.columns.row.map(() => null))]));
  return { ...parts.at(-1), columns };
}

// Whether the texts of a response have a text; those of one that is not there do not.
const has = (path, text) => open(path).then(
  ({ row }) => ["prompt", "response", "ground_truth", "messages"].some((name) => row[name]?.toLowerCase().includes(text.toLowerCase())),
  () => false,
);

export async function savedColumns(run, numbers) {
  const { steps, columns } = await open(`runs/${run}/columns`);
  return { steps, columns: numbers.map((number) => columns[number]) };
}
