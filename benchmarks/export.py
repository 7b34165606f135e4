"""Memory and time of an export: ``python benchmarks/export.py [--quick]``.

Checkpoints of two ranks, sharded as by FSDP2, of models with the shapes of Qwen2.5-0.5B and 1.5B (untied) in float32,
are exported by ``recipe.atropos.checkpoint.export``, the smaller one also by verl's ``model_merger``, each in its own
process.
Memory is the peak anonymous memory of the process, without the pages of mapped files, which the kernel reclaims when
it needs them, and without the memory of the interpreter after the imports.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from recipe.atropos.checkpoint.store import Checkpoints
from recipe.atropos.config.compose import load_config
from recipe.atropos.run.folder import RunDir
from recipe.atropos.tensors.format import TENSOR_NAMES
from recipe.atropos.utils.files import write_json

WORLD = 2
SHAPES = {
    "Qwen2.5-0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "heads": (14, 2)},
    "Qwen2.5-1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "heads": (12, 2)},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "heads": (2, 2)},
}
TARGETS = {"over_largest_tensor": "<= 1.5"}


def model_config(name: str) -> Qwen2Config:
    shape = dict(SHAPES[name])
    heads, kv_heads = shape.pop("heads")
    return Qwen2Config(
        vocab_size=151936,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=False,  # so the largest tensor exists twice
        architectures=["Qwen2ForCausalLM"],
        **shape,
    )


def shapes_of(config: Qwen2Config) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def save_rank(rank: int, folder: Path, name: str, store: str) -> None:
    """Save one rank's shards, of random values; no rank holds more than its own."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    state = {}
    for key, shape in shapes_of(model_config(name)).items():
        rows = -(-shape[0] // WORLD)
        local = torch.rand(max(0, min(rows, shape[0] - rank * rows)), *shape[1:])
        stride = torch.empty(shape, device="meta").stride()
        state[key] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    torch.save(state, folder / f"model_world_size_{WORLD}_rank_{rank}.pt")
    torch.distributed.destroy_process_group()


def make_run(folder: Path, name: str) -> RunDir:
    run = RunDir(folder / "run")
    config = model_config(name)
    with Checkpoints(run.checkpoints).saving(1, None) as checkpoint:
        actor = checkpoint / "actor"
        (actor / "huggingface").mkdir(parents=True)
        torch.multiprocessing.spawn(save_rank, (actor, name, str(folder / "store")), nprocs=WORLD)
        config.save_pretrained(actor / "huggingface")
        tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="a", eos_token="b").save_pretrained(
            actor / "huggingface"
        )
        write_json(actor / TENSOR_NAMES, list(shapes_of(config)))
        write_json(actor / "fsdp_config.json", {"FSDP_version": 2, "world_size": WORLD})
    settings = load_config(["actor_rollout_ref.model.path=org/model", f"run.dir={run.path}"])
    OmegaConf.save(settings, run.config)
    return run


def measure(command: list[str]) -> tuple[float, float]:
    """Return (peak anonymous memory in GB, seconds) of a command; exit if it fails."""
    begin, peak = time.monotonic(), 0
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
                peak = max(
                    [peak, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))]
                )
            except OSError:
                pass
            time.sleep(0.01)
        if process.returncode:
            log.seek(0)
            sys.exit(log.read().decode())
    return peak * 1024 / 1e9, time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smaller model alone")
    parser.add_argument("--smoke", action="store_true", help="the smallest size: whether it runs")
    arguments = parser.parse_args()
    names = ["tiny"] if arguments.smoke else ["Qwen2.5-0.5B"] if arguments.quick else ["Qwen2.5-0.5B", "Qwen2.5-1.5B"]
    imports = "import recipe.atropos.checkpoint.export; "
    imports += "from transformers import AutoModelForCausalLM, AutoModelForImageTextToText"
    floor, _ = measure([sys.executable, "-c", imports])
    print(f"{WORLD} ranks; the imports alone have {floor:.2f} GB\n")
    print(f"{'':<46}{'memory above the imports, GB':>30}{'seconds':>10}")
    figures: dict[str, Any] = {"imports_gb": round(floor, 3)}
    for name in names:
        sizes = [shape.numel() * 4 / 1e9 for shape in shapes_of(model_config(name)).values()]
        with tempfile.TemporaryDirectory() as temporary:
            run = make_run(Path(temporary), name)
            ours = measure([sys.executable, "-m", "recipe.atropos", "export", str(run.path)])
            theirs = None
            if name == names[0]:  # for a larger one it needs too much memory
                merger = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
                merger += ["--local_dir", str(run.checkpoints / "global_step_1/actor")]
                theirs = measure([*merger, "--target_dir", f"{temporary}/verl"])
        print(f"{name}, {sum(sizes):.2f} GB of float32, the largest tensor {max(sizes):.2f} GB")
        for what, taken in (
            ("recipe.atropos.checkpoint.export", ours),
            ("verl.model_merger, rounds to bfloat16", theirs),
        ):
            if taken is not None:
                print(f"  {what:<44}{taken[0] - floor:>30.2f}{taken[1]:>10.1f}")
        figures[name] = {
            "gb": round(sum(sizes), 3),
            "ours_gb": round(ours[0] - floor, 3),
            "ours_s": round(ours[1], 1),
            "verl_gb": theirs and round(theirs[0] - floor, 3),
            "verl_s": theirs and round(theirs[1], 1),
            "over_largest_tensor": round((ours[0] - floor) / max(sizes), 3),
        }
    ok = all(figures[name]["over_largest_tensor"] <= 1.5 for name in names)
    print(json.dumps({"name": "export", "figures": figures, "targets": TARGETS, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
