"""Which architectures can be trained: ``python benchmarks/models.py [--quick] [--only NAME,...] [--keep DIR]``

For each architecture, a random model of two layers goes through three steps of the real loop on a CPU: the launcher
starts Trajectory API, SGLang, gateway, trainer and an environment. A model has passed if

- the pushed names and shapes were those of its checkpoint, which the trainer compares, and every step was trained;
- after each push SGLang's logprobs of tokens that it samples matched the trainer's (``weight_sync.verify=probe``);
- those of the trained tokens did too: at step 1 with the weights that the server loaded itself ("before"), at steps
  2 and 3 with pushed ones ("after"; mean of the absolute difference, in nats);
- the gradient was not zero.

A model's other properties (tied embeddings, chat template, pad token, vocabulary larger than the tokenizer's, bfloat16
weights, LoRA) are assigned so that any two of these choices occur together in some model. If a model fails, the table
shows what ended the run first, or which comparison did not hold.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

from recipe.atropos.launcher.short_run import ShortRun, short_run

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from random_models import CHAT_TEMPLATE, FAMILIES, byte_tokenizer, make_random_model  # noqa: E402

STEPS = 3
LIMIT = 420  # seconds for one model
TARGET = 12  # models that pass
QUICK = ("qwen2", "llama", "gemma3_text", "mixtral")

# Families not in TIED_OR_NOT have only one kind: no checkpoint differs, and SGLang does not check.
TIED = {"gemma", "gemma2", "gemma3_text", "lfm2", "lfm2_moe"}
TIED_OR_NOT = {"qwen2", "qwen3", "llama", "granite", "ernie4_5_moe"}
UNPACKED = {"minimax", "lfm2", "lfm2_moe"}  # with layers that read packed rows as one
WITHOUT_LORA = {"gpt_oss", *UNPACKED}  # not every layer has an o_proj

CHOICES = {
    "embeddings": ("untied", "tied"),
    "template": ("text", "none", "dict"),
    "pad": ("pad", "no pad"),
    "vocabulary": ("tokenizer's", "larger"),
    "dtype": ("float32", "bfloat16"),
    "trained": ("full", "lora"),
}
TEMPLATES = {"text": CHAT_TEMPLATE, "none": None, "dict": {"default": CHAT_TEMPLATE, "tool_use": CHAT_TEMPLATE}}
OPTIONS = [
    "inference.mem_fraction_static=0.3",
    "inference.args.max_total_tokens=4096",
    "data.train_batch_size=2",
    "data.max_prompt_length=64",
    "data.max_response_length=32",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512",
    "actor_rollout_ref.actor.use_torch_compile=false",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "trainer.device=cpu",
]
Variant = dict[str, str]


def row(family: str, variant: Variant, run: ShortRun) -> str:
    figures = run.figures
    shown = [f"{figures[key]:.1e}" if key in figures else "" for key in ("before", "after", "probe")]
    like = ", ".join(value for key, value in variant.items() if value != CHOICES[key][0])
    cells = [family, like or "-", run.error or "passed", *shown, f"{run.seconds:.0f}"]
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


HEADER = "| model | variant | result | before | after | probe | s |\n|---|---|---|---|---|---|---|"


def possible(family: str, variant: Variant) -> bool:
    tied = variant["embeddings"] == "tied"
    if family not in TIED_OR_NOT and tied != (family in TIED):
        return False
    return not (family in WITHOUT_LORA and variant["trained"] == "lora")


def pairs(variant: Variant) -> set[tuple[tuple[str, str], ...]]:
    return set(itertools.combinations(variant.items(), 2))


def dealt_out(families: list[str]) -> dict[str, Variant]:
    """Return each family's variant: the one with the most pairs of choices not yet covered, then the rarest."""
    variants = [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]
    seen: Counter[tuple[tuple[str, str], ...]] = Counter()
    found = {}
    for family in families:
        found[family] = max(
            (variant for variant in variants if possible(family, variant)),
            key=lambda v: (sum(pair not in seen for pair in pairs(v)), -sum(seen[pair] for pair in pairs(v))),
        )
        seen.update(pairs(found[family]))
    return found


def make(folder: Path, family: str, variant: Variant) -> Path:
    return make_random_model(
        folder,
        family,
        dtype=variant["dtype"],
        chat_template=TEMPLATES[variant["template"]],
        pad=variant["pad"] == "pad",
        tie_word_embeddings=variant["embeddings"] == "tied",
        vocab_size=len(byte_tokenizer()) + (61 if variant["vocabulary"] == "larger" else 0),
    )


def tried(family: str, variant: Variant, folder: Path) -> ShortRun:
    """Train the model for three steps; ends within ``LIMIT`` seconds, together with all that it started."""
    try:
        model = make(folder / "model", family, variant)
    except Exception as error:  # transformers knows no such model, or cannot write it
        return ShortRun(folder, error=f"transformers: {type(error).__name__}: {error}")
    lora = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=[o_proj]"]
    padded = ["actor_rollout_ref.model.use_remove_padding=false"]
    overrides = [*OPTIONS, *(lora if variant["trained"] == "lora" else []), *(padded if family in UNPACKED else [])]
    return short_run(model, folder, overrides, steps=STEPS, dtype=variant["dtype"], limit=LIMIT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)} alone")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="NAME,...", help=", ".join(FAMILIES))
    parser.add_argument("--keep", type=Path, help="folder for models, runs and logs (default: temporary)")
    arguments = parser.parse_args()
    variants = dealt_out(list(FAMILIES))
    covered = set().union(*map(pairs, variants.values()))
    names = arguments.only or (QUICK if arguments.quick else list(FAMILIES))
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "VERL_PLATFORM": "cpu"}
    print(HEADER, flush=True)
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            folder = (arguments.keep or Path(temporary)).resolve() / name
            results.append(tried(name, variants[name], folder))
            print(row(name, variants[name], results[-1]), flush=True)
    passed = sum(result.error is None for result in results)
    target = TARGET if len(names) == len(FAMILIES) else len(names)
    report = {
        "name": "models",
        "figures": {"passed": passed, "models": len(results), "pairs_of_choices": len(covered)},
        "targets": {"passed": f">= {target}"},
        "ok": passed >= target,
    }
    print(json.dumps(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
