"""The schema of the configuration: what is refused by key, value and choices; and that its names are verl's."""

import subprocess
import sys
from typing import get_args

import pytest
from omegaconf import OmegaConf

from recipe.atropos.algorithm.estimators import ESTIMATORS
from recipe.atropos.config import schema as choices
from recipe.atropos.config.compose import (
    compose_config,
    leaves,
    load_complete,
    load_config,
    load_recorded,
    presets,
    resolved,
    with_values,
)
from recipe.atropos.config.env_specs import environment_specs
from recipe.atropos.config.keys import EXCLUDED, is_free, unsupported
from recipe.atropos.config.schema import documented
from recipe.atropos.config.unsupported import CONDITIONAL, UNSUPPORTED
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.utils.secret import config_yaml

ACTOR, MODEL, REF, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "ref", "rollout"))
ATROPOS, CORRECTION = "trainer.atropos", "algorithm.rollout_correction"


@pytest.fixture(scope="module")
def config():
    return load_config([f"{MODEL}.path=m"])


def check(config, values):
    resolved(with_values(config, values))


def refusal(*overrides):
    """The lines of the error that these arguments are."""
    with pytest.raises(ConfigurationError) as error:
        load_config([f"{MODEL}.path=m", *overrides])
    return str(error.value).splitlines()


REFUSED = [
    ("data.train_batch_size", 0, "data.train_batch_size=0: give 1 or more"),
    (f"{MODEL}.path", None, "actor_rollout_ref.model.path is not set: give --model"),
    ("seed", "16", "seed='16': give a whole number"),
    ("seed", 2**31, "seed=2147483648: give less than 2147483648"),
    ("seed", True, "seed=true: give a whole number"),
    ("inference.device", "gpu", "inference.device=gpu is called cuda; choose one of auto, cuda, cpu"),
    ("trainer.device", "npu", "trainer.device=npu; choose one of auto, cuda, cpu"),
    ("inference.args", 3, "inference.args=3: give a mapping"),
    ("inference.servrs", 1, "inference.servrs: no such key; did you mean inference.servers?"),
    ("environment.target", "", "environment.target=: give a string that is not empty, or null"),
    ("environment.group_size", None, "environment.group_size=null: give a whole number"),
    ("environments.a", {"target": "m", "wieght": 2}, "environments.a.wieght: no such key; did you mean environments.a"),
    ("environments.a", {"weight": 0}, "environments.a.weight=0: give more than 0, or null"),
    ("environments.a b", {}, "environments.a b"),
    ("evaluation.every", 0, "evaluation.every=0: give 1 or more, or null"),
    ("trainer.logger", ["wandbb"], "trainer.logger[0]=wandbb; choose one of wandb, mlflow"),
    (f"{ATROPOS}.max_staleness", True, "max_staleness=true: give a whole number, or null"),
    (f"{ATROPOS}.api_url", "localhost:8000", "api_url=localhost:8000: give a string that matches"),
    (f"{ATROPOS}.timeout", float("nan"), "timeout=NaN: give a finite number"),
    (f"{ATROPOS}.use_advantages", 1, "use_advantages=1: give true or false"),
    (f"{ATROPOS}.advantage_clipping", 5.0, "advantage_clipping=5.0: give a list"),
    (f"{ATROPOS}.advantage_clipping", [1], "advantage_clipping=[1]: give 2 of them"),
    (f"{ATROPOS}.weight_sync.timeout", -5, "weight_sync.timeout=-5: give more than 0"),
    (f"{ACTOR}.checkpoint.save_contents", ["model", "hf"], "save_contents[1]=hf; choose one of model, optimizer, "),
    (f"{ACTOR}.optim.lr", "abc", "optim.lr=abc: give a number"),
    (f"{ACTOR}.kl_loss_type", "low_kl", "kl_loss_type=low_kl; choose one of kl, k1, abs, mse, k2, low_var_kl"),
    (
        f"{ACTOR}.strategy",
        "megatron",
        "strategy=megatron is not supported: weights are pushed from the FSDP engines only; choose one of fsdp, fsdp2",
    ),
    (f"{ROLLOUT}.name", "vllm", "rollout.name=vllm is not supported: only SGLang serves"),
    (
        "watchdog.stop_on",
        ["reward_flat", "equal_score"],
        "watchdog.stop_on[1]=equal_score; choose one of environment_raises, agent_loops",
    ),
    ("watchdog.stop_on", ["logprob_gap"], "empty_batches; did you mean logprob_difference?"),
    ("algorithm.adv_estimator", "gae", "needs a critic, which this recipe does not train; choose one of gpg, grpo"),
    ("algorithm.adv_estimator", "dr_grpo", "dr_grpo is grpo with algorithm.norm_adv_by_std_in_grpo=false and actor_"),
]


