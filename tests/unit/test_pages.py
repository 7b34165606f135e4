"""docs: hyperparameters.md and costs.md have the keys, defaults and figures of the code."""

import importlib.util
import math
import re

import numpy as np
import pytest

from helpers import ROOT
from helpers.promises import code, tables
from helpers.qwen import write_qwen_config
from recipe.atropos.commands.plan import GIB, plan_memory
from recipe.atropos.config.compose import load_config, presets
from recipe.atropos.data.scored_group import ScoredGroup
from recipe.atropos.report.chart_table import CHARTS
from recipe.atropos.watchdog.alarms import ALARMS

PAGES = ["hyperparameters.md", "costs.md"]
DEFAULTS = {code(row[0])[0]: row[2] for rows in tables("configuration.md").values() for row in rows}
HYPERPARAMETERS = [
    row for heading, rows in tables("hyperparameters.md").items() if heading != "Where to begin" for row in rows
]
PRESETS = {"qwen2.5-0.5b-1gpu": ("0.5b", 24), "qwen2.5-1.5b-lora-1gpu": ("1.5b", 24), "qwen2.5-7b-8gpu": ("7b", 80)}
SEQUENCES, PROMPT, RESPONSE, LONGEST = 1024, 150, 250, 1024  # what costs.md assumes of a step
SPEEDS = {"0.5b": (40e12, 1e12), "1.5b": (40e12, 1e12), "7b": (300e12, 3e12)}  # operations and bytes per second


def text_of(page):
    return (ROOT / "docs" / page).read_text()


@pytest.mark.parametrize(("key", "default"), [(code(row[0])[0], row[1]) for row in HYPERPARAMETERS])
def test_pages_have_the_defaults_of_the_configuration(key, default):
    assert default == DEFAULTS[key]


def test_pages_name_the_hyperparameters_that_users_turn():
    named = {code(row[0])[0].rpartition(".")[2] for row in HYPERPARAMETERS}
    assert {"train_batch_size", "n", "lr", "clip_ratio_high", "loss_agg_mode", "max_staleness", "lora_rank"} <= named
    assert {"use_kl_loss", "rollout_is", "temperature", "overlong", "every", "entropy_coeff", "adv_estimator"} <= named


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_only_keys_that_exist(page, tmp_path):
    tops = {key.partition(".")[0] for key in DEFAULTS}
    named = {
        each for each in code(text_of(page)) if each.partition(".")[0] in tops and re.fullmatch(r"[\w.]+(=\S*)?", each)
    }
    keys = {each.partition("=")[0] for each in named if "." in each}
    assert [key for key in keys if key not in DEFAULTS and not key.startswith("environment.args.")] == []
    given = sorted(each for each in named if "=" in each)
    load_config([f"actor_rollout_ref.model.path={tmp_path}", *given])


def test_pages_have_every_key_that_alarms_and_charts_name():
    """Also in an alarm's advice: a user types it."""
    named = {chart.limit for chart in CHARTS} - {""}
    for alarm in ALARMS.values():
        named |= {
            *alarm.settings,
            *re.findall(r"\b(?:actor_rollout_ref|data|trainer|watchdog)\.[\w.]*\w", alarm.advice),
        }
    assert len(named) > 15 and named <= DEFAULTS.keys(), named - DEFAULTS.keys()


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], ids=lambda page: page.stem)
def test_pages_link_to_what_is_there(page):
    for file, _, anchor in re.findall(r"\]\(([\w./-]*)(#([\w-]+))?\)", page.read_text()):
        target = page.parent / file if file else page
        assert target.exists(), file
        headings = re.findall(r"^#+ (.*)", target.read_text(), re.M) if anchor else []
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, f"{file}#{anchor}"


def test_pages_link_to_commits_where_they_cite_repositories():
    cited = re.findall(r"github\.com/[\w.-]+/[\w.-]+/(?:blob|tree)/([^/]+)/", text_of("hyperparameters.md"))
    assert cited and all(re.fullmatch("[0-9a-f]{7,40}", commit) for commit in cited)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Each preset's plan, without flash-attn, and its configuration."""
    found, find_spec = {}, importlib.util.find_spec
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None if name == "flash_attn" else find_spec(name))
        for preset, (size, memory) in PRESETS.items():
            assert preset in presets()
            folder = write_qwen_config(tmp_path_factory.mktemp("qwen"), size)
            shared = [] if size == "7b" else ["inference.colocated=true"]
            config = load_config([f"preset={preset}", f"actor_rollout_ref.model.path={folder}", *shared])
            found[preset] = plan_memory(config, memory * GIB), config
    return found


