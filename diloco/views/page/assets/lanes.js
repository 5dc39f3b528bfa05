// The life of every session on one scale of time, and who contributed to which outer step as a grid.
"use strict";
Page.lanes = (function () {
  const MANY = 24;
  const COLOURS = {f: "--fresh", g: "--gated", l: "--late", x: "--bad", w: "--waits", ".": "--absent"};
  const WORDS = {f: "counted", g: "counted with less weight", l: "counted late", x: "lost", w: "may yet be counted", ".": "not there"};
  let grid = null;

  // ---------------------------------------------------------------- sessions

  function piece(kind, start, end, whole) {
    const bar = Page.element("i", {class: kind});
    bar.style.left = 100 * start / whole + "%";
    bar.style.width = 100 * Math.max(0, end - start) / whole + "%";
    return bar;
  }

  function pieces(session, whole) {
    const end = session.ended === null ? whole : session.ended;
    const joined = session.joined === null ? end : Math.min(session.joined, end);
    const found = [piece("boot", session.claimed, joined, whole), piece("train", joined, end, whole)];
    if (session.bad) {
      const cross = piece("end", end, end, whole);
      cross.style.left = "min(calc(100% - 4px), " + 100 * end / whole + "%)";
      found.push(cross);
    }
    return found;
  }

  // One session, or all sessions of one slot.   about: what stands beside it.
  function lane(name, sessions, about, alarm, whole) {
    const track = Page.element("div", {class: "track", "aria-hidden": "true"}, sessions.flatMap((one) => pieces(one, whole)));
    return Page.element("div", {class: "lane", role: "listitem", title: name + ": " + about}, Page.element("span", {}, name), track,
      Page.element("span", {class: alarm ? "how alarm" : "how"}, about));
  }

  function laneOfSession(session, whole) {
    const row = lane(session.name, [session], words(session), session.bad, whole);
    if (session.why) row.append(Page.element("div", {class: "why"}, session.why));
    return row;
  }

  function laneOfSlot(slot, sessions, whole) {
    const newest = sessions[sessions.length - 1], lost = sessions.filter((one) => one.bad).length;
    const times = sessions.length > 1 ? sessions.length + " sessions, " + lost + " lost; " : "";
    return lane(slot, sessions, times + (newest.phase || newest.end), newest.bad, whole);
  }

  function words(session) {
    const counted = session.actor ? "" : ", counted in " + session.counted;
    if (!session.phase) return session.end + " at " + Page.seconds(session.ended) + counted;
    const inner = session.phase === "train" && session.inner !== null ? " " + session.inner + "/" + session.inner_steps : "";
    return session.phase + inner + counted + (session.device ? ", " + session.device : "");
  }

  function showSessions(head) {
    const whole = Math.max(1e-3, head.elapsed_s || 0, ...head.sessions.map((one) => one.ended || one.claimed));
    const slots = [...new Set(head.sessions.map((one) => one.slot))], many = head.sessions.length > MANY;
    const lanes = many ? slots.map((slot) => laneOfSlot(slot, head.sessions.filter((one) => one.slot === slot), whole))
      : head.sessions.map((session) => laneOfSession(session, whole));
    Page.put("lane-means", many ? "One line per slot; a red end, and the next session follows." : "One line per process that held a slot.");
    const list = Page.element("div", {class: slots.length > MANY ? "lanes many" : "lanes", role: "list"}, lanes);
    const scale = Page.element("p", {class: "quiet"}, "From the start to " + Page.seconds(whole) + ".");
    Page.put("lanes", ...(lanes.length ? [list, scale, sessionTable(head)] : [Page.element("p", {class: "quiet"}, "No replica has claimed a slot yet.")]));
  }

  function sessionTable(head) {
    return Page.folded("All " + head.sessions.length + " sessions as a table", () => Page.table("sessions",
      ["session", "place", "device", "claimed", "joined", "at step", "counted in", "end", "why"],
      head.sessions.map((one) => [one.name, one.place, one.device || "–", Page.seconds(one.claimed), Page.seconds(one.joined),
        one.joined === null ? "–" : one.joined_step, one.counted,
        one.phase ? one.phase : one.end + " at " + Page.seconds(one.ended), one.why || ""]), [1, 2, 7, 8]));
  }

  // ---------------------------------------------------------------- the grid

  // One pixel of `small` is one step of one slot; the browser stretches it without blurring.  Where there are more steps
  // than pixels, a column stands for several steps and shows the worst of them, so that nothing lost is hidden.
  const WORST = "xlwgf.";

  function worst(first, end, slot) {
    let found = ".";
    for (let t = first; t < end; t++) {
      const letter = Page.steps.letter(t, slot);
      if (WORST.indexOf(letter) < WORST.indexOf(found)) found = letter;
    }
    return found;
  }

  function rgb(name) {
    const hex = Page.colour(name).slice(1);
    return [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16));
  }

  function paint() {
    const {canvas, slots} = grid, count = Math.max(1, Page.steps.count());
    const columns = Math.min(count, Math.max(1, Math.floor(canvas.clientWidth * (devicePixelRatio || 1))));
    const small = new ImageData(columns, slots.length);
    const colours = Object.fromEntries(Object.entries(COLOURS).map(([letter, name]) => [letter, rgb(name)]));
    for (let c = 0; c < columns; c++) {
      const first = Math.floor(c * count / columns), end = Math.max(first + 1, Math.floor((c + 1) * count / columns));
      slots.forEach((slot, i) => small.data.set([...colours[worst(first, end, slot)], 255], 4 * (i * columns + c)));
    }
    const source = Page.element("canvas", {width: columns, height: slots.length});
    source.getContext("2d").putImageData(small, 0, 0);
    stretch(source, count);
  }

  function stretch(source, count) {
    const {canvas, slots} = grid, ratio = devicePixelRatio || 1;
    canvas.width = Math.max(1, Math.floor(canvas.clientWidth * ratio));
    canvas.height = Math.max(1, Math.floor(canvas.clientHeight * ratio));
    const ctx = canvas.getContext("2d");
    ctx.imageSmoothingEnabled = false;
    ctx.drawImage(source, 0, 0, canvas.width, canvas.height);
    ctx.fillStyle = Page.colour("--page");
    const line = (x, y, w, h) => ctx.fillRect(Math.round(x), Math.round(y), w, h);
    if (canvas.width / count >= 5 * ratio) for (let t = 1; t < count; t++) line(t * canvas.width / count, 0, ratio, canvas.height);
    for (let i = 1; i < slots.length; i++) line(0, i * canvas.height / slots.length, canvas.width, ratio);
    ctx.strokeStyle = Page.colour("--ink");
    ctx.lineWidth = 2 * ratio;
    if (grid.chosen) {
      const {t, i} = grid.chosen, width = Math.max(3 * ratio, canvas.width / count);
      ctx.strokeRect(t * canvas.width / count, i * canvas.height / slots.length, width, canvas.height / slots.length);
    }
  }

  function choose(t, i) {
    const count = Page.steps.count();
    grid.chosen = {t: Math.max(0, Math.min(count - 1, t)), i: Math.max(0, Math.min(grid.slots.length - 1, i))};
    const slot = grid.slots[grid.chosen.i], letter = Page.steps.letter(grid.chosen.t, slot);
    const chunk = Page.steps.chunkOf(grid.chosen.t);
    const by = chunk ? ", closed by " + chunk.by[grid.chosen.t - chunk.first] : "";
    grid.words.textContent = "step " + grid.chosen.t + by + " · " + slot + ": " + WORDS[letter];
    paint();
  }

  function keys(event) {
    const now = grid.chosen || {t: Page.steps.count() - 1, i: 0};
    const to = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-1e9, 0], End: [1e9, 0]}[event.key];
    if (!to) return;
    event.preventDefault();
    choose(grid.chosen ? now.t + to[0] : now.t, now.i + (grid.chosen ? to[1] : 0));
  }

  function pointed(event) {
    const box = grid.canvas.getBoundingClientRect();
    choose(Math.floor((event.clientX - box.left) / box.width * Page.steps.count()),
      Math.floor((event.clientY - box.top) / box.height * grid.slots.length));
  }

  function makeGrid(slots) {
    const canvas = Page.element("canvas", {class: "map", tabindex: "0", role: "img"});
    const height = Math.max(slots.length <= 8 ? 22 : 12, 0) * slots.length;
    canvas.style.height = height + "px";
    const names = Page.element("div", {class: "map-names", "aria-hidden": "true"},
      slots.map((slot, i) => Page.element("span", {}, slots.length <= MANY || i % 4 === 0 ? slot : "")));
    names.style.height = height + "px";
    const words = Page.element("p", {class: "read", "aria-live": "polite"});
    grid = {canvas, slots, words, chosen: null, key: slots.join()};
    canvas.addEventListener("keydown", keys);
    canvas.addEventListener("pointermove", pointed);
    canvas.addEventListener("pointerdown", pointed);
    new ResizeObserver(() => paint()).observe(canvas);
    return [Page.element("div", {class: "map-row"}, names, canvas), words];
  }

  function showGrid(head) {
    if (!head.slots.length || !Page.steps.count()) {
      Page.put("grid", Page.element("p", {class: "quiet"}, "No outer step is committed yet."));
      grid = null;
      return;
    }
    if (!grid || grid.key !== head.slots.join()) Page.put("grid", makeGrid(head.slots), contributionTable());
    grid.head = head;
    grid.canvas.setAttribute("aria-label", "Who contributed: " + head.slots.length + " replicas by " + Page.steps.count()
      + " outer steps. Arrow keys move from step to step and from replica to replica.");
    paint();
  }

  function contributionTable() {
    return Page.folded("Counted, late and lost per replica, as a table", () => Page.table("contributions per replica",
      ["replica", "counted", "with less weight", "late", "lost"],
      Object.entries(grid.head.counted).map(([slot, counts]) => [slot, counts.fresh, counts.gated, counts.late, counts.lost])));
  }

  return {showSessions, showGrid, redraw: () => grid && paint()};
})();
