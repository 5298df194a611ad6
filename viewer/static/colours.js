// The colours of tokens: what each one shows, and how its number becomes a colour. Limits are those of the whole run.

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
  const [low, high] = (numbersOf(name, found) ?? []).filter(Number.isFinite).reduce(([least, most], one) => [Math.min(least, one), Math.max(most, one)], [Infinity, -Infinity]);
  if (low >= high) return undefined;
  const reach = Math.max(high, 1 / low);
  return name === "ratio" ? [1 / reach, reach] : [low, high];
}

// A function from a number to a CSS colour; "" for what has no number.
export function scaleOf(name, limits) {
  const kind = COLOURINGS.find(([one]) => one === name)[2];
  const [low, high] = limits ?? [-1, 1];
  const reach = kind === "ratio" ? Math.log(high) : Math.max(Math.abs(low), Math.abs(high)) || 1;
  return (value) => {
    if (typeof value !== "number") return "";
    if (kind === "rising") return shade(true, (value - low) / (high - low || 1));
    const distance = kind === "ratio" ? Math.log(Math.max(value, 1e-30)) : value;
    return shade(distance >= 0, Math.abs(distance) / reach);
  };
}

export function limitsOf(name, limits) {
  const kind = COLOURINGS.find(([one]) => one === name)[2];
  const [low, high] = limits ?? [-1, 1];
  const reach = Math.max(Math.abs(low), Math.abs(high));
  return kind === "signed" ? [-reach, reach] : [low, high];
}

// Blue for more, orange for less; transparent in the middle, so that both themes keep the contrast of the text.
export function shade(isMore, share) {
  const part = Math.max(0, Math.min(1, share)) * 0.62;
  return isMore ? `rgba(64, 132, 246, ${part.toFixed(3)})` : `rgba(240, 124, 28, ${part.toFixed(3)})`;
}
