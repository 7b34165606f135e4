"""reasoning-gym for Atropos: ``python -m recipe.atropos.environments.reasoning serve|evaluate|process [flags]``.

Its hundred tasks generate their problems and score the answers; this environment asks the policy for an answer between
``<answer>`` and ``</answer>`` and takes the task's own score, from 0 to 1. Tokens, masks and logprobs are the managed
server's: what the policy sampled, never encoded again.

The held-out problems are the same for every seed, and no training problem is one of them.
"""

import asyncio
import time
from typing import Any

import yaml
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field

from recipe.atropos.adapter.cli import adapt
from recipe.atropos.adapter.sampled import group_of_nodes
from recipe.atropos.data.sampling import default_temperature

Problem = dict[str, Any]  # question, answer, metadata: reasoning-gym's own

SYSTEM_PROMPT = (
    "Answer the question, step by step if that helps. Put the final answer, and nothing else, between <answer> and "
    "</answer>."
)
_HELD_OUT_SEED = 1_000_000
_SEEDS_APART = 1_000_003  # reasoning-gym's problem i of seed s is problem 0 of seed s + i
_SEEDS = 2**32 - 2**24  # some tasks take only 32 bits


class ReasoningEnvConfig(BaseEnvConfig):
    """BaseEnv's options and this environment's own."""

    task: str = Field("chain_sum", description="Name of the task in reasoning-gym")
    task_config: str = Field("{}", description="The task's own settings, as JSON or YAML: {min_terms: 2}")
    train_size: int = Field(10_000, description="Number of training problems in an epoch")
    eval_size: int = Field(256, description="Number of held-out problems; fewer where a task has fewer different ones")
    seed: int = Field(0, description="Of the training problems")
    system_prompt: str = Field(SYSTEM_PROMPT, description="Empty for none")
    temperature: float = Field(
        default_factory=default_temperature, description="Of sampling; by default the trainer's, 1 without a launcher"
    )
    max_answer_tokens: int | None = Field(None, description="Of one answer; by default what max_token_length leaves")


