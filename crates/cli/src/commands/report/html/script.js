"use strict";
// Shows the nearest point of each curve while the pointer is on a chart. The page is complete without it.
for (const chart of document.querySelectorAll("svg.chart[data-last-step]")) {
  const left = Number(chart.dataset.left);
  const right = Number(chart.dataset.right);
  const lastStep = Number(chart.dataset.lastStep);
  const curves = Array.from(chart.querySelectorAll("[data-points]"), (group) => {
    const numbers = group.dataset.points.split(" ").map(Number);
    const points = [];
    for (let index = 0; index < numbers.length; index += 2) {
      points.push({ step: numbers[index], value: numbers[index + 1] });
    }
    return { name: group.dataset.name, color: group.getAttribute("style"), points };
  });

  const cursor = document.createElementNS(chart.namespaceURI, "line");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y1", chart.dataset.top);
  cursor.setAttribute("y2", chart.dataset.bottom);
  cursor.style.display = "none";
  chart.append(cursor);
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  const figure = chart.closest("figure");
  figure.append(tip);

  const nearest = (points, step) =>
    points.reduce((best, point) => (Math.abs(point.step - step) < Math.abs(best.step - step) ? point : best));

  const line = (text, color) => {
    const row = document.createElement("div");
    if (color !== null) {
      row.className = "run";
      row.setAttribute("style", color);
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      row.append(swatch);
    }
    row.append(text);
    return row;
  };

  chart.addEventListener("pointermove", (event) => {
    const frame = chart.getBoundingClientRect();
    const place = ((event.clientX - frame.left) / frame.width) * chart.viewBox.baseVal.width;
    const pointed = (Math.min(Math.max((place - left) / (right - left), 0), 1)) * lastStep;
    const all = curves.map((curve) => nearest(curve.points, pointed));
    const step = nearest(all, pointed).step;
    const rows = curves.map((curve, index) => {
      const point = all[index];
      const at = point.step === step ? "" : ` at step ${point.step}`;
      return line(`${curve.name}: ${Number(point.value.toPrecision(5))}${at}`, curve.color);
    });
    tip.replaceChildren(line(`step ${step}`, null), ...rows);
    tip.hidden = false;
    const x = left + ((right - left) * step) / lastStep;
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.style.display = "";
    // Beside the pointer, on the side with more room.
    const box = figure.getBoundingClientRect();
    const inside = event.clientX - box.left;
    tip.style.left = inside < box.width / 2 ? `${inside + 14}px` : "";
    tip.style.right = inside < box.width / 2 ? "" : `${box.width - inside + 14}px`;
    tip.style.top = `${event.clientY - box.top + 10}px`;
  });

  chart.addEventListener("pointerleave", () => {
    tip.hidden = true;
    cursor.style.display = "none";
  });
}
