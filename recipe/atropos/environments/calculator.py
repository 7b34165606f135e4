r"""Word problems with a calculator: ``python -m recipe.atropos.environments.calculator serve|evaluate [flags]``.

The policy writes ``<call>412 + 97</call>`` and ends its turn; the tool's reply is the next turn of the chat template.
A turn without a call is the last; its boxed answer scores +1 or -1, however long the conversation. Guarantees, in
addition to those of ``gsm8k``:

- Each sequence of a group is a separate conversation, of at most ``max_turns`` policy turns and never longer than
  BaseEnv and the trainer accept.
- The tool's replies, and the chat template's tokens around them, are masked. A malformed call gets an error message as
  its reply, and costs the policy a turn.
- A turn truncated at its maximum length ends the conversation. A group is complete, or its error is raised.
- With ``tree_roots`` a group is a turn tree: so many conversations begin at the problem, each other one goes on after a
  turn of theirs. Which one and after which turn is drawn before it is known how long they become, or long ones would
  count too much; where one ended by then, the other begins at the problem too, as where the chat template has rewritten
  its turns, which is counted (``branches_at_root``). How many there are is settled before the group too:
  ``tree_tokens`` are what the groups have on average, by the lengths of earlier ones. The tool's replies depend on the
  messages alone, so a conversation can be taken up at any turn; a subclass of which this is not true says so with
  ``resettable = False``, and is then refused a tree. ``environment.credit`` compares what follows the same turns.
- With ``value_continuations`` so many other conversations go on after each turn but the last. The mean outcome of them
  is the turn's value (VinePPO, arXiv 2410.01679), sent as ``turn_values`` for ``environment.credit``. They are not
  trained on; ``group_overrides.value_tokens`` is how many tokens they had.

Problems come from the same sources as in ``gsm8k``; the preset ``calculator`` generates problems of several steps.
"""

import random
from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Literal

from atroposlib.envs.base import ScoredDataGroup
from pydantic import Field

from recipe.atropos.adapter.cli import adapt
from recipe.atropos.data.rows import trained_spans
from recipe.atropos.environments.calculator_tool import CALL, CLOSE, OPEN, answer, calculated
from recipe.atropos.environments.gsm8k import GSM8kEnv, GSM8kEnvConfig, is_correct
from recipe.atropos.environments.single_turn import Conversation, Messages, message
from recipe.atropos.environments.word_problems import WordProblem, gold_answer, progress
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.utils.tasks import together


class CalculatorEnvConfig(GSM8kEnvConfig):
    """The options of ``gsm8k``; ``max_answer_tokens`` limits one turn."""

    system_prompt: str = Field(
        f"Solve the problem step by step with a calculator: write {OPEN}412 + 97{CLOSE}, end your turn, and you are "
        "told the result. It knows numbers, + - * / and parentheses. At the end, without a call, put the final number, "
        r"and nothing else, into \boxed{}.",
        description="Empty for none",
    )
    max_turns: int = Field(8, ge=1, description="Of the policy, the one with the final answer included")
    tool_role: Literal["tool", "user"] = Field(
        "tool", description="Role of the calculator's answers; 'user' for chat templates without tools"
    )
    tree_roots: int | None = Field(
        None,
        ge=2,  # the first decision of a single one is compared only where it was the last, which biases the gradient
        description="Conversations of a group that begin at the problem, the others branch; by default all",
    )
    tree_tokens: int | None = Field(
        None, ge=1, description="Sampled tokens of a tree on average; it has fewer branches for it, by default all"
    )
    value_continuations: int | None = Field(
        None, ge=1, description="Conversations that go on after each turn, for its value alone"
    )


