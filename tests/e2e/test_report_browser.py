"""The pages about a run and of its API, looked at in a real browser: without an error, they name what is wrong."""

import json
import re
import shutil
import subprocess

import pytest

from helpers.runs import make_run
from helpers.seeded_runs import FAULTS, Seeded, healthy_run, seeded_run
from helpers.services import group
from helpers.sessions import ScriptedPolicy, Sessions, chat_tokenizer
from helpers.trajectory_api import ENVIRONMENT, running_trajectory_api
from recipe.atropos.report.page import write_report
from recipe.atropos.utils.files import read_lines, rewrite_lines

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture
def browsed(tmp_path):
    """A function that returns what a real browser makes of an address once its scripts have run, and what it logs."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")

    def browse(url, milliseconds):
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/browser"]
        command += ["--enable-logging=stderr", f"--virtual-time-budget={milliseconds}", "--dump-dom", url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        return done.stdout, done.stderr

    return browse


@pytest.fixture
def shown(browsed):
    """A function that returns a page's document; the browser's console must say ``told``."""

    def show(page, told=""):
        document, log = browsed(f"file://{page}", 3000)
        console = [line for line in log.splitlines() if ":CONSOLE" in line]
        assert (told in "".join(console)) if told else console == []
        return re.sub(r"<script.*?</script>", "", document, flags=re.DOTALL)

    return show


@pytest.mark.parametrize("slash", ["", "/"])
def test_the_page_of_the_api_shows_queue_and_environments(tmp_path, browsed, slash):
    """At the address that the docs give, and at that with a slash."""
    with running_trajectory_api(tmp_path, secret="s3cret") as api:
        api.url += "/s3cret"
        api.register(after=0)
        env_id = api.post("/register-env", ENVIRONMENT)["env_id"]
        api.post("/scored_data", group(1) | {"env_id": env_id})
        page, _ = browsed(f"{api.url}{slash}", 5000)
    assert "no batch 1: 4 of 8 sequences are queued, and no group is begun" in page
    assert "<td>env_0</td><td>4</td><td>0</td><td>1</td>" in page


def text_of(document, section):
    found = re.search(rf'<section id="{section}".*?</section>', document, re.DOTALL)
    return re.sub(r"<[^>]+>", "", found[0])


# Where else on the page the cause shows, beside verdict and alarms: a chart that is marked, or a table.
SHOWN = {
    "truncation": ("curves", r'<figure id="length" class="alarmed">'),
    "equal_groups": ("distributions", r'<figure id="outcomes" class="alarmed">'),
    "raising_environment": ("dropped", r"failed/ZeroDivisionError"),
}


@pytest.mark.parametrize("fault", SHOWN)
def test_the_page_names_what_is_wrong_and_shows_it(tmp_path, shown, fault):
    document = shown(write_report(seeded_run(tmp_path / "run", fault)))
    name = FAULTS[fault][1]
    assert f"Alarm {name}" in text_of(document, "verdict") and "Something is wrong" in text_of(document, "verdict")
    assert text_of(document, "alarms").index(f"{name} raised") >= 0 and "Try: " in text_of(document, "alarms")
    assert re.search(r"since step \d+, raised at step \d+", text_of(document, "alarms"))
    section, pattern = SHOWN[fault]
    whole = re.search(rf'<section id="{section}".*?</section>', document, re.DOTALL)[0]
    assert re.search(pattern, whole)


def test_sessions_of_agents_are_drawn_turn_by_turn(tmp_path, shown):
    files = make_run(tmp_path / "run")
    with Sessions(files.path, ScriptedPolicy(chat_tokenizer(), script=["<think>so</think>the sum", "19"])) as sessions:
        opened, messages = sessions.open(env="sums", item=7), [{"role": "user", "content": "<b>12</b>"}]
        for _ in range(2):
            reply = sessions.openai(opened).chat.completions.create(model="policy", messages=messages)
            messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and"}]
        sessions.call("POST", f"/sessions/{opened['id']}/reward", {"reward": 0.5})
        text = text_of(shown(write_report(files.path)), "sessions")
    assert "sums reward 0.5 2 turns" in text and "turn 1 after 0" in text and "weight versions 3 to 4, row 0" in text
    assert "user: &lt;b&gt;12&lt;/b&gt;thinking: soassistant: the sum" in text


def test_a_healthy_run_is_drawn_without_an_alarm(tmp_path, shown):
    document = shown(write_report(healthy_run(tmp_path / "run")))
    assert 'class="alarmed"' not in document and "None." in text_of(document, "alarms")
    assert "Learned: held-out score 0.367 → 0.996" in text_of(document, "verdict")
    legend = text_of(document, "curves").partition("Logprob difference")[2].partition("KL")[0]
    assert "mean 0.002" in legend and "mean, fresh samples 2.8e−7 (step 1)" in legend, "its newest is of another step"
    paths = re.findall(r'<path d="M[^"]{20,}"', document)
    assert len(paths) >= 10 and "NaN" not in document and "undefined" not in document
    assert len(re.findall(r'<article class="sample">', document)) == 12
    assert "advantages: GRPO" in text_of(document, "samples")
    assert re.search(r'<span class="token" style="background: rgba\(var\(--(up|down)\)', document)


def test_two_runs_are_laid_over_each_other(tmp_path, shown):
    one, two = healthy_run(tmp_path / "first"), seeded_run(tmp_path / "second", "sampling_mismatch")
    document = shown(write_report(one, two))
    assert re.search(r"first: all trained rows.*second: all trained rows", text_of(document, "curves"), re.DOTALL)
    differing = text_of(document, "configuration")
    assert "trainer.atropos.sampling_mismatch" in differing and "actor_rollout_ref.actor.optim.lr" not in differing


AT = """
setTimeout(() => {
  const plot = document.querySelector("#entropy svg[role]");
  for (const key of ["Home", "ArrowRight", "ArrowRight"]) plot.dispatchEvent(new KeyboardEvent("keydown", { key }));
  document.title = [...document.querySelectorAll("#entropy .legend b")].map((each) => each.textContent).join("; ");
}, 500);
"""


def test_two_long_runs_show_their_own_limits_and_values(tmp_path, shown):
    """Their curves are shortened, each to other steps."""
    one, two = Seeded(tmp_path / "one"), Seeded(tmp_path / "two")
    for run, times, limit in ((one, 9, "3"), (two, 12, "2")):
        run.lines = [line | {"step": at + 1} for at, line in enumerate(run.lines * times)]
        run.set("max_staleness", limit)
    one.lines[30] |= {"critic/score/max": 5.0}
    page = write_report(one.write(recorded=False), two.write(recorded=False), tokens=False)
    page.write_text(page.read_text().replace("</body>", f"<script>{AT}</script></body>"))
    document = shown(page)
    curves = text_of(document, "curves")
    assert "one: limit 3" in curves and "two: limit 2" in curves and "In this run" not in curves
    assert "one: single answers scored from −1 to 5. two: single answers scored from −1 to 1." in curves
    values = re.search(r"<title>(.*)</title>", document)[1].split("; ")
    assert len(values) == 2 and all(float(value) > 0 for value in values), values


def test_a_run_and_one_without_a_step_are_drawn(tmp_path, shown):
    page = write_report(make_run(tmp_path / "one").path, make_run(tmp_path / "two", steps=0).path, tokens=False)
    document = shown(page)
    assert "NaN" not in document and "undefined" not in document
    assert "one: mean" in text_of(document, "curves") and "two: limit" not in text_of(document, "curves")


# What a user does: read a curve with the keyboard, sort, search, open a row's tokens. The results go into the title.
USE = r"""
const find = (what) => document.querySelector(what);
function change(node, value) {
  node.value = value;
  node.dispatchEvent(new Event(node.tagName === "SELECT" ? "change" : "input"));
}
setTimeout(() => {
  for (const key of ["Home", "ArrowRight"]) {
    find("#entropy svg[role]").dispatchEvent(new KeyboardEvent("keydown", { key }));
  }
  const found = [find("#entropy .at").textContent];
  for (const order of ["worst", "best"]) {
    change(find("#samples select"), order);
    found.push(find(".sample .badge").textContent);
  }
  change(find("#samples input"), find(".sample pre.prompt").textContent.split(/\s+/)[3]);
  found.push([...document.querySelectorAll(".sample")].every((each) => each.querySelector("mark")));
  change(find("#samples input"), "(b.c");
  found.push([...document.querySelectorAll(".sample mark")].map((each) => each.textContent).join("|"));
  change(find("#samples input"), "no such text");
  found.push(document.querySelectorAll(".sample").length);
  change(find("#samples input"), "");
  const details = find(".sample > details:last-child");
  details.open = true;
  details.addEventListener("toggle", () => {
    found.push(details.querySelectorAll("tbody tr").length > 5);
    document.title = found.join("; ");
  });
}, 500);
"""


def test_the_page_can_be_used_by_keyboard(tmp_path, shown):
    run = healthy_run(tmp_path / "run")
    rows = read_lines(run / "rollouts/60.jsonl")
    longer = "İİ (B.C) (b.c"  # in lower case
    rewrite_lines(run / "rollouts/60.jsonl", [rows[0] | {"output": longer}, *rows[1:]])
    page = write_report(run)
    page.write_text(page.read_text().replace("</body>", f"<script>{USE}</script></body>"))
    document = shown(page)
    assert re.search(r"<title>(.*)</title>", document)[1] == "step 2; score −1; score 1; true; (B.C|(b.c; 0; true"


COLOR = r"""
const find = (value) => [...document.querySelectorAll("#samples select")].find((each) => each.value === value);
const said = () => [...document.querySelectorAll(".sample .uncolored")].slice(0, 4)
  .map((each) => each.textContent.slice(0, 43));
