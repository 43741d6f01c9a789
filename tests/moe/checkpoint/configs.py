"""The keys of published configurations, and of those that transformers 5.24 writes."""

# Those of most model types.
SHARED = """
    architectures attention_bias attention_dropout auto_map bos_token_id dtype eos_token_id
    head_dim hidden_act hidden_size initializer_range layer_types max_position_embeddings
    num_attention_heads num_hidden_layers num_key_value_heads output_router_logits pad_token_id
    rms_norm_eps rope_parameters rope_scaling rope_theta router_aux_loss_coef sliding_window
    tie_word_embeddings torch_dtype transformers_version use_cache vocab_size
"""

# Of each model type, and what is beside its `text_config`.
PUBLISHED = {
    "dbrx": (
        """
        attn_config d_model emb_pdrop ffn_config max_seq_len moe_jitter_eps moe_loss_weight
        moe_normalize_expert_weights moe_num_experts moe_top_k n_heads n_layers resid_pdrop
        """,
        "",
    ),
    "deepseek_v2": (
        """
        aux_loss_alpha ep_size first_k_dense_replace intermediate_size kv_lora_rank mlp_bias
        moe_intermediate_size moe_layer_freq n_group n_routed_experts n_shared_experts
        norm_topk_prob num_experts_per_tok pretraining_tp q_lora_rank qk_nope_head_dim
        qk_rope_head_dim routed_scaling_factor scoring_func seq_aux topk_group topk_method
        v_head_dim
        """,
        "",
    ),
    "deepseek_v3": (
        """
        aux_loss_alpha ep_size first_k_dense_replace intermediate_size kv_lora_rank
        moe_intermediate_size moe_layer_freq n_group n_routed_experts n_shared_experts
        norm_topk_prob num_experts_per_tok num_mtp_layers num_nextn_predict_layers
        pretraining_tp q_lora_rank qk_nope_head_dim qk_rope_head_dim rope_interleave
        routed_scaling_factor scoring_func seq_aux topk_group topk_method v_head_dim
        """,
        "",
    ),
    "deepseek_v32": (
        """
        ep_size first_k_dense_replace index_head_dim index_n_heads index_topk
        intermediate_size kv_lora_rank mlp_bias mlp_layer_types moe_intermediate_size
        moe_layer_freq n_group n_routed_experts n_shared_experts norm_topk_prob num_experts
        num_experts_per_tok num_nextn_predict_layers q_lora_rank qk_nope_head_dim
        qk_rope_head_dim routed_scaling_factor scoring_func topk_group topk_method
        v_head_dim
        """,
        "",
    ),
    "deepseek_v4": (
        """
        compress_rate_csa compress_rate_hca compress_rates compress_ratios
        compress_rope_theta hc_eps hc_mult hc_sinkhorn_iters index_head_dim index_n_heads
        index_topk mlp_bias mlp_layer_types moe_intermediate_size n_routed_experts
        expert_dtype n_shared_experts norm_topk_prob num_experts_per_tok num_hash_layers
        num_nextn_predict_layers o_groups o_lora_rank partial_rotary_factor q_lora_rank
        qk_rope_head_dim routed_scaling_factor router_jitter_noise scoring_func swiglu_limit
        """,
        "",
    ),
    "ernie4_5_moe": (
        """
        intermediate_size moe_capacity moe_gate moe_intermediate_size moe_k moe_layer_end_index
        moe_layer_interval moe_layer_start_index moe_norm_min moe_num_experts
        moe_num_shared_experts moe_use_aux_free num_nextn_predict_layers use_bias use_rmsnorm
        """,
        "",
    ),
    "gemma4_text": (
        """
        attention_k_eq_v enable_moe_block final_logit_softcapping global_head_dim
        hidden_activation hidden_size_per_layer_input intermediate_size
        moe_intermediate_size num_experts num_global_key_value_heads num_kv_shared_layers
        top_k_experts use_bidirectional_attention use_double_wide_mlp
        vocab_size_per_layer_input
        """,
        """
        audio_config audio_token_id boa_token_id boi_token_id eoa_token_index eoi_token_id
        image_token_id video_token_id vision_config vision_soft_tokens_per_image
        """,
    ),
    "glm4_moe": (
        """
        first_k_dense_replace intermediate_size moe_intermediate_size n_group
        n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok num_mtp_layers
        num_nextn_predict_layers partial_rotary_factor routed_scaling_factor topk_group
        use_qk_norm
        """,
        "",
    ),
    "glm4_moe_lite": (
        """
        intermediate_size kv_lora_rank mlp_layer_types moe_intermediate_size n_group
        n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok pretraining_tp
        q_lora_rank qk_nope_head_dim qk_rope_head_dim rope_interleave routed_scaling_factor
        topk_group v_head_dim
        """,
        "",
    ),
    "glm_moe_dsa": (
        """
        first_k_dense_replace index_head_dim index_n_heads index_skip_topk_offset index_topk
        index_topk_freq index_topk_pattern indexer_types intermediate_size kv_lora_rank
        mlp_bias mlp_layer_types moe_intermediate_size n_group n_routed_experts
        n_shared_experts norm_topk_prob num_experts num_experts_per_tok q_lora_rank
        qk_nope_head_dim qk_rope_head_dim routed_scaling_factor topk_group v_head_dim
        """,
        "",
    ),
    "gpt_oss": (
        """
        experts_per_token initial_context_length intermediate_size num_experts_per_tok
        num_local_experts swiglu_alpha swiglu_limit
        """,
        "",
    ),
    "granitemoe": (
        """
        attention_multiplier embedding_multiplier intermediate_size logits_scaling
        num_experts_per_tok num_local_experts residual_multiplier
        """,
        "",
    ),
    "granitemoehybrid": (
        """
        attention_multiplier embedding_multiplier intermediate_size logits_scaling
        num_experts_per_tok num_local_experts residual_multiplier
        layers_block_type mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state
        mamba_expand mamba_n_groups mamba_n_heads mamba_proj_bias normalization_function
        position_embedding_type shared_intermediate_size time_step_limit time_step_max time_step_min
        """,
        "",
    ),
    "granitemoeshared": (
        """
        attention_multiplier embedding_multiplier intermediate_size logits_scaling
        num_experts_per_tok num_local_experts residual_multiplier
        shared_intermediate_size
        """,
        "",
    ),
    "hunyuan_v1_moe": (
        """
        cla_share_factor eod_token_id intermediate_size mlp_bias moe_drop_tokens
        moe_intermediate_size moe_layer_num_skipped moe_random_routing_dropped_token moe_topk
        norm_type num_experts num_shared_expert pretraining_tp sep_token_id use_cla
        use_mixed_mlp_moe use_qk_norm
        """,
        "",
    ),
    "kimi_k2": (
        """
        add_cross_attention aux_loss_alpha bad_words_ids begin_suppress_tokens
        chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
        diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size ep_size
        exponential_decay_length_penalty finetuning_task first_k_dense_replace
        forced_bos_token_id forced_eos_token_id id2label intermediate_size is_decoder
        is_encoder_decoder kv_lora_rank label2id length_penalty max_length min_length
        moe_intermediate_size moe_layer_freq n_group n_routed_experts n_shared_experts
        no_repeat_ngram_size norm_topk_prob num_beam_groups num_beams num_experts_per_tok
        num_nextn_predict_layers num_return_sequences output_attentions output_hidden_states
        output_scores prefix pretraining_tp problem_type pruned_heads q_lora_rank
        qk_nope_head_dim qk_rope_head_dim quantization_config remove_invalid_values
        repetition_penalty return_dict return_dict_in_generate routed_scaling_factor
        scoring_func sep_token_id seq_aux suppress_tokens task_specific_params temperature
        tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p topk_group
        topk_method torchscript typical_p use_bfloat16 v_head_dim
        """,
        """
        ignore_index media_placeholder_token_id use_unified_vision_chunk video_placeholder
        vision_config
        """,
    ),
    "kimi_linear": (
        """
        first_k_dense_replace intermediate_size kv_lora_rank linear_attn_config mla_use_nope
        model_max_length moe_intermediate_size moe_layer_freq moe_renormalize
        moe_router_activation_func num_expert_group num_experts num_experts_per_token
        num_nextn_predict_layers num_shared_experts q_lora_rank qk_nope_head_dim qk_rope_head_dim
        routed_scaling_factor topk_group use_grouped_topk v_head_dim
        """,
        "",
    ),
    "llama4_text": (
        """
        attention_chunk_size attn_scale attn_temperature_tuning floor_scale
        for_llm_compressor interleave_moe_layer_step intermediate_size intermediate_size_mlp
        moe_layers no_rope_layer_interval no_rope_layers num_experts_per_tok
        num_local_experts router_jitter_noise use_qk_norm
        """,
        """
        boi_token_index eoi_token_index image_token_index vision_config
        """,
    ),
    "longcat_flash": (
        """
        attention_method expert_ffn_hidden_size ffn_hidden_size kv_lora_rank
        mla_scale_kv_lora mla_scale_q_lora moe_topk n_routed_experts num_layers q_lora_rank
        qk_head_dim qk_nope_head_dim qk_rope_head_dim routed_scaling_factor router_bias
        v_head_dim zero_expert_num zero_expert_type
        """,
        "",
    ),
    "minimax": (
        """
        attn_type_list block_size full_attn_alpha_factor full_attn_beta_factor
        intermediate_size layernorm_full_attention_alpha layernorm_full_attention_beta
        layernorm_linear_attention_alpha layernorm_linear_attention_beta layernorm_mlp_alpha
        layernorm_mlp_beta linear_attn_alpha_factor linear_attn_beta_factor mlp_alpha_factor
        mlp_beta_factor num_experts_per_tok num_local_experts postnorm rotary_dim
        router_jitter_noise shared_intermediate_size shared_moe_mode
        """,
        "",
    ),
    "minimax_m2": (
        """
        attn_type_list intermediate_size layernorm_full_attention_beta
        layernorm_linear_attention_beta layernorm_mlp_beta mlp_intermediate_size
        mtp_transformer_layers num_experts_per_tok num_local_experts num_mtp_modules
        qk_norm_type rotary_dim router_jitter_noise scoring_func shared_intermediate_size
        shared_moe_mode use_mtp use_qk_norm use_routing_bias
        """,
        "",
    ),
    "minimax_m3_vl_text": (
        """
        dense_intermediate_size index_block_size index_head_dim index_local_blocks
        index_n_heads index_topk_blocks intermediate_size mlp_layer_types moe_layer_freq
        num_experts_per_tok num_local_experts rotary_dim routed_scaling_factor
        router_jitter_noise shared_intermediate_size sparse_attention_config swiglu_alpha
        swiglu_limit
        """,
        """
        image_token_index merged_hidden_size projector_hidden_size video_token_index vision_config
        """,
    ),
    "mixtral": (
        """
        intermediate_size num_experts_per_tok num_local_experts router_jitter_noise
        """,
        "",
    ),
    "nemotron_h": (
        """
        chunk_size conv_kernel expand hidden_dropout hybrid_override_pattern intermediate_size
        layer_norm_epsilon layers_block_type mamba_head_dim mamba_hidden_act mamba_num_heads
        mamba_proj_bias mamba_ssm_cache_dtype mlp_bias mlp_hidden_act moe_intermediate_size
        moe_latent_size moe_shared_expert_intermediate_size moe_shared_expert_overlap n_group
        n_groups n_routed_experts n_shared_experts norm_eps norm_topk_prob num_experts_per_tok
        num_logits_to_keep num_nextn_predict_layers partial_rotary_factor rescale_prenorm_residual
        residual_in_fp32 routed_scaling_factor ssm_state_size time_step_floor time_step_limit
        time_step_max time_step_min time_step_rank topk_group use_bias use_conv_bias
        use_mamba_kernels
        """,
        "",
    ),
    "olmoe": (
        """
        clip_qkv intermediate_size norm_topk_prob num_experts num_experts_per_tok
        """,
        "",
    ),
    "phimoe": (
        """
        hidden_dropout input_jitter_noise intermediate_size lm_head_bias num_experts_per_tok
        num_local_experts original_max_position_embeddings router_jitter_noise
        """,
        "",
    ),
    "qwen2_moe": (
        """
        decoder_sparse_step intermediate_size max_window_layers mlp_only_layers
        moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok qkv_bias
        shared_expert_intermediate_size use_sliding_window
        """,
        "",
    ),
    "qwen3_5_moe_text": (
        """
        attn_output_gate full_attention_interval linear_conv_kernel_dim linear_key_head_dim
        linear_num_key_heads linear_num_value_heads linear_value_head_dim mamba_ssm_dtype
        moe_intermediate_size mtp_num_hidden_layers mtp_use_dedicated_embeddings num_experts
        num_experts_per_tok shared_expert_intermediate_size
        """,
        """
        image_token_id video_token_id vision_config vision_end_token_id
        vision_start_token_id
        """,
    ),
    "qwen3_moe": (
        """
        decoder_sparse_step intermediate_size max_window_layers mlp_only_layers
        moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok
        use_sliding_window
        """,
        "",
    ),
    "qwen3_next": (
        """
        decoder_sparse_step full_attention_interval intermediate_size linear_conv_kernel_dim
        linear_key_head_dim linear_num_key_heads linear_num_value_heads
        linear_value_head_dim mlp_only_layers moe_intermediate_size norm_topk_prob
        num_experts num_experts_per_tok shared_expert_intermediate_size
        """,
        "",
    ),
    "qwen3_vl_moe_text": (
        """
        decoder_sparse_step intermediate_size mlp_only_layers moe_intermediate_size
        num_experts num_experts_per_tok
        """,
        """
        image_token_id video_token_id vision_config vision_end_token_id
        vision_start_token_id
        """,
    ),
    "step3p5": (
        """
        att_impl_type intermediate_size moe_every_n_layer moe_intermediate_size moe_layer_offset
        moe_layers_enum moe_num_experts moe_router_activation moe_router_scaling_factor moe_top_k
        need_fp32_gate norm_expert_weight num_attention_groups num_nextn_predict_layers
        partial_rotary_factors share_expert_dim sink swiglu_limits swiglu_limits_shared
        use_head_wise_attn_gate use_moe use_moe_router_bias use_qk_norm yarn_only_types
        zero_centered
        """,
        """
        image_token_id vision_config
        """,
    ),
}
