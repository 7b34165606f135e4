// Charts as SVG, drawn for the width they have. A cursor follows pointer and arrow keys; the legend shows its values.

const DASHES = ["", "6 4", "2 3", "9 3 2 3", "1 5", "12 4"];
const PADDING = { left: 54, right: 12, top: 14, bottom: 22 };
const redraws = [];
for (const event of ["resize", "beforeprint", "afterprint"]) window.addEventListener(event, () => redraws.forEach((draw) => draw()));

function ticks(low, high, wanted = 4) {
  const span = high - low || 1;
  const rough = span / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) {
    found.push(Math.abs(value) < step * 1e-6 ? 0 : value);
  }
  return found;
}

function powers(low, high) {
  const found = [];
  const every = Math.max(1, Math.round((high - low) / 4));
  for (let each = Math.ceil(low); each <= high; each += every) found.push(each);
  return found;
}

const power = (exponent) => (exponent >= -2 && exponent <= 3 ? String(10 ** exponent) : `1e${exponent}`.replace("-", "−"));

// A figure with title, what it means, a place to draw in, and a legend. `draw(width, cursor)` returns an SVG's content;
// `at(cursor)` says where the cursor is and returns the legend's values; `count()` is the number of cursor positions.
function figure({ id, title, unit, about, height, legend, draw, at, count, locate, summary, alarmed }) {
  let cursor = null;
  const where = el("span", { class: "at", "aria-live": "polite" });
  const place = svg("svg", { role: "img", tabindex: 0, "aria-label": summary });
  const values = legend.map(() => el("b"));
  const items = legend.map(({ label, color, dash, block }, each) =>
    el("li", {}, swatch(color, dash, block), `${label} `, values[each]));
  const node = el("figure", { id, class: alarmed ? "alarmed" : null },
    where, el("h3", {}, title, unit ? ` (${unit})` : ""), about && el("p", { class: "about" }, about),
    place, el("ul", { class: "legend" }, items));

  let width = 0;
  function show() {
    const { label, texts } = at(cursor);
    where.textContent = label;
    texts.forEach((text, each) => { values[each].textContent = text; });
    place.replaceChildren(...draw(width, cursor));
  }
  function redraw() {
    const now = Math.max(240, Math.round(place.getBoundingClientRect().width || 400));
    if (now === width) return;
    width = now;
    place.setAttribute("viewBox", `0 0 ${width} ${height}`);
    show();
  }
  function move(to) {
    cursor = to === null ? null : Math.max(0, Math.min(count() - 1, to));
    show();
  }
  place.addEventListener("pointermove", (event) => {
    const box = place.getBoundingClientRect();
    move(locate(((event.clientX - box.left) / box.width) * width, width));
  });
  place.addEventListener("pointerleave", () => move(null));
  place.addEventListener("blur", () => move(null));
  place.addEventListener("keydown", (event) => {
    const now = cursor === null ? count() - 1 : cursor;
    const steps = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: count() - 1, Escape: null };
    if (!(event.key in steps)) return;
    event.preventDefault();
    move(steps[event.key]);
  });
  redraws.push(redraw);
  requestAnimationFrame(redraw);
  return node;
}

