"use strict";
(() => {
  // Colours: those of the system, until the reader chooses.
  const root = document.documentElement, button = document.getElementById("theme");
  const remember = (value) => { try { localStorage.setItem("cornstarch-theme", value); } catch { /* not allowed */ } };
  const recall = () => { try { return localStorage.getItem("cornstarch-theme"); } catch { return null; } };
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const label = () => {
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${dark() ? "light" : "dark"} colours`);
  };
  if (["light", "dark"].includes(recall())) root.dataset.theme = recall();
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    remember(root.dataset.theme);
    label();
  });
  system.addEventListener("change", label);
  label();

  // Closed details would be missing on paper.
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.open = true; }));

  // Numbers, formatted as in the page (number_format.py).
  const trim = (digits) => digits.includes(".") ? digits.replace(/\.?0+$/, "") : digits;
  const grouped = (value, places) => {
    const options = { minimumFractionDigits: places, maximumFractionDigits: places };
    return trim(value.toLocaleString("en-US", options));
  };
  const digits = (value, most) => Math.max(0, most - 1 - Math.floor(Math.log10(Math.abs(value))));
  const scaled = (value, base, letters) => {
    let power = 0;
    while (Math.abs(value) >= base * 0.9995 && power < letters.length - 1) { value /= base; power += 1; }
    return [value, letters[power]];
  };
  const show = {
    plain: (value) => {
      if (value === 0) return "0";
      if (Math.abs(value) >= 1e9 || Math.abs(value) < 1e-4) {
        const [mantissa, exponent] = value.toExponential(3).split("e");
        return `${trim(mantissa)}e${Number(exponent)}`;
      }
      return grouped(value, digits(value, 4));
    },
    percent: (value) => `${(value * 100).toFixed(1)}\u00a0%`,
    count: (value) => {
      if (Math.abs(value) < 1e5) return grouped(value, 0);
      const [short, letter] = scaled(value, 1000, ["", "k", "M", "B", "T", "P"]);
      return `${grouped(short, digits(short, 3))}\u00a0${letter}`.trim();
    },
    size: (value) => {
      const [short, letter] = scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
      return `${grouped(short, 1)}\u00a0${letter}`;
    },
  };

  const nearest = (points, step) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < step) low = middle; else high = middle;
    }
    return Math.abs(points[low][0] - step) <= Math.abs(points[high][0] - step) ? low : high;
  };

  for (const chart of document.querySelectorAll("figure.chart")) {
    const data = JSON.parse(chart.querySelector("script").textContent);
    const plots = chart.querySelector(".plots"), at = chart.querySelector(".at");
    const values = [...chart.querySelectorAll(".legend .value")];
    const [low, high] = data.across;
    const first = data.lines.reduce((best, line) => (line.length > best.length ? line : best));
    const before = [at, ...values].map((one) => one.textContent);
    let step = null;

    // A guide and one dot for each curve, in the plot of each scale.
    const pointers = [...chart.querySelectorAll(".area")].map((area, index) => {
      const [from, to, log] = data.up[index];
      const add = (className) => {
        const one = Object.assign(document.createElement("span"), { className, hidden: true });
        return area.appendChild(one);
      };
      const place = (value) => log ? Math.log(value / from) / Math.log(to / from) : (value - from) / (to - from);
      const swatches = [...chart.querySelectorAll(".legend .swatch")];
      return { area, place, log, guide: add("guide"), dots: swatches.map((one) => add(`point ${one.classList[2]}`)) };
    });

    const left = (value) => `${100 * (value - low) / (high - low)}%`;
    const leave = () => {
      step = null;
      [at, ...values].forEach((one, index) => { one.textContent = before[index]; });
      for (const { guide, dots } of pointers) for (const one of [guide, ...dots]) one.hidden = true;
    };
    const point = (wanted) => {
      step = first[nearest(first, wanted)][0];
      at.textContent = step.toLocaleString("en-US");
      const here = data.lines.map((line) => line[nearest(line, step)]);
      here.forEach(([, value], index) => { values[index].textContent = show[data.unit](value); });
      for (const { place, log, guide, dots } of pointers) {
        guide.hidden = false;
        guide.style.left = left(step);
        here.forEach(([where, value], index) => {
          dots[index].hidden = log && value <= 0;
          dots[index].style.left = left(where);
          dots[index].style.top = `${100 * (1 - place(value))}%`;
        });
      }
    };
    const follow = (event) => {
      const area = pointers.map((one) => one.area).find((one) => one.offsetParent !== null);
      const box = area.getBoundingClientRect();
      point(low + (high - low) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)));
    };
    plots.addEventListener("pointermove", follow);
    plots.addEventListener("pointerdown", follow);
    plots.addEventListener("pointerleave", leave);

    // The arrow keys do what the pointer does.
    plots.tabIndex = 0;
    plots.setAttribute("role", "group");
    plots.setAttribute("aria-label", `${chart.querySelector("h3").textContent}: read values with the arrow keys`);
    at.setAttribute("aria-live", "polite");
    plots.addEventListener("blur", leave);
    plots.addEventListener("keydown", (event) => {
      const last = first.length - 1, index = step === null ? last : nearest(first, step);
      const jump = event.shiftKey ? Math.max(1, Math.round(first.length / 20)) : 1;
      const to = { ArrowLeft: index - jump, ArrowRight: index + jump, Home: 0, End: last }[event.key];
      if (event.key === "Escape") leave();
      if (to === undefined) return;
      event.preventDefault();
      point(first[Math.min(last, Math.max(0, to))][0]);
    });
  }
})();
