"""An adapted environment with a teacher."""

from helpers.environments.teacher_env import TaughtEnv, TeacherConfig, server_of
from recipe.atropos.adapter.cli import adapt


def taught(model, url="http://127.0.0.1:1", teacher="default", **config):
    config = {"tokenizer_name": str(model), "group_size": 2, "use_wandb": False, "teacher_enabled": True} | config
    teacher = {"teacher_server_configs": server_of(model, url, api_key="")} if teacher == "default" else {}
    return adapt(TaughtEnv)(config=TeacherConfig(**config), server_configs=[server_of(model, url)], **teacher)