@pytest.mark.parametrize(("key", "value", "told"), REFUSED, ids=[f"{key}={value}" for key, value, _ in REFUSED])
def test_schema_refuses_by_key_value_and_choices(config, key, value, told):
    with pytest.raises(ConfigurationError) as refusal:
        check(config, {key: value})
    assert told in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


def test_schema_takes_scientific_numbers_and_names_each_key(config):
    sums = {"target": "m", "group_size": None, "weight": 2}
    check(config, {f"{ACTOR}.optim.lr": 1e-6, "trainer.experiment_name": 2024, "environments.sums": sums})
    with pytest.raises(ConfigurationError, match="^seed=-1: give 0 or more\ntrainer.nnodes=two: give a whole number$"):
        check(config, {"seed": -1, "trainer.nnodes": "two"})


def test_schema_describes_every_key():
    fields = documented().items()
    assert not [key for key, each in fields if not (each.description or hasattr(each.annotation, "model_fields"))]


def test_schema_choices_are_those_that_verl_registers():
    import torch
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY, kl_penalty
    from verl.utils.tracking import Tracking

    import recipe.atropos.algorithm.losses  # noqa: F401

    estimators = EXCLUDED["algorithm.adv_estimator"]
    losses = EXCLUDED[f"{ACTOR}.policy_loss.loss_mode"]
    assert {*ESTIMATORS, *estimators} == {*ADV_ESTIMATOR_REGISTRY, "grpo_atropos", "dr_grpo"}
    assert {*get_args(choices.PolicyLoss), *losses} == set(POLICY_LOSS_REGISTRY)
    assert set(get_args(choices.Tracker)) == set(Tracking.supported_backend)
    for name in {*get_args(choices.KL), *get_args(choices.KLLoss)}:
        assert kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), name).shape == (1, 1)


UNKNOWN = {
    "trainer.atropos.max_stalenes=1": "trainer.atropos.max_stalenes: no such key; did you mean",
    "+trainer.atropos.max_stalenes=1": "did you mean trainer.atropos.max_staleness?",
    "++trainer.atropos={weight_sync: {evry: 2}}": "trainer.atropos.weight_sync.evry: no such key; did you mean",
    "max_staleness=3": "max_staleness: no such key; did you mean trainer.atropos.max_staleness?",
    "learning_rate=3": "learning_rate: no such key",
    "rollout.name=vllm": "rollout.name: no such key; did you mean actor_rollout_ref.rollout.name?",
    "trainer.atropos=3": "trainer.atropos=3: give a mapping",
    "preset=dmo": "preset=dmo: no such preset; choose one of advantages, calculator, ",
    "trainer.logger=a,b": "a value with commas needs brackets or quotes",
    "~seed": "give key=value",
    "hydra.run.dir=x": "give key=value",
    "seed": "seed: give key=value",
    f"{ACTOR}.fsdp_config.wrap_policy={{min_params: 9}}": "wrap_policy.min_params: no such key",
    # misspelled, beside keys without effect
    f"{ROLLOUT}.temprature=1": f"{ROLLOUT}.temprature: no such key; did you mean {ROLLOUT}.temperature?",
    f"{ROLLOUT}.checkpoint_engin.update_weight_bucket_megabytes=2": f"did you mean {ROLLOUT}.checkpoint_engine.up",
}
WITHOUT_EFFECT = {
    "data.train_files=[a]": "environment.args.KEY",
    "custom_reward_function.path=f.py": "environment.reward_bridge",
    "reward_model.enable=true": "environment.reward_bridge",
    "reward.reward_manager.name=dapo": "environment.reward_bridge",
    "critic.optim.lr=1e-4": "no critic is trained",
    "model_engine=megatron": "only the FSDP engines",
    "trainer.test_freq=5": "set evaluation.every instead",
    "trainer.val_before_train=true": "set evaluation.every instead",
    "trainer.total_epochs=3": "set trainer.total_training_steps instead",
    "+trainer.v1.trainer_mode=colocate_async": "a training loop of its own",
    f"{ROLLOUT}.top_p=0.9": "environments choose how they sample",
    f"{ROLLOUT}.top_k=5": "environments choose how they sample",
    f"{ROLLOUT}.gpu_memory_utilization=0.8": "set inference.mem_fraction_static instead",
    f"{ROLLOUT}.tensor_model_parallel_size=2": "set inference.args.tp_size instead",
    f"{ROLLOUT}.checkpoint_engine.backend=nccl": "set trainer.atropos.weight_sync instead",
    f"{ACTOR}.grad_clip=0.5": "set actor_rollout_ref.actor.optim.clip_grad instead",
    f"{MODEL}.lora.rank=8": "lora_rank",
    f"{ROLLOUT}.gpu_memory_utilisation=0.8": "set inference.mem_fraction_static instead",
    f"{ROLLOUT}.temp=1": "set inference.args.FLAG",
    f"{ROLLOUT}.engine_kwargs.vllm=3": "set inference.args.FLAG",
    "critic.optm.lr=1": "no critic is trained",
    "reward.manger=dapo": "environment.reward_bridge",
    f"{ACTOR}.fsdp_config.qat.enable=true": "unquantized weights are pushed",
    f"{ACTOR}.checkpoint.strict=false": "only the FSDP engines",
    f"{MODEL}.tiled_mlp.enabled=true": "the FSDP engines do not read it",
    f"{REF}.fsdp_config.optimizer_offload=true": "the reference policy is not trained",
    f"{REF}.fsdp_config.entropy_checkpointing=true": "the reference policy computes no entropies",
}


