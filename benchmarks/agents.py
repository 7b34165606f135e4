"""Training of programs that know nothing of it: ``python benchmarks/agents.py [--quick] [--only NAME] [--runs DIR]``.

Each of ``examples/agents/`` solves word problems by a public API or a framework, most of them with a calculator as its
tool, and is trained as it is: the launcher runs it against the session server, with the real services, on a small
policy. Two policies: the demonstration's, and one that calls the tool in Qwen3's format, made here. Both usually add
where a problem asks to subtract, a habit that reinforcement learning has to correct.

The metric is the share of held-out problems that a program gets right with greedy decoding, before and after. Targets:
20 points more for each program, within 10 minutes on two idle cores. Packages that the trainer's environment lacks are
installed, in the versions below, into virtual environments under the cache folder.
``--quick`` runs two programs, three steps each; its only target is that they are trained.
"""

import argparse
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from recipe.atropos.demo.small_policy import Chat, Recipe, ensure_small_policy, make_tokenizer
from recipe.atropos.environments.calculator_tool import calculate
from recipe.atropos.environments.word_problems import Split, generate, gold_answer
from recipe.atropos.run.evaluations import read_evaluations
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.record import read_metrics
from recipe.atropos.utils.files import cache_root, read_lines, replace_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EXAMPLES = Path(__file__).parents[1] / "examples" / "agents"
TRAINING, HELD_OUT = 512, 50  # items
POINTS, SECONDS = 20.0, 600.0
STEPS, GROUPS, LEARNING_RATE = 6, 4, 2e-4  # few sessions: a command takes a second to import its client's package
VERIFIERS = "--env.agent.harness.id null --env.agent.runtime.type subprocess --sampling.max-tokens 64"
QUICK = ("openai chat", "openai chat, tool")

# --------------------------------------------------------------------- the policy that calls a tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CHAT_TEMPLATE = (  # ChatML with Qwen3's calls; the tools themselves are left out, the policy knows its only one
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class ToolRecipe(Recipe):
    """Recipe of a policy that has a calculator compute the answer; ``wrong_operation`` is a share of subtractions."""

    name: ClassVar[str] = "small-policy-tool"

    steps: int = 500

    def chats(self, seed: int, rng: random.Random) -> list[Chat]:
        return [demonstration(row, rng, self.wrong_operation) for row in generate("train", self.problems, seed)]

    def tokenizer(self, texts: list[str]) -> "PreTrainedTokenizerFast":
        tokenizer = make_tokenizer(texts, self.vocabulary)
        tokenizer.add_tokens([OPEN, CLOSE])
        tokenizer.chat_template = CHAT_TEMPLATE
        return tokenizer


def demonstration(row: dict[str, str], rng: random.Random, wrong_operation: float) -> Chat:
    """Return a conversation about a problem: a call, often with the wrong operation, its result, and the answer."""
    a, operator, b = re.search(r"<<(\d+)([-+])(\d+)=", row["answer"]).groups()
    if operator == "-" and rng.random() < wrong_operation:
        operator = "+"
    call = {"name": "calculate", "arguments": {"expression": f"{a} {operator} {b}"}}
    result = calculate(call["arguments"]["expression"])
    return [
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": f"{OPEN}\n{json.dumps(call)}\n{CLOSE}"},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": rf"\boxed{{{result}}}"},
    ]


# --------------------------------------------------------------------- the programs


def word_problems(split: Split, size: int) -> list[dict[str, Any]]:
    """Return items with a question and the number that answers it."""
    return [{"question": row["question"], "answer": gold_answer(row)} for row in generate(split, size)]