class ReasoningEnv(BaseEnv):
    """Single-turn problems of one task of reasoning-gym."""

    name = "reasoning"
    env_config_cls = ReasoningEnvConfig

    @classmethod
    def config_init(cls) -> tuple[ReasoningEnvConfig, list[APIServerConfig]]:
        env_config = ReasoningEnvConfig(
            tokenizer_name="Qwen/Qwen2.5-1.5B-Instruct",
            group_size=8,
            use_wandb=False,
            max_token_length=2048,
            wandb_name=cls.name,
        )
        server = APIServerConfig(
            model_name=env_config.tokenizer_name,
            base_url="http://localhost:9001/v1",
            api_key="x",
            server_type="sglang",
            health_check=False,
        )
        return env_config, [server]

    # ------------------------------------------------------------------ problems

    async def setup(self) -> None:
        """Both sets of problems.

        Raises:
            ValueError: reasoning-gym does not know the task, or the task not its settings, or not its own answer;
                names them.
        """
        config = self.config
        self.position = 0  # of the next training problem, counted over epochs
        self.test = held_out(config.task, config.task_config, config.eval_size)
        self._held_out = {problem["question"] for problem in self.test}
        self._train = dataset(config.task, config.task_config, config.train_size, config.seed)
        right = self.test[0]["answer"]
        if right is not None and score(self._train, f"<answer>{right}</answer>", self.test[0]) is None:
            raise ValueError(f"--env.task={config.task}: the task cannot score its own answer {right!r}; take another")

    async def get_next_item(self) -> Problem:
        """The training problems, epoch after epoch, without those that are held out.

        Raises:
            ValueError: all of them are.
        """
        for _ in range(self.config.train_size):
            problem = self._train[self.position % self.config.train_size]
            self.position += 1
            if problem["question"] not in self._held_out:
                return problem
        raise ValueError(
            f"--env.task={self.config.task} --env.task_config={self.config.task_config}: all of the "
            f"{self.config.train_size} training problems are among the {len(self.test)} held-out ones; lower "
            "--env.eval_size, or make the task larger"
        )

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """BaseEnv sets what is saved here as attributes when a run resumes at ``step``."""
        super().save_checkpoint(step, {"position": self.position, **(data or {})})

    def score(self, text: str, problem: Problem) -> float:
        """In [0, 1], by the task; 0 where nothing stands between the tags, or nothing that it can read."""
        found = score(self._train, text, problem)
        if found is None:
            self.report.count("unreadable_answers")
        return found or 0.0

    # ------------------------------------------------------------------ rollouts

    def messages(self, problem: Problem) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.config.system_prompt}] if self.config.system_prompt else []
        return [*system, {"role": "user", "content": problem["question"]}]

    def answer_tokens(self, messages: list[dict[str, str]]) -> int:
        """How long an answer may be: the whole sequence stays below what BaseEnv and the trainer accept.

        Raises:
            ValueError: the problem leaves no room for one.
        """
        prompt = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        limit = self.config.max_token_length
        if self.max_token_len > 0:
            limit = min(limit, self.max_token_len)
        room = limit - 1 - len(self.tokenizer.encode(prompt))
        if room < 1:
            raise ValueError(f"a problem fills --env.max_token_length={limit}: {messages[-1]['content'][:80]!r}")
        return min(room, self.config.max_answer_tokens or room)

    async def collect_trajectories(self, item: Problem) -> tuple[ScoredDataGroup | None, list[Problem]]:
        """A scored group for one problem. A problem whose sampling was aborted comes back for another try."""
        messages = self.messages(item)
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completion = await managed.chat_completion(
                messages=messages,
                n=self.config.group_size,
                max_tokens=self.answer_tokens(messages),
                temperature=self.config.temperature,
                top_p=1.0,
            )
            nodes = managed.get_state()["nodes"]
        if any(node.metadata["finish_reason"] == "abort" for node in nodes):
            return None, [item]
        texts = [choice.message.content for choice in completion.choices]
        return group_of_nodes(nodes, [self.score(text, item) for text in texts]), []

    # ------------------------------------------------------------------ evaluation

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Greedy answers to the held-out problems: ``eval/accuracy``, the share of full scores, ``eval/mean_score``.

        A call that fails raises: it is no wrong answer.
        """
        started = time.time()
        limit = asyncio.Semaphore(self.config.max_eval_workers)

        async def answer(problem: Problem) -> dict[str, Any]:
            messages = self.messages(problem)
            async with limit, self.server.managed_server(tokenizer=self.tokenizer) as managed:
                completion = await managed.chat_completion(
                    messages=messages, n=1, max_tokens=self.answer_tokens(messages), temperature=0.0, split="eval"
                )
            text = completion.choices[0].message.content
            known = {"question": problem["question"], "gold": problem["answer"]}
            return {**known, "answer": text, "score": self.score(text, problem)}

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(problem)) for problem in self.test]
        samples = [task.result() for task in tasks]
        metrics = {
            "eval/accuracy": sum(sample["score"] == 1 for sample in samples) / len(samples),
            "eval/mean_score": sum(sample["score"] for sample in samples) / len(samples),
            "eval/total": len(samples),
        }
        await self.evaluate_log(
            metrics=metrics,
            samples=samples,
            start_time=started,
            end_time=time.time(),
            generation_parameters={"temperature": 0.0},
        )


def dataset(task: str, settings: str, size: int, seed: int) -> Any:
    """``size`` problems of a task; item i is a Problem. Another ``seed`` gives others.

    Raises:
        ValueError: reasoning-gym does not know the task, or the task not its settings; names them.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise ValueError(f"--env.task={task}: reasoning-gym has no such task; it has {', '.join(sorted(DATASETS))}")
    try:
        given = yaml.safe_load(settings) or {}
        made = reasoning_gym.create_dataset(task, **given, size=size, seed=seed * _SEEDS_APART % _SEEDS)
        made[0]  # some settings are looked at only here
        return made
    except (yaml.YAMLError, TypeError, AssertionError, ValueError) as error:
        raise ValueError(f"--env.task_config={settings} does not suit --env.task={task}: {error}") from error


def held_out(task: str, settings: str, size: int) -> list[Problem]:
    """At most ``size`` different problems, the same whatever the seed of a run."""
    found: dict[str, Problem] = {}
    for problem in dataset(task, settings, 4 * size, _HELD_OUT_SEED):
        found.setdefault(problem["question"], problem)
        if len(found) == size:
            break
    return list(found.values())


def score(task: Any, text: str, problem: Problem) -> float | None:
    """In [0, 1], by the task (a ``dataset``); 0 where nothing stands between the tags.

    None where the task raises: some of them do, of an answer that is not written as they expect it.
    """
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(text.rpartition("</think>")[2])
    try:
        return float(task.score_answer(answer, problem))
    except Exception:  # whatever its parser raises
        return None


if __name__ == "__main__":
    adapt(ReasoningEnv).cli()
