"""The style and the script of a plan's page, beside those that all pages share. It is complete without the script."""

STYLE = """
.facts + .facts { margin-top: 0.2rem; }
.memory { list-style: none; display: grid; gap: 0.5rem; margin-top: 0.9rem; }
.memory li { display: grid; grid-template-columns: minmax(5.5rem, 12rem) 1fr 5.2rem; align-items: center; gap: 0.9rem; }
.memory .name { font-size: 0.88rem; color: var(--soft); overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap; }
.memory b { text-align: right; white-space: nowrap; }
.stack { position: relative; display: flex; height: 1.1rem; border-radius: 4px; background: var(--track); }
.stack i { display: block; height: 100%; background: var(--c); }
.stack i:first-child { border-radius: 4px 0 0 4px; }
.stack u { position: absolute; top: -0.2rem; bottom: -0.2rem; width: 2px; margin-left: -2px; background: var(--ink); }
#time .bars li { grid-template-columns: minmax(5.5rem, 16rem) 1fr 5.2rem; }
.filters { display: flex; flex-wrap: wrap; align-items: center; gap: 0.5rem 1rem; margin-bottom: 0.9rem; }
.filters label { display: flex; align-items: center; gap: 0.4rem; font-size: 0.86rem; color: var(--soft); }
.filters select { font: inherit; font-size: 0.86rem; max-width: 12rem; padding: 0.25rem 0.5rem; border-radius: 8px;
  border: 1px solid var(--edge); background: var(--card); color: var(--ink); }
.filters output { margin-left: auto; font-size: 0.86rem; color: var(--soft); font-variant-numeric: tabular-nums; }
#candidates td .text { min-width: 15rem; }
tr.best > * { background: var(--good-back); }
@media (max-width: 40rem) {
  .memory li, #time .bars li { grid-template-columns: 1fr auto; gap: 0.15rem 0.8rem; }
  .memory .stack { grid-column: 1 / -1; grid-row: 2; }
}
@media print { .filters { display: none !important; } .stack, tr.best > * { print-color-adjust: exact; } }
"""

SCRIPT = r"""
"use strict";
(() => {
  // Candidates: only those that have what was chosen.
  const filters = document.querySelector(".filters"), rows = [...document.querySelectorAll("#candidates tbody tr")];
  const choices = [...filters.querySelectorAll("select")], count = filters.querySelector("output");
  const apply = () => {
    for (const row of rows) {
      row.hidden = choices.some((one) => one.value && row.dataset[one.dataset.filter] !== one.value);
    }
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  };
  for (const one of choices) one.addEventListener("change", apply);
  filters.hidden = choices.length === 0;
  apply();
})();
"""
