// Charts by outer step or by time, each with a line of words that the arrow keys move along, drawn by uPlot.
//   chart(box, {title, series: [{label, values, colour, width, bars}], marks, errors, form})
"use strict";
Page.curves = (function () {
  const drawn = new Map();
  const FEW_POINTS = 60, FEW_REPLICAS = 6, FEW_MARKS = 24;
  let byTime = false;

  function axisX(count) {
    if (!byTime) return Array.from({length: count}, (_, t) => t);
    return Page.steps.column((chunk) => chunk.at).map((seconds) => (seconds === null ? null : seconds / 3600));
  }

  // x must ascend without gaps: steps whose chunk has not come are left out.
  function data(chart) {
    const x = axisX(Page.steps.count());
    const there = x.map((value, i) => i).filter((i) => x[i] !== null);
    const rows = chart.series.map((one) => there.map((i) => (one.values[i] === undefined ? null : one.values[i])));
    return {steps: there, rows: [there.map((i) => x[i]), ...rows]};
  }

  function placeOf(mark) { return byTime ? mark.at / 3600 : mark.step; }

  // Lines from top to bottom; where there are many of them, ticks at the foot, so that the curve can still be seen.
  function drawMarks(u, chart) {
    const {ctx, bbox} = u, ratio = devicePixelRatio || 1;
    const top = chart.marks().length > FEW_MARKS ? bbox.top + bbox.height - 9 * ratio : bbox.top;
    ctx.save();
    ctx.lineWidth = ratio;
    for (const mark of chart.marks()) {
      const x = u.valToPos(placeOf(mark), "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = Page.colour(mark.kind === "lost" ? "--bad" : "--good");
      if (top === bbox.top) ctx.setLineDash(mark.kind === "lost" ? [5 * ratio, 4 * ratio] : [2 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  // Held-out rewards: a diamond at its outer step, with two standard errors to each side.
  function drawErrors(u, chart) {
    const {ctx} = u, ratio = devicePixelRatio || 1, at = (value, scale) => u.valToPos(value, scale, true);
    ctx.save();
    ctx.strokeStyle = Page.colour("--accent");
    ctx.fillStyle = Page.colour("--card");
    ctx.lineWidth = 1.6 * ratio;
    for (const point of chart.errors()) {
      const x = at(placeOf(point), "x"), y = at(point.mean, "y"), r = 4 * ratio;
      ctx.beginPath();
      if (point.error !== null) {
        const low = at(point.mean - 2 * point.error, "y"), high = at(point.mean + 2 * point.error, "y");
        ctx.moveTo(x, low); ctx.lineTo(x, high);
        for (const end of [low, high]) { ctx.moveTo(x - r, end); ctx.lineTo(x + r, end); }
        ctx.stroke();
        ctx.beginPath();
      }
      ctx.moveTo(x, y - r); ctx.lineTo(x + r, y); ctx.lineTo(x, y + r); ctx.lineTo(x - r, y); ctx.closePath();
      ctx.fill();
      ctx.stroke();
    }
    ctx.restore();
  }

  function lineOf(one, count) {
    const bars = one.bars && uPlot.paths.bars({size: [0.8, 40]});
    return {
      label: one.label,
      stroke: () => Page.colour(one.colour),
      fill: one.fill ? () => Page.colour(one.fill) : undefined,
      width: one.width === undefined ? 1.4 : one.width,
      alpha: one.alpha,
      paths: bars || undefined,
      points: {show: !bars && one.width !== 0 && count <= FEW_POINTS, size: 5},
      spanGaps: true,
    };
  }

  // The range of y: all of [0, 1] for rewards that lie in it, so that two runs can be compared by eye.
  function rangeOf(chart) {
    return function (u, low, high) {
      for (const point of chart.errors()) {
        const reach = 2 * (point.error || 0);
        low = Math.min(low === null ? point.mean : low, point.mean - reach);
        high = Math.max(high === null ? point.mean : high, point.mean + reach);
      }
      if (low === null || high === null) return [0, 1];
      if (chart.unit && low >= 0 && high <= 1) return [0, 1];
      if (chart.fromZero) return [0, high > 0 ? high * 1.08 : 1];
      const room = (high - low || Math.abs(high) || 1) * 0.08;
      return [low - room, high + room];
    };
  }

  // An evaluation of θ_t stands at t, which is one further than the newest outer step's own point.
  function rangeX(chart) {
    return function (u, low, high) {
      const places = chart.errors().map(placeOf);
      const first = Math.min(low === null ? Infinity : low, ...places), last = Math.max(high === null ? -Infinity : high, ...places);
      return first > last ? [0, 1] : first === last ? [first - 0.5, last + 0.5] : [first, last];
    };
  }

  // "0.800" -> "0.8", "2.00 MB" -> "2 MB"
  function shortly(text) { return text.replace(/(\.\d*?)0+(?!\d)/, "$1").replace(/\.(?!\d)/, ""); }

  function options(chart, box) {
    const axis = {stroke: () => Page.colour("--quiet"), font: "11px system-ui", grid: {stroke: () => Page.colour("--line"), width: 1},
      ticks: {stroke: () => Page.colour("--line"), width: 1, size: 4}};
    const count = Page.steps.count();
    return {
      width: box.clientWidth, height: box.clientHeight,
      legend: {show: false},
      cursor: {drag: {x: false, y: false}, points: {size: 6}},
      scales: {x: {time: false, range: rangeX(chart)}, y: {range: rangeOf(chart)}},
      axes: [{...axis, size: 26, space: 60, label: byTime ? "hours" : "outer step", labelFont: "11px system-ui", labelSize: 16, incrs: byTime ? undefined : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000]},
        {...axis, size: 52, space: 18, values: (u, ticks) => ticks.map((tick) => shortly(chart.form(tick)))}],
      series: [{}, ...chart.series.map((one) => lineOf(one, count))],
      bands: chart.bands,
      hooks: {
        draw: [(u) => drawMarks(u, chart), (u) => drawErrors(u, chart)],
        setCursor: [(u) => read(chart, u.cursor.idx)],
      },
    };
  }

  // Which colour is which line; [] for one line alone, and for the band, which the key above the charts explains.
  function legend(chart) {
    const named = chart.series.filter((one) => one.label && one.colour !== "--band");
    return named.length < 2 ? [] : named.map((one) => {
      const word = Page.element("span", {}, "■ " + one.label + " ");
      word.style.color = "var(" + one.colour + ")";
      return word;
    });
  }

  // The values at one outer step, as words below the chart; without a step, the legend.
  function read(chart, index) {
    const t = index === null || index === undefined ? null : chart.stepsThere[index];
    if (t === null || t === undefined) {
      chart.words.replaceChildren(...legend(chart));
      return;
    }
    const values = chart.series.filter((one) => one.label).map((one) => [one.label, one.shown ? one.shown[t] : one.values[t]]);
    const known = values.filter(([, value]) => value !== null && value !== undefined);
    const near = chart.marks().filter((mark) => Math.abs(mark.step - t) <= 0.5).slice(0, 3).map((mark) => mark.text);
    const held = chart.errors().filter((point) => point.step === t).map((point) => "held out " + chart.form(point.mean));
    chart.words.textContent = ["step " + t, ...known.map(([label, value]) => label + " " + chart.form(value)), ...held, ...near].join(" · ");
  }

  function keys(chart, event) {
    const last = chart.stepsThere.length - 1;
    const now = chart.plot.cursor.idx === null || chart.plot.cursor.idx === undefined ? last : chart.plot.cursor.idx;
    const to = {ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last, PageUp: now - 10, PageDown: now + 10}[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const index = Math.max(0, Math.min(last, to));
    chart.plot.setCursor({left: chart.plot.valToPos(chart.plot.data[0][index], "x"), top: chart.plot.bbox.height / 4});
    read(chart, index);
  }

  function figure(chart) {
    const newest = Page.element("span", {class: "newest"});
    const plot = Page.element("div", {class: "plot", tabindex: "0", role: "img"});
    const words = Page.element("div", {class: "read", "aria-live": "polite"});
    const box = Page.element("figure", {}, Page.element("figcaption", {}, chart.title, newest), plot, words);
    plot.addEventListener("keydown", (event) => chart.plot && keys(chart, event));
    new ResizeObserver(() => {
      if (chart.plot && plot.clientWidth) chart.plot.setSize({width: plot.clientWidth, height: plot.clientHeight});
    }).observe(plot);
    return Object.assign(chart, {box, plotBox: plot, words, newest});
  }

  function describe(chart) {
    const main = chart.series[chart.main || 0];
    const shown = (main.shown || main.values).filter((value) => value !== null && value !== undefined);
    const held = chart.errors();
    const from = shown.length ? shown : held.map((point) => point.mean);
    if (!from.length) return;
    chart.newest.textContent = (legend(chart).length ? main.label + " " : "") + chart.form(from[0]) + " → " + chart.form(from[from.length - 1]);
    chart.plotBox.setAttribute("aria-label", chart.title + " by outer step: from " + chart.form(from[0]) + " to "
      + chart.form(from[from.length - 1]) + ", " + from.length + " points. Arrow keys read them.");
  }

  // Draws or redraws one chart in `home`; the same key is the same chart.
  function show(home, key, wanted) {
    const shape = JSON.stringify([wanted.series.map((one) => [one.label, one.colour]), byTime]);
    let chart = drawn.get(key);
    if (!chart) {
      chart = figure({...wanted});
      drawn.set(key, chart);
      home.append(chart.box);
    }
    Object.assign(chart, {...wanted});
    const found = data(chart);
    chart.stepsThere = found.steps;
    describe(chart);
    const few = found.steps.length <= FEW_POINTS;
    if (chart.plot && chart.shape === shape && chart.few === few) {
      chart.plot.setData(found.rows);
      return;
    }
    if (chart.plot) chart.plot.destroy();
    chart.shape = shape;
    chart.few = few;
    chart.plot = new uPlot(options(chart, chart.plotBox), found.rows, chart.plotBox);
    read(chart, null);
  }

  return {
    show, FEW_REPLICAS, has: (key) => drawn.has(key),
    redraw: () => drawn.forEach((chart) => chart.plot && chart.plot.redraw(false, true)),
    setByTime: (wish) => { byTime = wish; },
  };
})();
