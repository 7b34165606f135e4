"""An environment that needs no model, as Atropos' own are written: ``python answer_env.py serve --env.KEY=...``

Each item is a list of answers; they are the group's trained tokens. Right is one that ends in ``\\boxed{7}``. Like most
of Atropos' environments it drops a group of equal scores itself.
"""

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field

RIGHT, WRONG, BARE = r"<think>3 + 4</think> \boxed{7}", r"\boxed{8}", "7"
ITEMS = [[RIGHT, WRONG, BARE, BARE], [WRONG, BARE, BARE, BARE], [BARE] * 4]  # mixed; equal raw; equal shaped


class AnswerEnvConfig(BaseEnvConfig):
    own_advantages: bool = Field(False, description="Send advantages for each token")


class AnswerEnv(BaseEnv):
    name = "answers"
    env_config_cls = AnswerEnvConfig

    @classmethod
    def config_init(cls):
        server = APIServerConfig(
            model_name="m", base_url="http://127.0.0.1:1/v1", api_key="x", server_type="sglang", health_check=False
        )
        return AnswerEnvConfig(group_size=4, use_wandb=False, wandb_name=cls.name), [server]

    async def setup(self):
        self.number = -1

    async def get_next_item(self):
        self.number += 1
        return ITEMS[self.number % len(ITEMS)]

    async def collect_trajectories(self, item):
        return self.score(item), []

    def score(self, answers):
        prompt = self.tokenizer.encode("3 + 4?")
        scores = ScoredDataGroup()
        scores["tokens"], scores["masks"], scores["scores"], scores["inference_logprobs"] = [], [], [], []
        if self.config.own_advantages:
            scores["advantages"] = []
        for answer in answers:
            response = self.tokenizer.encode(answer) + [self.tokenizer.eos_token_id]
            scores["tokens"].append(prompt + response)
            scores["masks"].append([-100] * len(prompt) + response)
            scores["scores"].append(float(answer.endswith(r"\boxed{7}")))
            scores["inference_logprobs"].append([1.0] * len(prompt) + [-0.5] * len(response))
            if self.config.own_advantages:
                scores["advantages"].append([0.5] * len(prompt + response))
        if all(score == scores["scores"][0] for score in scores["scores"]):
            return None
        return scores

    async def evaluate(self, *args, **kwargs):
        groups = [self.score(item) for item in ITEMS]
        scores = [score for group in groups if group for score in group["scores"]]
        samples = [{"scores": group and group["scores"]} for group in groups]
        await self.evaluate_log({"eval/accuracy": sum(scores) / len(scores)}, samples=samples)


if __name__ == "__main__":
    AnswerEnv.cli()
