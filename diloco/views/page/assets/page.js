// The whole page: what comes from source.js goes into its sections.
"use strict";
(function () {
  const LABELS = {reward: "reward", loss: "loss", kl: "KL", entropy: "entropy", completion_length: "completion length",
    grad_norm: "gradient norm"};
  const OUTER = {rho: "ρ, what momentum adds along the mean", effective_step: "effective step η_eff", cos_pair: "cosine of replicas",
    cross_term: "LoRA cross term", mean_norm: "norm of the mean ‖ḡ‖", outer_lr: "outer learning rate"};
  const PARTS = [["inner_s", "training", "--r0"], ["offer_s", "uploading", "--r3"], ["wait_s", "waiting", "--r1"], ["mean_s", "averaging", "--r2"]];
  let head = null, waiting = false;

  const none = () => [];
  const marks = () => (head ? head.marks : []);
  const number = (value) => Page.number(value);

  // ---------------------------------------------------------------- curves

  // The held-out score of a step, at the time when that step was taken.
  function evaluations() {
    const at = Page.steps.column((chunk) => chunk.at);
    return head.evaluations.map((one) => {
      const score = (one.greedy || one.sampled).reward, time = one.step ? at[one.step - 1] : 0;
      return {step: one.step, at: time || 0, mean: score.mean, error: score.error};
    });
  }

  function replicaLines(values) {
    const slots = Object.keys(values);
    if (slots.length <= 1) return [];
    if (slots.length <= Page.curves.FEW_REPLICAS)
      return slots.map((slot, i) => ({label: slot, values: values[slot], colour: "--r" + i, width: 1, alpha: .75}));
    const across = (pick) => values[slots[0]].map((_, t) => {
      const there = slots.map((slot) => values[slot][t]).filter((value) => value !== null);
      return there.length ? pick(...there) : null;
    });
    return [{label: "lowest", values: across(Math.min), colour: "--band", width: 0}, {label: "highest", values: across(Math.max), colour: "--band", width: 0}];
  }

  function showMetric(name, isFirst) {
    const mean = {label: "mean", values: Page.steps.column((chunk) => chunk.metrics[name]), colour: "--ink", width: 2};
    const slots = isFirst ? head.slots.filter((slot) => Page.steps.column((chunk) => chunk.by_slot[slot]).some((v) => v !== null)) : [];
    const more = replicaLines(Object.fromEntries(slots.map((slot) => [slot, Page.steps.column((chunk) => chunk.by_slot[slot])])));
    const bands = more.length === 2 && more[0].label === "lowest" ? [{series: [2, 1], fill: () => Page.colour("--band")}] : undefined;
    const held = isFirst && name === "reward" ? evaluations : none;
    Page.curves.show(Page.byId("charts"), name, {title: LABELS[name] || name, series: [...more, mean], main: more.length, marks,
      errors: held, form: number, bands, unit: name === "reward"});
  }

  function showCurves() {
    const known = Page.steps.names("metrics");
    const names = Object.keys(LABELS).filter((name) => known.includes(name));
    const first = names[0];
    Page.byId("charts").className = "charts wide-first";
    names.forEach((name) => showMetric(name, name === first));
    if (first !== "reward" && head.evaluations.length) {
      Page.curves.show(Page.byId("charts"), "held out", {title: "held-out reward", series: [{label: "", values: [], colour: "--ink"}],
        marks, errors: evaluations, form: number});
    }
    Page.byId("no-curves").hidden = names.length > 0;
    Page.put("no-curves", "No outer step has measured anything yet.");
  }

  // ---------------------------------------------------------------- outer steps

  function showSteps() {
    const home = Page.byId("step-charts"), known = Page.steps.names("numbers"), constants = [];
    for (const [name, title] of Object.entries(OUTER)) {
      if (known.includes(name)) {
        const values = Page.steps.column((chunk) => chunk.numbers[name]);
        const given = new Set(values.filter((value) => value !== null && value !== undefined));
        if (given.size === 1 && !Page.curves.has("outer " + name)) {
          constants.push(title + " " + number([...given][0]));
          continue;
        }
        Page.curves.show(home, "outer " + name, {title, series: [{label: name.replaceAll("_", " "), values, colour: "--accent"}], marks, errors: none, form: number});
      }
    }
    showSeconds(home);
    showBytes(home);
    Page.put("constants", constants.length ? "The same in all outer steps: " + constants.join(" · ") + "." : "");
  }

  // The legend names the marks that this run has.
  function showKey() {
    const kinds = new Set(head.marks.map((mark) => mark.kind));
    Page.byId("key-lost").hidden = !kinds.has("lost");
    Page.byId("key-joined").hidden = !kinds.has("joined");
    Page.byId("key-held").hidden = !head.evaluations.length;
    Page.byId("key-band").hidden = head.slots.length <= Page.curves.FEW_REPLICAS;
  }

  // Parts on top of each other: the highest sum is drawn first, and each lower one over it.
  function showSeconds(home) {
    const columns = PARTS.map(([part, label, colour]) => ({label, colour, shown: Page.steps.column((chunk) => chunk.seconds[part])}));
    if (!columns.some((one) => one.shown.some((value) => value !== null))) return;
    let below = [];
    const stacked = columns.map((one) => {
      below = one.shown.map((value, t) => (value === null ? (below[t] ?? null) : (below[t] || 0) + value));
      return {...one, values: below, fill: one.colour, width: 1, bars: true};
    });
    Page.curves.show(home, "seconds", {title: "seconds of an outer step",
      series: stacked.reverse(), main: 3, marks: none, errors: none, form: number, fromZero: true});
  }

  function showBytes(home) {
    const up = Page.steps.column((chunk) => chunk.up), down = Page.steps.column((chunk) => chunk.down);
    if (!up.some((value) => value) && !down.some((value) => value)) return;
    Page.curves.show(home, "bytes", {title: "bytes of an outer step, all replicas", series: [{label: "up", values: up, colour: "--r0"},
      {label: "down", values: down, colour: "--r1"}], marks: none, errors: none, form: Page.bytes, fromZero: true});
  }

  function stepTable() {
    const names = Page.steps.names("metrics"), numbers = Page.steps.names("numbers");
    const columns = [...names.map((name) => Page.steps.column((chunk) => chunk.metrics[name])),
      ...numbers.map((name) => Page.steps.column((chunk) => chunk.numbers[name]))];
    const at = Page.steps.column((chunk) => chunk.at), by = Page.steps.column((chunk) => chunk.by);
    const up = Page.steps.column((chunk) => chunk.up), down = Page.steps.column((chunk) => chunk.down);
    const who = (t, letters) => head.slots.filter((slot) => letters.includes(Page.steps.letter(t, slot))).length;
    const rows = at.map((time, t) => [t, Page.seconds(time), by[t], who(t, "fg"), who(t, "l"), who(t, "x"),
      ...columns.map((column) => number(column[t])), Page.bytes(up[t]), Page.bytes(down[t])]);
    return Page.table("outer steps", ["step", "at", "closed by", "counted", "late", "lost", ...names.map((name) => LABELS[name] || name),
      ...numbers.map((name) => name.replaceAll("_", " ")), "up", "down"], rows.reverse());
  }

  // ---------------------------------------------------------------- all of it

  function showHead() {
    document.title = head.name + " · step " + head.step + (head.steps ? " of " + head.steps : "");
    Page.put("name", head.name);
    Page.put("about", head.about);
    Page.put("headline", head.headline);
    Page.put("worth", [...head.worth, ...head.actors.map((text) => "actors: " + text)].join(" · "));
    Page.put("state", head.state);
    Page.byId("state").className = "badge " + head.state.replace(" ", "-");
    Page.tables.show(head);
    Page.tables.once("sessions", head.sessions, () => Page.lanes.showSessions(head));
  }

  function draw() {
    waiting = false;
    showHead();
    showKey();
    showCurves();
    showSteps();
    Page.lanes.showGrid(head);
    Page.tables.once("step table", Page.steps.count(), () =>
      Page.put("step-table", Page.steps.count() ? Page.folded("All " + Page.steps.count() + " outer steps as a table", stepTable) : []));
    document.documentElement.dataset.drawn = String(Page.steps.count());
  }

  // Many chunks that come together are drawn once.
  function drawSoon() {
    if (head && !waiting) {
      waiting = true;
      requestAnimationFrame(draw);
    }
  }

  // ---------------------------------------------------------------- switches

  function isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  function repaint() {
    Page.curves.redraw();
    Page.lanes.redraw();
  }

  Page.byId("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    repaint();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  for (const [id, wish] of [["by-step", false], ["by-time", true]]) {
    Page.byId(id).addEventListener("click", () => {
      Page.byId("by-step").setAttribute("aria-pressed", String(!wish));
      Page.byId("by-time").setAttribute("aria-pressed", String(wish));
      Page.curves.setByTime(wish);
      drawSoon();
    });
  }

  Page.source.start({
    head: (data) => { head = data; Page.steps.setSize(data.chunk); drawSoon(); },
    chunk: (n, data) => { Page.steps.put(n, data); drawSoon(); },
    stale: (text) => { Page.put("stale", text); Page.byId("stale").hidden = !text; },
  });
})();