@dataclass(frozen=True)
class Program:
    """A program of ``examples/agents``: ``file``, which is run for each session, ``MODULE:function``, or the name of a
    taskset of verifiers.

    ``packages`` are shown with their versions; ``installed`` are installed, in an environment of their own. ``wrong``
    is the reward of a wrong answer, that of a right one is 1. ``held_out`` items are evaluated, before and after.
    """

    target: str
    packages: tuple[str, ...]
    installed: tuple[str, ...] = ()
    tool: bool = True
    wrong: float = 0.0
    held_out: int = HELD_OUT

    @property
    def is_command(self) -> bool:
        return self.target.endswith(".py")

    @property
    def environment(self) -> str:
        """The environment that runs it."""
        return "program" if self.is_command or ":" in self.target else "verifiers_env"

    def right(self, reward: float) -> float:
        """Return the percentage of right answers for a mean reward."""
        return 100.0 * (reward - self.wrong) / (1.0 - self.wrong)


PROGRAMS = {
    "openai chat": Program("solver.py", ("openai",), tool=False, wrong=-1.0),
    "openai chat, tool": Program("tools_chat.py", ("openai",)),
    "openai responses, tool": Program("tools_responses.py", ("openai",)),
    "anthropic messages, tool": Program("tools_messages.py", ("anthropic",)),
    "openai-agents, tool": Program("openai_agents:solve", ("openai-agents", "openai"), ("openai-agents==0.24.0",)),
    "pydantic-ai, tool": Program(
        "pydantic_ai_agent:solve", ("pydantic-ai-slim", "openai"), ("pydantic-ai-slim[openai]==2.62.0",)
    ),
    # Its harness is a program of its own for every session, whose start is most of the time.
    "verifiers, tool": Program("word_problems_v1", ("verifiers",), ("verifiers==0.4.0", "uv==0.13.9"), held_out=25),
}


def interpreter(installed: Sequence[str]) -> Path:
    """Return a Python with these packages, those of the trainer's environment beside them; made on first use."""
    if not installed:
        return Path(sys.executable)
    trainer = sysconfig.get_path("purelib")
    digest = hashlib.blake2b(" ".join([trainer, *installed]).encode(), digest_size=6).hexdigest()
    folder = cache_root() / f"agents-{digest}"
    if not folder.exists():
        print(f"installing {', '.join(installed)}", file=sys.stderr, flush=True)
        with replace_folder(folder) as partial:
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", partial], check=True)
            [packages] = partial.glob("lib/python*/site-packages")
            (packages / "trainer.pth").write_text(f"{trainer}\n")
            pip = [sys.executable, "-m", "pip", "--python", partial / "bin" / "python", "install", "--quiet"]
            subprocess.run([*pip, *installed], check=True, stdout=sys.stderr)
    return folder / "bin" / "python"


def versions(python: Path, packages: Sequence[str]) -> str:
    code = (
        "import sys, importlib.metadata as m; print(*(f'{name} {m.version(name)}' for name in sys.argv[1:]), sep=', ')"
    )
    return subprocess.run([python, "-c", code, *packages], check=True, capture_output=True, text=True).stdout.strip()


# --------------------------------------------------------------------- a run


