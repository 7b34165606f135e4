"""Every name of verl that the recipe uses is there, and takes what it is given."""

import ast
import inspect
from pathlib import Path

import pytest
from verl.checkpoint_engine.base import CheckpointEngine as Engine
from verl.single_controller.ray import base as ray_base
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from recipe.atropos.algorithm.estimators import ESTIMATORS
from recipe.atropos.verl_ext import algorithm, batch, cpu_platform, device, driver, engines, ranks, worker

RECIPE = Path(batch.__file__).parents[1]
IMPORTING = (algorithm, batch, cpu_platform, device, driver, engines, ranks, worker)
MODULES = {module.__name__.rpartition(".")[2]: module for module in IMPORTING}

# How each is called: the number of positional arguments, and the names of the others.
CALLS = {
    "algorithm.AdaptiveKLController": (0, ("init_kl_coef", "target_kl", "horizon")),
    "algorithm.FixedKLController": (0, ("kl_coef",)),
    "algorithm.Metric": (0, ("value", "aggregation")),
    "algorithm.agg_loss": (0, ("loss_mat", "loss_mask", "loss_agg_mode", "loss_scale_factor")),
    "algorithm.calculate_debug_metrics": (1, ()),
    "algorithm.compute_data_metrics": (1, ("use_critic",)),
    "algorithm.compute_grpo_outcome_advantage": (3, ("norm_adv_by_std_in_grpo",)),
    "algorithm.compute_rollout_correction_and_add_to_batch": (2, ()),
    "algorithm.compute_rollout_correction_weights": (
        0,
        ("log_ratio", "response_mask", "rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize"),
    ),
    "algorithm.compute_rollout_rejection_mask": (
        0,
        ("log_ratio", "response_mask", "rollout_rs", "rollout_rs_threshold"),
    ),
    "algorithm.compute_throughout_metrics": (2, ("n_gpus",)),
    "algorithm.compute_timing_metrics": (2, ()),
    "algorithm.compute_variance_proxy_metrics": (1, ("gradient_norm",)),
    "algorithm.get_adv_estimator_fn": (1, ()),
    "algorithm.get_kl_controller": (1, ()),
    "algorithm.kl_penalty": (2, ("kl_penalty",)),
    "algorithm.masked_mean": (1, ("mask", "axis")),
    "algorithm.ppo_loss": (0, ("config", "model_output", "data", "dp_group")),
    "algorithm.reduce_metrics": (1, ()),
    "algorithm.register_adv_est": (1, ()),
    "algorithm.register_policy_loss": (1, ()),
    "batch.calculate_workload": (1, ()),
    "batch.compute_position_id_with_mask": (1, ()),
    "batch.get_seqlen_balanced_partitions": (1, ("k_partitions", "equal_size")),
    "batch.log_seqlen_unbalance": (2, ("prefix",)),
    "batch.no_padding_2_padding": (2, ()),
    "batch.rename_dict": (2, ()),
    "engines.MixedPrecisionPolicy": (0, ("param_dtype", "reduce_dtype", "cast_forward_inputs")),
    "engines.apply_fsdp2": (3, ()),
    "engines.fsdp2_load_full_state_dict": (4, ()),
    "engines.get_fsdp_wrap_policy": (0, ("module", "config", "is_lora")),
    "engines.get_sharding_strategy": (1, ("zero3_enable",)),
    "device.get_device_id": (0, ()),
    "device.get_device_name": (0, ()),
    "device.get_torch_device": (0, ()),
    "device.set_expandable_segments": (1, ()),
    "driver.Tracking": (0, ("project_name", "experiment_name", "default_backend", "config")),
    "driver.get_ppo_ray_runtime_env": (1, ()),
    "driver.marked_timer": (2, ()),
    "driver.omega_conf_to_dataclass": (1, ()),
    "driver.should_save_ckpt_esi": (1, ("redundant_time",)),
    "driver.validate_config": (1, ("use_reference_policy", "use_critic")),
    "engines.fsdp_version": (1, ()),
    "engines.get_device_id": (0, ()),
    "engines.load_fsdp_model_to_gpu": (1, ()),
    "engines.offload_fsdp_model_to_cpu": (1, ()),
    "ranks.RayClassWithInitArgs": (0, ("cls", "config", "role", "distillation")),
    "ranks.RayResourcePool": (1, ("use_gpu", "name_prefix", "max_colocate_count")),
    "ranks.RayWorkerGroup": (2, ("ray_wait_register_center_timeout", "device_name")),
    "ranks.get_platform": (0, ()),
    "ranks.need_reference_policy": (1, ()),
    "ranks.sort_placement_group_by_node_ip": (1, ()),
    "worker.aggressive_empty_cache": (0, ("force_sync",)),
    "worker.initialize_global_process_group_ray": (0, ("backend",)),
    "worker.make_nd_compute_dataproto_dispatch_fn": (0, ("mesh_name",)),
    "worker.register": (0, ("dispatch_mode", "blocking")),
}
# What is used of the others, and of objects: attributes that must be there.
ATTRIBUTES = {
    algorithm.ActorConfig: ("loss_agg_mode", "loss_scale_factor", "use_kl_loss", "entropy_coeff"),
    algorithm.AdaptiveKLController: ("update",),
    algorithm.AggregationType: ("SUM", "MEAN"),
    batch.DataProto: ("from_dict", "select", "select_idxs", "to_tensordict"),
    batch.tensordict_utils: ("assign_non_tensor", "get"),
    cpu_platform.PlatformBase: ("device_name", "is_platform_available", "ray_resource_options"),
    cpu_platform.PlatformRegistry: ("register", "registered_names", "get"),
    device.PrecisionType: ("to_dtype",),
    driver.Tracking: ("log",),
    ranks.CheckpointEngine: ("send_weights", "receive_weights", "prepare", "finalize", "init_process_group"),
    ranks.CheckpointEngineRegistry: ("register",),
    ranks.RayResourcePool: ("store", "get_placement_groups"),
    ranks.RayWorkerGroup: ("_bind_worker_method", "world_size", "workers", "execute_all"),
    worker.ActorRolloutRefWorker: (
        "_query_dispatch_info",
        "compute_log_prob",
        "compute_ref_log_prob",
        "update_actor",
        "update_weights",
        "save_checkpoint",
        "load_checkpoint",
        "set_loss_fn",
    ),
    worker.Dispatch: ("ONE_TO_ALL",),
    worker.TrainingWorker: ("train_batch",),
    engines.EngineRegistry: ("register",),
    FSDPEngineWithLMHead: ("_build_fsdp_module", "_build_lora_module", "_build_module", "get_per_tensor_param"),
}


