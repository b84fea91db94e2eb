"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  if (!data.steps.length) return;
  const [range, what, alive, cursor] = ["step", "what", "alive", "cursor"].map((id) => document.getElementById(id));
  const chart = document.querySelector(".asked");
  const begins = [];
  data.at.reduce((sum, more) => (begins.push(sum + more), sum + more), 0);
  const share = begins[begins.length - 1];
  const width = Number(chart.dataset.width || 100);

  function bytes(count) {
    for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (count >= size) return `${(count / size).toFixed(2)} ${unit}`;
    }
    return `${count} B`;
  }

  function show(step) {
    const [op, where, footprint] = data.steps[step];
    what.textContent = `step ${step} of ${data.steps.length}: ${op}${where ? ` of ${where}` : ""}; ${bytes(footprint)}`;
    range.value = step;
    range.setAttribute("aria-valuetext", what.textContent);
    cursor.hidden = false;
    cursor.style.left = `${(begins[step] / share) * width}%`;
    const there = data.tensors.filter((tensor) => tensor[5] <= step && step < tensor[6]);
    const own = (tensor) => tensor[4] === "the caller"; // these are there at every step: what comes and goes is shown first
    const rows = [...there.filter((tensor) => !own(tensor)), ...there.filter(own)].slice(0, 100);
    alive.replaceChildren(...rows.map(([name, count, kind, looks, origin]) => {
      const row = document.createElement("tr");
      for (const text of [bytes(count), name, looks, kind, origin]) row.appendChild(document.createElement("td")).textContent = text;
      return row;
    }));
  }

  function stepAt(place) {
    let low = 0, high = data.steps.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (begins[middle] <= place) low = middle; else high = middle - 1;
    }
    return low;
  }

  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    show(stepAt(((event.clientX - box.left) / box.width) * (100 / width) * share));
  });
  range.max = data.steps.length - 1;
  range.addEventListener("input", () => show(Number(range.value)));
  document.getElementById("asking").hidden = false;
  show(data.steps.reduce((best, step, index) => (step[2] > data.steps[best][2] ? index : best), 0));
})();