class CalculatorEnv(GSM8kEnv):
    """Multi-turn math problems with a tool."""

    name = "calculator"
    env_config_cls = CalculatorEnvConfig
    resettable = True  # ``reply`` depends on the messages alone
    penalizes_length = False  # scores are in the units of ``turn_values``

    async def setup(self) -> None:
        """Load both splits, and check the chat template.

        Raises:
            FileNotFoundError, ValueError: naming the dataset, file or line; or the template cannot render the tool.
            ConfigurationError: branches are asked for where there can be none, or in ways that exclude each other.
        """
        await super().setup()
        self._try_chat_template()
        self._lengths = deque[int](maxlen=128), deque[int](maxlen=128)  # sampled tokens of the latest, first and others

    @classmethod
    def _load(cls, config: CalculatorEnvConfig) -> tuple[Sequence[WordProblem], Sequence[WordProblem]]:
        allowed = (set(), {"tree_roots"}, {"tree_roots", "tree_tokens"}, {"value_continuations"})
        given = {name: value for name in sorted(set().union(*allowed)) if (value := getattr(config, name)) is not None}
        if given.keys() not in (allowed if cls.resettable else allowed[:1]):
            options = " ".join(f"--env.{name}={value}" for name, value in given.items())
            raise ConfigurationError(
                f"{options} for {cls.__name__}: give tree_roots, alone or with tree_tokens, or value_continuations "
                "alone; none of them where states cannot be returned to (resettable is False)"
            )
        return super()._load(config)

    def _try_chat_template(self) -> None:
        role, secret = self.config.tool_role, "7" * 7
        chat = [*self.messages({"question": "1 + 1"}), message("assistant", "1"), message(role, secret)]
        fix = "give --env.tool_role=user" if role == "tool" else "give a tokenizer with another chat template"
        try:
            text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # whatever the template raises
            raise ValueError(f"the chat template refuses the role {role!r}: {error}; {fix}") from error
        if secret not in text:
            raise ValueError(f"the chat template leaves out what the role {role!r} says; {fix}")

    def reply(self, problem: WordProblem, messages: Messages) -> str | None:
        """Return what is said to the policy's turn, the last message; None ends the conversation."""
        return answer(messages[-1]["content"])

    async def converse(self, problem: WordProblem, n: int, split: Literal["train", "eval"]) -> list[Conversation]:
        roots = min(n, self.config.tree_roots or n) if split == "train" else n
        branches = self._paid_for(roots, n - roots)
        asked = self.messages(problem)
        conversations = await together(self._conversation(problem, split, asked) for _ in range(roots))
        begun = []
        for _ in range(branches):
            i, turn = random.randrange(roots), 1 + random.randrange(max(1, self.config.max_turns - 1))
            there = turn < (turns := turns_of(conversations[i], asked))
            begun.append((conversations[i].messages[: len(asked) + 2 * turn], (i, turn)) if there else (asked, None))
            self.report.count("branches_at_root", int(not turns))
        conversations += await together(self._conversation(problem, split, *one) for one in begun)
        for i, conversation in enumerate(conversations if split == "train" else ()):
            self._lengths[i >= roots].append(sampled_tokens(conversation.node))
            answers = tool_answers(conversation.messages)
            self.report.observe("calls", len(answers))
            self.report.observe("call_errors", sum(text.startswith("error") for text in answers))
        if split == "train" and self.config.value_continuations is not None:
            return await together(self._valued(problem, asked, one) for one in conversations)
        return conversations

    async def _valued(self, problem: WordProblem, asked: Messages, conversation: Conversation) -> Conversation:
        """Return a conversation with the values of its turns that are trained on; of the last its outcome."""
        k, last = self.config.value_continuations, (len(conversation.messages) - len(asked) + 1) // 2
        turns = range(last + 1 - len(list(trained_spans(conversation.node.masked_tokens))), last)
        begun = [(conversation.messages[: len(asked) + 2 * turn], (0, turn)) for turn in turns for _ in range(k)]
        found = await together(self._conversation(problem, "train", *one) for one in begun)
        outcomes = [self.outcome(problem, one) for one in found]
        values = [*(fmean(outcomes[i : i + k]) for i in range(0, len(found), k)), self.outcome(problem, conversation)]
        return conversation._replace(values=values, value_tokens=sum(sampled_tokens(one.node) for one in found))

    async def group_of(self, item: WordProblem, conversations: list[Conversation]) -> ScoredDataGroup:
        group = await super().group_of(item, conversations)
        group["group_overrides"]["group_size"] = len(conversations)  # a tree's budget may have fewer
        told: dict[str, Any] = {
            "branches": [one.branch for one in conversations],
            "turn_values": [one.values for one in conversations],
            "value_tokens": [one.value_tokens for one in conversations],
        }
        group["group_overrides"] |= {name: values for name, values in told.items() if any(values)}
        return group

    def outcome(self, problem: WordProblem, conversation: Conversation) -> float:
        """Return a conversation's score, of which a turn's value is the mean."""
        return 1.0 if is_correct(conversation.answer, gold_answer(problem)) else -1.0

    def _paid_for(self, roots: int, most: int) -> int:
        """Return how many branches, ``most`` at most, make the next group have ``tree_tokens`` on average."""
        if self.config.tree_tokens is None or not all(self._lengths):
            return most
        root, branch = map(fmean, self._lengths)
        return max(0, min(most, int((self.config.tree_tokens - roots * root) / branch + random.random())))

    async def _conversation(
        self,
        problem: WordProblem,
        split: Literal["train", "eval"],
        messages: Messages,
        branch: tuple[int, int] | None = None,
    ) -> Conversation:
        more = 0
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for turn in range(1 + (branch[1] if branch else 0), self.config.max_turns + 1):
                completion = await managed.chat_completion(
                    messages=messages,
                    n=1,
                    max_tokens=self.answer_tokens(messages, more),
                    temperature=self.temperature(split),
                    top_p=1.0,
                    split=split,
                )
                choice, nodes = completion.choices[0], managed.get_state()["nodes"]
                messages = [*messages, message("assistant", choice.message.content)]
                reply = self.reply(problem, messages) if choice.finish_reason == "stop" else None
                if reply is None or turn == self.config.max_turns:
                    break
                asked = [*messages, message(self.config.tool_role, reply)]
                more = self._tokens_beyond(messages, nodes[-1])
                if self.answer_tokens(asked, more) < 1:
                    break
                messages = asked
        if len(nodes) > 1:  # the template rewrote earlier turns: only turns since then are trained on
            self.report.count("split_conversations")
        return Conversation(messages, nodes[-1], choice.finish_reason, branch)

    def _tokens_beyond(self, messages: Messages, node: Any) -> int:
        """Return how many more tokens the policy sampled than encoding its texts, each with an end token, gives."""
        texts = [message["content"] for message in messages if message["role"] == "assistant"]
        own = texts[-len(list(trained_spans(node.masked_tokens))) :]  # of a branch, without its source's
        encoded = sum(len(self.tokenizer.encode(text, add_special_tokens=False)) + 1 for text in own)
        return max(0, sampled_tokens(node) - encoded)


def turns_of(conversation: Conversation, asked: Messages) -> int:
    """Return the number of the policy's turns; 0 if not all of them are to be trained on."""
    turns = (len(conversation.messages) - len(asked) + 1) // 2
    return turns if turns == len(list(trained_spans(conversation.node.masked_tokens))) else 0


def sampled_tokens(node: Any) -> int:
    """Return the number of tokens that are trained on; those that a branch begins with are its source's."""
    return sum(mask != -100 for mask in node.masked_tokens)


def tool_answers(messages: Messages) -> list[str]:
    """Return the tool's replies in a conversation that includes its prompt."""
    turns = messages[[message["role"] for message in messages].index("assistant") :]
    return [message["content"] for message in turns if message["role"] != "assistant"]


def steps_done(problem: WordProblem, text: str) -> float:
    """Return how much of the worked solution the calls in ``text`` give; for ``environment.credit.values``."""
    return progress(problem, (calculated(expression) for expression in CALL.findall(text)))


if __name__ == "__main__":
    adapt(CalculatorEnv).cli()
