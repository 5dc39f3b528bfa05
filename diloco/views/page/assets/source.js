// Where the data come from: inlined in a frozen file; else data/head.json again and again, and each chunk that changed.
//   start({head, chunk, stale})     head(data) and chunk(n, data) are called with what is new, the newest chunk first
"use strict";
Page.source = (function () {
  const AT_ONCE = 4, SLOWEST_S = 60, FORMAT = 1;
  const have = {};
  let failures = 0, since = 0, polled = null;

  function inlined() {
    const text = Page.byId("data").textContent;
    return text.trim() ? JSON.parse(text) : null;
  }

  // The token of a page that `diloco watch --web` serves is in its address, and after the first load in a cookie.
  const address = (name) => "data/" + name + ".json" + location.search;

  async function ask(name) {
    const answer = await fetch(address(name), {cache: "no-cache", signal: AbortSignal.timeout(30000)});
    if (!answer.ok) throw new Error("the server answers " + answer.status + " " + (await answer.text()).slice(0, 400));
    const data = await answer.json();
    if (data.format !== FORMAT) throw new Error("these data are of another release of diloco; reload the page");
    return data;
  }

  async function bringChunks(versions, on) {
    const wanted = versions.map((version, n) => [n, version]).filter(([n, version]) => version !== null && have[n] !== version).reverse();
    while (wanted.length) {
      await Promise.all(wanted.splice(0, AT_ONCE).map(async ([n, version]) => {
        on.chunk(n, await ask(n));
        have[n] = version;
      }));
    }
  }

  // A page in a bucket is as new as what its publisher last wrote.
  function silent(head) {
    const age = Date.now() / 1000 - head.made;
    return head.state === "running" && head.poll_s > 0 && age > 60 + 4 * head.poll_s ? "Nothing new was written for " + Page.seconds(age) + "." : "";
  }

  async function look(on) {
    let pause = 5;
    try {
      const head = await ask("head");
      if (head.waiting) {
        on.stale(head.waiting);
        polled = setTimeout(() => look(on), 500);
        return;
      }
      on.head(head);
      await bringChunks(head.chunks, on);
      failures = 0;
      on.stale(head.stale || silent(head));
      if (head.poll_s === 0) return;
      pause = head.poll_s;
    } catch (error) {
      if (failures++ === 0) since = Date.now() / 1000;
      pause = Math.min(SLOWEST_S, 2 ** failures);
      on.stale("No new data since " + Page.clock(since) + " (" + error.message + "). Asking again in " + pause + " s.");
    }
    polled = setTimeout(() => look(on), pause * 1000);
  }

  function start(on) {
    const whole = inlined();
    if (whole !== null) {
      on.head(whole.head);
      whole.chunks.forEach((chunk, n) => on.chunk(n, chunk));
      return;
    }
    if (location.protocol === "file:") {
      on.stale("This page asks for its data, which a browser does not allow for files. Open report.html instead.");
      return;
    }
    document.addEventListener("visibilitychange", () => {
      clearTimeout(polled);
      if (!document.hidden) look(on);
    });
    look(on);
  }

  return {start};
})();
