// Draws the page's charts from the JSON that stands in it, for the theme and the width at hand, and lets a pointer or the
// arrow keys ask for any value. Loads nothing. Names come from files: they are set as text, and escaped where plotly reads marks.
"use strict";
(() => {
  const given = JSON.parse(document.getElementById("charts").textContent);
  const scale = given.scale.map((colour, place) => [place / (given.scale.length - 1), colour]);
  const drawn = [];

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const inked = (colour) => given.colours[colour] || css("--ink");
  const escaped = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const shown = (value) => String(Number(value.toPrecision(4)));
  const isBlank = (heat) => heat.values.every((row) => row.every((value) => value === null)); // nothing but its marks
  const named = (axis, place) => axis.names[place] ?? String(place);

  // ---- what is said of a value

  function cellWords(panel, heat, row, column) {
    const place = (axis, at) => (axis.names.length ? named(axis, at) : `${axis.title} ${at * heat.every}`);
    const mark = heat.marks.find((one) => one.lookup.has(row * 1e5 + column));
    const state = heat.marks.length ? `: ${mark ? mark.name : heat.rest}` : "";
    const value = heat.values[row][column];
    return `${place(panel.y, row)}, ${place(panel.x, column)}${state}${value === null ? "" : `; ${heat.what} ${shown(value)}`}`;
  }

  function pointWords(panel, series, at) {
    const interval = series.low.length ? ` [${shown(series.low[at])}, ${shown(series.high[at])}]` : "";
    const note = series.notes[at] ? `; ${series.notes[at]}` : "";
    const x = panel.x.names.length ? named(panel.x, series.x[at]) : `${panel.x.title} ${shown(series.x[at])}`;
    return `${series.name}: ${x}, ${panel.y.title} ${shown(series.y[at])}${interval}${note}`;
  }

  const barWords = (panel, bars, at) => `${named(panel.y, at)}: ${bars.shown[at]}, ${bars.notes[at]}`;

  function words(panel, layer, at) {
    const said =
      layer.kind === "heat" ? cellWords(panel, layer, at[0], at[1])
      : layer.kind === "bars" ? barWords(panel, layer, at[0])
      : pointWords(panel, layer, at[0]);
    return panel.title ? `${panel.title}: ${said}` : said;
  }

  // ---- from a chart to plotly's traces and layout

  function place(chart, width) {
    const small = chart.panels.every((panel) => panel.square && panel.layers[0].values.length <= 64) && chart.columns > 3;
    const narrowest = small ? 125 : 330;
    const columns = Math.max(1, Math.min(chart.columns, chart.panels.length, Math.floor(width / narrowest)));
    const cell = width / columns;
    const longest = Math.max(0, ...chart.panels.flatMap((panel) => panel.y.names.map((name) => name.length)));
    const gutter = longest ? Math.min(6.3 * longest + 14, 0.42 * cell) : small ? 30 : 60;
    const inner = cell - gutter - 14;
    const rowsOf = (panel) => Math.max(panel.y.names.length, 1);
    const bars = (panel) => panel.layers[0].kind === "bars";
    const high = Math.max(...chart.panels.map((panel) =>
      panel.square ? inner
      : bars(panel) ? 24 * rowsOf(panel) + 10
      : panel.y.names.length ? Math.max(120, (rowsOf(panel) > 40 ? 11.5 : 17) * rowsOf(panel))
      : Math.max(240, Math.min(380, 0.62 * inner))));
    const top = chart.panels.some((panel) => panel.title) ? 26 : 8;
    const bottom = small ? 20 : 46;
    const rows = Math.ceil(chart.panels.length / columns);
    return { columns, cell, gutter, inner, high, top, bottom, small, height: rows * (top + high + bottom) };
  }

  function axisLayout(axis, small, extent) {
    const many = axis.names.length > 40;
    const layout = {
      title: small ? undefined : { text: escaped(axis.title), font: { size: 12, color: css("--soft") }, standoff: 6 },
      type: axis.log ? "log" : "linear", color: css("--soft"), gridcolor: css("--line"), zeroline: false,
      linecolor: css("--line"), tickfont: { size: small ? 9 : many ? 8.5 : 11, color: css("--soft") }, automargin: false,
      nticks: small ? 3 : undefined, showgrid: true, ticks: "outside", tickcolor: css("--line"), ticklen: 3,
    };
    if (axis.names.length) {
      Object.assign(layout, {
        tickmode: "array", tickvals: axis.names.map((_, at) => at), ticktext: axis.names.map(escaped), showgrid: false,
        title: undefined,
      });
    } else if (axis.log && extent) {
      const [low, high] = extent, parts = high / low > 300 ? [1] : high / low > 30 ? [1, 3] : [1, 2, 5], values = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
        for (const part of parts) values.push(Number((part * 10 ** power).toPrecision(2)));
      }
      Object.assign(layout, { tickmode: "array", tickvals: values, ticktext: values.map((value) => (value < 0.001 ? value.toExponential(0) : String(value))) });
    }
    return layout;
  }

  function extentOf(panel, axis) {
    const values = panel.layers.flatMap((layer) => (layer.kind === "bars" ? layer.values : layer[axis] || [])).filter((value) => value > 0);
    return values.length ? [Math.min(...values), Math.max(...values)] : null;
  }

  function heatTraces(panel, heat, spots, at) {
    const rows = heat.values.length, columns = heat.values[0].length, blank = isBlank(heat);
    const size = Math.max(2.4, Math.min(9, 0.62 * Math.min(spots.inner / columns, spots.high / rows)));
    const found = [{
      trace: {
        ...at, type: "heatmap", zmin: heat.low, zmax: heat.high, showscale: false,
        z: blank ? heat.values.map((row) => row.map(() => 0)) : heat.values, // there, and not seen: it can be pointed at
        colorscale: blank ? [[0, "rgba(0,0,0,0)"], [1, "rgba(0,0,0,0)"]] : scale,
        hoverongaps: true, hoverinfo: "text",
        x0: 0, dx: heat.every, y0: 0, dy: panel.y.names.length ? 1 : heat.every,
        text: heat.values.map((row, r) => row.map((_, c) => escaped(words(panel, heat, [r, c])))),
      },
      layer: heat,
    }];
    for (const mark of heat.marks) {
      found.push({
        trace: {
          ...at, type: "scatter", mode: "markers", hoverinfo: "skip",
          x: mark.cells.map((cell) => cell[1]), y: mark.cells.map((cell) => cell[0]),
          marker: {
            size: mark.marker === "diamond" ? size * 1.25 : mark.marker === "down" ? Math.max(8, size) : size, symbol: given.markers[mark.marker][0],
            color: mark.colour !== "ink" ? given.colours[mark.colour] : blank ? css("--ink") : "#ffffff",
            line: { color: blank ? css("--ink") : "#000000", width: size > 4 ? 1 : 0.4 },
          },
        },
        layer: null,
      });
    }
    return found;
  }

  function seriesTrace(panel, series, at) {
    const colour = inked(series.colour);
    const mode = [series.line && "lines", series.points && "markers", series.labels.some(Boolean) && "text"];
    return {
      trace: {
        ...at, type: "scatter", mode: mode.filter(Boolean).join("+"), x: series.x, y: series.y, hoverinfo: "text",
        hovertext: series.x.map((_, i) => escaped(words(panel, series, [i]))),
        text: series.labels.map(escaped), textposition: "top center", textfont: { color: css("--ink"), size: 12 },
        line: { color: colour, width: 2, dash: series.hollow ? "dot" : "solid" },
        marker: {
          size: series.large ? 16 : series.x.length > 30 || (series.x.length > 8 && !series.low.length) ? 6 : 9, symbol: given.markers[series.marker][0],
          color: series.hollow ? css("--ground") : colour, line: { color: series.large ? css("--ink") : colour, width: series.hollow ? 2 : 1 },
        },
        error_y: series.low.length ? {
          type: "data", symmetric: false, color: colour, thickness: 1, width: 2,
          array: series.high.map((high, i) => high - series.y[i]), arrayminus: series.low.map((low, i) => series.y[i] - low),
        } : undefined,
        cliponaxis: false,
      },
      layer: series,
    };
  }

  function barTrace(panel, bars, at) {
    return {
      trace: {
        ...at, type: "bar", orientation: "h", x: bars.values, y: bars.values.map((_, i) => i), width: 0.72,
        marker: { color: bars.colours.map(inked) }, text: bars.shown.map(escaped), textposition: "outside", cliponaxis: false,
        textfont: { color: css("--ink"), size: 11 }, hoverinfo: "text",
        hovertext: bars.values.map((_, i) => escaped(words(panel, bars, [i]))),
      },
      layer: bars,
    };
  }

  function build(chart, width) {
    const spots = place(chart, width);
    const layout = {
      width, height: spots.height, margin: { l: 0, r: 0, t: 0, b: 0 }, paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest", annotations: [], shapes: [],
      dragmode: width < 600 ? false : "zoom", font: { family: "system-ui, sans-serif" },
      hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line"), font: { color: css("--ink"), size: 12 }, align: "left", namelength: -1 },
    };
    const curves = [];
    chart.panels.forEach((panel, index) => {
      const suffix = index ? String(index + 1) : "", at = { xaxis: `x${suffix}`, yaxis: `y${suffix}` };
      const column = index % spots.columns, row = Math.floor(index / spots.columns);
      const left = column * spots.cell + spots.gutter, up = row * (spots.top + spots.high + spots.bottom) + spots.top;
      const h = spots.height, x = axisLayout(panel.x, spots.small, extentOf(panel, "x")), y = axisLayout(panel.y, spots.small, extentOf(panel, "y"));
      x.domain = [left / width, Math.min(1, (left + spots.inner) / width)];
      y.domain = [Math.max(0, 1 - (up + spots.high) / h), Math.min(1, 1 - up / h)];
      x.anchor = at.yaxis; y.anchor = at.xaxis;
      const first = panel.layers[0];
      if (first.kind === "heat") {
        const rows = first.values.length, step = panel.y.names.length ? 1 : first.every;
        y.range = [(rows - 0.5) * step, -0.5 * step]; // the first row stands at the top
        x.range = [-0.5 * first.every, (first.values[0].length - 0.5) * first.every];
        x.showgrid = y.showgrid = false;
      } else if (first.kind === "bars") {
        const most = Math.max(...first.values), least = Math.min(...first.values);
        y.range = [first.values.length - 0.4, -0.6];
        x.range = panel.x.log ? [Math.log10(least / 2.5), Math.log10(most * 3)] : [Math.min(0, 1.15 * least), 1.15 * Math.max(0, most)];
      }
      layout[`xaxis${suffix}`] = x; layout[`yaxis${suffix}`] = y;
      if (panel.title) {
        layout.annotations.push({
          text: escaped(panel.title), showarrow: false, xref: "paper", yref: "paper", xanchor: "left", yanchor: "bottom",
          x: left / width, y: 1 - up / h, font: { size: spots.small ? 10 : 13, color: css("--ink") },
        });
      }
      for (const rule of panel.rules) {
        const across = rule.axis === "x"
          ? { x0: rule.at, x1: rule.at, y0: 0, y1: 1, xref: at.xaxis, yref: `${at.yaxis} domain` }
          : { y0: rule.at, y1: rule.at, x0: 0, x1: 1, yref: at.yaxis, xref: `${at.xaxis} domain` };
        layout.shapes.push({ type: "line", ...across, line: { color: css("--soft"), width: 1, dash: rule.name ? "dot" : "solid" } });
        if (rule.name) {
          layout.annotations.push({
            text: escaped(rule.name), showarrow: false, font: { size: 11, color: css("--soft") },
            ...(rule.axis === "x"
              ? { x: panel.x.log ? Math.log10(rule.at) : rule.at, xref: at.xaxis, y: 1, yref: `${at.yaxis} domain`, xanchor: "left", yanchor: "top" }
              : { y: panel.y.log ? Math.log10(rule.at) : rule.at, yref: at.yaxis, x: 0.995, xref: `${at.xaxis} domain`, xanchor: "right", yanchor: "bottom" }),
          });
        }
      }
      for (const layer of panel.layers) {
        const made = layer.kind === "heat" ? heatTraces(panel, layer, spots, at)
          : layer.kind === "bars" ? [barTrace(panel, layer, at)] : [seriesTrace(panel, layer, at)];
        curves.push(...made.map((one) => ({ ...one, panel, index })));
      }
    });
    return { layout, curves };
  }

  function legend(chart, list) {
    const rows = new Map();
    for (const panel of chart.panels) {
      for (const layer of panel.layers) {
        if (layer.kind === "heat") {
          const blank = isBlank(layer);
          if (!blank) rows.set(`scale ${layer.what} ${layer.low} ${layer.high}`, { scale: layer });
          for (const mark of layer.marks) rows.set(mark.name, { sign: given.markers[mark.marker][1], ringed: mark.colour === "ink" && !blank, colour: mark.colour, name: mark.name });
        } else if (layer.kind === "series") {
          const sign = layer.points ? given.markers[layer.marker][1] : layer.hollow ? "┄" : "━";
          rows.set(layer.name, { sign: layer.hollow && layer.points ? "○" : sign, colour: layer.colour, name: layer.name });
        }
      }
    }
    list.replaceChildren(...[...rows.values()].map((row) => {
      const item = document.createElement("li"), sign = document.createElement("span");
      if (row.scale) {
        sign.className = "scale";
        sign.style.background = `linear-gradient(90deg, ${given.scale.join(",")})`;
        item.append(`${row.scale.what}: ${shown(row.scale.low)}`, sign, shown(row.scale.high));
        return item;
      }
      sign.className = row.ringed ? "sign ringed" : "sign";
      if (!row.ringed) sign.style.color = inked(row.colour);
      sign.textContent = row.sign;
      item.append(sign, ` ${row.name}`);
      return item;
    }));
  }

  // ---- asking for values

  // Every value of a chart as a stop for the keys, panel by panel: heat maps go both ways, all else from left to right.
  function stopsOf(curves) {
    const panels = [];
    curves.forEach((curve, number) => {
      if (!curve.layer) return;
      const found = (panels[curve.index] ??= { panel: curve.panel, heat: null, stops: [] });
      if (curve.layer.kind === "heat") found.heat = { number, layer: curve.layer };
      else {
        const values = curve.layer.kind === "bars" ? curve.layer.values.map((_, i) => i) : curve.layer.x;
        values.forEach((x, i) => found.stops.push({ number, layer: curve.layer, at: [i], x }));
      }
    });
    for (const panel of panels) panel.stops.sort((one, other) => one.x - other.x);
    return panels;
  }

  function say(state, text) {
    state.readout.textContent = text;
    state.readout.classList.add("live");
  }

  function show(state) {
    const panel = state.panels[state.panel];
    const stop = panel.heat && !panel.stops.length ? { number: panel.heat.number, layer: panel.heat.layer, at: [state.row, state.column] } : panel.stops[state.stop];
    if (!stop) return; // a panel without a value
    say(state, words(panel.panel, stop.layer, stop.at));
    const trace = state.curves[stop.number].trace, [row, column] = stop.at;
    const place = stop.layer.kind === "heat" ? { xval: column * trace.dx, yval: row * trace.dy } : { pointNumber: row };
    Plotly.Fx.hover(state.div, [{ curveNumber: stop.number, ...place }], trace.xaxis + trace.yaxis);
  }

  function move(state, key) {
    const panel = state.panels[state.panel], bound = (value, most) => Math.max(0, Math.min(most, value));
    const turn = (by) => {
      state.panel = bound(state.panel + by, state.panels.length - 1);
      state.stop = 0;
    };
    if (key === "PageDown") turn(1);
    else if (key === "PageUp") turn(-1);
    else if (panel.heat && !panel.stops.length) {
      const rows = panel.heat.layer.values.length - 1, columns = panel.heat.layer.values[0].length - 1;
      const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -1e6], End: [0, 1e6] }[key];
      state.row = bound(state.row + by[0], rows);
      state.column = bound(state.column + by[1], columns);
    } else {
      const by = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, Home: -1e6, End: 1e6 }[key];
      state.stop = bound(state.stop + by, panel.stops.length - 1);
    }
    const after = state.panels[state.panel];
    if (after.heat) {
      state.row = bound(state.row, after.heat.layer.values.length - 1);
      state.column = bound(state.column, after.heat.layer.values[0].length - 1);
    }
    show(state);
  }

  const KEYS = new Set(["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End", "PageUp", "PageDown"]);

  function listen(state) {
    state.div.addEventListener("focus", () => show(state));
    state.div.addEventListener("blur", () => Plotly.Fx.unhover(state.div));
    state.div.addEventListener("keydown", (event) => {
      if (event.key === "Escape") Plotly.Fx.unhover(state.div);
      if (!KEYS.has(event.key) || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      move(state, event.key);
    });
    state.div.on("plotly_hover", (event) => {
      const point = event.points[0], curve = state.curves[point.curveNumber];
      if (curve && curve.layer) say(state, words(curve.panel, curve.layer, Array.isArray(point.pointNumber) ? point.pointNumber : [point.pointNumber]));
    });
  }

  // ---- drawing, and drawing again

  function draw(state, width) {
    const { layout, curves } = build(state.chart, width);
    Object.assign(state, { width, curves, panels: stopsOf(curves) });
    legend(state.chart, state.list);
    return Plotly.react(state.div, curves.map((curve) => curve.trace), layout, { displayModeBar: false, responsive: false });
  }

  const drawAll = (width) => drawn.forEach((state) => draw(state, width || state.div.clientWidth));

  for (const chart of given.charts) {
    for (const panel of chart.panels) {
      for (const layer of panel.layers) {
        for (const mark of layer.marks || []) mark.lookup = new Set(mark.cells.map((cell) => cell[0] * 1e5 + cell[1]));
      }
    }
    const figure = document.getElementById(`figure-${chart.name}`);
    const state = {
      chart, div: figure.querySelector(".plot"), list: figure.querySelector(".legend"), readout: figure.querySelector(".readout"),
      panel: 0, row: 0, column: 0, stop: 0,
    };
    drawn.push(state);
    draw(state, state.div.clientWidth);
    listen(state);
  }

  let waiting = 0;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => drawn.some((state) => state.div.clientWidth !== state.width) && drawAll(), 120);
  });

  // ---- light and dark

  const button = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (document.documentElement.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const label = () => {
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Change to ${dark() ? "light" : "dark"} colours`);
    button.setAttribute("aria-pressed", String(dark()));
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    label();
    drawAll();
  });
  system.addEventListener("change", () => { label(); drawAll(); });
  label();

  // ---- on paper everything is light and as wide as a page
  let before = "";
  window.addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme || "";
    document.documentElement.dataset.theme = "light";
    drawAll(680);
  });
  window.addEventListener("afterprint", () => {
    if (before) document.documentElement.dataset.theme = before;
    else delete document.documentElement.dataset.theme;
    drawAll();
  });
  document.documentElement.dataset.drawn = "yes"; // for who waits until all is there
})();
