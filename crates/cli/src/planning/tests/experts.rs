//! Memory of ranks with different experts.

use super::*;
use std::sync::Arc;
use trireme_model::ExchangeConfig;
use trireme_parallel::Spill;
use trireme_tensor::OverflowAllocator;

pub(super) fn model(capacity_factor: Option<f64>, num_shadowed: usize) -> ModelConfig {
    let text = r#"{"model_type": "deepseek_v3", "vocab_size": 350, "hidden_size": 36, "intermediate_size": 60,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
        "q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7,
        "n_routed_experts": 4, "n_group": 2, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 50,
        "first_k_dense_replace": 1}"#;
    let mut config = ModelConfig::from_json(text).unwrap();
    let experts = config.experts.as_mut().unwrap();
    experts.capacity_factor = capacity_factor;
    experts.exchange = ExchangeConfig { num_chunks: 2, num_shadowed };
    config
}

fn cases() -> Vec<Case> {
    let bf16 = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    let mut cases = Vec::new();
    for (stage, keep) in ZERO_STAGES.into_iter().flat_map(|stage| Keep::ALL.map(|keep| (stage, keep))) {
        let (state, num_shards) = (StateLayout::zero(stage), shards(stage, 2));
        let options = if stage % 2 == 0 { OPTIONS } else { bf16 };
        // 5 positions with 3 choices each are not a multiple of 4 experts.
        let shape = (3, 5);
        let case = Case { options, num_microbatches: 2, experts: 2, shape, ..Case::default() };
        cases.push(Case { num_shards, state, keep, ..case });
    }
    cases
}

#[test]
fn a_capacity_bounds_memory_to_the_byte() {
    for (factor, num_shadowed) in [(0.5, 0), (1.25, 3), (4.0, 1)] {
        let config = model(Some(factor), num_shadowed);
        for case in cases() {
            case.check(&config, 2);
        }
        let offloaded = StateLayout::UNSHARDED.with_tier(StateClass::Activations, Tier::Host);
        Case { experts: 2, state: offloaded, ..Case::default() }.check(&config, 2);
        Case { experts: 2, tensor_degree: 2, shape: (2, 18), ..Case::default() }.check(&config, 4);
        Case { experts: 4, num_shards: 2, state: StateLayout::zero(3), ..Case::default() }.check(&config, 4);
        Case::default().check(&config, 1);
    }
}

/// Without a capacity, loads decide how much memory the experts' rows take, up to the rows of all choices of all ranks. All other memory is
/// predicted.
#[test]
fn uneven_loads_take_memory_of_activations_alone() {
    let config = model(None, 1);
    for case in cases() {
        let hosts = [0; 2];
        run_ranks_on(&hosts, |group| {
            let rank = group.rank().0;
            let device = Device::open(case.device_options(None)).unwrap();
            let host = device.host().unwrap();
            case.run(&config, group, &device, &host).unwrap();
            let dry = case.dry_run(&config, BackendKind::Cpu, &hosts, rank).peaks.0;
            for (category, dry) in Category::ALL.into_iter().zip(dry) {
                let found = device.memory().usage(category).peak;
                if category == Category::Activations {
                    assert!(found <= 2 * dry, "{found} of {dry} bytes, rank {rank} of {case:?}");
                } else {
                    assert_eq!(found, dry, "{category:?}, rank {rank} of {case:?}");
                }
            }
        });
    }
}

/// A rank whose experts get more rows than planned needs more memory than planned. It fails, unless it may spill.
#[test]
fn a_budget_that_uneven_loads_would_exceed_spills() {
    for (stage, tensor_degree, num_shadowed) in [(0, 1, 0), (3, 1, 1), (0, 2, 0)] {
        let config = model(None, num_shadowed);
        let (state, num_shards) = (StateLayout::zero(stage), shards(stage, 2));
        let shape = (3, 5 + (tensor_degree - 1));
        let case = Case { num_microbatches: 2, experts: 2, shape, ..Case::default() };
        spills_instead(&config, &Case { state, num_shards, tensor_degree, ..case });
    }
}

fn spills_instead(config: &ModelConfig, case: &Case) {
    let hosts = vec![0; 2 * case.tensor_degree];
    let run = |spills: bool| {
        run_ranks_on(&hosts, |group| {
            let dry = case.dry_run(config, BackendKind::Cpu, &hosts, group.rank().0);
            // The peak of the total. The sum of the categories' peaks would leave room, because they come at different times.
            let budget = dry.total();
            let device = Device::open(case.device_options(Some(budget))).unwrap();
            let spill = Arc::new(Spill::new(std::env::temp_dir()));
            if spills {
                device.set_overflow_allocator(
                    Arc::clone(&spill) as Arc<dyn OverflowAllocator>,
                    dry.excluding_activations,
                );
            }
            let ran = case.run(config, group, &device, &device.host().unwrap());
            assert!(device.memory().total().peak <= budget);
            (ran.map_err(|error| error.to_string()), spill.peak())
        })
    };
    let ended = run(false);
    assert!(
        ended.iter().any(|(ran, _)| ran.as_ref().is_err_and(|error| error.contains("budget"))),
        "{ended:?}"
    );
    let spilled = run(true);
    assert!(spilled.iter().all(|(ran, _)| ran.is_ok()), "{spilled:?}");
    assert!(spilled.iter().any(|(_, peak)| *peak > 0), "{spilled:?}");
}
