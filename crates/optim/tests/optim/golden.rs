//! Compares weights after a few steps with other implementations.
//!
//! `peers/optimizer_reference.py` prints the expected weights. It computes in f64, from the parameters and gradients that [`values`]
//! generates. For AdamW, Adam, SGD, Adafactor and Muon it uses torch.optim 2.13 (Muon with Newton-Schulz iterations in f64). For the others
//! it uses a few lines of numpy that follow the papers named in docs/optimizers.md.

use crate::common::{DEFAULT, MUON, OptimizerCase, device, options, step};
use std::sync::Arc;
use trireme_optim::{
    MuonScale, Optimizer, OptimizerName, OptimizerOptions, OptimizerSettings, StepSettings, Unsharded,
};
use trireme_tensor::{Initial, Parameter, ParameterTable};

/// Returns multiples of 1/64 between -2 and 2, from a linear congruential generator.
fn values(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = (state * 1_103_515_245 + 12_345) % (1 << 31);
        (((state >> 16) % 257) as f32 - 128.0) / 64.0
    };
    (0..len).map(|_| next()).collect()
}

/// The values of a 6 x 4 matrix and a vector of 5 elements after `num_steps` steps.
struct Golden {
    kind: OptimizerCase,
    num_steps: u64,
    matrix: [f64; 24],
    /// `None` for Muon, which leaves vectors to AdamW.
    vector: Option<[f64; 5]>,
}

const GOLDEN: [Golden; 11] = [
    Golden {
        kind: (OptimizerName::AdamW, DEFAULT),
        num_steps: 3,
        matrix: [
            -0.0573236, -0.4744755, -0.5486324, -1.4357000, 1.4265457, 1.5364784, 0.2738024, 1.5625423,
            -1.7116348, 1.4461038, 0.9083736, 0.6923244, -0.7095279, 1.7612928, -0.3145839, -1.0238831,
            0.6251785, -0.1576699, 1.2919794, 0.0300748, 1.6864054, -0.4641146, 1.1290190, -1.6280642,
        ],
        vector: Some([0.0897719, 1.2007204, 1.3561345, -1.0987583, 0.2050323]),
    },
    Golden {
        kind: (OptimizerName::Adam, DEFAULT),
        num_steps: 3,
        matrix: [
            -0.0569202, -0.4783001, -0.5500748, -1.4432783, 1.4465416, 1.5498405, 0.2760063, 1.5767160,
            -1.6017614, 1.4665960, 0.9171283, 0.6978979, -0.7164811, 1.7704832, -0.3192735, -1.0333286,
            0.6305069, -0.1607798, 1.3017326, 0.0298322, 1.6985126, -0.4676993, 1.1439333, -1.6467833,
        ],
        vector: Some([0.0897719, 1.2007204, 1.3561345, -1.0987583, 0.2050323]),
    },
    Golden {
        kind: (OptimizerName::Sgd, OptimizerSettings { nesterov: true, ..DEFAULT }),
        num_steps: 3,
        matrix: [
            -0.2812072, -0.7079171, -0.5775476, -1.4827959, 1.6500312, 1.5146804, 0.4840345, 1.5262516,
            -1.7529098, 1.1809436, 1.1185323, 0.5433241, -0.8055654, 1.6897957, -0.0667502, -1.2565470,
            0.7137727, 0.0864956, 1.3312954, 0.1110748, 1.7602415, -0.4552926, 1.6085741, -1.7975888,
        ],
        vector: Some([0.0249211, 1.2558914, 1.5038273, -1.3035477, 0.0191469]),
    },
    Golden {
        kind: (OptimizerName::Lion, DEFAULT),
        num_steps: 3,
        matrix: [
            -0.0722923, -0.5186543, -0.6351370, -1.4196210, 1.4267702, 1.5202118, 0.2877774, 1.5114718,
            -1.6966733, 1.4361036, 0.9342328, 0.6577738, -0.6495313, 1.7423487, -0.2817190, -0.9886507,
            0.6417887, -0.1431929, 1.2810948, 0.0722923, 1.6433462, -0.5581780, 1.1343261, -1.6422554,
        ],
        vector: Some([0.0906250, 1.1906250, 1.4250000, -1.1500000, 0.1906250]),
    },
    Golden {
        kind: (OptimizerName::Adafactor, DEFAULT),
        num_steps: 3,
        matrix: [
            -0.0909115, -0.4804988, -0.6175097, -1.4253500, 1.4865229, 1.5590047, 0.2597187, 1.4922404,
            -1.7307858, 1.4129909, 0.9005270, 0.6253091, -0.6710525, 1.6815270, -0.3686798, -1.0420984,
            0.6252571, -0.1597229, 1.2287675, -0.0082283, 1.7286463, -0.5166651, 1.1530779, -1.5906494,
        ],
        vector: Some([0.1076776, 1.1792370, 1.4197659, -1.0702576, 0.1855555]),
    },
    Golden {
        kind: (OptimizerName::Lamb, DEFAULT),
        num_steps: 3,
        matrix: [
            -0.1282488, -0.5204660, -0.5498540, -1.4451263, 1.4970682, 1.5274484, 0.3435737, 1.5889683,
            -1.7201272, 1.3594071, 0.9635804, 0.6425192, -0.7509398, 1.7624321, -0.2582791, -1.0503425,
            0.6899297, -0.0845856, 1.2953094, 0.0809118, 1.6965027, -0.4594416, 1.1982499, -1.6847398,
        ],
        vector: Some([0.0954224, 1.2054699, 1.3926785, -1.1473797, 0.2255172]),
    },
    Golden {
        kind: (OptimizerName::Lars, OptimizerSettings { trust_coefficient: 0.02, ..DEFAULT }),
        num_steps: 3,
        matrix: [
            0.0738453, -0.3788757, -0.5933010, -1.3913359, 1.3011782, 1.5933657, 0.1446378, 1.4855526,
            -1.6723030, 1.6044436, 0.8010473, 0.7165102, -0.6126558, 1.7190708, -0.4318728, -0.9565085,
            0.5023242, -0.2922403, 1.2512570, -0.0758334, 1.7197820, -0.5146269, 1.0074442, -1.5195907,
        ],
        vector: Some([0.1394504, 1.1418610, 1.3753008, -1.0032620, 0.1400230]),
    },
    Golden {
        kind: (OptimizerName::Muon, MUON),
        num_steps: 3,
        matrix: [
            0.0208164, -0.4436702, -0.5724390, -1.3745032, 1.3742629, 1.5256426, 0.1901401, 1.4913616,
            -1.6616795, 1.5013942, 0.8576152, 0.7145098, -0.6309530, 1.7201154, -0.3804680, -1.0263810,
            0.4950575, -0.2185991, 1.2500448, -0.0445122, 1.7070295, -0.4788743, 1.0925251, -1.5712554,
        ],
        vector: None,
    },
    Golden {
        kind: (OptimizerName::Muon, OptimizerSettings { muon_scale: MuonScale::MatchRmsAdamW, ..MUON }),
        num_steps: 3,
        matrix: [
            0.0545019, -0.3991099, -0.5799085, -1.3717232, 1.3162165, 1.5522349, 0.1591717, 1.4738770,
            -1.6528250, 1.5517706, 0.8140350, 0.7106174, -0.6125492, 1.7039046, -0.4107694, -0.9738921,
            0.4935455, -0.2629061, 1.2388241, -0.0639802, 1.6986703, -0.4963072, 1.0280550, -1.5243046,
        ],
        vector: None,
    },
    Golden {
        kind: (OptimizerName::OneBitAdam, OptimizerSettings { freeze_step: 2, ..DEFAULT }),
        num_steps: 3,
        matrix: [
            -0.0679473, -0.4780336, -0.5471097, -1.4397221, 1.4314479, 1.5366004, 0.2914729, 1.5628310,
            -1.9017724, 1.4210315, 0.9029327, 0.6979235, -0.7099480, 1.7579932, -0.3159613, -1.0247820,
            0.6555275, -0.1513203, 1.2912662, 0.0294289, 1.6857841, -0.4630889, 1.1336303, -1.6210462,
        ],
        vector: Some([0.0900114, 1.2009234, 1.3593479, -1.1100875, 0.0542699]),
    },
    Golden {
        kind: (OptimizerName::ZeroOneAdam, OptimizerSettings { var_update_scaler: 1, ..DEFAULT }),
        num_steps: 5,
        matrix: [
            -0.1868765, -0.5296141, -0.5997662, -1.4753158, 1.5232153, 1.5249790, 0.3090297, 1.5963770,
            -1.9556404, 1.3894583, 0.9296022, 0.6252176, -0.6891637, 1.7666484, -0.2943454, -1.0388113,
            0.7674555, -0.1284914, 1.2989514, 0.0719632, 1.6549008, -0.4544419, 1.2128391, -1.6137176,
        ],
        vector: Some([0.1063986, 1.2102187, 1.4217982, -1.1463538, -0.0435814]),
    },
];

