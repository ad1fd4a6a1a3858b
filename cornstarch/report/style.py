"""The page's style: one table of colours for light and dark, and the rules that use it."""

# By name: light, dark. Texts have a contrast of at least 4.5 with what they stand on, curves of at least 3.
COLOURS = {
    "back": ("#f5f7f8", "#0f1418"),
    "card": ("#ffffff", "#171e24"),
    "sunk": ("#eef1f3", "#0b0f13"),
    "track": ("#e4e9ed", "#2b363f"),
    "ink": ("#17212b", "#e4eaef"),
    "soft": ("#55626f", "#9eacb8"),
    "edge": ("#e0e5e9", "#2a343d"),
    "grid": ("#e8ecef", "#26303a"),
    "accent": ("#0f766e", "#4fd1c0"),
    "good": ("#15703d", "#5fd68f"),
    "good-back": ("#e3f4ea", "#12301f"),
    "warn": ("#8a5300", "#f2b84b"),
    "warn-back": ("#fdf1dc", "#35280f"),
    "bad": ("#b3261e", "#ff8f86"),
    "bad-back": ("#fde8e6", "#3a1917"),
    "busy": ("#1d5fa8", "#7db8f5"),
    "busy-back": ("#e4effb", "#14283d"),
    "series-1": ("#0f857c", "#4fd1c0"),
    "series-2": ("#cc5a14", "#ff9a52"),
    "series-3": ("#5b57d1", "#a9a6ff"),
    "series-4": ("#b83280", "#f58ac4"),
    "series-5": ("#68750f", "#c5d36a"),
    "series-6": ("#1f74b8", "#6fb9f2"),
}


def _variables(column: int) -> str:
    scheme = ("light", "dark")[column]
    return f"color-scheme:{scheme};" + "".join(f"--{name}:{pair[column]};" for name, pair in COLOURS.items())


_SCHEMES = f"""
:root {{ {_variables(0)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(1)} }} }}
:root[data-theme="light"] {{ {_variables(0)} }}
:root[data-theme="dark"] {{ {_variables(1)} }}
@media print {{ :root, :root[data-theme] {{ {_variables(0)} }} }}
"""

