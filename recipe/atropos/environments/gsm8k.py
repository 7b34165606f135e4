r"""GSM8K for Atropos: ``python -m recipe.atropos.environments.gsm8k serve|evaluate|process [flags]``.

Problems come from the hub, a local folder or a generator (``word_problems``). The policy answers in ``\boxed{}``;
math_verify scores the text, after ``</think>`` if that is in it, +1 or -1. Tokens, masks and logprobs come from the
managed server: they are what the policy sampled, and never re-encoded. If all answers are right, long ones score less.
A group of equal scores carries no learning signal; BaseEnv does not send it, unless ``ensure_scores_are_not_same`` is
off or the scores are shaped first.

All this matches Atropos' own gsm8k_server, which ``gsm8k_upstream`` runs. Intended differences:

- an answer of fewer than ten tokens counts like any other; upstream leaves it out and loses its group as too small;
- an answer may use the tokens that the problem leaves of ``max_token_length``; upstream, both together may exceed it,
  and then the group is rejected;
- evaluation is greedy, on the first ``eval_size`` problems; upstream samples at 0.6 and reports 0.0;
- a gold answer that cannot be parsed is an error; upstream skips the problem silently.
"""

import re
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from pydantic import Field

from recipe.atropos.adapter.cli import adapt
from recipe.atropos.environments.single_turn import Conversation, SingleTurnEnv, SingleTurnEnvConfig
from recipe.atropos.environments.word_problems import GSM8K, WordProblem, gold_answer, load_problems, progress

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
    system_prompt: str = Field(
        r"Solve the problem step by step. Put the final number, and nothing else, into \boxed{}.",
        description="Empty for none",
    )


class GSM8kEnv(SingleTurnEnv):
    """Single-turn math problems with a verifiable number as answer."""

    name = "gsm8k"
    env_config_cls = GSM8kEnvConfig
    penalizes_length = True  # where all answers of a group are right

    @staticmethod
    def load(config: GSM8kEnvConfig) -> tuple[list[WordProblem], list[WordProblem]]:
        """Return the train split and the test split.

        Raises:
            AtroposError, FileNotFoundError, ValueError: naming the dataset, file or line.
        """
        name, part = config.dataset_name, config.dataset_config
        return (
            load_problems(name, "train", part, config.train_size, seed=config.seed),
            load_problems(name, "test", part, config.eval_size),
        )

    async def scores(self, problem: WordProblem, answers: list[str], nodes: list[Any]) -> list[float]:
        """Score each answer. Raises ValueError if the gold answer cannot be parsed."""
        gold = gold_answer(problem)
        correct = [is_correct(answer, gold) for answer in answers]
        self.percent_correct_buffer.extend(map(float, correct))
        if self.penalizes_length and all(correct):
            return [length_penalty(len(node.tokens), self.config.max_token_length) for node in nodes]
        return [1.0 if right else -1.0 for right in correct]

    async def eval_sample(self, problem: WordProblem, conversation: Conversation) -> dict[str, Any]:
        """Return the answer's record; the mean of ``correct`` is ``eval/percent_correct`` (0 to 1)."""
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
    r"""Return whether the boxed answer in ``text`` equals the number ``gold``; False if nothing is boxed.

    Raises:
        ValueError: ``gold`` cannot be parsed as a number or formula.
    """
    # No time limit: ``gold`` comes from the data, and a process' first parse may take seconds on a busy machine.
    gold_parsed = _parsed(rf"\boxed{{{gold}}}", parsing_timeout=0)
    if not gold_parsed:
        raise ValueError(f"gold answer {gold!r} cannot be parsed")
    answer = _parsed(text)
    return bool(answer) and bool(verify(gold_parsed, answer))


def _parsed(text: str, **options: Any) -> list[Any]:
    """Return what is boxed after ``</think>``, as a formula and as text; [] if nothing is."""
    text = text.rpartition("</think>")[2]
    if r"\boxed" not in text:
        return []
    return parse(text, extraction_config=[_BOXED], extraction_mode="first_match", **options)


def steps_done(problem: WordProblem, text: str) -> float:
    """Return how much of the worked solution ``text`` states as ``= c``; for ``environment.credit.values``."""
    return progress(problem, re.findall(r"=\s*\$?(-?[\d,]*\.?\d+)", text))


def length_penalty(length: int, limit: int) -> float:
    """Return 1 up to half of ``limit`` tokens, then linearly less, to 0 at ``limit`` (Atropos' gsm8k_server)."""
    threshold = 0.5 * limit
    return 1.0 - min(1.0, max(0.0, (length - threshold) / (limit - threshold)))


if __name__ == "__main__":
    adapt(GSM8kEnv).cli()
