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

from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from pydantic import Field

from recipe.atropos.adapter.cli import adapt
from recipe.atropos.environments.single_turn import Conversation, SingleTurnEnv, SingleTurnEnvConfig
from recipe.atropos.environments.word_problems import GSM8K, Row, gold_answer, load_problems

SYSTEM_PROMPT = r"Solve the problem step by step. Put the final number, and nothing else, into \boxed{}."

_BOXED = LatexExtractionConfig(
    normalization_config=NormalizationConfig(
        nits=False, malformed_operators=False, basic_latex=True, boxed="all", units=True
    ),
    boxed_match_priority=0,
    try_extract_without_anchor=False,
)


class GSM8kEnvConfig(SingleTurnEnvConfig):
    """The options of single-turn environments and this environment's own."""

    dataset_name: str = Field(
        GSM8K, description="A hub name, a GSM8K .jsonl file or folder, or 'synthetic': problems generated for trials"
    )
    dataset_config: str = Field("main", description="Configuration of the dataset on the hub, or subfolder")
    system_prompt: str = Field(SYSTEM_PROMPT, description="Empty for none")


class GSM8kEnv(SingleTurnEnv):
    """Single-turn math problems with a verifiable number as answer."""

    name = "gsm8k"
    env_config_cls = GSM8kEnvConfig

    @staticmethod
    def load(config: GSM8kEnvConfig) -> tuple[list[Row], list[Row]]:
        """The train split and the test split.

        Raises:
            AtroposError, FileNotFoundError, ValueError: naming the dataset, file or line.
        """
        name, part = config.dataset_name, config.dataset_config
        train = load_problems(name, "train", part, config.train_size, seed=config.seed)
        return train, load_problems(name, "test", part, config.eval_size)

    async def scores(self, problem: Row, answers: list[str], nodes: list[Any]) -> list[float]:
        """Raises ValueError where the gold answer cannot be read."""
        gold = gold_answer(problem)
        correct = [is_correct(answer, gold) for answer in answers]
        self.percent_correct_buffer.extend(map(float, correct))
        if all(correct):
            return [length_penalty(len(node.tokens), self.config.max_token_length) for node in nodes]
        return [1.0 if right else -1.0 for right in correct]

    async def eval_sample(self, problem: Row, conversation: Conversation) -> dict[str, Any]:
        """``correct`` is counted, as ``eval/percent_correct`` (0 to 1)."""
        answer, gold = conversation.answer, gold_answer(problem)
        correct = is_correct(answer, gold)
        return {
            "messages": conversation.messages,
            "question": problem["question"],
            "answer": answer,
            "gold": gold,
            "parsed": [str(value) for value in _parsed(answer)],
            "correct": correct,
            "score": int(correct),
            "finish_reason": conversation.finish_reason,
        }


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


if __name__ == "__main__":
    adapt(GSM8kEnv).cli()
