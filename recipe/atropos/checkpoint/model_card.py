"""The model card of an exported model: its base model, training and results, from the run's own files."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from recipe.atropos.config.env_specs import environment_specs
from recipe.atropos.config.models import looks_local
from recipe.atropos.run.evaluations import held_out, read_evaluations
from recipe.atropos.run.folder import RunDir
from recipe.atropos.utils.files import read_json, write_atomic
from recipe.atropos.utils.machine import installed
from recipe.atropos.utils.secret import read_config_yaml

EXPORTED = "export.json"
"""File in every exported folder with ``run``, ``step``, ``dtype``, ``adapter``, and ``size`` in bytes."""

_PACKAGES = ("verl-atropos", "verl", "atroposlib", "torch", "transformers", "peft")
_LOAD_MODEL = """
model = AutoModelForCausalLM.from_pretrained("FOLDER", dtype="auto")"""
_LOAD_ADAPTER = """\
from peft import PeftModel

base = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "FOLDER")"""


def write_card(folder: Path, run: RunDir) -> None:
    """Write ``README.md`` into an exported folder, from the run's current files, without secrets or local paths."""
    config, summary, exported = read_config_yaml(run.config), read_json(run.summary, {}), read_json(folder / EXPORTED)
    base = base_model(config, summary)
    adapter, trained = exported["adapter"], model_name(config.actor_rollout_ref.model.path)
    lines = [
        "---",  # what the hub reads
        f"library_name: {'peft' if adapter else 'transformers'}",
        *([] if looks_local(base) else [f"base_model: {base}"]),
        "pipeline_tag: text-generation",
        "tags: [reinforcement-learning, grpo, atropos, verl]",
        "---",
        "",
        f"# {exported['run']}, step {exported['step']}",
        "",
        f"{model_name(base)} after {exported['step']} updates by reinforcement learning on [Atropos]"
        "(https://github.com/NousResearch/atropos) environments, with [verl](https://github.com/verl-project/verl).",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in _figures(config, summary, exported)),
        "",
        *_heldout(run, exported["step"]),
        "## Use",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        (_LOAD_ADAPTER if adapter else _LOAD_MODEL).format(base=trained),
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        "```",
        "",
    ]
    write_atomic(folder / "README.md", "\n".join(lines).encode())


def base_model(config: DictConfig, summary: Mapping[str, Any]) -> str:
    """Return the folder or hub name of the original model, also if the run started from another run's weights."""
    return summary.get("resumed_from", {}).get("base") or config.actor_rollout_ref.model.path


def model_name(path: str) -> str:
    """Return the model's hub name, also of a folder in the hub's cache, or a local folder's name without the path."""
    if cached := re.search(r"/models--([^/]+)", path):
        return cached[1].replace("--", "/")
    return Path(path).name if looks_local(path) else path


def _figures(config: DictConfig, summary: dict[str, Any], exported: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    model = config.actor_rollout_ref.model
    yield "base model", model_name(base_model(config, summary))
    if start := summary.get("resumed_from"):
        yield "weights at step 0", f"run {Path(start['run']).name}, step {start['step']}"
    if model.lora_rank:
        how = "the adapter alone" if exported["adapter"] else "merged"
        yield "LoRA", f"rank {model.lora_rank}, alpha {model.lora_alpha}, {how}"
    for spec in environment_specs(config).values():
        target = spec.target.rpartition("/")[2]  # without the folders of its file
        yield "environment", f"{spec.name} ({target}), groups of {spec.group_size}"
    yield "algorithm", config.algorithm.adv_estimator
    yield "learning rate", config.actor_rollout_ref.actor.optim.lr
    yield "groups a step", config.data.train_batch_size
    yield "steps", f"{exported['step']} of {summary.get('steps', exported['step'])}"
    yield "weights", exported["dtype"]
    for key, name in (
        ("sequences_trained", "sequences trained on, whole run"),
        ("tokens_trained", "tokens trained on, whole run"),
        ("mean_score_first", "mean score of the first step"),
        ("mean_score_last", "mean score of the last step"),
    ):
        if (value := summary.get(key)) is not None:
            yield name, f"{value:.4g}" if isinstance(value, float) else value
    if summary.get("alarms"):
        yield "alarms", ", ".join(summary["alarms"])
    yield "seed", config.seed
    yield "packages", ", ".join(f"{name} {version}" for name, version in installed(_PACKAGES).items())


def _heldout(run: RunDir, step: int) -> Iterator[str]:
    """Yield a table of each environment's first evaluation and its evaluation at ``step``."""
    evaluations = held_out(read_evaluations(run.path))
    if not evaluations:
        return
    yield from ("## Held-out evaluation", "", f"| environment | metric | items | first | step {step} |")
    yield "|---|---|---|---|---|"
    for env, found in evaluations.items():
        begin, before, items, metric = found[0]
        value = next((f"{score:.4g}" for at, score, *_ in found if at == step), "not evaluated")
        yield f"| {env} | {metric} | {items or ''} | {before:.4g} (step {begin}) | {value} |"
    yield ""