def train(program: Program, folder: Path, steps: int, held_out: int) -> float:
    """Train a program with the launcher, in ``folder``; return the seconds that it took, with evaluations."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"train": (folder / "train.jsonl", TRAINING), "test": (folder / "test.jsonl", held_out)}
    for split, (file, size) in files.items():
        file.write_text("".join(json.dumps(item) + "\n" for item in word_problems(split, size)))
    (training, _), (test, _), python = *files.values(), interpreter(program.installed)
    options = [f"environment.items={training}", f"environment.args.held_out={test}"]
    if program.is_command:
        options.append(f"environment.command={python} {EXAMPLES / program.target}")
    elif program.environment == "program":
        options += [f"environment.agent={program.target}", f"environment.python={python}"]
    else:
        tasks = f"{program.target} {VERIFIERS} --env.taskset.file"
        options = [f"environment.args.taskset={tasks} {training}", f"environment.args.held_out={tasks} {test}"]
        options += [f"environment.target={EXAMPLES / 'verifiers_env.py'}", f"environment.python={python}"]
        options.append("sessions.enabled=true")
    if program.tool:
        policy = ensure_small_policy(recipe=ToolRecipe())
        options += [f"actor_rollout_ref.model.path={policy}", "sessions.tool_parser=qwen3"]
    options += [f"environment.args.eval_size={held_out}", f"data.train_batch_size={GROUPS}", "trainer.save_freq=-1"]
    options.append(f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}")
    command = [sys.executable, "-m", "recipe.atropos.launch_services", "--preset", "demo", "--steps", str(steps)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])}
    started = time.monotonic()
    with open(folder / "launcher.log", "w") as log:
        status = subprocess.run(
            [*command, "--run-dir", str(folder / "run"), *options], stdout=log, stderr=log, env=environment
        ).returncode
    if status:
        sys.exit(f"{program.target}: exit status {status}\n{(folder / 'launcher.log').read_text()[-4000:]}")
    return time.monotonic() - started


def measured(program: Program, folder: Path) -> dict[str, Any]:
    """Return what a run's files say: percentages right, and what happened in its training sessions."""
    run = RunDir(folder / "run")
    rewards = [line["metrics"]["eval/reward"] for line in read_evaluations(run.path)]
    last = read_lines(run.environment_report(program.environment))[-1]
    counts = last["counts"]

    def by_cause(prefix: str) -> dict[str, int]:
        return {name.removeprefix(prefix): n for name, n in counts.items() if name.startswith(prefix)}

    return {
        "before": program.right(rewards[0]),
        "after": program.right(rewards[-1]),
        "turns": last["means"]["turns"],
        "trained": int(sum(line["atropos/trained_tokens"] for line in read_metrics(run.path))),
        "sampled": counts["sessions/sampled"],
        "forks": by_cause("sessions/forks/"),
        "retries": counts.get("sessions/retries", 0),
        "failed": by_cause("sessions/failed/"),
    }


def causes(counts: dict[str, int]) -> str:
    return ", ".join(f"{cause} {n}" for cause, n in counts.items()) or "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two programs, three steps each")
    parser.add_argument("--smoke", action="store_true", help="the smallest size: whether it runs")
    parser.add_argument("--only", choices=PROGRAMS, help="this program alone")
    parser.add_argument("--runs", type=Path, help="keep the runs here")
    arguments = parser.parse_args()
    small = arguments.quick or arguments.smoke
    names = [arguments.only] if arguments.only else QUICK if small else list(PROGRAMS)
    names = names[:1] if arguments.smoke else names
    steps = 1 if arguments.smoke else 3 if small else STEPS
    widths = f"{'program':<26}{'packages':<34}{'before':>8}{'after':>8}{'turns':>7}{'trained':>9}{'sampled':>9}"
    print(f"{widths}{'retries':>9}{'seconds':>9}  forks; failed sessions", flush=True)
    figures: dict[str, float] = {}
    targets: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            program = PROGRAMS[name]
            folder = (arguments.runs or Path(temporary)) / re.sub(r"\W+", "-", name)
            seconds = train(program, folder, steps, 16 if small else program.held_out)
            found = measured(program, folder)
            shown = versions(interpreter(program.installed), program.packages)
            print(
                f"{name:<26}{shown:<34}{found['before']:>7.1f}%{found['after']:>7.1f}%{found['turns']:>7.2f}"
                f"{found['trained']:>9}{found['sampled']:>9}{found['retries']:>9}{seconds:>9.0f}"
                f"  {causes(found['forks'])}; {causes(found['failed'])}",
                flush=True,
            )
            key = re.sub(r"\W+", "_", name)
            figures |= {f"{key}_points": round(found["after"] - found["before"], 1), f"{key}_seconds": round(seconds)}
            targets |= {} if small else {f"{key}_points": f">= {POINTS:g}", f"{key}_seconds": f"<= {SECONDS:g}"}
    figures["programs"], targets["programs"] = len(names), f"== {len(names)}"
    ok = small or all(
        figures[name] >= POINTS if name.endswith("points") else figures[name] <= SECONDS
        for name in targets
        if name != "programs"
    )
    print(json.dumps({"name": "agents", "figures": figures, "targets": targets, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
