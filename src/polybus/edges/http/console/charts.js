// Charts over time, each with its table for those who cannot see it.
import { html, useEffect, useRef } from "./vendor/preact.js";
import uPlot from "./vendor/uplot.js";
import { TableBelow, Time } from "./components.js";
import * as format from "./format.js";

const TABLE_ROWS_MAX = 30;
const HEIGHT_PX = 190;
const SERIES = ["--s1", "--s2", "--s3", "--s4", "--s5", "--s6"];
const BY_PROTOCOL = { "boson-frames": 0, "boson-properties": 1, goms: 2, queue: 3, msgstream: 4, http: 5 };

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const seriesColour = (name, index) => `var(${SERIES[(BY_PROTOCOL[name] ?? index) % SERIES.length]})`;

// A custom property may be light-dark(…): only an element knows what it comes to.
function resolved(text) {
  const probe = document.createElement("span");
  probe.style.color = text;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

const faded = (rgb, alpha) => rgb.replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);

const DAY_S = 86_400;

/** Seconds only where minutes would repeat, and days only where hours would. */
function clock(at, range_s) {
  const [day, time] = format.time(at * 1000, { date: "always", milliseconds: false }).split(" ");
  if (range_s > DAY_S) return `${day.slice(5)} ${time.slice(0, 5)}`;
  return time.slice(0, range_s < 600 ? 8 : 5);
}

function options(width, { series, write, least_s, least }) {
  const line = resolved("var(--line)");
  const dim = resolved("var(--dim)");
  const font = `11px ${colour("--font") || "sans-serif"}`;
  const axis = { stroke: dim, font, ticks: { show: false }, grid: { stroke: line, width: 1 } };
  return {
    width,
    height: HEIGHT_PX,
    legend: { show: false },
    cursor: { y: false, points: { size: 6 } },
    padding: [8, 8, 0, 0],
    scales: { x: { range: (_, low, high) => (high === null ? [null, null] : [Math.min(low, high - least_s), high]) }, y: { range: (_, low, high) => [Math.min(0, low * 1.1), Math.max(least, high * 1.1) || 1] } },
    axes: [
      { ...axis, grid: { show: false }, space: 80, size: 30, values: (_, ticks) => ticks.map((at) => clock(at, ticks.at(-1) - ticks[0])) },
      { ...axis, size: 62, space: 36, values: (_, ticks) => ticks.map(write) },
    ],
    series: [{}, ...series.map((one) => {
      const stroke = resolved(one.colour);
      return { label: one.label, stroke, width: 1.75, fill: faded(stroke, 0.08), points: { show: false }, spanGaps: false };
    })],
  };
}

/** `times` in seconds; a series: {label, name, colour, values}; `write` formats a value with its unit; `least_s`: at least this much time; `least`: the axis goes up to it at least. */
export function TimeChart({ title, times, series, write, latest, least_s = 1, least = 1 }) {
  const box = useRef(null);
  const plot = useRef(null);
  const tip = useRef(null);
  const shape = series.map((one) => one.label).join("\n");
  const shown = useRef(null);
  shown.current = { times, series, write, least_s, least };
  useEffect(() => {
    const draw = () => {
      plot.current?.destroy();
      const made = options(box.current.clientWidth, shown.current);
      made.hooks = { setCursor: [(chart) => point(chart, tip.current, shown.current)] };
      plot.current = new uPlot(made, dataOf(shown.current.times, shown.current.series), box.current);
    };
    draw();
    const resized = new ResizeObserver(() => box.current && plot.current?.setSize({ width: box.current.clientWidth, height: HEIGHT_PX }));
    resized.observe(box.current);
    const themed = new MutationObserver(draw);
    themed.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    const system = matchMedia("(prefers-color-scheme: dark)");
    system.addEventListener("change", draw);
    return () => {
      resized.disconnect();
      themed.disconnect();
      system.removeEventListener("change", draw);
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => plot.current?.setData(dataOf(times, series)), [times, series]);
  return html`<figure class="chart">
    <figcaption class="legend">${series.map((one) => html`<span key=${one.label} class="legend-entry"><i style=${{ background: one.colour }} aria-hidden="true"></i>${format.safe(one.label)}${latest !== false && html`<b>${write(last(one.values))}</b>`}</span>`)}</figcaption>
    <div class="plot" ref=${box} role="img" aria-label=${`${title}: a chart; its values are in the table below it`}></div>
    <div class="plot-tip" ref=${tip} aria-hidden="true"></div>
    <${ChartTable} title=${title} times=${times} series=${series} write=${write} />
  </figure>`;
}

const dataOf = (times, series) => [times, ...series.map((one) => one.values)];
const last = (values) => values.findLast((one) => one !== null && one !== undefined) ?? 0;

function point(chart, tip, { series, write }) {
  const index = chart.cursor.idx;
  if (index === null || index === undefined || chart.cursor.left < 0) {
    tip.textContent = "";
    return;
  }
  const at = format.time(chart.data[0][index] * 1000, { milliseconds: false });
  const values = series.map((one) => `${format.safe(one.label)} ${write(one.values[index])}`);
  tip.textContent = [at, ...values].join("   ");
}

function ChartTable({ title, times, series, write }) {
  const step = Math.max(1, Math.ceil(times.length / TABLE_ROWS_MAX));
  const indexes = () => Array.from({ length: Math.ceil(times.length / step) }, (_, index) => times.length - 1 - index * step);
  return html`<${TableBelow} label=${title}>${() => html`<table>
    <caption class="hidden">${title}</caption>
    <thead><tr><th scope="col">Time</th>${series.map((one) => html`<th scope="col" class="end">${format.safe(one.label)}</th>`)}</tr></thead>
    <tbody>${indexes().map((index) => html`<tr key=${index}><th scope="row"><${Time} at=${times[index] * 1000} milliseconds=${false} /></th>${series.map((one) => html`<td class="end">${write(one.values[index])}</td>`)}</tr>`)}</tbody>
  </table>`}<//>`;
}
