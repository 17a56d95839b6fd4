// What pages share: data that is loaded, kept fresh and given up with the page.
import { useCallback, useEffect, useRef, useState } from "./vendor/preact.js";
import { follow } from "./live.js";

/**
 * Load something, again when `deps` change, and every `every_s` seconds.
 * The last data stays while newer is loaded, and when the bus is away.
 */
export function useLoad(load, deps = [], { every_s = 0 } = {}) {
  const [state, setState] = useState({ data: null, error: null, loading: true });
  const current = useRef(null);
  const reload = useCallback(async () => {
    current.current?.abort();
    const stop = (current.current = new AbortController());
    setState((before) => ({ ...before, loading: true }));
    try {
      const data = await load(stop.signal);
      if (!stop.signal.aborted) setState({ data, error: null, loading: false });
    } catch (error) {
      if (!stop.signal.aborted) setState((before) => ({ data: before.data, error, loading: false }));
    }
  }, deps);
  useEffect(() => {
    setState((before) => ({ ...before, error: null }));
    reload();
    return () => current.current?.abort();
  }, [reload]);
  useEffect(() => {
    if (!every_s) return undefined;
    const timer = setInterval(() => document.hidden || reload(), every_s * 1000);
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