@pytest.mark.parametrize("override", UNKNOWN)
def test_schema_names_the_nearest_key(override):
    [told] = refusal(override)
    assert UNKNOWN[override] in told and "+" not in told


def test_schema_names_what_to_set_for_keys_without_effect():
    lines = refusal(*WITHOUT_EFFECT)
    for override, line in zip(WITHOUT_EFFECT, lines, strict=True):
        assert line.startswith(override.lstrip("+").partition("=")[0]) and "has no effect here" in line
        assert WITHOUT_EFFECT[override] in line


def test_schema_names_all_wrong_keys_in_one_answer():
    """As they are in a script of verl's: those without effect, misspelled and renamed ones, and other values."""
    wrong = ["data.train_files=a", "data={shuffle: false, trian_batch_size: 2}", f"{ROLLOUT}.name=vllm"]
    lines = refusal("data.max_prompt_length=8", "trainer.test_freq=5", *wrong, "lr=1", "sed=1")
    starts = ["trainer.test_freq=5 ", "data.train_files=a ", "data.shuffle=False ", "data.trian_batch_size: ", "lr=1: "]
    starts += ["sed: ", f"{ROLLOUT}.name=vllm "]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts
    assert refusal("foo", "seed=1", "bar") == ["foo: give key=value", "bar: give key=value"]


IDLE = {  # a value, beside which value of another key it has no effect, and the one beside which it has
    "algorithm.kl_ctrl.kl_coef=0.02": ("algorithm.use_kl_in_reward=false", "true"),
    "algorithm.kl_penalty=k3": ("algorithm.use_kl_in_reward=false", "true"),
    f"{CORRECTION}.rollout_rs_threshold=2.0": (f"{CORRECTION}.rollout_rs=null", None),
    f"{CORRECTION}.loss_type=reinforce": (f"{CORRECTION}.bypass_mode=false", "true"),
    f"{ACTOR}.kl_loss_coef=0.02": (f"{ACTOR}.use_kl_loss=false", "true"),
    f"{ACTOR}.loss_scale_factor=7.5": (f"{ACTOR}.loss_agg_mode=token-mean", "seq-mean-token-sum-norm"),
    f"{ACTOR}.policy_loss.dro_beta=0.5": (f"{ACTOR}.policy_loss.loss_mode=vanilla", "dro"),
    f"{ACTOR}.optim.zero_indexed_step=false": (f"{ACTOR}.optim.lr_scheduler_type=constant", "cosine"),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=2": (f"{ACTOR}.use_dynamic_bsz=true", "false"),
    f"{ACTOR}.fsdp_config.use_orig_params=true": (f"{ACTOR}.strategy=fsdp2", "fsdp"),
    f"{ACTOR}.fsdp_config.wrap_policy.min_num_params=9": (f"{ACTOR}.strategy=fsdp2", "fsdp"),
    f"{MODEL}.fused_kernel_options.impl_backend=triton": (f"{MODEL}.use_fused_kernels=false", "true"),
    f"{MODEL}.target_modules=[q_proj]": (f"{MODEL}.lora_rank=0", None),
    f"{ACTOR}.checkpoint.save_lora_only=true": (f"{MODEL}.lora_rank=0", None),
    f"{MODEL}.lora_adapter_path=/some/adapter": (f"{MODEL}.lora_rank=0", None),
}


