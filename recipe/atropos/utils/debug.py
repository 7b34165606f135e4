"""Look at what a run was trained on, train on it again without any server, export its model, look at an environment.

    python -m recipe.atropos.utils.debug show runs/NAME --step 3 --group 0 --sequence 1
    python -m recipe.atropos.utils.debug replay runs/NAME [key=value ...]
    python -m recipe.atropos.utils.debug export runs/NAME [--step N | --best] [--out DIR] [--dtype bfloat16]
    python -m recipe.atropos.utils.debug verify-env --env MODULE:Class --model DIR --url URL [key=value ...]

``show`` and ``replay`` need the batches of the run: start it with ``trainer.atropos.record_batches=true``. ``show``
prints one trajectory, each token colored by mask, logprob and advantage. ``replay`` trains with the run's own
configuration, without Trajectory API, environment and SGLang, into ``runs/NAME-replay``, and says whether the weights
became the same: on a CPU they do; on GPUs set ``actor_rollout_ref.actor.fsdp_config.full_determinism=true`` in both.

``export`` writes the model of a checkpoint as a folder in Hugging Face format (``checkpoint/export.py``).

``verify-env`` has an environment roll out one item with a running SGLang server, and shows what each side saw and what
the trainer would read of it; keys are fields of the environment's configuration. Exit status 0 only if there is
something to train on, all of it sampled by that server.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text
from transformers import AutoConfig, AutoTokenizer

from recipe.atropos.adapter.loading import EnvironmentTargetError
from recipe.atropos.algorithm.advantages import AdvantageConfig, RunningMoments, compute_advantages
from recipe.atropos.checkpoint.export import add_arguments as add_export_arguments
from recipe.atropos.checkpoint.export import export
from recipe.atropos.commands import plan as memory_plan
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.data.replay import read_batch
from recipe.atropos.data.rows import RowLimits, environment_name
from recipe.atropos.data_source import DataSourceError
from recipe.atropos.errors import ConfigurationError, one_line_errors
from recipe.atropos.run_dir import RunDir
from recipe.atropos.verl_ext.batch import DataProto

_UNLIKELY = -3.0  # nats; a sampled token below it (5%) is underlined


def load_config(run: Path) -> DictConfig:
    """The configuration that the launcher left in the run folder.

    Raises:
        FileNotFoundError: it is no run folder.
    """
    path = RunDir(run).config
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; give the folder of a run that launch_services started")
    return OmegaConf.load(path)


def rows_of_step(config: DictConfig, step: int) -> DataProto:
    """The recorded batch of ``step`` as rows, with the advantages that these rows alone give.

    A penalty on the KL in the reward, rejection and statistics over the whole run need the model and the run; they are
    left out.

    Raises:
        DataSourceError: there is no such batch, or the estimator needs the model.
    """
    atropos = config.trainer.atropos
    if "optimal_token_baseline" in config.algorithm.adv_estimator:
        raise DataSourceError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs the model: nothing to show"
        )
    model = config.actor_rollout_ref.model
    model_config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    limits = RowLimits(
        config.data.max_prompt_length,
        config.data.max_response_length,
        pad_token_id=0,
        overlong=atropos.overlong,
        vocab_size=model_config.get_text_config().vocab_size,
        read_teacher=atropos.distillation.loss_coef > 0,
    )
    rows, report = groups_to_data_proto(read_batch(RunDir(config.run.dir).batches, step), limits)
    if rows is None:
        raise DataSourceError(f"step {step} holds no row to train on; dropped: {dict(report.dropped)}")
    rows.batch["token_level_rewards"] = rows.batch["token_level_scores"]
    settings = AdvantageConfig.from_config(atropos)
    compute_advantages(rows, config.algorithm, settings, RunningMoments())
    return rows


def find_row(rows: DataProto, group: int, sequence: int) -> int:
    """The row of the ``sequence``-th trained sequence of ``group``.

    Raises:
        DataSourceError: there is none; says which there are.
    """
    of_group = [row for row, uid in enumerate(rows.non_tensor_batch["uid"]) if uid == str(group)]
    if sequence not in range(len(of_group)):
        groups = sorted({int(uid) for uid in rows.non_tensor_batch["uid"]})
        raise DataSourceError(
            f"no sequence {sequence} in group {group}, which has {len(of_group)} trained ones; groups are {groups}"
        )
    return of_group[sequence]


def tokens_of_row(rows: DataProto, row: int, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """A row's tokens in order: position, id, text, trained, logprob and advantage (None where there is none)."""
    tensors = rows.batch
    width = tensors["prompts"].shape[1]
    known = rows.non_tensor_batch["has_log_probs"][row]
    for column in tensors["attention_mask"][row].nonzero().squeeze(-1).tolist():
        at = column - width
        trained = at >= 0 and bool(tensors["response_mask"][row, at])
        token = int(tensors["input_ids"][row, column])
        yield {
            "position": int(tensors["position_ids"][row, column]),
            "id": token,
            "text": tokenizer.decode([token]),
            "trained": trained,
            "logprob": tensors["rollout_log_probs"][row, at].item() if trained and known else None,
            "advantage": tensors["advantages"][row, at].item() if trained else None,
        }