_PAGE = """
*, *::before, *::after { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 4rem; -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--back); color: var(--ink); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial, sans-serif;
  font-size: 1rem; overflow-wrap: anywhere;
}
.page { max-width: 70rem; margin-inline: auto; padding-inline: 1.5rem; }
h1, h2, h3, h4, p, ul, dl, dd, figure, pre, fieldset { margin: 0; padding: 0; }
h1 { font-size: clamp(1.6rem, 1.2rem + 2vw, 2.4rem); line-height: 1.15; letter-spacing: -0.02em; font-weight: 700; }
h2 { font-size: 1.3rem; letter-spacing: -0.01em; margin-bottom: 1rem; }
h3 { font-size: 0.95rem; font-weight: 600; }
h4 { font-size: 0.9rem; font-weight: 600; }
small { font-size: 0.8rem; color: var(--soft); font-weight: 400; }
b { font-weight: 600; font-variant-numeric: tabular-nums; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 0.84rem; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; border-radius: 4px; }
[hidden] { display: none !important; }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
.skip { position: absolute; left: 1rem; top: -4rem; z-index: 9; padding: 0.5rem 1rem; background: var(--card);
  color: var(--accent); border-radius: 8px; }
.skip:focus { top: 1rem; }
section { margin-top: 3rem; }
#overview { margin-top: 1.5rem; }
.card, .chart, details, .scroll { background: var(--card); border: 1px solid var(--edge); border-radius: 12px; }
.lead { max-width: 46rem; margin: -0.4rem 0 1.1rem; color: var(--soft); }
.missing { padding: 1rem 1.2rem; border: 1px dashed var(--edge); border-radius: 12px; color: var(--soft); }
.missing ~ .missing { margin-top: 0.9rem; }
.note { font-size: 0.85rem; color: var(--soft); margin-bottom: 0.5rem; }
.warning { color: var(--warn); }
.notes { margin-top: 1.5rem; padding: 0.8rem 1.2rem; border-radius: 12px; background: var(--warn-back);
  color: var(--warn); font-size: 0.92rem; }
.c1 { --c: var(--series-1); } .c2 { --c: var(--series-2); } .c3 { --c: var(--series-3); }
.c4 { --c: var(--series-4); } .c5 { --c: var(--series-5); } .c6 { --c: var(--series-6); }
.pill { display: inline-block; padding: 0.1rem 0.65rem; border-radius: 999px; font-size: 0.82rem; font-weight: 600;
  background: var(--sunk); color: var(--soft); white-space: nowrap; max-width: 100%; overflow: hidden;
  text-overflow: ellipsis; vertical-align: bottom; }
.pill.good, .pill.right { background: var(--good-back); color: var(--good); }
.pill.warn { background: var(--warn-back); color: var(--warn); }
.pill.bad, .pill.wrong { background: var(--bad-back); color: var(--bad); }
.pill.busy { background: var(--busy-back); color: var(--busy); }
footer { margin-block: 3rem; color: var(--soft); font-size: 0.85rem; }

.top { display: flex; justify-content: space-between; align-items: center; gap: 1rem; padding: 1.4rem 0 1.8rem; }
.brand { display: flex; align-items: center; gap: 0.6rem; font-weight: 600; color: var(--soft); font-size: 0.92rem; }
.logo { width: 1.7rem; height: 1.7rem; flex: none; }
.logo rect { fill: #0f766e; } .logo path { fill: #fde68a; }
.logo .vein { stroke: #0f766e; stroke-width: 1.6; fill: none; }
button { font: inherit; font-size: 0.85rem; font-weight: 600; padding: 0.4rem 1rem; border-radius: 999px;
  border: 1px solid var(--edge); background: var(--card); color: var(--ink); cursor: pointer; }
button:hover { border-color: var(--soft); }
.title { display: flex; flex-wrap: wrap; align-items: center; gap: 0.6rem 1rem; }
.title .pill { font-size: 0.92rem; padding: 0.2rem 0.85rem; }
.facts { display: flex; flex-wrap: wrap; gap: 0.2rem 1.6rem; margin-top: 0.7rem; color: var(--soft);
  font-size: 0.92rem; }
.facts b { color: var(--ink); font-weight: 500; }
.command { margin-top: 1rem; padding: 0.6rem 0.9rem; border-radius: 8px; background: var(--sunk); overflow-x: auto;
  overflow-wrap: normal; }
.progress { display: flex; align-items: center; gap: 1rem; margin-top: 1.2rem; color: var(--soft); font-size: 0.85rem; }
.progress span { white-space: nowrap; font-variant-numeric: tabular-nums; }
.track { display: block; flex: 1; height: 0.5rem; border-radius: 999px; background: var(--track); overflow: hidden; }
.track i { display: block; height: 100%; border-radius: 999px; background: var(--c, var(--accent)); }
nav { position: sticky; top: 0; z-index: 5; margin-top: 1.4rem; border-block: 1px solid var(--edge);
  background: var(--card); }
nav .page { display: flex; gap: 0.25rem; overflow-x: auto; scrollbar-width: none; }
nav a { padding: 0.7rem 0.75rem; color: var(--soft); text-decoration: none; font-size: 0.88rem; font-weight: 500;
  white-space: nowrap; }
nav a:first-child { margin-left: -0.75rem; }
nav a:hover { color: var(--accent); }
nav a:focus-visible { outline-offset: -3px; }

.cards { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 0.9rem; }
.cards:has(.wide) { grid-template-columns: minmax(0, 2fr) repeat(3, minmax(0, 1fr)); }
.card { padding: 1rem 1.2rem; }
.card > h3 { color: var(--soft); font-size: 0.82rem; font-weight: 500; }
.figure { font-size: 1.6rem; line-height: 1.3; font-weight: 650; letter-spacing: -0.02em; margin-top: 0.15rem;
  font-variant-numeric: tabular-nums; }
.beside { color: var(--soft); font-size: 0.82rem; }
.wide { grid-row: 1 / span 2; }
.bars { list-style: none; display: grid; gap: 0.55rem; margin-top: 0.7rem; }
.bars li { display: grid; grid-template-columns: minmax(5.5rem, 9rem) 1fr 4.2rem; align-items: center; gap: 0.9rem; }
.bars b, .bars small { text-align: right; white-space: nowrap; }
.bars .track { height: 0.6rem; }
.wide .bars { gap: 1rem; margin-top: 0.9rem; }
.wide .bars li { grid-template-columns: 1fr auto auto; gap: 0.3rem 0.6rem; }
.wide .bars .track { grid-column: 1 / -1; grid-row: 2; }
"""

