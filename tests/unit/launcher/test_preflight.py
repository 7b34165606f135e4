"""What cannot work is refused before anything is started, by key and with what to give instead."""

import contextlib
import json

import pytest
from omegaconf import OmegaConf

from helpers.configs import changed_config
from helpers.trainer import compose_config
from recipe.atropos.config.preflight import REJECTION_STATISTICS, check_config, correction_rules
from recipe.atropos.errors import ConfigurationError

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "ref"))
CORRECTION, ATROPOS = "algorithm.rollout_correction", "trainer.atropos"
BASELINE = f"algorithm.adv_estimator=tir_optimal_token_baseline {ACTOR}.calculate_sum_pi_squared=true"
ADAPTER_ONLY = (
    f"actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.lora.merge=false {ATROPOS}.weight_sync.transport=auto"
)
# Half of the longest row for each of the two ranks that share it.
SHARED = f"data.max_prompt_length=1024 data.max_response_length=1024 {ACTOR}.ppo_max_token_len_per_gpu=1024"
MODEL = ["actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B", f"{ACTOR}.ppo_max_token_len_per_gpu=4096"]

CASES = {
    "algorithm.adv_estimator=optimal_token_baseline": "calculate_sum_pi_squared=true",
    f"{BASELINE} {CORRECTION}.bypass_mode=true": "needs the forward pass",
    f"{BASELINE} actor_rollout_ref.model.use_fused_kernels=true": "needs whole logits",
    f"algorithm.adv_estimator=rloo {ATROPOS}.fallback_to_grpo=false": "or choose grpo_atropos",
    f"{ATROPOS}.use_advantages=false {ATROPOS}.fallback_to_grpo=false": "leave no advantage",
    "environment.credit={} algorithm.adv_estimator=rloo": (
        "environment.credit has no effect with algorithm.adv_estimator=rloo, which reads no advantages"
    ),
    "environment.credit.teacher.hint=json:dumps actor_rollout_ref.rollout.temperature=0.5": (
        "credit has no effect with actor_rollout_ref.rollout.temperature=0.5, because its teacher judges at 1"
    ),
    "environment.credit.teacher.hint=json:no_such": "environment.credit.teacher.hint=json:no_such: ",
    f"environment.credit={{}} {ATROPOS}.use_advantages=false": "use_advantages=false; set it to true, or drop credit",
    "environment.credit={} algorithm.norm_adv_by_std_in_grpo=false": "grpo=false has no effect with environment.credit",
    f"{ATROPOS}.advantage_clipping=[1,-1]": "low below high",
    f"{ACTOR}.policy_loss.loss_mode=dro": "dro_beta",
    f"{ACTOR}.policy_loss.loss_mode=bypass_mode": "bypass_mode=true; set it",
    f"{ACTOR}.shuffle=true": "would tear groups apart",
    f"{CORRECTION}.bypass_mode=true {CORRECTION}.rollout_is_batch_normalize=true": "over each micro-batch",
    f"{ACTOR}.policy_loss.loss_mode=gspo {CORRECTION}.bypass_mode=true": "drop one of them",
    f"{ACTOR}.policy_loss.loss_mode=sapo": "=sapo with actor_rollout_ref.actor.loss_agg_mode=token-mean: verl",
    f"{CORRECTION}.bypass_mode=true {CORRECTION}.rollout_rs=seq_mean_k3 {CORRECTION}.rollout_rs_threshold=0.1": (
        "rollout_rs=seq_mean_k3 with bypass_mode=true: verl's loss rejects tokens, but divides by all"
    ),
    f"{ACTOR}.ppo_max_token_len_per_gpu=1024": "no room for a row of data.max_prompt_length",
    f"{CORRECTION}.rollout_is_threshold=null": "rollout_is_threshold=null with rollout_is=token",
    f"{CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_threshold=0.5_2.0 {CORRECTION}.bypass_mode=true": (
        "=0.5_2.0 with bypass_mode=true"
    ),
    f"{CORRECTION}.rollout_is_threshold=-1": "rollout_is_threshold=-1: give a number above 0",
    f"{CORRECTION}.rollout_rs=token_k1": "rollout_rs_threshold=null with rollout_rs=token_k1",
    f"{CORRECTION}.rollout_rs=nonsense {CORRECTION}.rollout_rs_threshold=2": "nonsense is none of token_k1",
    f"{ADAPTER_ONLY} {ATROPOS}.weight_sync.transport=disk": "transport=disk: an adapter travels inside the request",
    f"{ADAPTER_ONLY} inference.colocated=true": "lost with the memory that servers release",
    f"{ATROPOS}.distillation.use_policy_loss=false": "give a loss_coef",
    f"{ATROPOS}.distillation.loss_coef=1 actor_rollout_ref.model.use_fused_kernels=true": "needs whole logits",
    f"{ATROPOS}.distillation.loss_coef=1 trainer.nnodes=2 {ACTOR}.ulysses_sequence_parallel_size=2": "whole logits",
    f"{ATROPOS}.distillation.loss_coef=1 {ATROPOS}.distillation.use_policy_loss=false {ACTOR}.use_kl_loss=true": (
        "leaves out the KL and entropy terms"
    ),
    f"inference.colocated=true {ATROPOS}.weight_sync.every=2": "every update needs a push; set it to 1",
    f"inference.colocated=true {ATROPOS}.weight_sync.pause_mode=in_place": "dies when it gives memory back",
    "actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]": (
        "give save_contents=[model], of which model holds base and adapter"
    ),
    f"{ACTOR}.checkpoint.save_contents=[hf_model]": "lacks model: a run that is resumed",
    f"{ACTOR}.checkpoint.load_contents=[optimizer]": "load_contents=.* lacks model",
    f"{ACTOR}.checkpoint.load_contents=[model] {ACTOR}.optim.lr_warmup_steps=3": "lacks extra: a run that is resumed",
    f"{ACTOR}.checkpoint.save_contents=[model] {ACTOR}.optim.lr_scheduler_type=cosine": "load_contents=.* lacks extra",
    f"{ACTOR}.fsdp_config.fsdp_size=0": "fsdp_size=0 does not divide .* = 1, the number of ranks",
    f"{ACTOR}.fsdp_config.fsdp_size=3 trainer.n_gpus_per_node=4": "fsdp_size=3 does not divide",
    f"{ACTOR}.ulysses_sequence_parallel_size=3 trainer.n_gpus_per_node=4": "parallel_size=3 does not divide",
    f"{ATROPOS}.replay=/no/such/folder": "no batches there; give the folder trajectories",
    f"{ACTOR}.use_dynamic_bsz=false": f"{ACTOR}.ppo_micro_batch_size_per_gpu=null",
    f"{ROLLOUT}.log_prob_use_dynamic_bsz=false": f"{ROLLOUT}.log_prob_use_dynamic_bsz=False with",
    f"{ACTOR}.use_kl_loss=true {REF}.log_prob_use_dynamic_bsz=false": f"{REF}.log_prob_micro_batch_size_per_gpu=null",
    f"{ACTOR}.use_kl_loss=true {REF}.log_prob_max_token_len_per_gpu=9": "log_prob_max_token_len_per_gpu=9 has no room",
    f"{ACTOR}.fsdp_config.mixed_precision.param_dtyp=fp32": "mixed_precision.param_dtyp: no such key",
    "sessions.renderer=qwen": "sessions.renderer=qwen; choose one of auto, .*default, .*qwen3, ",
    "sessions.tool_parser=qwen": "sessions.tool_parser=qwen; choose one of deepseek-v3, glm, qwen3",
}


