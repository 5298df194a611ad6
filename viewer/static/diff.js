// What changed from one text to another: the longest common subsequence of their words stays, all else was removed or added.
import { diffArrays } from "./vendor/diff_array.js";

const WORDS = /\s*(?:[\p{sc=Han}\p{sc=Hira}\p{sc=Kana}]|[^\s\p{sc=Han}\p{sc=Hira}\p{sc=Kana}]+)|\s+/gu;
const OPTIONS = { maxEditLength: 500, comparator: (one, other) => one.trim() === other.trim() };

// [[-1 removed, 0 kept or 1 added, text], ...]; null if too many words differ.
export function changes(before, after) {
  const found = diffArrays(before.match(WORDS) ?? [], after.match(WORDS) ?? [], OPTIONS);
  return found?.map(({ removed, added, value }) => [added - removed, value.join("")]) ?? null;
}