def test_schema_refuses_values_beside_which_they_have_no_effect():
    expected, others = [], {f"{CORRECTION}.rollout_rs": "token_k1", f"{MODEL}.lora_rank": "8"}
    for given, (switch, wanted) in IDLE.items():
        advice = f"set that to {wanted}" if wanted else "give that too"
        told = given.replace("[q_proj]", '["q_proj"]')
        expected.append(f"{told} has no effect with {switch}; {advice}, or leave it out")
        others.setdefault(switch.partition("=")[0], wanted)
    assert refusal(*IDLE) == expected
    config = load_config([f"{MODEL}.path=m", *IDLE, *(f"{key}={value}" for key, value in others.items())])
    for key, value in (given.split("=") for given in IDLE):
        assert str(OmegaConf.select(config, key)).lower().replace("'", "") == value


def test_schema_takes_what_is_off_as_it_is_shipped():
    given = ["algorithm.kl_ctrl.kl_coef=0.0", f"{ACTOR}.kl_loss_type=low_var_kl", f"{ACTOR}.clip_ratio_c=3.0"]
    config = load_config([f"{MODEL}.path=m", *given, "data.max_response_length=99"])
    assert config.algorithm.kl_ctrl.kl_coef == 0, "as DAPO's scripts do"
    assert config.actor_rollout_ref.actor.loss_scale_factor == 99, "it follows, and nobody gave it"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["algorithm.adv_estimator=rloo", "algorithm.norm_adv_by_std_in_grpo=false"], "grpo=false has no effect with"),
        ([f"{MODEL}.use_remove_padding=false", f"{ACTOR}.pad_to_length=true"], "pad_to_length=true has no effect with"),
        ([f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.offload_policy=true"], "offload_policy=true has no effect"),
        (["algorithm.gamma=0.9"], "algorithm.gamma=0.9 has no effect with algorithm.adv_estimator=grpo_atropos"),
    ],
)
def test_schema_refuses_a_value_without_effect_beside_another(options, told):
    [line] = refusal(*options)
    assert told in line


def test_schema_refuses_another_value_than_the_followed_keys():
    [told] = refusal(f"{ROLLOUT}.dtype=bfloat16", "inference.dtype=float16")
    assert "rollout.dtype=bfloat16 has no effect here: " in told and "inference.dtype" in told
    [told] = refusal(f"{ACTOR}.fsdp_config.use_torch_compile=7")
    assert "use_torch_compile=7: give true or false" in told


def test_schema_lets_shipped_values_and_free_mappings_through():
    config = load_config(
        [
            f"{MODEL}.path=m",
            f"{ROLLOUT}.tensor_model_parallel_size=1",
            f"{ROLLOUT}.dtype=float16",  # it follows the next one
            "inference.dtype=float16",
            "trainer.test_freq=-1",
            "inference.args.tp_size=2",
            f"+{MODEL}.override_config.attn_implementation=sdpa",
            "environments.a={target: m, args: {x: 1}}",
            "ray_kwargs.ray_init.address=local",
            f"{ACTOR}.clip_ratio=0.1",
            f"{ACTOR}.use_torch_compile=false",
        ]
    )
    assert config.inference.args == {"tp_size": 2} and config.environments.a.args == {"x": 1}
    workers = config.actor_rollout_ref
    assert workers.actor.clip_ratio_high == 0.1, "verl reads that one"
    assert workers.actor.fsdp_config.use_torch_compile is workers.ref.fsdp_config.use_torch_compile is False


