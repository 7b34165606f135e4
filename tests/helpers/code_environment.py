"""The code environment over generated problems, with a sandbox of its own."""

import asyncio

from recipe.atropos.adapter.cli import adapt
from recipe.atropos.environments.code import CodeEnv
from recipe.atropos.environments.code_problems import SYNTHETIC


def make_code_environment(model_path, url="http://127.0.0.1:1"):
    config, [server] = CodeEnv.config_init()
    server.model_name = config.tokenizer_name = str(model_path)
    server.base_url = f"{url}/v1"
    config.dataset_name, config.train_size, config.eval_size, config.group_size = SYNTHETIC, 20, 8, 3
    config.max_token_length, config.max_answer_tokens, config.sandboxes = 2048, 12, 1
    env = adapt(CodeEnv)(config, [server])
    asyncio.run(CodeEnv.setup(env))
    return env
