// Makes texts of numbers, and of what models have written.

// Controls, marks of direction and what has no width: each is shown by its number, for it could hide or turn what is around it.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/gu;

export function visible(text) {
  const plain = typeof text === "object" && text !== null ? JSON.stringify(text) : String(text ?? "");
  return plain.replace(HIDDEN, (char) => `\u27e8${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e9`);
}

// The value of a text of JSON, null of any other.
export function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

export function number(value) {
  if (typeof value !== "number" || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (Number.isSafeInteger(value)) return (value + 0).toLocaleString("en"); // -0 + 0 is 0
  if (size >= 1e15) return value.toExponential(1);
  if (size >= 10000) return Math.round(value).toLocaleString("en");
  if (size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(size >= 1 ? 4 : 3)));
}

// Rows, prompts and samples are counted from 1 wherever somebody reads them, as the rows of data files are.
export const nth = (index) => (Number.isInteger(index) ? index + 1 : index);

export function signed(value) {
  return typeof value === "number" && value > 0 ? `+${number(value)}` : number(value);
}

export function duration(seconds) {
  if (typeof seconds !== "number" || !(seconds >= 0)) return "–";
  if (seconds < 100) return `${seconds < 10 ? Number(seconds.toFixed(1)) : Math.round(seconds)} s`;
  return seconds < 6000 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export function clock(unixSeconds) {
  return typeof unixSeconds === "number" && Math.abs(unixSeconds) < 1e11 ? new Date(unixSeconds * 1000).toISOString().slice(0, 19).replace("T", " ") : "–";
}

// Why the tokens of a row are recorded, by the bits of its column `why`.
const REASONS = ["drawn at random", "high score", "low score", "longest", "KL", "value error", "|advantage|", "mismatch", "repetition", "no EOS", "scorer failed"];

export function reasons(why) {
  return REASONS.filter((_, bit) => why & (1 << bit));
}

// What went wrong with a response.
export function notes(row) {
  const noScore = row.failure && `no score: ${row.failure}`;
  return [row.is_truncated && "cut at the limit", row.has_eos === false && "no EOS", noScore, row.lost && "environment lost"].filter(Boolean);
}
