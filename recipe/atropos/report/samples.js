// Samples over time, and how the answers to one item changed.

const UNLIKELY = -3; // nats; such a token is underlined
const SHOWN = 12; // samples at a time

function colored(token, by, largest) {
  const { piece, trained, logprob, advantage } = token;
  const known = trained && logprob !== null;
  let style = null;
  if (trained && by === "advantage" && advantage && largest) {
    style = `background: rgba(var(--${advantage > 0 ? "up" : "down"}), ${(0.1 + 0.5 * Math.min(1, Math.abs(advantage) / largest)).toFixed(2)})`;
  } else if (known && by === "logprob") {
    style = `background: rgba(var(--rare), ${(0.75 * (1 - Math.exp(logprob))).toFixed(2)})`;
  } else if (trained && by === "mask") style = "background: rgba(var(--mask), 0.22)";
  const says = trained
    ? `logprob ${number(logprob)}${known ? ` (probability ${percent(Math.exp(logprob))})` : ""}, advantage ${number(advantage)}`
    : "not trained on";
  const classes = ["token", !trained && "untrained", known && logprob < UNLIKELY && "unlikely"].filter(Boolean).join(" ");
  return el("span", { class: by === "none" ? "token" : classes, style, title: says }, piece);
}

const tokensOf = (row) => row.pieces.map((piece, at) => ({
  piece, trained: row.mask[at] === "1", logprob: row.logprobs[at], advantage: row.advantages[at],
}));

function found(text, query) {
  if (!query) return [text];
  // In lower case a text may have another length.
  const parts = text.split(new RegExp(`(${query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")})`, "iu"));
  return parts.map((part, at) => (at % 2 ? el("mark", {}, part) : part));
}

function answer(row, by, largest, query) {
  if (!row.pieces || query) return el("pre", {}, found(row.answer, query));
  const cut = row.length && row.length > row.pieces.length ? ` [... ${row.length - row.pieces.length} more tokens]` : "";
  return el("pre", {}, tokensOf(row).map((token) => colored(token, by, largest)), cut);
}

// Why nothing is colored, where a reader would look for it.
function uncolored(row, by) {
  if (by === "none") return null;
  if (!row.pieces) return "not colored: this page has no tokens of this sample";
  const trained = tokensOf(row).filter((token) => token.trained);
  if (!trained.length) return "not colored: none of these tokens is trained on";
  if (by === "logprob" && trained.every((token) => token.logprob === null)) return "not colored: its tokens came without logprobs";
  if (by === "advantage" && trained.every((token) => !token.advantage)) {
    return trained[0].advantage === null ? "not colored: its advantages are not known" : "not colored: its advantages are 0, as where all answers of a group have the same score";
  }
  return null;
}

function tokenTable(row) {
  const details = el("details", {}, el("summary", {}, `${row.pieces.length} tokens as a table`));
  details.addEventListener("toggle", () => {
    if (details.children.length > 1) return;
    details.append(table(["token", "trained", "logprob", "advantage"], tokensOf(row).map((token) => [
      el("code", {}, JSON.stringify(token.piece)), token.trained ? "yes" : "no", number(token.logprob), number(token.advantage),
    ]), [2, 3]));
  });
  return details;
}

function versions([oldest, newest]) {
  if (oldest === null) return "weight version unknown";
  return oldest === newest ? `weight version ${oldest}` : `weight versions ${oldest} to ${newest}`;
}

function card(row, prompt, by, largest, query, best) {
  const score = el("span", { class: `badge ${row.score >= best ? "good" : "bad"}` }, `score ${number(row.score)}`);
  const behind = row.versions[0] === null ? "" : `, ${row.step - 1 - row.versions[0]} updates old`;
  return el("article", { class: "sample" },
    el("div", { class: "facts" }, el("b", {}, `step ${row.step}`), score,
      row.raw !== null && row.raw !== row.score && el("span", {}, `raw score ${number(row.raw)}`),
      [row.environment, `group ${row.group}`, versions(row.versions) + behind, row.length && `${row.length} tokens`, row.origin && `advantages: ${row.origin}`].filter(Boolean).map((text) => el("span", {}, text))),
    el("details", { open: prompt.length < 400 }, el("summary", {}, "prompt"), el("pre", { class: "prompt" }, found(prompt, query))),
    answer(row, by, largest, query), el("p", { class: "about uncolored" }, query ? null : uncolored(row, by)), row.pieces && tokenTable(row));
}

