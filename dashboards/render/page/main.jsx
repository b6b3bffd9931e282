// Draws every row and panel of draftmill.json in its place, with Grafana's own components.
import { createTheme, dateTime, getDisplayValueAlignmentFactors, ThemeContext } from '@grafana/data';
import { BarGauge, BigValue, GlobalStyles, PanelChrome, TimeSeries, VizRepeater } from '@grafana/ui';
import { useLayoutEffect } from 'react';
import { createRoot } from 'react-dom/client';
import { chosen, frames, marks } from './data.js';
import dashboard from './draftmill.json';

const COLUMNS = 24;
const CELL = 30;
const GAP = 8;
const theme = createTheme({ colors: { mode: 'dark' } });

/** The last value of a series, ready to be shown. */
const shown = (frame) => {
  const field = frame.fields[1];
  const last = field.values.findLast((value) => value !== null);
  return { ...field.display(last), title: field.config.displayNameFromDS };
};

const Stat = ({ panel, data, width, height }) => {
  const { noValue } = panel.fieldConfig.defaults;
  const value = data.length ? shown(data[0]) : { text: noValue, numeric: NaN, color: theme.colors.text.secondary };
  const sparkline = data.length && panel.options.graphMode === 'area' ? { x: data[0].fields[0], y: data[0].fields[1] } : undefined;
  return <BigValue {...panel.options} theme={theme} width={width} height={height} value={value} sparkline={sparkline} />;
};

const Bars = ({ panel, data, width, height }) => {
  const largest = Math.max(1e-9, ...data.map((frame) => frame.fields[1].values[0] ?? 0));
  const { options } = panel;
  return (
    <VizRepeater
      source={data}
      renderCounter={0}
      getValues={() => data}
      getAlignmentFactors={(all, w, h) => getDisplayValueAlignmentFactors(all.map((display) => ({ display: shown(display) })), w, h)}
      orientation={options.orientation}
      width={width}
      height={height}
      minVizHeight={options.minVizHeight}
      maxVizHeight={options.maxVizHeight}
      renderValue={({ value: frame, width: w, height: h, alignmentFactors, orientation }) => (
        <BarGauge
          {...options}
          theme={theme}
          width={w}
          height={h}
          orientation={orientation}
          alignmentFactors={alignmentFactors}
          field={{ max: largest, ...frame.fields[1].config }}
          display={frame.fields[1].display}
          value={shown(frame)}
          valueDisplayMode={options.valueMode}
          itemSpacing={8}
        />
      )}
    />
  );
};

/** The annotations, as lines across a graph. */
const Marks = ({ builder, all }) => {
  useLayoutEffect(() => {
    builder.addHook('draw', (plot) => {
      const { ctx, bbox } = plot;
      for (const { time, color } of all) {
        const x = Math.round(plot.valToPos(time, 'x', true));
        ctx.save();
        ctx.strokeStyle = theme.visualization.getColorByName(color);
        ctx.setLineDash([4, 4]);
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
        ctx.restore();
      }
    });
  }, [builder]);
  return null;
};

const Graph = ({ panel, data, all, from, to, width, height }) => (
  <TimeSeries
    frames={data}
    timeRange={{ from: dateTime(from), to: dateTime(to), raw: { from: 'now-1h', to: 'now' } }}
    timeZone="utc"
    width={width}
    height={height}
    legend={panel.options.legend}
    options={panel.options}
  >
    {(builder) => <Marks builder={builder} all={all} />}
  </TimeSeries>
);

const KINDS = { stat: Stat, bargauge: Bars, timeseries: Graph };

const Panel = ({ panel, data, ...rest }) => {
  const Kind = KINDS[panel.type];
  const values = data.flatMap((frame) => frame.fields[1].values);
  const empty = values.every((value) => value === null) && panel.fieldConfig.defaults.noValue === undefined;
  return (
    <div data-empty={empty ? panel.title : undefined} style={{ width: '100%', height: '100%' }}>
      <PanelChrome title={panel.title} width={rest.place.width} height={rest.place.height}>
        {(width, height) => (empty ? <>No data</> : <Kind panel={panel} data={data} {...rest} width={width} height={height} />)}
      </PanelChrome>
    </div>
  );
};

const Row = ({ title }) => (
  <div style={{ font: `500 16px ${theme.typography.fontFamily}`, color: theme.colors.text.primary, lineHeight: '30px' }}>{title}</div>
);

const cell = (outer) => (outer - GAP * (COLUMNS + 1)) / COLUMNS;

const Dashboard = ({ panels, run, all, from, to, outer }) => {
  const size = (cells, one) => Math.round(cells * one + (cells - 1) * GAP);
  const at = (cells, one) => Math.round(cells * (one + GAP));
  const height = 48 + GAP + Math.max(...panels.map(({ panel: { gridPos } }) => at(gridPos.y + gridPos.h, CELL)));
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles isExtensionSandbox={false} />
      <div data-drawn={true} data-height={height} style={{ background: theme.colors.background.canvas, width: outer, minHeight: '100vh', position: 'relative' }}>
        <div style={{ padding: 12, font: `500 18px ${theme.typography.fontFamily}`, color: theme.colors.text.primary }}>
          {dashboard.title} <span style={{ color: theme.colors.text.secondary }}>Run {run.run}, instance {run.instance}</span>
        </div>
        {panels.map(({ panel, data }) => {
          const { x, y, w, h } = panel.gridPos;
          const place = { left: GAP + at(x, cell(outer)), top: 48 + at(y, CELL), width: size(w, cell(outer)), height: size(h, CELL) };
          return (
            <div key={panel.id} style={{ position: 'absolute', ...place }}>
              {panel.type === 'row' ? <Row {...panel} /> : <Panel panel={panel} data={data} all={all} from={from} to={to} place={place} />}
            </div>
          );
        })}
      </div>
    </ThemeContext.Provider>
  );
};

/** The panels of the rows that are wanted, moved up where a row before them is not. */
const wanted = (panels, keep) => {
  let kept = true;
  const all = panels.filter((panel) => (panel.type === 'row' ? (kept = keep(panel.title)) : kept));
  const lines = new Set(all.flatMap(({ gridPos: { y, h } }) => Array.from({ length: h }, (_, i) => y + i)));
  const above = (y) => [...lines].filter((line) => line < y).length;
  return all.map((panel) => ({ ...panel, gridPos: { ...panel.gridPos, y: above(panel.gridPos.y) } }));
};

const draw = async () => {
  const run = await chosen();
  const step = 5;
  const wish = new URLSearchParams(location.search);
  const to = Math.floor(Date.now() / 1000 / step) * step * 1000;
  const from = to - Number(wish.get('seconds') ?? 3600) * 1000;
  const keep = (title) => (!wish.has('only') || title.includes(wish.get('only'))) && (!wish.has('without') || !title.includes(wish.get('without')));
  const load = async (panel) => ({ panel, data: panel.targets ? await frames(panel, run, from, to, step, theme) : [] });
  const [all, ...panels] = await Promise.all([
    marks(dashboard.annotations.list, run, from, to, step),
    ...wanted(dashboard.panels, keep).map(load),
  ]);
  createRoot(document.getElementById('root')).render(
    <Dashboard panels={panels} run={run} all={all} from={from} to={to} outer={window.innerWidth} />
  );
};

const fail = (error) => document.body.append(`failed: ${error?.stack ?? error}`);
window.addEventListener('error', (event) => fail(event.error ?? event.message));
draw().catch(fail);
