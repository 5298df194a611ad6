// What every module uses of Preact, bound to htm: tags are made of text, so that nothing is ever parsed as HTML.
import { h, render } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export { useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
export { render };
export const html = htm.bind(h);
