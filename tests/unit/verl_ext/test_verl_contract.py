"""Every name of verl that the recipe uses is there, and takes what it is given."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest
from verl.checkpoint_engine.base import CheckpointEngine as Engine
from verl.single_controller.ray import base as ray_base
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from recipe.atropos.algorithm.estimators import ESTIMATORS
from recipe.atropos.verl_ext import algorithm, batch, cpu_platform, ranks, worker

RECIPE = Path(batch.__file__).parents[1]
TREES = {path.relative_to(RECIPE).as_posix(): ast.parse(path.read_text()) for path in RECIPE.rglob("*.py")}
# What is used of verl's objects, and of the classes that ours derive from: attributes that must be there.
ATTRIBUTES = {
    algorithm.ActorConfig: ("loss_agg_mode", "loss_scale_factor", "use_kl_loss", "entropy_coeff"),
    algorithm.AdaptiveKLController: ("update",),
    batch.DataProto: ("select", "select_idxs", "to_tensordict"),
    cpu_platform.PlatformBase: ("device_name", "is_platform_available", "ray_resource_options"),
    ranks.CheckpointEngine: ("send_weights", "receive_weights", "prepare", "finalize", "init_process_group"),
    ranks.RayResourcePool: ("store", "get_placement_groups"),
    ranks.RayWorkerGroup: ("_bind_worker_method", "world_size", "workers", "execute_all"),
    worker.ActorRolloutRefWorker: (
        *("_query_dispatch_info", "compute_log_prob", "compute_ref_log_prob", "update_actor", "update_weights"),
        *("save_checkpoint", "load_checkpoint", "set_loss_fn"),
    ),
    worker.TrainingWorker: ("train_batch",),
    FSDPEngineWithLMHead: ("_build_fsdp_module", "_build_lora_module", "_build_module", "get_per_tensor_param"),
}


def imported(tree):
    """{name in a file: (module, name there)} of what is imported from verl, or from the package that does so."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(("verl.", "recipe.atropos.verl_ext."))
        for alias in node.names
    }


def uses():
    """{text: (module, name, node)} of each call and each attribute of what is verl's, in the whole recipe."""
    found = {}
    for tree in TREES.values():
        names = imported(tree)
        for node in ast.walk(tree):
            root = node.func if isinstance(node, ast.Call) else node
            while isinstance(root, ast.Attribute):
                root = root.value
            module, name = names.get(getattr(root, "id", None), ("", ""))
            ours = f"{module.removeprefix('recipe.atropos.').replace('.', '/')}.py"
            is_verls = module.startswith("verl.") or name in imported(TREES.get(ours, ast.Module([])))
            if is_verls and isinstance(node, ast.Call | ast.Attribute):
                found[f"{name}: {ast.unparse(node)[:80]}"] = (module, name, node)
    return found


USES = uses()


def test_verl_is_imported_in_one_package_alone():
    found = set()
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found |= {(name.partition("/")[0], module) for module in modules if module.partition(".")[0] == "verl"}
    assert {package for package, _ in found} == {"verl_ext"}
    leaving = ("verl.experimental", "verl.trainer.ppo.ray_trainer")
    assert not [module for _, module in found if module.startswith(leaving)]


@pytest.mark.parametrize("use", USES)
def test_each_name_takes_what_it_is_given(use):
    module, name, node = USES[use]
    given = getattr(importlib.import_module(module), name)
    for part in ast.unparse(node.func if isinstance(node, ast.Call) else node).split(".")[1:]:
        given = getattr(given, part)
    if isinstance(node, ast.Call):
        positional = [None for argument in node.args if not isinstance(argument, ast.Starred)]
        named = {keyword.arg: None for keyword in node.keywords if keyword.arg}
        signature = inspect.signature(given)
        whole = len(positional) + len(named) == len(node.args) + len(node.keywords)
        (signature.bind if whole else signature.bind_partial)(*positional, **named)


def test_what_ours_derive_from_is_made_as_they_make_it():
    """Of a worker group, what ``verl_ext.worker_group.LimitedWorkerGroup`` overrides, and what it is called with."""
    inspect.signature(ranks.RayResourcePool).bind(None, use_gpu=True, name_prefix="", max_colocate_count=1)
    inspect.signature(ranks.RayWorkerGroup).bind(None, None, ray_wait_register_center_timeout=1, device_name="")
    weights, rejection = algorithm.compute_rollout_correction_weights, algorithm.compute_rollout_rejection_mask
    options = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")
    assert list(inspect.signature(weights).parameters)[:5] == ["log_ratio", "response_mask", *options]
    options = ("rollout_rs", "rollout_rs_threshold")
    inspect.signature(rejection).bind(**dict.fromkeys(("log_ratio", "response_mask", *options)))
    assert len(USES) > 60 and {"agg_loss", "DataProto", "tensordict_utils"} <= {name for _, name, _ in USES.values()}
    assert not cpu_platform.PlatformCPU.__abstractmethods__
    assert list(inspect.signature(Engine.send_weights).parameters)[:3] == ["self", "weights", "global_steps"]
    bind = inspect.signature(ranks.RayWorkerGroup._bind_worker_method)
    assert list(bind.parameters) == ["self", "user_defined_cls", "func_generator"]
    generator = list(inspect.signature(ray_base.func_generator).parameters)
    assert generator == ["self", "method_name", "dispatch_fn", "collect_fn", "execute_fn", "blocking"]


@pytest.mark.parametrize("owner", ATTRIBUTES, ids=lambda owner: getattr(owner, "__name__", str(owner)))
def test_each_attribute_is_there(owner):
    missing = [name for name in ATTRIBUTES[owner] if not hasattr(owner, name)]
    assert not missing


def test_verl_contract_of_each_estimator():
    always = ("token_level_rewards", "response_mask", "index", "config", "norm_adv_by_std_in_grpo")
    for needs in ESTIMATORS.values():
        compute = needs.compute or algorithm.get_adv_estimator_fn(needs.name)
        inspect.signature(compute).bind(**dict.fromkeys((*always, *needs.tensors)))