@pytest.mark.parametrize("overrides", CASES, ids=range(len(CASES)))
def test_a_configuration_that_cannot_work_is_refused_by_key(overrides):
    with pytest.raises(ConfigurationError, match=CASES[overrides].replace("[", r"\[")):
        check_config(changed_config(compose_config(*MODEL), overrides.split()))


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        f"{ACTOR}.policy_loss.loss_mode=advantage_weighted_sft {ATROPOS}.advantage_clipping=[-5,5]",
        f"{CORRECTION}.bypass_mode=true {CORRECTION}.rollout_is=null",
        f"{ACTOR}.policy_loss.loss_mode=sapo {ACTOR}.loss_agg_mode=seq-mean-token-mean",
        f"{CORRECTION}.rollout_is=sequence {CORRECTION}.rollout_rs=seq_mean_k3 {CORRECTION}.rollout_rs_threshold=0.1",
        f"{ATROPOS}.distillation.loss_coef=1 {ATROPOS}.distillation.use_policy_loss=false",
        BASELINE,
        "actor_rollout_ref.model.lora_rank=8",
        f"actor_rollout_ref.model.lora_rank=8 {ACTOR}.use_kl_loss=true {REF}.log_prob_use_dynamic_bsz=false",
        ADAPTER_ONLY,
        f"{ADAPTER_ONLY} inference.urls=[http://h:1]",
        f"{SHARED} {ACTOR}.ulysses_sequence_parallel_size=2 trainer.nnodes=2",
        f"{SHARED} {ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2 trainer.nnodes=2",
        f"{ACTOR}.fsdp_config.fsdp_size=8 trainer.nnodes=2",
        "sessions.renderer=default sessions.tool_parser=qwen3.5",
        "sessions.renderer=glm-4.5",
        f"{ACTOR}.checkpoint.load_contents=[model]",
    ],
    ids=range(17),
)
def test_a_configuration_that_works_is_let_through(overrides):
    check_config(changed_config(compose_config(*MODEL), overrides.split()))


WINDOW = "/config.json has use_sliding_window=true, and SGLang serves"
FUSED = "actor_rollout_ref.model.use_fused_kernels=true"
UNPACKED = "actor_rollout_ref.model.use_remove_padding=false"


