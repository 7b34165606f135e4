// The page, from its data: verdict, alarms, curves, phases, histograms, reasons, samples, configuration, versions, terms.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const NAMES = RUNS.map((run) => run.name);
const TWO = RUNS.length > 1;
const OUTCOME_COLORS = { sent: "var(--c0)", "not_sent/equal_scores": "var(--c4)", "not_sent/too_long": "var(--c5)" };
const LEVELS = { good: "Good", warn: "Look closer", bad: "Something is wrong", neutral: "Nothing to say yet" };

const perRun = (make) => RUNS.flatMap((run) => [TWO && el("h3", { class: "run" }, run.name), make(run)]);

function verdictSection() {
  const said = RUNS.map((run) => el("p", { class: `verdict ${run.verdict.level}` },
    el("strong", {}, TWO ? `${run.name}: ${LEVELS[run.verdict.level]}` : LEVELS[run.verdict.level]), run.verdict.text));
  const figures = TWO
    ? table(["", ...NAMES], [...new Set(RUNS.flatMap((run) => run.figures.map(([name]) => name)))].map((name) =>
      [name, ...RUNS.map((run) => (run.figures.find(([each]) => each === name) || ["", "–"])[1])]))
    : el("dl", { class: "tiles", style: `--columns: ${Math.ceil(RUNS[0].figures.length / Math.ceil(RUNS[0].figures.length / 8))}` }, RUNS[0].figures.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  return section("verdict", "Verdict", null, said, figures);
}

function alarm(each) {
  const raised = each.state === "raised";
  const from = each.since_step === null ? "since the start" : `since step ${each.since_step}`;
  const since = raised ? from : `${from}, until step ${each.until_step ?? "?"}`;
  const at = each.raised_step ? `raised at step ${each.raised_step}` : "";
  return el("article", { class: `alarm ${each.state}` },
    el("h3", {}, el("code", {}, each.alarm), " ", el("span", { class: `badge ${raised ? "bad" : ""}` }, each.state), " ",
      [each.environment && `environment ${each.environment}`, since, at, each.times > 1 && `raised ${each.times} times`].filter(Boolean).join(", ")),
    each.means && el("p", {}, `${each.means[0].toUpperCase()}${each.means.slice(1)}.`),
    el("p", {}, el("b", {}, each.seen === each.seen_last ? "Seen: " : "When it was raised: "), each.seen || "no details were recorded"),
    each.seen !== each.seen_last && el("p", {}, el("b", {}, raised ? "Newest: " : "At its end: "), each.seen_last),
    Object.keys(each.settings).length > 0 && el("p", {}, el("b", {}, "Settings: "),
      Object.entries(each.settings).map(([key, value], place) => [place ? ", " : "", el("code", {}, `${key}=${value}`)])),
    each.advice && el("p", {}, el("b", {}, "Try: "), each.advice),
    el("p", { class: "about" }, each.where && document.getElementById(each.where) ? [el("a", { href: `#${each.where}` }, "Where this page shows it"), ". "] : "",
      each.recorded ? "" : "Found by this page in the run's files; the run itself raised no such alarm."));
}

function alarmSection() {
  return section("alarms", "Alarms", "Problems that the run revealed while it went on: what was seen, since which step (the first that showed it), the settings that matter, what to try. Causes before their symptoms.",
    perRun((run) => (run.alarms.length ? run.alarms.map(alarm) : el("p", {}, "None."))));
}

function curveSection() {
  const ids = [...new Set(RUNS.flatMap((run) => run.curves.map((chart) => chart.id)))];
  const charts = ids.map((id) => lineChart(RUNS.map((run) => run.curves.find((chart) => chart.id === id)), NAMES));
  const about = "Over steps: one step is one update of the policy. Point at a curve, or focus it and use the arrow keys, to read values; otherwise the newest are shown.";
  return section("curves", "Curves", about, charts.length ? el("div", { class: "grid" }, charts) : el("p", {}, "No step was trained yet."));
}

function phaseSection() {
  const charts = RUNS.filter((run) => run.timeline.bars.length).map((run) => {
    const { names, bars, seconds } = run.timeline;
    const all = Object.values(seconds).reduce((a, b) => a + b, 0) || 1;
    return barChart({
      id: `phases-${run.name}`, title: TWO ? run.name : "Seconds of a step by phase", unit: "s", names, bars, clip: true,
      totals: names.map((name) => percent((seconds[name] || 0) / all)),
      about: "Shares are of the whole run. A long first step waits for the first batch, and compiles.",
    });
  });
  return section("phases", "Phase timeline", "What a step's time goes to: wait (for a batch), convert (to tensors), evaluate (waiting for an evaluation), log_prob (the trainer's own logprobs), advantage, update (of the weights), push (of the weights to the servers), record. What it takes to save checkpoints is in the shares alone.",
    charts);
}

function histogram(run, id, title, about) {
  const found = run[id];
  if (!found) return null;
  return barChart({
    id: `${id}-histogram-${run.name}`, title: TWO ? `${title}, ${run.name}` : title, unit: `share of rows, by ${found.unit}`, about, stacked: false,
    names: found.series.map((series) => series.label), format: percent,
    bars: found.labels.map((label, at) => ({ label, values: found.series.map((series) => series.values[at]) })),
    totals: found.series.map((series) => `${number(series.rows)} rows`),
  });
}

function outcomeCharts(run) {
  return run.outcomes.map(({ environment, names, bars }, place) => {
    const sums = names.map((_, at) => bars.reduce((all, bar) => all + bar.values[at], 0));
    const all = sums.reduce((a, b) => a + b, 0) || 1;
    return barChart({
      id: place || run !== RUNS[0] ? `outcomes-${run.name}-${environment}` : "outcomes", title: `What became of the items of ${TWO ? `${run.name}, ` : ""}${environment}`, unit: "groups", names, bars, colors: OUTCOME_COLORS,
      alarmed: run.alarms.some((each) => each.where === "outcomes" && each.state === "raised" && [null, environment].includes(each.environment)),
      totals: sums.map((sum) => `${number(sum)} (${percent(sum / all)})`), about: "By minutes since the start. One item gives one group of answers.",
    });
  });
}

function distributionSection() {
  return section("distributions", "Histograms and outcomes", "Each third of the run's steps has its own color.", el("div", { class: "grid" }, RUNS.flatMap((run) => [
    histogram(run, "staleness", "Staleness of trained rows", "0: sampled by the very weights that the step started from."),
    histogram(run, "lengths", "Response lengths", "From the first sampled token on, as trained on."),
    outcomeCharts(run),
  ])));
}

function droppedSection() {
  const rows = RUNS.flatMap((run) => run.dropped.map((each) => [
    ...(TWO ? [run.name] : []), each.where, el("code", {}, each.reason), each.meaning, number(each.count), percent(each.share)]));
  const head = [...(TWO ? ["run"] : []), "where", "reason", "meaning", "number", "share"];
  return section("dropped", "Dropped groups and rows, by reason", "Environments drop whole groups, before sending them; the trainer drops rows.",
    rows.length ? table(head, rows, [head.length - 2, head.length - 1]) : el("p", {}, "Nothing was recorded."));
}

function sessionSection() {
  if (!RUNS.some(({ sessions }) => sessions.rows.length || sessions.newest.length || sessions.note)) return null;
  const rows = RUNS.flatMap((run) => run.sessions.rows.map((row) => [...(TWO ? [run.name] : []), ...row.map(number)]));
  const head = [...(TWO ? ["run"] : []), "environment", "sessions", "failed", "left out", "begun anew", "retries", "turns with calls", "turns per session"];
  return section("sessions", "Sessions of agents", "One run of a program is a session. One that fails is repeated once, then left out; a history that cannot go on exactly begins anew, and the session has another row. Below, the newest session of each environment.",
    rows.length && table(head, rows, [head.length - 7, head.length - 5, head.length - 3, head.length - 2, head.length - 1]),
    perRun(({ sessions }) => [sessions.note && el("p", {}, sessions.note), ...sessions.newest.map(sessionCard)]));
}

function sampleSection() {
  const body = el("div", {});
  const show = (run) => body.replaceChildren(...[sampleBrowser(run.samples),
    run.items.length && [el("h3", { id: "items" }, "How the answers to one item changed"),
      el("p", { class: "about" }, "Held-out items at each evaluated weight version, changed ones first, and prompts that were trained on several times."), el("div", { class: "cards" }, itemList(run.items))]].flat(3).filter(Boolean));
  show(RUNS[0]);
  const [choice, box] = select("Run", NAMES.map((name, at) => [at, name]), () => show(RUNS[Number(box.value)]));
  return section("samples", "Samples over time", "Answers that the policy was trained on: of each shown step the best, the worst, and others.",
    TWO && el("div", { class: "controls" }, choice), body);
}

function configurationSection() {
  const keys = [...new Set(RUNS.flatMap((run) => run.configuration.map(([key]) => key)))].sort();
  const maps = RUNS.map((run) => new Map(run.configuration.map((row) => [row[0], row])));
  const body = el("div", {}), search = el("input", { type: "search", placeholder: "key or value", oninput: show });
  const only = el("input", { type: "checkbox", checked: true, onchange: show });
  function show() {
    const query = search.value.trim().toLowerCase();
    const rows = keys.map((key) => maps.map((map) => map.get(key) || [key, "not set", null, false]).concat([[key]]))
      .filter((cells) => {
        const runs = cells.slice(0, -1), differs = TWO ? new Set(runs.map((cell) => cell[1])).size > 1 : runs[0][2] !== null;
        cells.differs = differs;
        return (!only.checked || differs) && (!query || runs.some((cell) => `${cell[0]} ${cell[1]}`.toLowerCase().includes(query)));
      });
    const lines = rows.map((cells) => {
      const runs = cells.slice(0, -1), given = runs.find((cell) => cell[2] !== null);
      return Object.assign([el("code", {}, runs[0][0]), ...runs.map((cell) => el("code", {}, cell[1])), el("code", {}, given ? given[2] : "")], { differs: runs.some((cell) => cell[2] !== null) });
    });
    const shown = table(["key", ...(TWO ? NAMES : ["value"]), "default, if it is another"], lines, [], (row) => (row.differs ? "differs" : null));
    shown.classList.add("tall");
    body.replaceChildren(el("p", { class: "about", role: "status" }, `${lines.length} of ${keys.length} keys`), shown);
  }
  show();
  const what = TWO ? " only where the runs differ" : " only what differs from the default";
  return section("configuration", "Configuration", "The resolved configuration, without secrets. A colored edge marks values that are not the default.",
    el("div", { class: "controls" }, el("label", { class: "check" }, only, what), el("label", {}, "Search", search)), body);
}

function versionSection() {
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.versions)))];
  const about = RUNS.every((run) => run.recorded) ? "Of what was installed at the latest start." : "Of what is installed where this page was written, if a run recorded none.";
  return section("versions", "Versions", about, table(["package", ...(TWO ? NAMES : ["version"])], names.map((name) => [name, ...RUNS.map((run) => run.versions[name] || "")])));
}