function sampleBrowser({ prompts, rows, note }) {
  if (!rows.length) return el("p", {}, "No samples were recorded (trainer.rollout_data_dir).");
  const steps = [...new Set(rows.map((row) => row.step))];
  const scores = rows.map((row) => row.score);
  const best = Math.min(...scores) === Math.max(...scores) ? -Infinity : (Math.min(...scores) + Math.max(...scores)) / 2;
  const largest = Math.max(0, ...rows.flatMap((row) => (row.advantages || []).map((each) => Math.abs(each || 0))));
  const list = el("div", { class: "cards" }), count = el("p", { class: "about", role: "status" });
  const more = el("button", { type: "button", onclick: () => { limit += SHOWN; show(); } }, "Show more");
  let limit = SHOWN;
  const again = () => { limit = SHOWN; show(); };
  const [order, orderBox] = select("Order", [["late", "newest first"], ["early", "oldest first"], ["best", "best first"], ["worst", "worst first"]], again);
  const [step, stepBox] = select("Step", [["", "all"], ...steps.map((each) => [each, each])], again);
  const [color, colorBox] = select("Color tokens by", [["advantage", "advantage"], ["logprob", "logprob"], ["mask", "mask"], ["none", "nothing"]], again);
  const withTokens = rows.some((row) => row.pieces);
  if (!withTokens) colorBox.value = "none";
  const search = el("input", { type: "search", placeholder: "in prompts and answers", oninput: again });

  function show() {
    const query = search.value.trim().toLowerCase();
    const chosen = rows.filter((row) => (!stepBox.value || row.step === Number(stepBox.value)) &&
      (!query || `${prompts[row.prompt]}\n${row.answer}`.toLowerCase().includes(query)));
    const by = { late: (a, b) => b.step - a.step, early: (a, b) => a.step - b.step, best: (a, b) => b.score - a.score, worst: (a, b) => a.score - b.score };
    chosen.sort(by[orderBox.value]);
    list.replaceChildren(...chosen.slice(0, limit).map((row) => card(row, prompts[row.prompt], colorBox.value, largest, query, best)));
    more.hidden = chosen.length <= limit;
    count.textContent = `${Math.min(limit, chosen.length)} of ${chosen.length} samples that match are shown. The page has ${rows.length}, of ${steps.length} steps.`;
  }
  show();
  const range = `Their scores are from ${number(Math.min(...scores))} to ${number(Math.max(...scores))}; held-out scores may have another range. `;
  const legend = "Tokens: green raised, red lowered by their advantage; orange: improbable; blue: trained on; gray italics: not trained on; underlined: logprob under −3.";
  return [el("div", { class: "controls" }, order, step, el("label", {}, "Search", search), withTokens && color),
    el("p", { class: "about" }, range + (withTokens ? legend : note)), count, list, more];
}

function sessionTurn(turn) {
  const after = turn.parent !== null ? ` after ${turn.parent}` : turn.number ? `, begins anew: ${turn.begins}` : "";
  const say = (kind) => ([who, text]) => el("pre", { class: who === "thinking" ? "thinking" : kind }, el("b", {}, `${who}: `), text);
  return el("details", { class: "turn", open: true, style: `--level: ${turn.level}` },
    el("summary", {}, `turn ${turn.number}${after}`, el("span", { class: "at" }, `${turn.tokens} tokens, ${versions(turn.versions || [null, null])}, row ${turn.row}`)),
    turn.added.map(say("prompt")), turn.reply.map(say("reply")));
}

function sessionCard({ session, environment, item, end, turns: all, turns_shown: turns }) {
  const left = all - turns.length;
  return el("details", { class: "item" }, el("summary", {}, el("b", {}, environment), " ", el("span", { class: "badge" }, end), ` ${all} turns, session ${session}`),
    el("p", { class: "about" }, `item ${item}`), turns.map(sessionTurn),
    left > 0 && el("p", { class: "about" }, `${left} more turns: python -m recipe.atropos inspect RUN --session ${session}`));
}

function itemList(items) {
  const badge = (score) => el("span", { class: "badge" }, number(score));
  return items.map((item) => {
    const [first, last] = [item.answers[0], item.answers[item.answers.length - 1]];
    return el("details", { class: "item" },
      el("summary", {}, badge(first.score), " → ", badge(last.score), ` ${item.prompt.split("\n").join(" ").slice(0, 160)}`),
      el("p", { class: "about" }, `${item.kind}, ${item.environment}`), el("pre", { class: "prompt" }, item.prompt),
      el("ol", {}, item.answers.map((each) => el("li", {}, el("span", {}, `${item.kind === "held out" ? "version" : "step"} ${each.at}`),
        badge(each.score), el("pre", {}, each.answer)))));
  });
}
