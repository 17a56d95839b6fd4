// What pages share: data that is loaded, kept fresh and given up with the page.
import { useCallback, useEffect, useRef, useState } from "./vendor/preact.js";
import { onKey } from "./keys.js";
import { follow } from "./live.js";

/**
 * Load something, again when `deps` change, and every `every_s` seconds unless it is still waited for.
 * The last data stays while newer is loaded, and when the bus is away.
 */
export function useLoad(load, deps = [], { every_s = 0 } = {}) {
  const [state, setState] = useState({ data: null, error: null, loading: true });
  const current = useRef(null);
  const waits = useRef(false);
  const reload = useCallback(async () => {
    current.current?.abort();
    const stop = (current.current = new AbortController());
    waits.current = true;
    setState((before) => ({ ...before, loading: true }));
    try {
      const data = await load(stop.signal);
      if (!stop.signal.aborted) setState({ data, error: null, loading: false });
    } catch (error) {
      if (!stop.signal.aborted) setState((before) => ({ data: before.data, error, loading: false }));
    }
    if (current.current === stop) waits.current = false;
  }, deps);
  useEffect(() => {
    setState((before) => ({ ...before, error: null }));
    reload();
    return () => current.current?.abort();
  }, [reload]);
  useEffect(() => {
    if (!every_s) return undefined;
    const timer = setInterval(() => document.hidden || waits.current || reload(), every_s * 1000);
    return () => clearInterval(timer);
  }, [reload, every_s]);
  return { ...state, reload };
}

/** Follow a live channel while the component is shown. */
export function useLive(channel, fields, take, deps = []) {
  const latest = useRef(take);
  latest.current = take;
  const [error, setError] = useState(null);
  useEffect(() => {
    setError(null);
    if (!fields) return undefined;
    return follow(channel, fields, (data) => latest.current(data), setError);
  }, deps);
  return error;
}

/** Run something that the user asked for; its error, and whether it runs. */
export function useAction(act) {
  const [state, setState] = useState({ running: false, error: null });
  const run = async (...given) => {
    setState({ running: true, error: null });
    try {
      const answer = await act(...given);
      setState({ running: false, error: null });
      return answer;
    } catch (error) {
      setState({ running: false, error });
      return undefined;
    }
  };
  return { ...state, run, clear: () => setState({ running: false, error: null }) };
}

/** Where the first of the rows is that fits, or null. */
export function placeOf(rows, fits) {
  const at = rows.findIndex(fits);
  return at < 0 ? null : at;
}

/** j and k show the next and the previous of `count` rows; `at` is the place of the one that is shown, or null. Escape closes it. */
export function useRowKeys(count, at, show, close) {
  const latest = useRef(null);
  latest.current = { show, close, step: (by) => count > 0 && show(at === null ? 0 : Math.min(count - 1, Math.max(0, at + by))) };
  useEffect(() => {
    const ends = [onKey("j", () => latest.current.step(1)), onKey("k", () => latest.current.step(-1)), onKey("Escape", () => latest.current.close())];
    return () => ends.forEach((end) => end());
  }, []);
}

// As in console.css: what is opened is above its list.
const PHONE = "(max-width: 860px)";

/** On a phone, scroll to what was opened; elsewhere it is beside its list. Returns the ref of its box. */
export function useInView(opened) {
  const box = useRef(null);
  useEffect(() => {
    if (matchMedia(PHONE).matches) box.current.scrollIntoView();
  }, [opened]);
  return box;
}