const TERMS = {
  "step": "One update of the policy, on one batch of groups.",
  "session": "One run of a program that calls the policy; its turns are the policy's replies.",
  "item, group, row": "An item is one task of the environment. Its several answers are a group; one answer is a row.",
  "score": "What the environment gives an answer. Advantages compare the scores of a group.",
  "advantage": "How much better than its group an answer (or token) was; it raises or lowers its probability.",
  "logprob": "Natural logarithm of a token's probability: 0 is certain, −3 is 5%.",
  "entropy": "Mean uncertainty over the next token, in nats.",
  "mask": "Which tokens are trained on: those that the policy sampled, not those of the prompt or a tool.",
  "weight version": "The step whose weights a server had when it sampled.",
  "staleness": "How many updates the policy is ahead of the weights that sampled a row.",
  "KL": "How far two policies are apart, in nats per token.",
  "held out": "Items for evaluation only.",
  "alarm": "A problem that the run named while it went on.",
};

function termSection() {
  return section("terms", "Terms", null, el("dl", { class: "terms" },
    Object.entries(TERMS).map(([term, text]) => el("div", {}, el("dt", {}, term), el("dd", {}, text)))));
}

document.getElementById("names").textContent = NAMES.join(" and ");
document.getElementById("states").textContent = `${RUNS.map((run) => (TWO ? `${run.name} ${run.state}` : run.state)).join(", ")}; written ${DATA.written}`;
const content = document.getElementById("content");
const later = [curveSection(), phaseSection(), distributionSection(), droppedSection(), sessionSection(), sampleSection(), configurationSection(), versionSection(), termSection()].filter(Boolean);
content.append(verdictSection(), ...later);
content.insertBefore(alarmSection(), later[0]); // last, because it links to what is there
document.getElementById("sections").append(...[...content.children].map((each) =>
  el("a", { href: `#${each.id}` }, each.querySelector("h2").textContent.split(",")[0])));
