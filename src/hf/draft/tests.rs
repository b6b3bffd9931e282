//! Configurations of drafters: read, written and refused.

use super::*;

fn sample() -> DraftConfig {
    DraftConfig {
        head: HeadConfig::Dflash,
        hidden_size: 48,
        intermediate_size: 96,
        num_hidden_layers: 3,
        num_attention_heads: 6,
        num_key_value_heads: 2,
        head_dim: 10,
        rms_norm_eps: 1e-6,
        rope_theta: 5e5,
        vocab_size: 300,
        block_size: 6,
        mask_token_id: 299,
        target_layer_ids: vec![1, 4],
        num_target_layers: 7,
        max_position_embeddings: 1024,
        layer_types: vec![LayerType::Sliding, LayerType::Full, LayerType::Full],
        sliding_window: Some(32),
        sliding_causal: true,
        bos_token_id: Some(1),
        eos_token_ids: vec![2, 3],
        pad_token_id: None,
        dtype: Dtype::Bf16,
    }
}

#[test]
fn a_config_round_trips_through_json() {
    let config = sample();
    assert_eq!(DraftConfig::from_json(&config.to_json()).unwrap(), config);
}

/// SpecForge#742 and speculators#662: readers use one of two locations, so both must be written and read.
#[test]
fn specforge_742_both_spellings_are_written_and_either_is_read() {
    let config = sample();
    let whole = config.to_json();
    for (key, inner) in [("block_size", "dflash_config"), ("rope_theta", "rope_parameters")] {
        assert_eq!(whole[key], whole[inner][key]);
        let mut outer_only = whole.clone();
        outer_only[inner].as_object_mut().unwrap().remove(key);
        assert_eq!(DraftConfig::from_json(&outer_only).unwrap(), config);
        let mut inner_only = whole.clone();
        inner_only.as_object_mut().unwrap().remove(key);
        assert_eq!(DraftConfig::from_json(&inner_only).unwrap(), config);
        let mut neither = outer_only;
        neither.as_object_mut().unwrap().remove(key);
        let text = DraftConfig::from_json(&neither).unwrap_err().to_string();
        assert!(text.contains(key), "{text}");
    }
    assert_eq!(whole["rope_scaling"], Value::Null);
}

/// speculators#613, Automodel#3605: a leaked partial rotary made acceptance collapse in serving.
#[test]
fn speculators_613_partial_rotary_is_never_written_and_refused_when_read() {
    let mut value = sample().to_json();
    assert!(!value.to_string().contains("partial_rotary") && !value.to_string().contains("mrope"));
    value["partial_rotary_factor"] = json!(0.25);
    let text = DraftConfig::from_json(&value).unwrap_err().to_string();
    assert!(text.contains("partial_rotary_factor") && text.contains("0.25"), "{text}");
}

#[test]
fn contradictions_are_refused_by_name() {
    for (key, value) in [
        ("num_target_layers", json!(5)),
        ("num_key_value_heads", json!(4)),
        ("vocab_size", json!(299)),
        ("head_dim", json!(9)),
        ("layer_types", json!(["full_attention"])),
        ("use_sliding_window", json!(false)),
        ("hidden_act", json!("gelu")),
        ("attention_bias", json!(true)),
        ("architectures", json!(["DFlash2DraftModel"])),
    ] {
        let mut config = sample().to_json();
        config[key] = value;
        assert!(DraftConfig::from_json(&config).is_err(), "{key}");
    }
}

#[test]
fn a_drafter_has_11_n_plus_3_tensors() {
    let config = sample();
    let shapes = config.tensor_shapes();
    assert_eq!(shapes.len(), 11 * config.num_hidden_layers + 3);
    assert_eq!(shapes["fc.weight"], [48, 96]);
    assert_eq!(shapes["layers.2.self_attn.o_proj.weight"], [48, 60]);
}

/// Table of docs/dflash.md#tapped-layers; 38, 62 and 94 distinguish half-to-even from half-up.
#[test]
fn taps_follow_the_published_table() {
    for (layers, ids) in [
        (24, [1, 6, 11, 16, 21]),
        (28, [1, 7, 13, 19, 25]),
        (32, [1, 8, 15, 22, 29]),
        (36, [1, 9, 17, 25, 33]),
        (38, [1, 10, 18, 26, 35]),
        (40, [1, 10, 19, 28, 37]),
        (48, [1, 12, 23, 34, 45]),
        (60, [1, 15, 29, 43, 57]),
        (61, [1, 15, 30, 44, 58]),
        (62, [1, 16, 30, 44, 59]),
        (64, [1, 16, 31, 46, 61]),
        (94, [1, 24, 46, 68, 91]),
    ] {
        assert_eq!(default_target_layer_ids(layers, 5), ids, "{layers} layers");
    }
    assert_eq!(default_target_layer_ids(36, 1), [18]);
}