_CHARTS = """
.chart { padding: 1.1rem 1.2rem 0.9rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 0.9rem;
  margin-top: 0.9rem; }
.charts:empty { display: none; }
figcaption { display: flex; flex-wrap: wrap; align-items: center; gap: 0.3rem 1.2rem; margin-bottom: 0.9rem; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0.1rem 1.2rem; width: 100%; font-size: 0.84rem;
  color: var(--soft); }
.legend b { display: inline-block; min-width: 3.2rem; color: var(--ink); }
.swatch { display: inline-block; width: 1rem; height: 0; margin-right: 0.4rem; vertical-align: middle;
  border-top: 2.5px solid var(--c); border-radius: 2px; }
.swatch.raw { opacity: 0.4; }
.swatch.dots { width: 0.6rem; height: 0.6rem; border: 0; border-radius: 50%; background: var(--c); }
.switch { margin-left: auto; display: flex; align-items: center; gap: 0.4rem; font-size: 0.84rem; color: var(--soft);
  cursor: pointer; }
.switch input { accent-color: var(--accent); width: 1rem; height: 1rem; margin: 0; }
.plot.log { display: none; }
.chart:has(.log-choice:checked) .plot.log { display: grid; }
.chart:has(.log-choice:checked) .plot.linear { display: none; }
.plots { touch-action: pan-y; cursor: crosshair; }
.plot { display: grid; grid-template: 10.5rem 1.6rem / 3.7rem 1fr; padding: 0.4rem 0.9rem 0 0; }
.tall .plot { grid-template-rows: clamp(14rem, 40vw, 21rem) 1.6rem; }
.area { position: relative; min-width: 0; }
.area svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.up, .across { position: relative; font-size: 0.76rem; color: var(--soft); font-variant-numeric: tabular-nums;
  white-space: nowrap; }
.up span { position: absolute; right: 0.6rem; transform: translateY(-50%); }
.across { grid-column: 2; }
.across span { position: absolute; top: 0.45rem; transform: translateX(-50%); }
.chart path { fill: none; vector-effect: non-scaling-stroke; stroke-linecap: round; stroke-linejoin: round; }
.grid { stroke: var(--grid); stroke-width: 1; }
.grid.faint { opacity: 0.6; }
.base { stroke: var(--soft); stroke-width: 1; opacity: 0.6; }
.mark { stroke: var(--soft); stroke-width: 1.2; stroke-dasharray: 2 5; }
.curve { stroke: var(--c); stroke-width: 2.2; }
.curve.raw { stroke-width: 1; opacity: 0.4; }
.curve.dots { stroke-width: 1.8; opacity: 0.75; }
.curve.dots.c2 { stroke-dasharray: 7 4; } .curve.dots.c3 { stroke-dasharray: 2 4; }
.curve.dots.c4 { stroke-dasharray: 9 3 2 3; } .curve.dots.c5 { stroke-dasharray: 12 4; }
.dot { stroke: var(--c); stroke-width: 7; } .dot.small { stroke-width: 4; }
.flag { position: absolute; padding: 0 0.35rem; font-size: 0.74rem; color: var(--soft);
  white-space: nowrap; pointer-events: none; }
.flag.before { transform: translateX(-100%); }
.guide { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--soft); pointer-events: none; }
.point { position: absolute; width: 9px; height: 9px; margin: -4.5px; border-radius: 50%; background: var(--c);
  border: 2px solid var(--card); pointer-events: none; }
.looks { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 0.9rem; }
.look > h3 { color: var(--ink); font-size: 1rem; font-weight: 600; }
.look > div { margin-top: 1rem; }
.look > div + div { padding-top: 1rem; border-top: 1px solid var(--edge); }
.look .bars { margin-top: 0.4rem; }
.look .bars .name { color: var(--soft); font-size: 0.88rem; }
.verdict { margin-top: 0.55rem; font-size: 0.88rem; color: var(--soft); }
.verdict.good b { color: var(--good); } .verdict.warn b { color: var(--warn); } .verdict.bad b { color: var(--bad); }
"""

