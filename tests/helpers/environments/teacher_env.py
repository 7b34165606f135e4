"""Environments of the shape of Atropos' ``TeacherDistillationEnv`` and ``gsm8k_server_teacher_distill``, which
atroposlib 0.4.0 lacks: the same arguments, in the same places, and the same order of calls."""

import asyncio

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class TeacherConfig(BaseEnvConfig):
    teacher_enabled: bool = False
    teacher_top_k: int = 0
    teacher_answers: bool = True


class TeacherDistillationEnv(BaseEnv):
    env_config_cls = TeacherConfig

    @classmethod
    def teacher_config_init(cls):
        return None

    def __init__(self, config, server_configs, teacher_server_configs=None, slurm=False, testing=False):
        super().__init__(config, server_configs, slurm=slurm, testing=testing)
        self.teacher_server = None
        if config.teacher_enabled:
            raise TypeError(f"as upstream: servers of the teacher are {teacher_server_configs!r}")

    def _validate_teacher_tokenizer_compatibility(self, name):
        if name != self.tokenizer.name_or_path:
            raise ValueError(f"{name} is another tokenizer")

    async def _fetch_teacher_for_sequence(self, token_ids, top_k):
        if not self.config.teacher_answers:
            raise ConnectionError("no teacher")
        payload = await self.teacher_server.get_logprobs(input_ids=token_ids, top_k=top_k, max_tokens=1, split="train")
        return payload["prompt_topk_token_ids"], payload["prompt_topk_logprobs"]

    async def _attach_teacher_distillation(self, group):
        if not self.config.teacher_enabled or self.teacher_server is None:
            return group
        tasks = [self._fetch_teacher_for_sequence(tokens, self.config.teacher_top_k) for tokens in group["tokens"]]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        if any(isinstance(one, Exception) for one in found):
            found = []
        group["distill_token_ids"] = [ids for ids, _ in found] or None
        group["distill_logprobs"] = [logprobs for _, logprobs in found] or None
        return group

    async def handle_send_to_api(
        self, scored_data, item=None, do_send_to_api=True, abort_on_any_max_length_exceeded=True
    ):
        group = await self._attach_teacher_distillation(scored_data)
        await super().handle_send_to_api(group, item, do_send_to_api, abort_on_any_max_length_exceeded)


class Positional(BaseEnv):
    """As upstream's gsm8k_server: its constructor knows no teacher, and passes arguments on by position."""

    def __init__(self, config, server_configs, slurm=True, testing=False):
        super().__init__(config, server_configs, slurm, testing)

    async def setup(self): ...

    async def get_next_item(self): ...

    async def evaluate(self, *args, **kwargs): ...

    async def collect_trajectories(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(messages=[{"role": "user", "content": item}], n=2, max_tokens=8)
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[node.tokens for node in nodes], masks=[node.masked_tokens for node in nodes])
        group["inference_logprobs"] = [node.logprobs for node in nodes]
        return group | {"scores": [1.0, 0.0], "group_overrides": {}}, []


class TaughtEnv(Positional, TeacherDistillationEnv):
    name = "taught"

    async def _send_scored_data_to_api(self, scored_data):
        self.sent = scored_data


def server_of(model, url="http://127.0.0.1:1", **values):
    values = {"server_type": "sglang", "api_key": "x"} | values
    return APIServerConfig(model_name=str(model), tokenizer_name=str(model), base_url=f"{url}/v1", **values)