@pytest.mark.parametrize(
    ("settings", "options", "told"),
    [
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32}, "", WINDOW),
        ({"model_type": "qwen3_moe", "use_sliding_window": True}, "", WINDOW),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32}, "", None),
        ({"model_type": "gemma2", "use_sliding_window": True, "sliding_window": 32}, "", None),
        ({"model_type": "qwen2", "tie_word_embeddings": False}, f"{FUSED} {ACTOR}.strategy=fsdp2", "=fsdp2 .*not tied"),
        ({"model_type": "qwen2", "tie_word_embeddings": False}, f"{FUSED} {ACTOR}.strategy=fsdp", None),
        ({"model_type": "qwen2", "tie_word_embeddings": True}, f"{FUSED} {ACTOR}.strategy=fsdp2", None),
        ({"model_type": "gemma2", "final_logit_softcapping": 30.0}, FUSED, r"leave out .* \(final_logit_softcapping\)"),
        ({"model_type": "granite", "logits_scaling": 8.0}, FUSED, r"leave out .* \(logits_scaling\)"),
        ({"model_type": "phimoe", "lm_head_bias": True}, FUSED, r"leave out .* \(lm_head_bias\)"),
        ({"model_type": "phimoe", "lm_head_bias": False}, FUSED, None),
        ({"model_type": "phi"}, FUSED, r"leave out .* \(a bias\)"),
        ({"model_type": "granite", "logits_scaling": 1.0, "final_logit_softcapping": None}, FUSED, None),
        ({"model_type": "granite", "logits_scaling": 8.0}, "", None),
        ({"model_type": "qwen3_next"}, "", "the layers of qwen3_next would read all rows"),
        ({"model_type": "qwen3_next"}, UNPACKED, None),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, "", "the layers of lfm2 would"),
        ({"model_type": "granitemoehybrid", "layer_types": ["attention"] * 2}, "", None),
        ({"model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"]}, "", "layers of gpt_oss"),
        ({"model_type": "qwen2_5_vl", "vision_config": {}}, "", "qwen2_5_vl reads images"),
    ],
)
def test_a_model_that_cannot_be_served_or_trained_is_refused(tmp_path, settings, options, told):
    """Of a window that SGLang ignores, fused kernels that compute something else, and rows that become one."""
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = compose_config(*MODEL[1:], f"actor_rollout_ref.model.path={tmp_path}", *options.split())
    with pytest.raises(ConfigurationError, match=told) if told else contextlib.nullcontext():
        check_config(config)


@pytest.mark.parametrize(("rank", "alpha", "told"), [(8, 16, "lora_alpha=16"), (4, 32, "lora_rank=4"), (8, 32, None)])
def test_an_adapter_to_begin_with_is_as_configured(tmp_path, rank, alpha, told):
    """It is the adapter's own rank and alpha that verl trains with."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 32}))
    given = [f"lora_rank={rank}", f"lora_alpha={alpha}", f"lora_adapter_path={tmp_path}"]
    config = compose_config(*MODEL, *(f"actor_rollout_ref.model.{each}" for each in given))
    with pytest.raises(ConfigurationError, match=f"{told} with .*give that") if told else contextlib.nullcontext():
        check_config(config)


@pytest.mark.parametrize("given", ["/no/such", "'~'", "none/of/these"])
def test_an_adapter_to_begin_with_is_there(tmp_path, monkeypatch, given):
    """Where PEFT and verl look, which leave a ~ as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16}))
    options = ["actor_rollout_ref.model.lora_rank=8", f"actor_rollout_ref.model.lora_adapter_path={given}"]
    with pytest.raises(ConfigurationError, match=r"lora_adapter_path=.*: no adapter there .* without ~"):
        check_config(compose_config(*MODEL, *options))
    check_config(compose_config(*MODEL, *options, "run.resume_from=other"))


THRESHOLDS = [2, -1, "0.5_2", "2_0.5", "a", "1_b", "", "0.5_2,3", "2,3"]


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("chosen", ["token_k1", "seq_mean_k3", "token_k1,seq_max_k2", "token_k4", "token_k1,token_k1"])
def test_schema_of_rejection_thresholds_is_verls(chosen, threshold):
    import torch
    from verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS, compute_rollout_rejection_mask

    assert set(REJECTION_STATISTICS) == SUPPORTED_ROLLOUT_RS_OPTIONS
    correction = OmegaConf.create({"rollout_is": None, "rollout_rs": chosen, "rollout_rs_threshold": threshold})
    refused = next((message for wrong, message in correction_rules(correction) if wrong), "")
    try:
        compute_rollout_rejection_mask(torch.zeros(1, 2), torch.ones(1, 2), chosen, threshold)
    except ValueError:
        assert "algorithm.rollout_correction.rollout_rs" in refused
    else:
        assert refused == ""