_GANTT = """
.gantt { margin-top: 0.9rem; padding: 1.1rem 1.2rem 0.9rem; background: var(--card); border: 1px solid var(--edge);
  border-radius: 12px; }
.gantt h3 { margin: 0.9rem 0 0.3rem; }
.rows, .times { display: grid; grid-template-columns: 9rem 1fr; }
.places > span { display: flex; height: 1.5rem; padding-right: 0.6rem; font-size: 0.8rem; line-height: 1.5rem;
  color: var(--soft); white-space: nowrap; }
.places span span { overflow: hidden; text-overflow: ellipsis; }
.gantt svg { display: block; width: 100%; }
.gantt svg :is(.f, .b, .i, .w, .t, .o) { stroke: var(--card); stroke-width: 1; vector-effect: non-scaling-stroke; }
.gantt :is(.f, .b, .i, .w, .t, .o, .n) { fill: var(--c); }
.f { --c: var(--series-6); } .b { --c: var(--series-1); } .i { --c: var(--series-3); } .w { --c: var(--series-5); }
.t { --c: var(--series-2); } .o { --c: var(--series-4); } .n { --c: var(--track); }
.block { display: inline-block; width: 0.8rem; height: 0.8rem; margin-right: 0.4rem; border-radius: 3px;
  vertical-align: -0.05rem; background: var(--c); }
.times { height: 1.6rem; font-size: 0.76rem; color: var(--soft); font-variant-numeric: tabular-nums; }
.times .unit { text-align: right; padding: 0.3rem 0.6rem 0 0; }
.marks { position: relative; }
.marks span { position: absolute; top: 0.3rem; white-space: nowrap; }
.gantt + .scroll, .earlier > :is(.cards, .gantt) { margin-top: 0.9rem; }
.earlier { padding-bottom: 0.1rem; } #pipeline > .earlier { margin-top: 0.9rem; }
.earlier > :is(.cards, .gantt, .scroll) { margin-inline: 1.2rem; }
.earlier .scroll { margin-bottom: 1.2rem; border-width: 1px; border-radius: 12px; }

"""

