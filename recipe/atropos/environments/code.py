"""Programs scored by tests: ``python -m recipe.atropos.environments.code serve|evaluate [flags]``.

The policy gets a problem of HumanEval or MBPP, or in one of their formats, and writes a Python program. A sandbox runs
it against the problem's tests: +1 if all pass, else -1. Guarantees, in addition to those of ``single_turn``:

- nothing that the policy writes runs outside the sandbox (``sandbox`` documents its isolation); if that does not work,
  the environment ends before anything is sampled, unless ``isolation`` is "none";
- an answer can pass only by what its functions return (``sandbox/answer.py``);
- answers are counted by outcome, ``answers/timeout`` and so on.

Problems: see ``code_problems``. A group of equal scores is not sent, as in ``gsm8k``.
"""

import asyncio
import logging
from typing import Any

from pydantic import Field

from recipe.atropos.adapter.cli import adapt
from recipe.atropos.environments.code_problems import Problem, job, load_problems
from recipe.atropos.environments.sandbox.runner import Isolation, ProgramVerdict, Sandbox, SandboxLimits
from recipe.atropos.environments.single_turn import Conversation, SingleTurnEnv, SingleTurnEnvConfig

logger = logging.getLogger(__name__)


class CodeEnvConfig(SingleTurnEnvConfig):
    """The options of single-turn environments and of the sandbox, whose limits apply to each answer."""

    dataset_name: str = Field(
        "google-research-datasets/mbpp",
        description="In HumanEval's or MBPP's format: a hub name, .jsonl or .parquet file, or folder; or 'synthetic'",
    )
    dataset_config: str | None = Field(None, description="Configuration of the dataset on the hub")
    system_prompt: str = Field(
        "Write the Python function that is asked for, with the imports that it needs, in one ```python block.",
        description="Empty for none",
    )
    shown_tests: int = Field(1, ge=0, description="How many of MBPP's tests the policy reads; HumanEval's never")
    isolation: Isolation = Field("seccomp", description="Of the sandbox; 'none' is unsafe")
    sandboxes: int | None = Field(None, ge=1, description="Answers that run at a time; by default one a core")
    cpu_seconds: int = Field(SandboxLimits.cpu_seconds, ge=1, description="CPU time")
    wall_seconds: float = Field(SandboxLimits.wall_seconds, gt=0, description="Elapsed time")
    memory_mb: int = Field(SandboxLimits.memory_mb, ge=128, description="Memory, MiB")


class CodeEnv(SingleTurnEnv):
    """Single-turn programming problems, scored by tests."""

    name = "code"
    env_config_cls = CodeEnvConfig

    async def setup(self) -> None:
        """Start the sandbox and load both splits.

        Raises:
            SandboxError: answers cannot be isolated here.
            ConfigurationError: naming the dataset, file or row.
        """
        config = self.config
        limits = SandboxLimits(config.cpu_seconds, config.wall_seconds, config.memory_mb)
        self.sandbox = Sandbox(limits, config.isolation, config.sandboxes)
        self.sandbox.start()
        unprotected = config.isolation == "none"
        what = "UNPROTECTED, as --env.isolation=none wants it" if unprotected else "isolated and probed"
        logger.warning("answers run %s: isolation %s, %d at a time", what, self.sandbox.isolation, self.sandbox.workers)
        await super().setup()

    @staticmethod
    def load(config: CodeEnvConfig) -> tuple[list[Problem], list[Problem]]:
        """Return the train split and the test split.

        Raises:
            ConfigurationError: naming the dataset, file or row.
        """
        name, part, shown = config.dataset_name, config.dataset_config, config.shown_tests
        return (
            load_problems(name, "train", part, config.train_size, config.seed, shown),
            load_problems(name, "test", part, config.eval_size, 0, shown),
        )

    async def verdicts(self, problem: Problem, texts: list[str]) -> list[ProgramVerdict]:
        """Return the verdict of each answer, in order."""
        loop, sandbox = asyncio.get_running_loop(), self.sandbox
        jobs = [job(problem, text) for text in texts]
        found = await asyncio.gather(*(loop.run_in_executor(sandbox.executor, sandbox.check, one) for one in jobs))
        for verdict in found:
            self.report.count(f"answers/{verdict.why}")
        return found

    async def scores(self, problem: Problem, answers: list[str], nodes: list[Any]) -> list[float]:
        passed = [verdict.passed for verdict in await self.verdicts(problem, answers)]
        self.percent_correct_buffer.extend(map(float, passed))
        return [1.0 if right else -1.0 for right in passed]

    async def eval_sample(self, problem: Problem, conversation: Conversation) -> dict[str, Any]:
        [verdict] = await self.verdicts(problem, [conversation.answer])
        return {
            "messages": conversation.messages,
            "task": problem["task"],
            "answer": conversation.answer,
            "gold": problem["gold"],
            "correct": verdict.passed,
            "why": f"{verdict.why} {verdict.detail}".strip(),
            "score": int(verdict.passed),
            "finish_reason": conversation.finish_reason,
        }


if __name__ == "__main__":
    adapt(CodeEnv).cli()