def test_schema_keys_without_effect_say_why_and_what_to_set():
    """If another value than the shipped one is given."""
    shipped = compose_config([])
    named = [*UNSUPPORTED, *CONDITIONAL, *(switch for switch, _ in CONDITIONAL.values())]
    assert not [key for key in named if OmegaConf.select(shipped, key, default="absent") == "absent"]
    ignored = [key for key, _ in leaves(OmegaConf.to_container(shipped)) if unsupported(key)[0] and not is_free(key)]
    lines = refusal(*(f"{key}=another" for key in ignored))
    assert len(lines) == len(ignored) > 300
    for line in lines:
        why, instead = unsupported(line.partition("=")[0])
        assert f"=another has no effect here: {why}; " in line
        assert line.endswith(f"; set {instead} instead" if instead else "; leave it out")


def test_schema_keeps_the_braces_of_a_template(tmp_path, monkeypatch):
    """Whether they are escaped, or in a variable that is referred to; also where config.yaml is read again."""
    template, path = r"${name}, in \boxed{}: \${x}^2, \\${y}", tmp_path / "config.yaml"
    monkeypatch.setenv("TEMPLATE", template)
    given = [r"environment.args.prompt='give \${x}^2'", "environment.args.prompts=[{a: '${oc.env:TEMPLATE}'}]"]
    config = load_config(["preset=demo", *given])
    for load in (load_complete, load_recorded):
        [spec] = environment_specs(resolved(config)).values()
        assert (spec.args["prompt"], spec.args["prompts"]) == ("give ${x}^2", [{"a": template}])
        path.write_bytes(config_yaml(config))
        config = load(path)
        assert config_yaml(config) == path.read_bytes()


def test_schema_preset_does_not_leak_into_another_environment():
    told = []
    other = ["preset=reward_bridge", "environment.target=their.env", "environment.args.size=3"]
    config = compose_config(other, told.append)
    assert config.environment.args == {"size": 3} and config.environment.reward_bridge is None
    assert len(told) == 2 and "environment.args is for recipe.atropos.environments.gsm8k" in told[0]
    same = ["preset=demo", "environment.target=recipe.atropos.environments.gsm8k", "seed=5"]
    assert compose_config(same, told.append).environment.args.seed == 5 and len(told) == 2
    assert load_config(["preset=demo", "environment.args={}"]).environment.args == {}
    one = load_config(["preset=two_environments", "environments.sums.target=their.env"])
    assert one.environments.sums.args == {} and one.environments.word_problems.args.steps_per_eval == 0


@pytest.mark.parametrize("preset", presets())
def test_schema_takes_every_preset(preset):
    assert load_config([f"preset={preset}"]).run.name


def test_schema_takes_a_rule_of_credit_in_every_form(tmp_path):
    (tmp_path / "credit.yaml").write_text("environment: {credit: {values: 'my_env:steps_done', lam: 0.3}}")
    for given in ("environment.credit.lam=0.3", "environment.credit={lam: 0.3}", f"config={tmp_path}/credit.yaml"):
        assert load_config(["preset=demo", given]).environment.credit.lam == 0.3


def test_schema_is_checked_without_torch_and_verl():
    code = """
import sys
from recipe.atropos.config.compose import load_config
from recipe.atropos.launch_services import compose_overrides, parse_arguments
load_config(compose_overrides(parse_arguments(["--preset", "demo"])))
print([name for name in ("torch", "verl", "ray", "transformers", "atroposlib", "matplotlib") if name in sys.modules])
"""
    checked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert checked.stdout.strip() == "[]", checked.stderr


def test_schema_bounds_counts_and_times():
    """Each by its own key."""
    told = {
        "trainer.total_training_steps=0": "1 or more",
        f"{MODEL}.lora_rank=-1": "0 or more",
        f"{ATROPOS}.logprob_tolerance=0": "more than 0, or null",
        "environment.group_size=0": "1 or more",
        "environment.replicas=0": "1 or more",
        "environment.max_restarts=-1": "0 or more",
        "evaluation.timeout=0": "more than 0, or null",
    }
    assert sorted(refusal(*told)) == sorted(f"{given}: give {bound}" for given, bound in told.items())