def style_of(token: dict[str, Any], largest: float) -> Style:
    """Grey: not trained on. Green and red: advantage above and below 0, the fuller the larger. Underlined: unlikely."""
    if not token["trained"]:
        return Style(color="bright_black")
    share = min(1.0, abs(token["advantage"]) / largest) if largest else 0.0
    full, empty = int(60 + 140 * share), int(60 - 60 * share)
    color = (60, 60, 60) if share == 0 else (empty, full, empty) if token["advantage"] > 0 else (full, empty, empty)
    unlikely = token["logprob"] is not None and token["logprob"] < _UNLIKELY
    return Style(color="white", bgcolor=f"rgb({color[0]},{color[1]},{color[2]})", underline=unlikely)


def show(run: Path, step: int, group: int, sequence: int, table: bool, console: Console) -> None:
    """Print one trajectory of a recorded step."""
    config = load_config(run)
    config.run.dir = str(run)
    rows = rows_of_step(config, step)
    row = find_row(rows, group, sequence)
    model = config.actor_rollout_ref.model
    tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    tokens = list(tokens_of_row(rows, row, tokenizer))
    trained = [token for token in tokens if token["trained"]]
    largest = max(abs(token["advantage"]) for token in trained)
    others = rows.non_tensor_batch
    environment = environment_name(others["env_name"][row], others["env_id"][row])
    versions = f"{others['policy_version_min'][row]} to {others['policy_version_max'][row]}"
    console.print(
        f"step {step}, group {group}, sequence {sequence} of {environment}: "
        f"score {rows.batch['token_level_scores'][row].sum():g}, {len(tokens)} tokens, {len(trained)} trained, "
        f"largest advantage {largest:.3g}, weight versions {versions}",
        markup=False,
    )
    legend = Text("grey: not trained on; green / red: advantage above / below 0; underlined: logprob under ")
    console.print(legend.append(f"{_UNLIKELY:g}"))
    console.print(Text.assemble(*((token["text"], style_of(token, largest)) for token in tokens)))
    if table:
        grid = Table("position", "id", "token", "trained", "logprob", "advantage")
        for token in tokens:
            numbers = ["" if token[key] is None else f"{token[key]:.4f}" for key in ("logprob", "advantage")]
            text = Text(repr(token["text"]), style_of(token, largest))
            grid.add_row(str(token["position"]), str(token["id"]), text, "yes" if token["trained"] else "", *numbers)
        console.print(grid)


def replay(run: Path, overrides: Sequence[str], console: Console) -> bool:
    """Train on the recorded batches of ``run``; True if the weights of the last step equal the run's.

    Raises:
        FileNotFoundError, DataSourceError: there is nothing to replay.
    """
    from recipe.atropos.main import run as train

    config = load_config(run)
    replayed = run.with_name(f"{run.name}-replay")
    settings = {
        "run.name": replayed.name,
        "run.dir": str(replayed),
        "trainer.default_local_dir": str(RunDir(replayed).checkpoints),
        "trainer.rollout_data_dir": str(RunDir(replayed).rollouts),
        "trainer.resume_mode": "disable",
        "trainer.atropos.record_batches": False,
        "trainer.atropos.replay": str(RunDir(run).batches),
    }
    for key, value in settings.items():
        OmegaConf.update(config, key, value)
    OmegaConf.set_struct(config, True)  # a key that is not there is a misspelt one
    config.merge_with_dotlist(list(overrides))
    train(config)
    step = config.trainer.total_training_steps
    folders = [RunDir(folder).checkpoints / f"global_step_{step}" / "actor" for folder in (run, config.run.dir)]
    if not folders[0].is_dir():
        console.print(f"trained {step} steps; {run} has no checkpoint of that step to compare the weights with")
        return False
    differing = differing_tensors(*folders)
    if differing:
        console.print(f"weights after step {step} differ in {len(differing)} tensors, first {differing[0]}")
    else:
        console.print(f"weights after step {step}: the same, bit for bit")
    return not differing


