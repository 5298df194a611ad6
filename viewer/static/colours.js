// The colours of tokens: what each one shows, and how its number becomes a colour. Limits are those of the whole run.
import { clamp, extent } from "./parts.js";

// [name, what it is, the scale: "signed" around a middle, or "rising" from the lower limit to the upper one]
export const COLOURINGS = [
  ["value", "value V of the state before the token", "rising"],
  ["advantage", "advantage, as the loss sees it", "signed"],
  ["delta", "temporal difference r + γV' − V", "signed"],
  ["kl", "log p − log p of the reference", "signed"],
  ["ratio", "p in the update / p before it, at its last use", "ratio"],
  ["entropy", "entropy of the policy at the token", "rising"],
  ["mismatch", "|log p − log p of the rollout backend|", "rising"],
  ["reward", "reward of the token", "signed"],
];
const SOURCES = { value: "value", advantage: "advantage", entropy: "entropy_tokens", reward: "rewards" };

// The list of numbers that a colouring shows, null if it was not recorded.
export function numbersOf(name, found) {
  return (SOURCES[name] ? found.row[SOURCES[name]] : found.derived[name]) ?? null;
}

// The limits of one response by itself; those of a ratio lie around 1.
export function ownLimits(name, found) {
  const [low, high] = extent(numbersOf(name, found) ?? []);
  if (low >= high) return undefined;
  const reach = Math.max(high, 1 / low);
  return name === "ratio" ? [1 / reach, reach] : [low, high];
}

// {low, high, at, of}: the numbers at the ends of a scale; CSS colours of a share of the way between them, and of a number, "" for none.
export function scaleOf(name, limits = [-1, 1]) {
  const kind = COLOURINGS.find(([one]) => one === name)[2];
  const reach = Math.max(...limits.map(Math.abs)) || 1;
  const [low, high] = kind === "signed" ? [-reach, reach] : limits;
  const placed = kind === "ratio" ? (value) => Math.log(Math.max(value, 1e-30)) : Number;
  const at = (share) => (kind === "rising" ? shade(true, share) : shade(share >= 0.5, Math.abs(2 * share - 1)));
  const of = (value) => (typeof value === "number" ? at((placed(value) - placed(low)) / (placed(high) - placed(low) || 1)) : "");
  return { low, high, at, of };
}

// Blue for more, orange for less; transparent in the middle, so that both themes keep the contrast of the text.
export function shade(isMore, share) {
  const part = clamp(share, 0, 1) * 0.62;
  return isMore ? `rgba(64, 132, 246, ${part.toFixed(3)})` : `rgba(240, 124, 28, ${part.toFixed(3)})`;
}
