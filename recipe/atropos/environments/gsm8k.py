r"""GSM8K for Atropos: ``python -m recipe.atropos.environments.gsm8k serve|evaluate|process [flags]``.

Problems come from the hub, a local folder or a generator (``word_problems``). The policy answers in ``\boxed{}``;
math_verify decides, +1 or -1, by what follows ``</think>`` where the policy thinks aloud. Tokens, masks and logprobs
are the managed server's: what the policy sampled, never encoded again. Where all answers are right, long ones get less.
A group in which every score is equal teaches nothing; BaseEnv does not send it, unless ``ensure_scores_are_not_same``
is off or something shapes the scores before that.

All this is as in Atropos' own gsm8k_server, which ``gsm8k_upstream`` runs. On purpose otherwise are:

- an answer of fewer than ten tokens counts as any other; there it is left out, and its group, now too small, is lost;
- an answer has the room that the problem leaves of ``max_token_length``; there both together may exceed it, and then
  the group is refused;
- evaluation is greedy, over the first ``eval_size`` problems; there it samples at 0.6, and says 0.0;
- a gold answer that cannot be parsed is an error; there the problem is skipped without a word.
"""

import asyncio
import logging
import random
import time
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from pydantic import Field

from recipe.atropos.adapter.cli import adapt
from recipe.atropos.adapter.completion_cache import trained_spans
from recipe.atropos.adapter.sampled import group_of_nodes
from recipe.atropos.data.sampling import default_temperature
from recipe.atropos.environments.word_problems import GSM8K, Row, gold_answer, load_problems

logger = logging.getLogger(__name__)

SYSTEM_PROMPT = r"Solve the problem step by step. Put the final number, and nothing else, into \boxed{}."

_BOXED = LatexExtractionConfig(
    normalization_config=NormalizationConfig(
        nits=False, malformed_operators=False, basic_latex=True, boxed="all", units=True
    ),
    boxed_match_priority=0,
    try_extract_without_anchor=False,
)


class GSM8kEnvConfig(BaseEnvConfig):
    """BaseEnv's options and this environment's own."""

    dataset_name: str = Field(
        GSM8K, description="A hub name, a GSM8K .jsonl file or folder, or 'synthetic': problems generated for trials"
    )
    dataset_config: str = Field("main", description="Configuration of the dataset on the hub, or subfolder")
    train_size: int | None = Field(None, description="Use only the first problems of the train split")
    eval_size: int = Field(256, description="Number of held-out problems, the first of the test split")
    seed: int = Field(0, description="Order of the training problems; of the generated ones also their choice")
    system_prompt: str = Field(SYSTEM_PROMPT, description="Empty for none")
    temperature: float = Field(
        default_factory=default_temperature, description="Of sampling; by default the trainer's, 1 without a launcher"
    )
    max_answer_tokens: int | None = Field(None, description="Of one answer; by default what max_token_length leaves")