def test_verl_is_imported_in_one_package_alone():
    found = {}
    for path in RECIPE.rglob("*.py"):
        name = path.relative_to(RECIPE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                if module.partition(".")[0] == "verl":
                    assert not module.startswith(("verl.experimental", "verl.trainer.ppo.ray_trainer")), name
                    found.setdefault(name, set()).add(module)
    assert {name.partition("/")[0] for name in found} == {"verl_ext"}, found


def test_each_name_has_a_contract():
    """Each that is imported from verl; worker_group and attention take theirs from these modules."""
    names = {}
    for path in (RECIPE / "verl_ext").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "verl":
                names |= {f"{path.stem}.{alias.asname or alias.name}": None for alias in node.names}
    assert {name.partition(".")[0] for name in names} == MODULES.keys()
    of_attributes = {name for name in names if getattr(MODULES[name.split(".")[0]], name.split(".")[1]) in ATTRIBUTES}
    assert names.keys() == CALLS.keys() | of_attributes


@pytest.mark.parametrize("name", CALLS)
def test_each_name_takes_what_it_is_given(name):
    module, _, attribute = name.partition(".")
    positional, keywords = CALLS[name]
    signature = inspect.signature(getattr(MODULES[module], attribute))
    signature.bind(*[None] * positional, **dict.fromkeys(keywords))


@pytest.mark.parametrize("owner", ATTRIBUTES, ids=lambda owner: getattr(owner, "__name__", str(owner)))
def test_each_attribute_is_there(owner):
    missing = [name for name in ATTRIBUTES[owner] if not hasattr(owner, name)]
    assert not missing


def test_verl_contract_of_a_platform_is_answered_in_full():
    assert not cpu_platform.PlatformCPU.__abstractmethods__


def test_a_worker_group_binds_its_methods_by_a_generator_of_ours():
    """What ``verl_ext.worker_group.LimitedWorkerGroup`` overrides, and what it is called with."""
    bind = inspect.signature(ranks.RayWorkerGroup._bind_worker_method)
    assert list(bind.parameters) == ["self", "user_defined_cls", "func_generator"]
    generator = list(inspect.signature(ray_base.func_generator).parameters)
    assert generator == ["self", "method_name", "dispatch_fn", "collect_fn", "execute_fn", "blocking"]


def test_verl_contract_of_each_estimator():
    """Each that can be chosen is registered, and takes what it is given."""
    always = ("token_level_rewards", "response_mask", "index", "config", "norm_adv_by_std_in_grpo")
    for needs in ESTIMATORS.values():
        compute = needs.compute or algorithm.get_adv_estimator_fn(needs.name)
        inspect.signature(compute).bind(**dict.fromkeys((*always, *needs.tensors)))


def test_a_checkpoint_engine_is_made_as_ours_is():
    assert list(inspect.signature(Engine.send_weights).parameters)[:3] == ["self", "weights", "global_steps"]
