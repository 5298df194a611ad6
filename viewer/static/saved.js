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
  const answer = await open(path);
  const text = new URLSearchParams(query).get("text");
  if (text) answer.columns.found = await Promise.all(answer.columns.row.map((row) => has(`${path}/${row}`, text)));
  return answer;
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