class GSM8kEnv(BaseEnv):
    """Single-turn math problems with a verifiable number as answer."""

    name = "gsm8k"
    env_config_cls = GSM8kEnvConfig

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.position = 0  # of the next training problem, counted over epochs
        self.percent_correct_buffer: list[float] = []
        self.eval_metrics: list[tuple[str, float]] = []

    @classmethod
    def config_init(cls) -> tuple[GSM8kEnvConfig, list[APIServerConfig]]:
        """A list of one server: without the adapter, BaseEnv ignores ``--openai.base_url`` for any other form."""
        env_config = cls.env_config_cls(
            tokenizer_name="Qwen/Qwen2.5-1.5B-Instruct",
            group_size=8,
            use_wandb=False,
            max_token_length=2048,
            wandb_name=cls.name,  # also the name that the environment registers with
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
        """Load both splits.

        Raises:
            AtroposError, FileNotFoundError, ValueError: as ``load``.
        """
        self.train, self.test = self.load(self.config)
        self._order: tuple[int, list[int]] = (-1, [])

    @classmethod
    def check_config(cls, config: GSM8kEnvConfig) -> None:
        """The launcher asks before it starts anything."""
        cls.load(config)

    @staticmethod
    def load(config: GSM8kEnvConfig) -> tuple[list[Row], list[Row]]:
        """The train split and the test split. The latter does not depend on the seed: runs are compared on the same.

        Raises:
            AtroposError, FileNotFoundError, ValueError: naming the dataset, file or line.
        """
        name, part = config.dataset_name, config.dataset_config
        train = load_problems(name, "train", part, config.train_size, seed=config.seed)
        return train, load_problems(name, "test", part, config.eval_size)

    async def get_next_item(self) -> Row:
        """The training problems in a new seeded order every epoch, without end."""
        epoch, index = divmod(self.position, len(self.train))
        if self._order[0] != epoch:
            order = list(range(len(self.train)))
            random.Random(f"gsm8k order {self.config.seed} {epoch}").shuffle(order)
            self._order = (epoch, order)
        self.position += 1
        return self.train[self._order[1][index]]

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """BaseEnv sets what is saved here as attributes when a run resumes at ``step``."""
        super().save_checkpoint(step, {"position": self.position, **(data or {})})

    # ------------------------------------------------------------------ rollouts

    def messages(self, row: Row) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.config.system_prompt}] if self.config.system_prompt else []
        return [*system, {"role": "user", "content": row["question"]}]

    def answer_tokens(self, messages: list[dict[str, str]], more: int = 0) -> int:
        """How long an answer may be: the whole sequence stays below what BaseEnv and the trainer accept.

        ``more``: tokens of the prompt beyond those that ``messages`` are encoded in.
        """
        prompt = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        limit = self.config.max_token_length
        if self.max_token_len > 0:
            limit = min(limit, self.max_token_len)
        room = limit - 1 - len(self.tokenizer.encode(prompt)) - more
        return min(room, self.config.max_answer_tokens or room)

    async def collect_trajectories(self, item: Row) -> tuple[ScoredDataGroup | None, list[Row]]:
        """A scored group for one problem, or None. A problem whose sampling was aborted comes back for another try."""
        messages = self.messages(item)
        max_tokens = self.answer_tokens(messages)
        if max_tokens < 1:
            logger.warning("skipped a problem whose prompt leaves no room for an answer: %s", item["question"][:80])
            return None, []
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(
                messages=messages,
                n=self.config.group_size,
                max_tokens=max_tokens,
                temperature=self.config.temperature,
                top_p=1.0,
            )
            nodes = managed.get_state()["nodes"]
        if any(node.metadata["finish_reason"] == "abort" for node in nodes):
            return None, [item]
        return self.score(item, nodes), []

    def score(self, item: Row, nodes: list[Any]) -> ScoredDataGroup:
        """The group with its scores. Raises ValueError where the gold answer cannot be read."""
        gold = gold_answer(item)
        correct = [
            is_correct(self.tokenizer.decode(_last_turn(node), skip_special_tokens=True), gold) for node in nodes
        ]
        self.percent_correct_buffer.extend(map(float, correct))
        scores = [1.0 if right else -1.0 for right in correct]
        if all(correct):
            scores = [length_penalty(len(node.tokens), self.config.max_token_length) for node in nodes]
        return group_of_nodes(nodes, scores)

    # ------------------------------------------------------------------ evaluation

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Greedy accuracy on the held-out problems, through the same server calls as the rollouts.

        Logged as ``eval/percent_correct`` (0 to 1) and ``eval/total``. A call that fails raises: it is no wrong answer.
        Problems that leave no room for one are left out, with a warning, as they are in training.

        Raises:
            ValueError: all of them do.
        """
        started = time.time()
        limit = asyncio.Semaphore(self.config.max_eval_workers)

        async def answer(row: Row) -> dict[str, Any]:
            async with limit:
                messages, finish_reason = await self.greedy_conversation(row)
            graded = await self.graded(row, messages[-1]["content"])
            return {"messages": messages, **graded, "finish_reason": finish_reason}

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(row)) for row in self._with_room(self.test)]
        samples = [task.result() for task in tasks]
        metrics = {
            "eval/percent_correct": sum(sample["correct"] for sample in samples) / len(samples),
            "eval/total": len(samples),
        }
        self.eval_metrics.extend(metrics.items())
        await self.evaluate_log(
            metrics=metrics,
            samples=samples,
            start_time=started,
            end_time=time.time(),
            generation_parameters={"temperature": 0.0},
        )

    async def graded(self, row: Row, text: str) -> dict[str, Any]:
        """What a sample of the evaluation says of an answer; ``correct`` is counted."""
        gold = gold_answer(row)
        correct = is_correct(text, gold)
        return {
            "question": row["question"],
            "answer": text,
            "gold": gold,
            "parsed": [str(value) for value in _parsed(text)],
            "correct": correct,
            "score": int(correct),
        }

    def _with_room(self, rows: list[Row]) -> list[Row]:
        fit = [row for row in rows if self.answer_tokens(self.messages(row)) > 0]
        limit = f"--env.max_token_length={self.config.max_token_length}"
        if not fit:
            raise ValueError(f"none of the {len(rows)} held-out problems leaves room for an answer in {limit}")
        if len(fit) < len(rows):
            logger.warning("%d of %d held-out problems leave no room in %s", len(rows) - len(fit), len(rows), limit)
        return fit

    async def greedy_conversation(self, row: Row) -> tuple[list[dict[str, str]], str]:
        """Messages to what the policy says last to a held-out problem, and why that ended."""
        messages = self.messages(row)
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completion = await managed.chat_completion(
                messages=messages, n=1, max_tokens=self.answer_tokens(messages), temperature=0.0, split="eval"
            )
        (choice,) = completion.choices
        return [*messages, {"role": "assistant", "content": choice.message.content}], choice.finish_reason

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        wandb_metrics = dict(wandb_metrics or {})
        if self.percent_correct_buffer:
            wandb_metrics["train/percent_correct"] = sum(self.percent_correct_buffer) / len(self.percent_correct_buffer)
        wandb_metrics.update(self.eval_metrics)
        self.percent_correct_buffer, self.eval_metrics = [], []
        await super().wandb_log(wandb_metrics)


def is_correct(text: str, gold: str) -> bool:
    r"""Whether the boxed answer in ``text`` equals the number ``gold``; False where nothing is boxed.

    Raises:
        ValueError: ``gold`` cannot be read as a number or formula.
    """
    # Without a time limit: it is the data's, and the first parse of a process may take seconds on a busy machine.
    gold_parsed = _parsed(rf"\boxed{{{gold}}}", parsing_timeout=0)
    if not gold_parsed:
        raise ValueError(f"gold answer {gold!r} cannot be parsed")
    answer = _parsed(text)
    return bool(answer) and bool(verify(gold_parsed, answer))


def _parsed(text: str, **options: Any) -> list[Any]:
    """What is boxed after the thoughts, as a formula and as text; [] where nothing is."""
    text = text.rpartition("</think>")[2]
    if r"\boxed" not in text:
        return []
    return parse(text, extraction_config=[_BOXED], extraction_mode="first_match", **options)


def length_penalty(length: int, limit: int) -> float:
    """1 up to half of ``limit`` tokens, then falling in a line to 0 at ``limit`` (Atropos' gsm8k_server)."""
    threshold = 0.5 * limit
    return 1.0 - min(1.0, max(0.0, (length - threshold) / (limit - threshold)))


def _last_turn(node: Any) -> list[int]:
    """The tokens that the policy sampled last, in an answer of one turn all of them."""
    *_, (start, end) = trained_spans(node.masked_tokens)
    return node.tokens[start:end]


if __name__ == "__main__":
    adapt(GSM8kEnv).cli()
