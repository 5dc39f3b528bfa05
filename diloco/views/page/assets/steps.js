// Outer steps out of chunks: columns over all steps, with gaps where a chunk has not come yet.
"use strict";
Page.steps = (function () {
  const chunks = [];
  let size = 100;

  const count = () => chunks.reduce((most, chunk) => (chunk ? Math.max(most, chunk.first + chunk.at.length) : most), 0);

  // column((chunk) => chunk.metrics.reward) -> a value per outer step, null where there is none.
  function column(of) {
    const values = new Array(count()).fill(null);
    for (const chunk of chunks) {
      const found = chunk && of(chunk);
      if (found) found.forEach((value, i) => { values[chunk.first + i] = value; });
    }
    return values;
  }

  // The names in one part of the chunks: names("metrics") -> ["reward", "loss"].
  function names(part) {
    const found = new Set();
    for (const chunk of chunks) if (chunk) Object.keys(chunk[part]).forEach((name) => found.add(name));
    return [...found];
  }

  // The letter of a slot at a step (diloco/views/page/data.py).
  function letter(t, slot) {
    const chunk = chunks[Math.floor(t / size)];
    const at = chunk ? chunk.slots.indexOf(slot) : -1;
    const row = chunk && chunk.who[t - chunk.first];
    return row && at >= 0 ? row[at] : ".";
  }

  return {
    put: (n, chunk) => { chunks[n] = chunk; },
    setSize: (chunk) => { size = chunk; },
    count, column, names, letter,
    chunkOf: (t) => chunks[Math.floor(t / size)],
  };
})();