def parameters_of(plan, config):
    """P and A of the page: the model's and the adapter's, from the bytes of the plan."""
    model = plan.server.weights // 2
    ranks = config.trainer.n_gpus_per_node
    both = plan.trainer.parts["parameters"] * ranks // 4
    return model, both - model if config.actor_rollout_ref.model.lora_rank else 0


def row_of(heading, preset, column=1):
    rows = [row for row in tables("costs.md")[heading] if code(row[0]) == [preset]]
    return rows[0][column:]


@pytest.mark.parametrize("preset", PRESETS)
def test_pages_have_the_memory_that_is_planned(planned, preset):
    plan, _ = planned[preset]
    parts = plan.trainer.parts
    names = ["parameters", "optimizer", "reference", "gradients", "gathered", "activations", "logits", "buckets"]
    expected = [*(parts[name] for name in names), plan.trainer.peak, plan.server.weights, plan.server.cache]
    assert [float(cell) for cell in row_of("Memory", preset)] == pytest.approx(
        [each / GIB for each in expected], abs=0.006
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_pages_have_the_seconds_that_their_formulas_give(planned, preset):
    plan, config = planned[preset]
    model, adapter = parameters_of(plan, config)
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == SEQUENCES
    assert config.data.max_response_length == LONGEST and config.actor_rollout_ref.actor.use_kl_loss
    speed, bandwidth = SPEEDS[PRESETS[preset][0]]
    factor = (6 if adapter else 8) + 2 + 2
    operations = factor * model * SEQUENCES * (PROMPT + RESPONSE)
    bytes_per_token = plan.server.cache // plan.server.tokens
    wanted = SEQUENCES // (config.inference.servers or 1)
    at_once = min(wanted, plan.server.tokens // (PROMPT + RESPONSE))
    waves = math.ceil(wanted / at_once)
    read = 2 * model + at_once * bytes_per_token * (PROMPT + RESPONSE / 2)
    formula, _, training, k, batches, generation, pushed = row_of("Seconds of a step", preset)
    assert formula.startswith(f"{factor} P T") and float(formula.partition("= ")[2]) == pytest.approx(
        operations, rel=0.03
    )
    assert float(training) == pytest.approx(operations / speed / config.trainer.n_gpus_per_node, rel=0.02)
    assert k == f"{bytes_per_token:,}" and batches.startswith(f"{at_once:,} x {waves}")
    assert float(generation) == pytest.approx(waves * LONGEST * read / bandwidth, rel=0.02)
    assert float(pushed) == pytest.approx(2 * model / 1e9, abs=0.006)


@pytest.mark.parametrize("preset", PRESETS)
def test_pages_have_the_disk_that_their_formulas_give(planned, preset):
    plan, config = planned[preset]
    model, adapter = parameters_of(plan, config)
    checkpoint, kept, exported = (float(cell) for cell in row_of("Disk", preset))
    assert checkpoint == pytest.approx((4 * (model + adapter) + 8 * (adapter or model)) / 1e9, abs=0.006)
    assert config.trainer.max_actor_ckpt_to_keep + bool(config.evaluation.every) == 3
    assert kept == pytest.approx(3 * checkpoint, abs=0.06) and exported == pytest.approx(4 * model / 1e9, abs=0.006)


def test_pages_have_the_bytes_of_a_stored_token():
    lengths, trained = np.full(8, 2048), np.arange(8 * 2048) % 2048 >= 100
    tokens = np.random.default_rng(0).integers(0, 151_936, 8 * 2048)
    logprobs = np.where(trained, -0.25, 1.0)
    group = ScoredGroup(lengths, tokens, np.where(trained, tokens, -100), np.ones(8), {"inference_logprobs": logprobs})
    assert len(group.pack()) / tokens.size == pytest.approx(8.13, abs=0.03)
    more = ScoredGroup(group.lengths, tokens, group.masks, group.scores, {**group.floats, "advantages": logprobs})
    assert (len(more.pack()) - len(group.pack())) / tokens.size == pytest.approx(4, abs=0.01)