def differing_tensors(one: Path, other: Path) -> list[str]:
    """Names of the tensors that two checkpoints of the actor do not share bit for bit, over all ranks.

    Raises:
        FileNotFoundError: a checkpoint has no model, or one of another number of ranks.
    """
    names = []
    files, others = ({path.name for path in folder.glob("model_world_size_*.pt")} for folder in (one, other))
    if not files or files != others:
        raise FileNotFoundError(f"{one} and {other} hold no checkpoints of one and the same number of ranks")
    for name in sorted(files):
        states = [torch.load(folder / name, weights_only=False, map_location="cpu") for folder in (one, other)]
        for key in sorted(states[0].keys() | states[1].keys()):
            pair = [getattr(state.get(key), "_local_tensor", state.get(key)) for state in states]
            if any(tensor is None for tensor in pair) or not torch.equal(*pair):
                names.append(key)
    return names


def verify_env(arguments: argparse.Namespace, console: Console) -> bool:
    """Whether what the environment makes of one item can be trained on.

    Raises:
        ConfigurationError: the environment has no such configuration.
    """
    from recipe.atropos.commands import verify_env

    overrides = OmegaConf.to_container(OmegaConf.from_dotlist(arguments.overrides))
    try:
        result = asyncio.run(
            verify_env.verify(arguments.env, arguments.model, arguments.url, overrides, arguments.timeout)
        )
    except TimeoutError as error:
        raise ConfigurationError(f"{arguments.env}: not done within --timeout={arguments.timeout:g} s") from error
    except EnvironmentTargetError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"{arguments.env}: {error}") from error
    verify_env.show(result, console, arguments.table)
    return result.ok


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipe.atropos.utils.debug", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("show", help="print one trajectory of a recorded step")
    shown.add_argument("run", type=Path, help="folder of the run")
    shown.add_argument("--step", type=int, default=1)
    shown.add_argument("--group", type=int, default=0, help="its place in the batch")
    shown.add_argument("--sequence", type=int, default=0)
    shown.add_argument("--table", action="store_true", help="also a line a token")
    replayed = commands.add_parser("replay", help="train on the recorded batches, without servers")
    replayed.add_argument("run", type=Path, help="folder of the run")
    replayed.add_argument("overrides", nargs="*", help="key=value of the configuration")
    add_export_arguments(commands.add_parser("export", help="a checkpoint's model in Hugging Face format"))
    memory_plan.add_arguments(
        commands.add_parser("plan", help="the memory that a configuration needs of each GPU, and what does not fit")
    )
    verified = commands.add_parser("verify-env", help="one group with a real server, and what each side saw")
    verified.add_argument("--env", required=True, help="MODULE:Class, FILE.py or FILE.py:Class")
    verified.add_argument("--model", help="folder or name of the policy; default: the environment's own tokenizer")
    verified.add_argument("--url", help="its SGLang server or gateway; default: the environment's own")
    verified.add_argument("--timeout", type=float, default=300.0, help="seconds, over all of it")
    verified.add_argument("--table", action="store_true", help="also a line a token")
    verified.add_argument("overrides", nargs="*", help="key=value of the environment's configuration")
    arguments = parser.parse_args(argv)
    console = Console(highlight=False)
    with one_line_errors(OmegaConfBaseException, OSError):
        if arguments.command == "show":
            show(arguments.run, arguments.step, arguments.group, arguments.sequence, arguments.table, console)
            return 0
        if arguments.command == "export":
            console.print(str(export(arguments)), markup=False, soft_wrap=True)
            return 0
        if arguments.command == "plan":
            return 0 if memory_plan.plan(arguments, console) else 1
        if arguments.command == "verify-env":
            return 0 if verify_env(arguments, console) else 1
        return 0 if replay(arguments.run, arguments.overrides, console) else 1


if __name__ == "__main__":
    sys.exit(main())
