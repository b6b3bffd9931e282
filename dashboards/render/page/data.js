// Asks Prometheus what the dashboard asks, and makes of the answers what Grafana's components take.
import { FieldType, getDisplayProcessor } from '@grafana/data';

const ask = async (path, parameters) => {
  const response = await fetch(`/api/v1/${path}?${new URLSearchParams(parameters)}`);
  const answer = await response.json();
  if (answer.status !== 'success') throw new Error(`${path}: ${answer.error}`);
  return answer.data;
};

/** The newest run that Prometheus knows, and its instance. */
export const chosen = async () => {
  const { result } = await ask('query', { query: 'topk(1, max by (run, instance) (draftmill_build_info))' });
  return result[0].metric;
};

/** A query with the variables filled in, as Grafana does with a data source that is scraped every 5 seconds. */
const filled = (expr, run) =>
  expr.replaceAll('$run', run.run).replaceAll('$instance', run.instance).replaceAll('$__rate_interval', '20s');

const legend = (format, labels) => format.replace(/{{\s*(\w+)\s*}}/g, (_, name) => labels[name] ?? '');

const number = (text) => (Number.isFinite(Number(text)) ? Number(text) : null);

/** All series of a range query, on the same times: null where there is no value. */
export const range = async (expr, run, from, to, step) => {
  const parameters = { query: filled(expr, run), start: from / 1000, end: to / 1000, step };
  const { result } = await ask('query_range', parameters);
  const times = Array.from({ length: Math.floor((to - from) / 1000 / step) + 1 }, (_, i) => from + i * step * 1000);
  return result.map(({ metric, values }) => {
    const known = new Map(values.map(([time, value]) => [Math.round(time * 1000), number(value)]));
    return { labels: metric, times, values: times.map((time) => known.get(time) ?? null) };
  });
};

const now = async (expr, run, to) => {
  const { result } = await ask('query', { query: filled(expr, run), time: to / 1000 });
  return result.map(({ metric, value }) => ({ labels: metric, times: [value[0] * 1000], values: [number(value[1])] }));
};

/** The panel's configuration of one series: its defaults, with what is overridden for its query or its name. */
const configured = (panel, refId, name) => {
  const config = structuredClone(panel.fieldConfig.defaults);
  for (const { matcher, properties } of panel.fieldConfig.overrides) {
    const meant = matcher.options === { byFrameRefID: refId, byName: name }[matcher.id];
    for (const { id, value } of meant ? properties : []) {
      const keys = id.split('.');
      const last = keys.pop();
      keys.reduce((inner, key) => (inner[key] ??= {}), config)[last] = value;
    }
  }
  return config;
};

/** One data frame for each series of a panel. */
export const frames = async (panel, run, from, to, step, theme) => {
  const answers = await Promise.all(
    panel.targets.map(async (target) => {
      const series = target.instant ? await now(target.expr, run, to) : await range(target.expr, run, from, to, step);
      return series.map((one) => ({ ...one, target }));
    })
  );
  return answers.flat().map(({ labels, times, values, target }, index) => {
    const name = legend(target.legendFormat, labels);
    const config = { ...configured(panel, target.refId, name), displayNameFromDS: name };
    const present = values.filter((one) => one !== null);
    const [min, max] = [Math.min(...present), Math.max(...present)];
    const state = { seriesIndex: index, range: { min, max, delta: max - min } };
    const value = { name: 'Value', type: FieldType.number, config, values, labels, state };
    value.display = getDisplayProcessor({ field: value, theme });
    const time = { name: 'Time', type: FieldType.time, config: { interval: step * 1000 }, values: times };
    return { refId: target.refId, fields: [time, value], length: times.length };
  });
};

/** When what the annotations mark happened: [{ time, color }]. */
export const marks = async (annotations, run, from, to, step) => {
  const each = annotations.map(async ({ target, iconColor, useValueForTime }) => {
    const series = await range(target.expr, run, from, to, step);
    const times = series.flatMap((one) => {
      const here = one.values.map((value, i) => value !== null && (useValueForTime ? value : one.times[i]));
      // A stretch of neighbours is one thing that happened.
      return here.filter((time, i) => time && (useValueForTime ? time !== here[i - 1] : !here[i - 1]));
    });
    return times.filter((time) => time > from).map((time) => ({ time, color: iconColor }));
  });
  return (await Promise.all(each)).flat();
};
