"""Lists the settings of TRL's GRPOConfig with their types; tests/support/trl_table.py writes and checks it.

No torch here.
"""

TRL_VERSION = "1.16.0"
_BY_TYPE = {
    "str | None": (
        "output_dir", "optim_args", "torch_compile_backend", "torch_compile_mode", "run_name", "trackio_space_id",
        "trackio_bucket_id", "hub_token", "hub_model_id", "hub_revision", "metric_for_best_model",
        "dataloader_multiprocessing_context", "ddp_backend", "fsdp", "resume_from_checkpoint", "cache_implementation",
        "vllm_structured_outputs_regex", "vllm_server_base_url", "log_completions_hub_repo",
    ),
    "int": (
        "per_device_train_batch_size", "max_steps", "gradient_accumulation_steps", "per_device_eval_batch_size", "seed",
        "dataloader_num_workers", "ddp_timeout", "local_rank", "top_k", "vllm_server_port", "vllm_group_port",
        "vllm_tensor_parallel_size", "num_iterations", "ref_model_sync_steps",
    ),
    "float": (
        "num_train_epochs", "learning_rate", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
        "max_grad_norm", "label_smoothing_factor", "logging_steps", "eval_delay", "save_steps", "temperature", "top_p",
        "repetition_penalty", "vllm_server_timeout", "vllm_gpu_memory_utilization", "beta", "epsilon",
        "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg",
        "vespo_lambda_neg", "ref_model_mixup_alpha", "top_entropy_quantile", "entropy_coef", "entropy_coef_min",
        "entropy_coef_max", "entropy_coef_delta", "entropy_target",
    ),
    "str": (
        "lr_scheduler_type", "optim", "logging_strategy", "log_level", "log_level_replica", "project", "eval_strategy",
        "save_strategy", "hub_strategy", "train_sampling_strategy", "length_column_name", "vllm_mode",
        "vllm_model_impl", "vllm_server_host", "importance_sampling_level", "multi_objective_aggregation",
        "scale_rewards", "loss_type", "vllm_importance_sampling_mode",
    ),
    "dict | str | None": (
        "lr_scheduler_kwargs", "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs", "accelerator_config",
        "fsdp_config", "deepspeed", "model_init_kwargs", "generation_kwargs", "chat_template_kwargs",
        "transformers_continuous_batching_config",
    ),
    "list | str | None": (
        "optim_target_modules", "report_to",
    ),
    "bool": (
        "average_tokens_across_devices", "fp16", "bf16_full_eval", "fp16_full_eval", "gradient_checkpointing",
        "torch_compile", "use_liger_kernel", "use_cache", "auto_find_batch_size", "logging_first_step",
        "log_on_each_node", "logging_nan_inf_filter", "prediction_loss_only", "eval_on_start", "eval_do_concat_batches",
        "eval_use_gather_object", "batch_eval_metrics", "save_only_model", "save_on_each_node", "enable_jit_checkpoint",
        "push_to_hub", "hub_always_push", "load_best_model_at_end", "ignore_data_skip",
        "restore_callback_states_from_checkpoint", "full_determinism", "use_cpu", "dataloader_drop_last",
        "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_in_order", "skip_memory_metrics",
        "do_train", "do_eval", "do_predict", "trust_remote_code", "disable_dropout", "cast_lm_head_to_fp32",
        "ds3_gather_for_generation", "use_vllm", "vllm_enable_sleep_mode", "mask_truncated_completions",
        "sync_ref_model", "use_adaptive_entropy", "vllm_importance_sampling_correction", "use_bias_correction_kl",
        "log_completions", "log_multimodal", "log_unique_prompts", "use_transformers_continuous_batching",
        "use_transformers_paged",
    ),
    "bool | None": (
        "bf16", "tf32", "activation_checkpointing", "disable_tqdm", "hub_private_repo", "greater_is_better",
        "remove_unused_columns", "ddp_find_unused_parameters", "ddp_broadcast_buffers", "ddp_static_graph",
        "shuffle_dataset",
    ),
    "dict | None": (
        "liger_kernel_config",
    ),
    "float | None": (
        "neftune_noise_alpha", "eval_steps", "router_aux_loss_coef", "min_p", "delta", "epsilon_high",
        "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "off_policy_mask_threshold",
        "vllm_importance_sampling_cap",
    ),
    "int | None": (
        "torch_empty_cache_steps", "eval_accumulation_steps", "save_total_limit", "data_seed",
        "dataloader_prefetch_factor", "ddp_bucket_cap_mb", "num_generations", "num_generations_eval",
        "max_completion_length", "generation_batch_size", "steps_per_generation", "vllm_max_model_length",
        "max_tool_calling_iterations", "num_completions_to_print",
    ),
    "bool | str": (
        "include_num_input_tokens_seen",
    ),
    "bool | str | None": (
        "trackio_static_space_id",
    ),
    "list": (
        "include_for_metrics",
    ),
    "None": (
        "parallelism_config",
    ),
    "list | None": (
        "label_names", "reward_weights",
    ),
    "list | str": (
        "debug",
    ),
    "int | str | None": (
        "pad_to_multiple_of",
    ),
}  # fmt: skip
TRL_FIELDS: dict[str, str] = {name: kind for kind, names in _BY_TYPE.items() for name in names}
