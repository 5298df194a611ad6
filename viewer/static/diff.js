// What changed from one text to another: the longest common subsequence of their words stays, all else was removed or added.

const WORDS = /\s*(?:[\p{sc=Han}\p{sc=Hira}\p{sc=Kana}]|[^\s\p{sc=Han}\p{sc=Hira}\p{sc=Kana}]+)|\s+/gu;
const LINES = /[^\n]*\n|[^\n]+/g;
const MOST_CELLS = 4e6; // 2,000 words against 2,000

// {unit: "words" or "lines", parts: [[-1 removed, 0 kept or 1 added, text], ...]}; by lines where words are too many, null where lines are, too.
export function changes(before, after) {
  for (const [unit, pattern] of [["words", WORDS], ["lines", LINES]]) {
    const parts = partsOf(before.match(pattern) ?? [], after.match(pattern) ?? []);
    if (parts) return { unit, parts };
  }
  return null;
}

function partsOf(old, now) {
  const numbers = new Map();
  const numbered = (pieces) => Int32Array.from(pieces, (piece) => numbers.get(piece.trim()) ?? numbers.set(piece.trim(), numbers.size).size - 1);
  const [a, b] = [numbered(old), numbered(now)];
  let begin = 0, end = 0;
  while (begin < Math.min(a.length, b.length) && a[begin] === b[begin]) begin++;
  while (end < Math.min(a.length, b.length) - begin && a.at(-1 - end) === b.at(-1 - end)) end++;
  const [rows, columns] = [a.length - begin - end, b.length - begin - end];
  if (rows * columns > MOST_CELLS) return null;
  // lengths[row][column]: of the longest common subsequence of what follows in both.
  const width = columns + 1, lengths = new Uint16Array((rows + 1) * width);
  for (let row = rows - 1; row >= 0; row--) for (let column = columns - 1; column >= 0; column--) {
    const at = row * width + column;
    lengths[at] = a[begin + row] === b[begin + column] ? lengths[at + width + 1] + 1 : Math.max(lengths[at + width], lengths[at + 1]);
  }
  const parts = [];
  const add = (sign, text) => (parts.at(-1)?.[0] === sign ? (parts.at(-1)[1] += text) : parts.push([sign, text]));
  now.slice(0, begin).forEach((text) => add(0, text));
  for (let row = 0, column = 0; row < rows || column < columns;) {
    const isSame = row < rows && column < columns && a[begin + row] === b[begin + column];
    const isRemoved = !isSame && row < rows && (column === columns || lengths[(row + 1) * width + column] >= lengths[row * width + column + 1]);
    if (isRemoved) add(-1, old[begin + row++]);
    else add(isSame ? 0 : 1, now[begin + column++]);
    if (isSame) row++;
  }
  now.slice(now.length - end).forEach((text) => add(0, text));
  return parts;
}