setTimeout(() => {
  const found = [said()], color = find("advantage");
  color.value = "logprob";
  color.dispatchEvent(new Event("change"));
  document.title = JSON.stringify([...found, said()]);
}, 500);
"""


def test_a_sample_says_why_nothing_is_colored(tmp_path, shown):
    page = write_report(healthy_run(tmp_path / "run"))
    before, data, after = re.split(r'(?<=id="data">)(.*?)(?=</script>)', page.read_text(), maxsplit=1, flags=re.DOTALL)
    known = json.loads(data)
    rows = known["runs"][0]["samples"]["rows"]
    first = next(at for at, row in enumerate(rows) if row["step"] == 60)  # the newest are shown first
    rows[first] |= {"advantages": [0.0] * len(rows[first]["pieces"])}
    rows[first + 1] |= {"logprobs": [None] * len(rows[first + 1]["pieces"])}
    del rows[first + 2]["pieces"]
    data = json.dumps(known).replace("<", "\\u003c")
    page.write_text(f"{before}{data}{after}".replace("</body>", f"<script>{COLOR}</script></body>"))
    document = shown(page)
    text = "not colored: this page has no tokens of this sample"[:43]
    by_advantage, by_logprob = json.loads(re.search(r"<title>(.*)</title>", document)[1])
    assert by_advantage == ["not colored: its advantages are 0, as where", "", text, ""]
    assert by_logprob == ["", "not colored: its tokens came without logpro", text, ""]
    assert "Their scores are from −1 to 1" in text_of(document, "samples")


def test_an_error_of_the_page_would_be_seen(tmp_path, shown):
    page = write_report(healthy_run(tmp_path / "run"))
    page.write_text(page.read_text().replace("content.append(verdictSection()", "content.append(noSuchSection()"))
    shown(page, told="noSuchSection is not defined")
