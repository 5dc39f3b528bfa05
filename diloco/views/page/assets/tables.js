// Everything that is words: tiles, troubles, the parent, costs, rollouts, events, the config, checks.
"use strict";
Page.tables = (function () {
  const element = Page.element;
  const TURN = 1500;
  const before = {};

  // Draws a part again only if its data changed, so that what a reader has opened stays open.
  function once(name, data, draw) {
    const text = JSON.stringify(data);
    if (before[name] === text) return;
    before[name] = text;
    draw();
  }

  function tile(name, value, more) {
    return element("div", {}, element("dt", {}, name), element("dd", {}, value, more ? element("small", {}, " " + more) : null));
  }

  function showTiles(head) {
    const isLive = (one) => one.phase && !["silent", "left"].includes(one.phase), sessions = head.sessions.filter(isLive);
    const actors = sessions.filter((one) => one.actor).length, live = sessions.length - actors;
    const tiles = head.result ? [tile(head.result.name, Page.number(head.result.first) + " → " + Page.number(head.result.last),
      head.result.error === null ? "" : "± " + Page.number(head.result.error))] : [];
    tiles.push(tile("outer step", head.step, head.steps ? "of " + head.steps : ""));
    if (head.state === "running") tiles.push(tile("time left", Page.seconds(head.eta_s)));
    tiles.push(tile("per outer step", Page.seconds(head.step_s)), tile("running for", Page.seconds(head.elapsed_s)));
    tiles.push(tile("replicas", head.state === "running" ? live : head.slots.length, head.state === "running" ? "of " + head.replicas : ""));
    if (actors) tiles.push(tile("actors", actors, ""));
    if (head.costs && (head.costs.usd || head.costs.usd_per_hour)) tiles.push(tile("spent", Page.dollars(head.costs.usd), head.costs.max_usd ? "of " + Page.dollars(head.costs.max_usd) : ""));
    if (head.snapshot !== null) tiles.push(tile("newest snapshot", "step " + head.snapshot, head.state === "running" ? Page.seconds(head.snapshot_age_s) + " old" : ""));
    Page.put("tiles", tiles);
  }

  function showTroubles(head) {
    const found = head.troubles.map((one) => element("div", {class: "trouble"}, element("strong", {}, (one.slot ? one.slot + ": " : "") + one.text),
      one.advice ? element("div", {}, one.advice) : null,
      one.page ? element("div", {class: "quiet"}, "docs/troubles.md#" + one.page) : null));
    const mild = head.messages.map((text) => element("div", {class: "trouble mild"}, text));
    Page.put("troubles", found, mild);
    Page.byId("troubles").hidden = !(found.length + mild.length);
  }

  // OLD ●──●──●──●        the parent, and where this run leaves it
  //        └──●──● NEW
  function showParent(head) {
    const box = Page.byId("parent");
    box.hidden = !head.parent;
    if (!head.parent) return;
    const dot = (name, left) => { const made = element("b", {class: name}); made.style.left = left + "%"; return made; };
    const rail = (...parts) => element("span", {class: "rail", "aria-hidden": "true"}, parts);
    const [url, step] = [head.parent.slice(0, head.parent.lastIndexOf("@")), head.parent.slice(head.parent.lastIndexOf("@") + 1)];
    box.replaceChildren(element("div", {class: "fork"},
      rail(element("i", {class: "old"}), dot("", 0), dot("", 22), dot("", 42), dot("", 64), dot("", 84)),
      element("span", {class: "quiet"}, url),
      rail(element("i", {class: "stem"}), element("i", {class: "new"}), dot("new", 64), dot("new", 84)),
      element("span", {}, element("strong", {}, head.name), " goes on from its outer step " + step)));
  }

  // ---------------------------------------------------------------- money

  function showCosts(head) {
    const costs = head.costs;
    if (!costs || (!costs.bills && !costs.usd)) {
      Page.put("costs", element("p", {class: "quiet"}, "Nothing was launched that has a price."));
      return;
    }
    const of = (limit) => limit ? " of " + limit : "";
    const words = Page.dollars(costs.usd) + of(costs.max_usd && Page.dollars(costs.max_usd)) + " so far, "
      + Page.dollars(costs.usd_per_hour) + " per hour now, " + costs.hours.toFixed(2) + of(costs.max_hours) + " hours with any replica";
    const unknown = costs.unknown_price.length ? element("p", {class: "trouble mild"}, "The price of " + costs.unknown_price.join(", ") + " is not known, so the sums leave it out.") : null;
    const places = Object.entries(costs.per_executor).map(([name, usd]) => [name, Page.dollars(usd)]);
    const slots = Object.entries(costs.per_slot).map(([name, usd]) => [name, Page.dollars(usd)]);
    Page.put("costs", element("p", {}, words), unknown, Page.table("cost by place", ["place", "so far"], places),
      Page.folded("By replica", () => Page.table("cost by replica", ["replica", "so far"], slots)));
  }

  // ---------------------------------------------------------------- rollouts

  function turnOf(turn) {
    const box = element("div", {class: turn.role === "hint" ? "turn hint" : "turn"}, element("div", {class: "role"}, turn.role));
    if (turn.text.length <= TURN) box.append(element("pre", {}, turn.text));
    else box.append(element("pre", {}, turn.text.slice(0, TURN) + "…"), Page.folded("all of it", () => element("pre", {}, turn.text)));
    return box;
  }

  function sampleOf(sample) {
    const brief = (turn) => (turn ? turn.text.slice(-140).replace(/\s+/g, " ").trim() : "");
    const asked = brief(sample.turns.filter((turn) => turn.role === "user").pop() || sample.turns[0]);
    const last = sample.turns.length > 1 ? brief(sample.turns[sample.turns.length - 1]) : "";
    const head = element("summary", {}, element("span", {class: "reward"}, "reward " + Page.number(sample.reward)),
      element("span", {}, "step " + sample.step + ", " + sample.slot), element("span", {class: "brief quiet"}, asked), element("span", {class: "brief"}, last));
    return element("details", {class: "sample"}, head, element("div", {}, sample.turns.map(turnOf)));
  }

  function showRollouts(head) {
    const columns = [["Early", head.early], ["Late", head.late]].filter(([, found]) => found.length);
    if (!columns.length) {
      Page.put("samples", element("p", {class: "quiet"}, "No rollouts are written down yet, or fleet.log_rollouts = 0."));
      return;
    }
    Page.put("samples", element("div", {class: "columns"}, columns.map(([title, found]) =>
      element("div", {}, element("h3", {}, title), found.map(sampleOf)))));
  }

  // ---------------------------------------------------------------- events

  let tip = null;

  function hideTip() {
    if (tip) tip.remove();
    tip = null;
  }

  function showTip(target, text) {
    hideTip();
    tip = element("div", {class: "tip", "aria-hidden": "true"}, text);
    document.body.append(tip);
    const box = target.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 4)) + "px";
    tip.style.top = (box.bottom + tip.offsetHeight + 8 < innerHeight ? box.bottom + 4 : box.top - tip.offsetHeight - 4) + "px";
  }

  function eventOf(event, meaning) {
    const kind = element("button", {type: "button", class: "kind", "aria-description": meaning}, event.kind.replaceAll("_", " "));
    for (const name of ["mouseenter", "focus", "click"]) kind.addEventListener(name, () => showTip(kind, meaning));
    for (const name of ["mouseleave", "blur"]) kind.addEventListener(name, hideTip);
    kind.addEventListener("keydown", (pressed) => { if (pressed.key === "Escape") hideTip(); });
    return element("div", {class: event.loud ? "event loud" : "event", role: "listitem"}, element("time", {}, Page.seconds(event.at)),
      element("span", {}, event.slot && !event.who.startsWith(event.slot) ? event.who + ": " + event.slot : event.who), kind,
      element("span", {class: "text"}, event.text));
  }

  function showEvents(head) {
    if (!head.events.length) {
      Page.put("event-list", element("p", {class: "quiet"}, "Nothing has happened yet that a person should know."));
      return;
    }
    const list = (events) => element("div", {role: "list"}, events.map((event) => eventOf(event, head.explanations[event.kind])));
    const first = list(head.events.slice(0, 30)), rest = head.events.slice(30);
    Page.put("event-list", element("p", {class: "quiet"}, "The newest first. What a word means: point at it, or tab to it."), first,
      rest.length ? Page.folded(rest.length + " earlier events", () => list(rest)) : null);
  }

  // ---------------------------------------------------------------- config, checks

  function rows(table, prefix, found) {
    for (const [name, value] of Object.entries(table)) {
      if (value && typeof value === "object" && !Array.isArray(value)) rows(value, prefix + name + ".", found);
      else found.push([prefix + name, typeof value === "string" ? value : JSON.stringify(value)]);
    }
    return found;
  }

  function showConfig(head) {
    const found = rows(head.config, "", []);
    Page.put("settings", Page.folded(found.length + " settings", () => Page.table("settings", ["setting", "value"], found, [1])));
  }

  function showChecks(head) {
    Page.put("checks", head.checks.map((check) => element("li", {class: check.ok ? "ok" : "no"}, check.text)));
    Page.put("made", "Read from ", element("code", {}, head.url), " at " + Page.clock(head.made) + ". Again at any time: ",
      element("code", {}, "diloco report " + head.url));
  }

  function show(head) {
    showTiles(head);
    once("troubles", [head.troubles, head.messages], () => showTroubles(head));
    once("parent", [head.parent, head.name], () => showParent(head));
    once("costs", head.costs, () => showCosts(head));
    once("rollouts", [head.early, head.late], () => showRollouts(head));
    once("events", head.events, () => showEvents(head));
    once("config", head.config, () => showConfig(head));
    showChecks(head);
  }

  return {show, once};
})();