_LISTS = """
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; overflow-wrap: normal; }
th, td { padding: 0.65rem 0.9rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--edge); }
tr > :first-child { padding-left: 1.2rem; } tr > :last-child { padding-right: 1.2rem; }
thead th { color: var(--soft); font-size: 0.8rem; font-weight: 500; white-space: nowrap; }
tbody th, tfoot th { font-weight: 600; }
tbody tr:last-child > * { border-bottom: 0; }
tfoot > tr > * { border-top: 2px solid var(--edge); border-bottom: 0; font-weight: 600; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td small { display: block; }
td .track { height: 0.3rem; margin-top: 0.3rem; min-width: 4.5rem; }
td .text { display: block; min-width: 14rem; overflow-wrap: anywhere; }
td { white-space: nowrap; } td .text { white-space: normal; }
details { margin-top: 0.9rem; }
section > details { margin-top: 0; }
#curves > details { margin-top: 0.9rem; }
summary { padding: 0.8rem 1.2rem; cursor: pointer; font-weight: 500; font-size: 0.92rem; }
summary:hover { color: var(--accent); }
details .scroll { border-width: 1px 0 0; border-radius: 0 0 12px 12px; max-height: 34rem; overflow: auto; }
details pre { padding: 1rem 1.2rem; line-height: 1.55; overflow-wrap: normal; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr)); gap: 0.9rem; }
.columns > div { background: var(--card); border: 1px solid var(--edge); border-radius: 12px; padding: 1rem 1.2rem; }
.columns h3 { color: var(--soft); font-size: 0.82rem; font-weight: 500; margin-bottom: 0.4rem; }
.columns .missing { border: 0; padding: 0; }
.plain { list-style: none; display: grid; gap: 0.35rem; font-size: 0.92rem; }
.choice { border: 0; display: inline-flex; margin-bottom: 1rem; padding: 0.2rem; border-radius: 999px;
  background: var(--sunk); }
.choice input { position: absolute; opacity: 0; }
.choice span { display: block; padding: 0.25rem 1rem; border-radius: 999px; font-size: 0.86rem; color: var(--soft);
  cursor: pointer; }
.choice input:checked + span { background: var(--card); color: var(--ink); font-weight: 600;
  box-shadow: 0 1px 2px rgb(0 0 0 / 0.15); }
.choice input:focus-visible + span { outline: 2px solid var(--accent); }
section:has([value="right"]:checked) .sample:not(.right) { display: none; }
section:has([value="wrong"]:checked) .sample:not(.wrong) { display: none; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 15.5rem), 1fr)); gap: 0.9rem; }
.sample { display: flex; flex-direction: column; gap: 0.8rem; border-top-width: 3px; }
.sample.right { border-top-color: var(--good); } .sample.wrong { border-top-color: var(--bad); }
.sample header { display: flex; justify-content: space-between; align-items: flex-start; gap: 0.5rem; }
.sample header h3 { min-width: 0; overflow-wrap: anywhere; } .sample header .pill { flex: none; }
.sample header small { display: block; }
.question { font-size: 0.95rem; white-space: pre-wrap; max-height: 26rem; overflow: auto; }
.question img { display: block; max-width: 100%; height: auto; max-height: 15rem; object-fit: contain;
  margin: 0.5rem auto; border-radius: 8px; background: var(--sunk); }
.question .tiny { image-rendering: pixelated; border-radius: 4px; }
.question audio { display: block; width: 100%; height: 2.6rem; margin: 0.5rem 0; }
.caption { display: block; text-align: center; font-size: 0.78rem; color: var(--soft); margin-bottom: 0.4rem; }
.sample dl { display: grid; grid-template-columns: auto 1fr; gap: 0.2rem 0.9rem; margin-top: auto; padding-top: 0.7rem;
  border-top: 1px solid var(--edge); font-size: 0.95rem; max-height: 16rem; overflow: auto; }
.sample dt { color: var(--soft); font-size: 0.85rem; padding-top: 0.08rem; }
.sample dd { white-space: pre-wrap; font-weight: 600; }
.sample.wrong dd:last-child { color: var(--bad); } .sample.right dd:last-child { color: var(--good); }
.versions { display: flex; flex-wrap: wrap; gap: 0.6rem; }
.versions div { display: flex; gap: 0.5rem; padding: 0.3rem 0.8rem; border: 1px solid var(--edge); border-radius: 999px;
  background: var(--card); font-size: 0.86rem; }
.versions dt { color: var(--soft); } .versions dd { font-variant-numeric: tabular-nums; font-weight: 600; }

@media (max-width: 60rem) {
  .cards:has(.wide) { grid-template-columns: repeat(3, minmax(0, 1fr)); }
  .wide { grid-area: 1 / 1 / auto / -1; }
}
@media (max-width: 40rem) {
  .page { padding-inline: 1rem; }
  .cards, .cards:has(.wide) { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0.7rem; }
  .card, .chart { padding: 0.9rem 1rem; }
  .figure { font-size: 1.35rem; }
  .bars li { grid-template-columns: 1fr auto; gap: 0.15rem 0.8rem; }
  .bars .track { grid-column: 1 / -1; grid-row: 2; }
  .plot { grid-template-columns: 3.5rem 1fr; }
  .gantt { padding: 0.9rem 1rem; } .rows, .times { grid-template-columns: 6.6rem 1fr; }
  .places > span { font-size: 0.76rem; padding-right: 0.4rem; }
  #pipeline .card:last-child { grid-column: 1 / -1; }
}
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
@media print {
  body { background: #fff; font-size: 10pt; }
  nav, button, .choice, .switch, .skip, audio { display: none !important; }
  .page { max-width: none; padding: 0; }
  section { margin-top: 1.5rem; }
  h2, h3 { break-after: avoid; }
  .card, .chart, .gantt, tr { break-inside: avoid; }
  .scroll, details .scroll, .question, .sample dl { overflow: visible; max-height: none; }
  .track, .track i, .pill, .plot, .gantt, .question img { print-color-adjust: exact;
    -webkit-print-color-adjust: exact; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  table { font-size: 8.5pt; }
  table code, table small, thead th { font-size: 7.5pt; }
  th, td { padding: 0.3rem 0.4rem; }
  th, td, thead th.number { white-space: normal; overflow-wrap: break-word; }
  details::details-content { content-visibility: visible; block-size: auto; }
}
"""

STYLE = _SCHEMES + _PAGE + _CHARTS + _GANTT + _LISTS