const swatch = (color, dash, block) => svg("svg", { "aria-hidden": "true", viewBox: "0 0 22 10" }, block
  ? svg("rect", { width: 12, height: 10, fill: color })
  : svg("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: color, "stroke-width": 2.5, "stroke-dasharray": dash || null }));

// `charts` are the same chart of each run; with two runs, a run has a color and a series a dash pattern.
function lineChart(charts, names) {
  const chart = charts.find(Boolean);
  const height = 210;
  const lines = charts.flatMap((each, run) => (each ? each.series : []).map((series, place) => ({
    ...series,
    label: names.length > 1 ? `${names[run]}: ${series.label}` : series.label,
    color: `var(--c${(names.length > 1 ? run : place) % 10})`,
    dash: names.length > 1 ? DASHES[place % DASHES.length] : "",
  }))).filter((line) => line.y.some((y) => y !== null));
  const scale = chart.log ? (y) => (y > 0 ? Math.log10(y) : null) : (y) => y;
  const ys = lines.flatMap((line) => [...line.y, ...(line.low || []), ...(line.high || [])])
    .filter((y) => y !== null).map(scale).filter((y) => y !== null);
  const xs = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  let low = Math.min(...ys), high = Math.max(...ys);
  const share = charts.every((each) => !each || each.share);
  if (chart.zero || share) low = Math.min(0, low);
  if (share) high = Math.max(1, high);
  const given = charts.flatMap((each, run) => (each ? [[each.limit, `${names[run]}: `]] : []));
  const limits = given.every(([limit]) => limit === chart.limit) ? [[chart.limit, ""]] : given;
  for (const [limit] of limits) if (limit && limit <= 3 * high) high = Math.max(high, limit);
  if (low === high) { high += Math.abs(high) * 0.1 || 1; low -= chart.zero ? 0 : Math.abs(low) * 0.1; }
  const left = xs[0], right = xs[xs.length - 1] > left ? xs[xs.length - 1] : left + 1;
  const marks = charts.flatMap((each, run) => (each ? each.marks : []).map((mark) => ({ ...mark, whose: names.length > 1 ? `${names[run]}: ` : "" })));
  const own = charts.map((each, run) => each && each.own && `${names.length > 1 ? names[run] : "In this run"}: ${each.own}.`).filter(Boolean);
  const X = (x, width) => PADDING.left + ((x - left) / (right - left)) * (width - PADDING.left - PADDING.right);
  const Y = (y) => PADDING.top + ((high - y) / (high - low)) * (height - PADDING.top - PADDING.bottom);

  function paths(line, width) {
    const points = line.x.map((x, at) => [X(x, width), line.y[at] === null ? null : scale(line.y[at]), at]);
    let path = "", pen = false;
    for (const [x, y] of points) {
      if (y !== null) path += `${pen ? "L" : "M"}${x.toFixed(1)},${Y(y).toFixed(1)}`;
      pen = y !== null;
    }
    const found = [svg("path", { d: path, fill: "none", stroke: line.color, "stroke-width": 1.8, "stroke-dasharray": line.dash || null, "stroke-linejoin": "round" })];
    if (line.low) {
      const edge = (values) => points.map(([x, , at]) => [x, values[at] === null ? null : scale(values[at])]).filter(([, y]) => y !== null);
      const around = [...edge(line.high), ...edge(line.low).reverse()].map(([x, y]) => `${x.toFixed(1)},${Y(y).toFixed(1)}`);
      found.unshift(svg("polygon", { points: around.join(" "), fill: line.color, opacity: 0.15 }));
    }
    const alone = points.filter(([, y], at) => y !== null && (line.points || ((points[at - 1] || [0, null])[1] === null && (points[at + 1] || [0, null])[1] === null)));
    return [...found, ...alone.map(([x, y]) => svg("circle", { cx: x, cy: Y(y), r: line.points ? 3.5 : 2, fill: line.color }))];
  }

  function draw(width, cursor) {
    const found = [];
    for (const tick of chart.log ? powers(low, high) : ticks(low, high)) {
      found.push(svg("line", { x1: PADDING.left, x2: width - PADDING.right, y1: Y(tick), y2: Y(tick), stroke: "var(--line)" }),
        svg("text", { x: PADDING.left - 6, y: Y(tick) + 4, "text-anchor": "end" }, chart.log ? power(tick) : number(tick)));
    }
    for (const tick of ticks(left, right, Math.min(6, width / 90)).filter(Number.isInteger)) {
      found.push(svg("text", { x: X(tick, width), y: height - 6, "text-anchor": "middle" }, number(tick)));
    }
    for (const [limit, whose] of limits.filter(([each]) => each && each >= low && each <= high)) {
      found.push(svg("line", { x1: PADDING.left, x2: width - PADDING.right, y1: Y(limit), y2: Y(limit), stroke: "var(--soft)", "stroke-dasharray": "4 4" }),
        svg("text", { x: width - PADDING.right, y: Y(limit) - 4, "text-anchor": "end" }, `${whose}limit ${number(limit)}`));
    }
    for (const [place, mark] of marks.entries()) {
      const x = X(Math.max(left, Math.min(right, mark.x)), width), end = x > width * 0.6;
      found.push(svg("line", { x1: x, x2: x, y1: PADDING.top - 4, y2: height - PADDING.bottom, stroke: "var(--bad)", "stroke-dasharray": "3 3" }),
        svg("text", { x: x + (end ? -4 : 4), y: PADDING.top - 3 + 12 * place, "text-anchor": end ? "end" : "start", style: "fill: var(--bad)" }, `${mark.whose}${mark.alarm}`));
    }
    found.push(...lines.flatMap((line) => paths(line, width)));
    if (cursor !== null) {
      const x = X(xs[cursor], width);
      found.push(svg("line", { x1: x, x2: x, y1: PADDING.top, y2: height - PADDING.bottom, stroke: "var(--text)", opacity: 0.5 }));
    }
    return found;
  }

  const newest = xs[xs.length - 1];
  function last(line) {
    const place = line.y.findLastIndex((y) => y !== null);
    return `${number(line.y[place])}${line.x[place] === newest ? "" : ` (step ${number(line.x[place])})`}`;
  }
  function at(cursor) {
    if (cursor === null) return { label: `step ${number(newest)}`, texts: lines.map(last) };
    const x = xs[cursor];
    // A point of a shortened series stands for all steps since the one before.
    const place = (line) => (line.low ? line.x.findIndex((each) => each >= x) : line.x.indexOf(x));
    return { label: `step ${number(x)}`, texts: lines.map((line) => number(line.y[place(line)])) };
  }
  const first = (line) => line.y.find((y) => y !== null);
  return figure({
    id: chart.id, title: chart.title, unit: chart.unit, about: [chart.about, ...own].join(" "), height, legend: lines, draw, at,
    alarmed: charts.some((each) => each && each.marks.length),
    count: () => xs.length,
    locate: (x, width) => {
      const wanted = left + ((x - PADDING.left) / (width - PADDING.left - PADDING.right)) * (right - left);
      return xs.reduce((best, each, place) => (Math.abs(each - wanted) < Math.abs(xs[best] - wanted) ? place : best), 0);
    },
    summary: `${chart.title}, step ${xs[0]} to ${xs[xs.length - 1]}. ` +
      lines.map((line) => `${line.label}: ${number(first(line))} to ${last(line)}`).join("; ") + ". Arrow keys show values.",
  });
}

// Bars over an axis of labels: stacked on each other, or side by side.
function barChart({ id, title, unit, about, names, bars, stacked = true, clip = false, colors, format = number, totals, alarmed }) {
  const height = 230;
  const color = (place) => (colors && colors[names[place]]) || `var(--c${place % 10})`;
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const tops = bars.map((bar) => (stacked ? sum(bar.values) : Math.max(...bar.values))).sort((a, b) => b - a);
  // One bar that is far above all others is cut, and says how high it is.
  const cut = clip && tops.length > 2 && tops[0] > 3 * tops[1];
  const high = Math.max(1e-9, cut ? 1.25 * tops[1] : tops[0]);
  const slot = (width) => (width - PADDING.left - PADDING.right) / bars.length;
  const Y = (y) => PADDING.top + ((high - y) / high) * (height - PADDING.top - PADDING.bottom);

  function draw(width, cursor) {
    const found = [], each = slot(width), gap = Math.min(3, each * 0.15);
    for (const tick of ticks(0, high)) {
      found.push(svg("line", { x1: PADDING.left, x2: width - PADDING.right, y1: Y(tick), y2: Y(tick), stroke: "var(--line)" }),
        svg("text", { x: PADDING.left - 6, y: Y(tick) + 4, "text-anchor": "end" }, format(tick)));
    }
    bars.forEach((bar, at) => {
      const x = PADDING.left + at * each;
      if (cursor === at) found.push(svg("rect", { x, y: PADDING.top, width: each, height: height - PADDING.top - PADDING.bottom, fill: "var(--soft)", opacity: 0.2 }));
      let below = 0;
      bar.values.forEach((whole, place) => {
        const value = Math.min(whole, high - (stacked ? below : 0));
        if (!(value > 0)) return;
        const wide = stacked ? each - gap : (each - gap) / bar.values.length;
        const from = stacked ? below : 0;
        found.push(svg("rect", {
          x: x + gap / 2 + (stacked ? 0 : place * wide), y: Y(from + value), width: Math.max(0.5, wide), height: Math.max(0.5, Y(from) - Y(from + value)), fill: color(place),
        }));
        below += value;
      });
      if (cut && sum(bar.values) > high) {
        found.push(svg("text", { x: x + each + 3, y: PADDING.top + 8 }, `↑ ${format(sum(bar.values))} ${unit}`));
      }
    });
    const every = Math.ceil(bars.length / Math.max(1, Math.floor((width - 70) / 90)));
    bars.forEach((bar, at) => {
      if (at % every === 0) found.push(svg("text", { x: PADDING.left + (at + 0.5) * each, y: height - 6, "text-anchor": "middle" }, bar.label.split(",")[0]));
    });
    return found;
  }
  const at = (cursor) => (cursor === null
    ? { label: "", texts: names.map((_, place) => (totals ? totals[place] : "")) }
    : { label: bars[cursor].label, texts: bars[cursor].values.map(format) });
  return figure({
    id, title, unit, about, height, draw, at, alarmed,
    legend: names.map((label, place) => ({ label, color: color(place), block: true })),
    count: () => bars.length,
    locate: (x, width) => Math.floor((x - PADDING.left) / slot(width)),
    summary: `${title}: ${names.map((name, place) => `${name} ${totals ? totals[place] : ""}`).join("; ")}. Arrow keys show values.`,
  });
}
