// The bus's figures over time: loaded once, then one point per step from the live figures.
import { get } from "./api.js";

const POINTS_MAX = 360;
const HOUR_S = 3600;
// Of the last hour. A bus that has just started is shown second by second.
const STEPS = { young_s: 1, old_s: 10 };

/** The ranges to choose from; the first is what is shown otherwise. */
export const RANGES = {
  "1h": { text: "1 h", name: "last hour", seconds: HOUR_S },
  "6h": { text: "6 h", name: "last 6 hours", seconds: 6 * HOUR_S },
  "1d": { text: "24 h", name: "last 24 hours", seconds: 24 * HOUR_S },
  "7d": { text: "7 d", name: "last 7 days", seconds: 7 * 24 * HOUR_S },
};

/** Columns of numbers, oldest first. A new object for each change: it is state. */
export async function loadHistory(range_s, stop) {
  const step = range_s > HOUR_S ? range_s / POINTS_MAX : await stepOfHour(stop);
  const wanted = Math.min(range_s, POINTS_MAX * step);
  const history = await get("/v1/metrics/history", { "range-s": wanted, "step-s": step }, { signal: stop });
  return { ...history, range_s };
}

async function stepOfHour(stop) {
  const { "uptime-s": uptime_s } = await get("/v1/info", {}, { signal: stop });
  return uptime_s < POINTS_MAX / 2 ? STEPS.young_s : STEPS.old_s;
}

/** Whether it no longer shows all since the start, and larger steps would. */
export const isOutgrown = (history) => history["step-s"] < STEPS.old_s && history.times.length >= POINTS_MAX;

/** The history with a live sample. Groups have times of their own, in larger steps. */
export function withSample(history, sample) {
  const fast = grown(history.times, history["step-s"], history.fast, sample.time);
  const slow = grown(history["slow-times"], history["slow-step-s"], history.slow, sample.time);
  return {
    ...history,
    fast: fast.taken,
    times: fast.times,
    series: fast.columns(history.series, sample.series),
    slow: slow.taken,
    "slow-times": slow.times,
    groups: slow.columns(history.groups, sample.groups),
    "group-lag-s": slow.columns(history["group-lag-s"], sample["group-lag-s"]),
  };
}

/** Times with that of a sample; the point of the running step is the mean of what was `taken` in it. */
function grown(before, step, taken_before, time) {
  const at = Math.floor(time / step) * step;
  const isSame = before.length > 0 && before.at(-1) >= at;
  // The bus takes a sample a second, and its last step may have begun before this page.
  const known = taken_before ?? Math.max(0, Math.floor(time - at));
  const taken = isSame ? known + 1 : 1;
  const all = isSame ? before : [...before, at];
  const drop = Math.max(0, all.length - POINTS_MAX);
  const cut = (list) => (drop ? list.slice(drop) : list);
  const column = (cells, value) => {
    const next = cells ? [...cells] : new Array(before.length).fill(null);
    const last = next.at(-1);
    if (!isSame) next.push(value);
    else if (value !== null) next[next.length - 1] = last === null || taken === 1 ? value : last + (value - last) / taken;
    return cut(next);
  };
  const columns = (old, values) => {
    const names = new Set([...Object.keys(old), ...Object.keys(values)]);
    return Object.fromEntries([...names].map((name) => [name, column(old[name], values[name] ?? absent(name))]));
  };
  return { taken, times: cut(all), columns };
}

// Traffic that a sample does not name is zero; anything else is not known.
const absent = (name) => (/^(in|out)\./.test(name) ? 0 : null);