#[test]
fn weights_are_those_of_other_implementations() {
    let mut table = ParameterTable::default();
    table.begin_unit("embedding");
    table.add(Parameter::vector("wte", 1, Initial::ZEROS));
    table.begin_unit("block");
    table.add(Parameter::matrix("h.w", &[6, 4], Initial::ZEROS));
    table.add(Parameter::vector("h.b", 5, Initial::ZEROS));
    table.begin_unit("head");
    table.add(Parameter::vector("norm", 1, Initial::ZEROS));
    let (table, device) = (Arc::new(table), device(2));
    let parts = table.shards(0, 1);
    for Golden { kind, num_steps, matrix, vector } in GOLDEN {
        let options = OptimizerOptions { weight_decay: 0.1, ..options(kind) };
        let mut optimizer = Optimizer::new(&options, &table, &parts, &device).unwrap();
        let of_unit = |seed| vec![vec![1.0], [values(24, seed + 1), values(5, seed + 2)].concat(), vec![1.0]];
        let mut weights = of_unit(0);
        for number in 1..=num_steps {
            let settings = StepSettings { step: number, lr: 0.05, grad_scale: 1.0 };
            let grads = of_unit(100 * number);
            step(&mut optimizer, &device, &mut weights, &grads, &parts, settings, &mut Unsharded);
        }
        let expected = matrix.iter().chain(vector.iter().flatten());
        for (index, (&found, &expected)) in weights[1].iter().zip(expected).enumerate() {
            assert!(
                (f64::from(found) - expected).abs() < 2e-6,
                "{kind:?}, element {index}: {found} instead of {expected}"
            );
        }
    }
}
