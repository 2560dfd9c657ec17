// Shows the values under the pointer. The page says everything that matters without this script.
for (const figure of document.querySelectorAll("figure[data-hover]")) {
  const series = [...figure.querySelectorAll("[data-xs]")].map((item) => ({
    name: item.dataset.name,
    xs: item.dataset.xs.split(" ").map(Number),
    labels: item.dataset.ys.split(" "),
  }));
  if (!series.length) continue;
  const steps = [...new Set(series.flatMap((one) => one.xs))].sort((a, b) => a - b);
  const tip = figure.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.hidden = true;

  // The last value at or before a step: validation is measured more rarely than training.
  const valueAt = (one, step) => {
    let index = -1;
    while (index + 1 < one.xs.length && one.xs[index + 1] <= step) index += 1;
    return index < 0 ? null : { step: one.xs[index], label: one.labels[index] };
  };

  const show = (svg, event) => {
    const box = svg.getBoundingClientRect();
    const [kind, low, high, start, end] = svg.dataset.scale.split(" ").map((v, i) => (i ? Number(v) : v));
    const zoom = box.width / svg.viewBox.baseVal.width;
    const warp = kind === "log" ? Math.log : (v) => v;
    const pixel = (v) => start + ((warp(v) - warp(low)) / (warp(high) - warp(low) || 1)) * (end - start);
    const at = (event.clientX - box.left) / zoom;
    const step = steps.reduce((a, b) => (Math.abs(pixel(b) - at) < Math.abs(pixel(a) - at) ? b : a));
    const line = svg.querySelector(".cursor");
    line.setAttribute("x1", pixel(step));
    line.setAttribute("x2", pixel(step));
    line.removeAttribute("visibility");
    const counted = svg.dataset.counted;
    const name = (x) => (counted === "step" ? `step ${x}` : `${Number(x.toPrecision(4)).toLocaleString("en")} ${counted}`);
    const rows = [name(step)];
    for (const one of series) {
      const found = valueAt(one, step);
      if (found) rows.push(`${one.name ? `${one.name} ` : ""}${found.label}${found.step === step ? "" : ` (${name(found.step)})`}`);
    }
    tip.textContent = rows.join("\n");
    tip.hidden = false;
    const outer = figure.getBoundingClientRect();
    const left = box.left - outer.left + pixel(step) * zoom;
    const flip = left + tip.offsetWidth + 16 > outer.width;
    tip.style.left = `${Math.max(0, flip ? left - tip.offsetWidth - 10 : left + 10)}px`;
    tip.style.top = `${box.top - outer.top + 8}px`;
  };

  for (const svg of figure.querySelectorAll("svg[data-scale]")) {
    svg.addEventListener("pointermove", (event) => show(svg, event));
    svg.addEventListener("pointerdown", (event) => show(svg, event));
    svg.addEventListener("pointerleave", () => {
      tip.hidden = true;
      svg.querySelector(".cursor").setAttribute("visibility", "hidden");
    });
  }
}
